"""The vision tower of Qwen2.5-VL, whose layers see windows, and the three-axis positions of its text."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from smmd_jax.backbones.images import PatchedImages
from smmd_jax.backbones.layer import FeedForward
from smmd_jax.backbones.norm import RMSNorm
from smmd_jax.backbones.stack import run_unrolled
from smmd_jax.backbones.vision import VisionConfig, attend_within, grid_rotation, linear, run_tower_layer


class QwenVisionAttention(nnx.Module):
    """Attention over the visible patches; queries, keys and values come from one biased matrix."""

    def __init__(self, config: VisionConfig, **options):
        width = config.hidden_size
        self.heads = config.num_heads
        self.qkv = linear(width, 3 * width, True, **options)
        self.proj = linear(width, width, True, **options)

    def __call__(self, inputs: Float[Array, "I L D"], rotation, visible) -> Float[Array, "I L D"]:
        queries, keys, values = jnp.split(self.qkv(inputs), 3, axis=-1)
        return self.proj(attend_within(queries, keys, values, rotation, visible, self.heads))


class QwenVisionBlock(nnx.Module):
    """Attention and a gated feed-forward, each behind its norm; names are those of the files."""

    def __init__(self, config: VisionConfig, *, rngs, dtype, param_dtype):
        options = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.norm1, self.norm2 = (
            RMSNorm(config.hidden_size, config, rngs=rngs, param_dtype=param_dtype) for _ in range(2)
        )
        self.attn = QwenVisionAttention(config, **options)
        self.mlp = FeedForward(config, **options)

    def __call__(self, inputs: Float[Array, "I L D"], rotation, visible) -> Float[Array, "I L D"]:
        inputs = inputs + self.attn(self.norm1(inputs), rotation, visible)
        return inputs + self.mlp(self.norm2(inputs))


class PatchEmbed(nnx.Module):
    """One matrix over the numbers of a patch (in the files a convolution in three dimensions)."""

    def __init__(self, config: VisionConfig, **options):
        self.proj = linear(config.patch_numbers, config.hidden_size, False, **options)

    def __call__(self, patches: Float[Array, "I L K"]) -> Float[Array, "I L D"]:
        return self.proj(patches)


class QwenMerger(nnx.Module):
    """Norm each patch, lay the patches of a block side by side, and map them to the width of the text."""

    def __init__(self, config: VisionConfig, outputs: int, *, rngs, dtype, param_dtype):
        options = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.width = config.hidden_size * config.merge_size**2
        self.ln_q = RMSNorm(config.hidden_size, config, rngs=rngs, param_dtype=param_dtype)
        self.mlp_0 = linear(self.width, self.width, True, **options)
        self.mlp_2 = linear(self.width, outputs, True, **options)

    def __call__(self, states: Float[Array, "I L D"]) -> Float[Array, "I cells D"]:
        blocks = self.ln_q(states).reshape(states.shape[0], -1, self.width)
        return self.mlp_2(jax.nn.gelu(self.mlp_0(blocks), approximate=False))


class QwenVision(nnx.Module):
    """Turn patches into one feature per block: windowed layers, a few that see the whole image, and the merger.

    Patches are not moved into windows: who sees whom is a mask, which gives the same sums.

    References:
        S. Bai et al., Qwen2.5-VL Technical Report, 2025, section 2.1.1.
    """

    def __init__(
        self, config: VisionConfig, outputs: int, *, rngs: nnx.Rngs, dtype=jnp.float32, param_dtype=jnp.float32,
        remat: str = "none",
    ):  # fmt: skip
        self.config, self.dtype, self.remat = config, dtype, remat
        options = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.patch_embed = PatchEmbed(config, **options)
        self.blocks = nnx.List([QwenVisionBlock(config, **options) for _ in range(config.num_layers)])
        self.merger = QwenMerger(config, outputs, **options)

    def __call__(self, images: PatchedImages) -> Float[Array, "I cells D"]:
        config = self.config
        half = config.head_dim // 2
        frequencies = config.rope_theta ** (-np.arange(0, half, 2, dtype=np.float32) / half)
        rotation = grid_rotation(images.rows, images.columns, frequencies, frequencies)
        whole = images.real[:, None, :] & images.real[:, :, None]
        window = whole & (images.windows[:, None, :] == images.windows[:, :, None])
        states = self.patch_embed(images.patches.astype(self.dtype))
        tables = [
            (rotation, whole if index in config.full_layers else window) for index in range(len(self.blocks))
        ]
        return self.merger(run_unrolled(self.blocks, states, tables, None, run_tower_layer, remat=self.remat))

    @property
    def all_layers(self) -> list[QwenVisionBlock]:
        """The layers of the tower, which adapters may stand beside."""
        return list(self.blocks)


def grid_positions(
    input_ids: Int[np.ndarray, "B T"],
    grids: Int[np.ndarray, "I 3"],
    *,
    image_token_id: int,
    merge: int,
    attention_mask: Int[np.ndarray, "B T"] | None = None,
) -> Int[np.ndarray, "3 B T"]:
    """Return the time, row and column of every token, on the host.

    Text counts on by one along all three. An image that starts at p has time p, and rows and columns p + i; the text
    after it goes on at p + max(rows, columns). Padding counts for nothing and has position 0.

    Args:
        input_ids: int [B, T].
        grids: per image its frames, rows and columns of patches, in the order of the image tokens.
        image_token_id: of the tokens that features replace.
        merge: patches along one side of a feature.
        attention_mask: [B, T], non-zero for real tokens.

    Raises:
        ValueError: image tokens that are not those of the grids.

    Example:
        >>> grid_positions(np.array([[5, 9, 9, 6]]), np.array([[1, 2, 4]]), image_token_id=9, merge=2)[:, 0].tolist()
        [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]

    References:
        P. Wang et al., Qwen2-VL, 2024, section 2.1, M-RoPE.
    """
    input_ids = np.asarray(input_ids)
    real = np.ones(input_ids.shape, bool) if attention_mask is None else np.asarray(attention_mask) != 0
    positions = np.zeros((3, *input_ids.shape), np.int32)
    pending = iter(np.asarray(grids).reshape(-1, 3).tolist())
    for row in range(len(input_ids)):
        columns = np.flatnonzero(real[row])
        is_image = input_ids[row, columns] == image_token_id
        place, begin = 0, 0
        while place < len(columns):
            if not is_image[place]:
                text = int(np.argmax(np.append(is_image[place:], True)))
                positions[:, row, columns[place : place + text]] = begin + np.arange(text)
                place, begin = place + text, begin + text
                continue
            grid = next(pending, None)
            if grid is None:
                raise ValueError(f"row {row} has image tokens beyond the {len(grids)} images: one image for each run")
            frames, high, wide = grid[0], grid[1] // merge, grid[2] // merge
            size = frames * high * wide
            if not is_image[place : place + size].all() or place + size > len(columns):
                found = int(np.argmin(np.append(is_image[place:], False)))
                raise ValueError(f"row {row} has {found} image tokens in a row, its image gives {size} features")
            cells = np.indices((frames, high, wide)).reshape(3, -1) + begin
            positions[:, row, columns[place : place + size]] = cells
            place, begin = place + size, begin + max(high, wide)
    if next(pending, None) is not None:
        raise ValueError(f"got {len(grids)} images, and the prompts have image tokens for fewer")
    return positions
