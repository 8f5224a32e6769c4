"""The vision tower of Llama 3.2 Vision: images cut into tiles, local layers, gated global layers, layers in between."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from smmd_jax.backbones.attention import attend
from smmd_jax.backbones.stack import run_unrolled
from smmd_jax.backbones.vision import VisionConfig, linear

# The tower was trained on tiles whose rows are filled up to a multiple of this, and what fills them is attended to.
_ROW_MULTIPLE = 8
# Epsilon of the two norms outside the layers, which the config does not name.
_OUTER_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class MllamaVisionConfig(VisionConfig):
    """Describe the tower; what is not listed is as in VisionConfig.

    Args:
        num_layers: of the local layers.
        image_size: pixels along one side of a tile.
        max_tiles: most tiles of an image.
        aspect_ratios: how many arrangements of tiles there are.
        num_global_layers: of the gated layers after the local ones.
        feature_layers: local layers whose input is a feature too.

    Raises:
        ValueError: a feature layer that the tower lacks, tiles that are no whole patches.
    """

    image_size: int
    max_tiles: int
    aspect_ratios: int
    num_global_layers: int
    feature_layers: tuple[int, ...]

    def __post_init__(self):
        if any(not 0 <= layer < self.num_layers for layer in self.feature_layers):
            raise ValueError(f"feature_layers are {self.feature_layers}, wanted 0 to {self.num_layers - 1}")
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size is {self.image_size}, wanted a multiple of patch_size {self.patch_size}")

    @property
    def tile_patches(self) -> int:
        """Features of a tile: its patches and the one of the class embedding."""
        return (self.image_size // self.patch_size) ** 2 + 1

    @property
    def output_size(self) -> int:
        """Width of a feature: the states after the last layer, and those in between."""
        return self.hidden_size * (1 + len(self.feature_layers))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TiledImages:
    """Hold I images of at most M tiles for each row of a batch, by the names of the Hugging Face processor.

    Args:
        pixel_values: float [B, I, M, channels, size, size].
        aspect_ratio_ids: int [B, I], number of the arrangement of the tiles, from 1; 0: no image.
        aspect_ratio_mask: bool [B, I, M], which tiles there are.
        cross_attention_mask: bool [B, T, I, M], which tiles a token reads.
    """

    pixel_values: Float[Array, "B I M channels size size"]
    aspect_ratio_ids: Int[Array, "B I"]
    aspect_ratio_mask: Bool[Array, "B I M"]
    cross_attention_mask: Bool[Array, "B T I M"]


def _layer_norm(width: int, eps: float, *, rngs: nnx.Rngs, dtype, param_dtype) -> nnx.LayerNorm:
    # The fast variance is a difference of two large numbers.
    return nnx.LayerNorm(width, epsilon=eps, use_fast_variance=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)


def _gate(param_dtype) -> nnx.Param:
    return nnx.Param(jnp.zeros((1,), param_dtype))


def _tanh(gate: nnx.Param, like: Array) -> Array:
    return jnp.tanh(gate[...].astype(jnp.float32)).astype(like.dtype)


class MllamaVisionAttention(nnx.Module):
    """Attention over all tiles of an image; no biases.

    Hidden are only pairs of which both are padding. The queries of one tile after another are taken, and their scores
    computed again on the way back: those of a whole image are 2.6 GB a layer at the released size.
    """

    def __init__(self, config: VisionConfig, **options):
        width = config.hidden_size
        self.heads = config.num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (linear(width, width, False, **options) for _ in range(4))

    def __call__(
        self, inputs: Float[Array, "I L D"], real: Bool[Array, "I L"], *, tiles: int
    ) -> Float[Array, "I L D"]:
        count, length, width = inputs.shape
        queries, keys, values = (
            jnp.swapaxes(projection(inputs).reshape(count, length, self.heads, -1), 1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries = (queries.astype(jnp.float32) * queries.shape[-1] ** -0.5).astype(values.dtype)

        @jax.checkpoint
        def of_tile(tile):
            queries, own = tile
            visible = own[:, :, None] | real[:, None, :]
            return attend(queries[:, :, None], keys, values, visible)[:, :, 0]

        by_tile = jnp.moveaxis(queries.reshape(count, self.heads, tiles, length // tiles, -1), 2, 0)
        means = jax.lax.map(of_tile, (by_tile, jnp.moveaxis(real.reshape(count, tiles, -1), 1, 0)))
        return self.o_proj(means.transpose(1, 0, 3, 2, 4).reshape(count, length, width))


class MllamaVisionMlp(nnx.Module):
    """Widen, exact GELU, narrow; with biases."""

    def __init__(self, config: VisionConfig, **options):
        self.fc1 = linear(config.hidden_size, config.intermediate_size, True, **options)
        self.fc2 = linear(config.intermediate_size, config.hidden_size, True, **options)

    def __call__(self, inputs: Float[Array, "I L D"]) -> Float[Array, "I L D"]:
        return self.fc2(jax.nn.gelu(self.fc1(inputs), approximate=False))


class MllamaVisionLayer(nnx.Module):
    """Attention and feed-forward, each behind its norm and, in a global layer, times the tanh of a gate."""

    def __init__(self, config: VisionConfig, *, gated: bool, rngs, dtype, param_dtype):
        options = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.input_layernorm, self.post_attention_layernorm = (
            _layer_norm(config.hidden_size, config.norm_eps, **options) for _ in range(2)
        )
        self.self_attn = MllamaVisionAttention(config, **options)
        self.mlp = MllamaVisionMlp(config, **options)
        self.gate_attn, self.gate_ffn = (_gate(param_dtype) if gated else None for _ in range(2))

    def __call__(
        self, inputs: Float[Array, "I L D"], real: Bool[Array, "I L"], *, tiles: int
    ) -> Float[Array, "I L D"]:
        def gated(gate: nnx.Param | None, outputs: Array) -> Array:
            return outputs if gate is None else _tanh(gate, outputs) * outputs

        inputs = inputs + gated(self.gate_attn, self.self_attn(self.input_layernorm(inputs), real, tiles=tiles))
        return inputs + gated(self.gate_ffn, self.mlp(self.post_attention_layernorm(inputs)))


class MllamaTransformer(nnx.Module):
    """Layers, under the name that the files give them."""

    def __init__(self, config: VisionConfig, count: int, *, gated: bool, **options):
        self.layers = nnx.List([MllamaVisionLayer(config, gated=gated, **options) for _ in range(count)])


class TileEmbedding(nnx.Module):
    """Add what tells the tiles of an arrangement apart: one vector a tile, times the tanh of a gate."""

    def __init__(self, config: MllamaVisionConfig, *, rngs, dtype, param_dtype):
        self.embedding = _arrangements(config, config.hidden_size, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.gate = _gate(param_dtype)

    def __call__(self, states: Float[Array, "I M N D"], ids: Int[Array, "I"]) -> Float[Array, "I M N D"]:
        count, tiles, _, width = states.shape
        return states + _tanh(self.gate, states) * self.embedding(ids).reshape(count, tiles, 1, width)


class PositionEmbedding(nnx.Module):
    """Add where a patch lies: (1 - tanh(gate)) position + tanh(gate) position in its tile of the arrangement."""

    def __init__(self, config: MllamaVisionConfig, *, rngs, dtype, param_dtype):
        numbers = config.tile_patches * config.hidden_size
        shape, std = (config.tile_patches, config.hidden_size), config.hidden_size**-0.5
        self.position_embedding = nnx.Param(nnx.initializers.normal(std)(rngs.params(), shape, param_dtype))
        self.tile_embedding = _arrangements(config, numbers, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.gate = _gate(param_dtype)

    def __call__(self, states: Float[Array, "I M N D"], ids: Int[Array, "I"]) -> Float[Array, "I M N D"]:
        gate = _tanh(self.gate, states)
        alone = self.position_embedding[...].astype(states.dtype)
        return states + (1 - gate) * alone + gate * self.tile_embedding(ids).reshape(states.shape)


def _arrangements(config: MllamaVisionConfig, numbers: int, *, rngs, dtype, param_dtype) -> nnx.Embed:
    """A table with `numbers` numbers for each tile of each arrangement; row 0 is that of no image."""
    return nnx.Embed(
        config.aspect_ratios + 1, config.max_tiles * numbers, dtype=dtype, param_dtype=param_dtype, rngs=rngs,
        embedding_init=nnx.initializers.normal(config.hidden_size**-0.5),
    )  # fmt: skip


class MllamaVision(nnx.Module):
    """Turn tiles into features: the states after the global layers beside those within the local ones.

    The states of a layer stand beside those after the last one by channel: channel c of the k-th of K feature layers is
    number D + c K + k of a feature. A feature layer gives its input, as in the code that the weights were trained
    with; some releases of transformers take its output.

    All tiles of an image attend to one another. Hidden are only pairs of which both are padding: patches that are there
    do attend to tiles that are not.

    References:
        A. Dubey et al., The Llama 3 Herd of Models, 2024, section 7.2.
    """

    def __init__(
        self, config: MllamaVisionConfig, *, rngs: nnx.Rngs, dtype=jnp.float32, param_dtype=jnp.float32,
        remat: str = "none",
    ):  # fmt: skip
        self.config, self.dtype, self.remat = config, dtype, remat
        options = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        width = config.hidden_size
        self.patch_embedding = linear(config.patch_numbers, width, False, **options)
        self.class_embedding = nnx.Param(
            nnx.initializers.normal(width**-0.5)(rngs.params(), (width,), param_dtype)
        )
        self.gated_positional_embedding = PositionEmbedding(config, **options)
        self.pre_tile_positional_embedding = TileEmbedding(config, **options)
        self.post_tile_positional_embedding = TileEmbedding(config, **options)
        self.layernorm_pre, self.layernorm_post = (_layer_norm(width, _OUTER_EPS, **options) for _ in range(2))
        self.transformer = MllamaTransformer(config, config.num_layers, gated=False, **options)
        self.global_transformer = MllamaTransformer(config, config.num_global_layers, gated=True, **options)

    def __call__(
        self,
        pixel_values: Float[Array, "I M channels size size"],
        aspect_ratio_ids: Int[Array, "I"],
        aspect_ratio_mask: Bool[Array, "I M"],
    ) -> Float[Array, "I M N features"]:
        config = self.config
        count, tiles = aspect_ratio_mask.shape
        states = self.patch_embedding(_patches(pixel_values.astype(self.dtype), config.patch_size))
        states = self.pre_tile_positional_embedding(states, aspect_ratio_ids)
        first = jnp.broadcast_to(self.class_embedding[...].astype(self.dtype), (count, tiles, 1, config.hidden_size))
        states = self.gated_positional_embedding(jnp.concatenate([first, states], axis=2), aspect_ratio_ids)
        states = self.layernorm_pre(states)

        length = config.tile_patches
        padding = -length % _ROW_MULTIPLE
        states = jnp.pad(states, ((0, 0), (0, 0), (0, padding), (0, 0)))
        real = aspect_ratio_mask[:, :, None] & (np.arange(length + padding) < length)
        real = real.reshape(count, -1)

        def by_tile(states: Float[Array, "I L D"]) -> Float[Array, "I M N D"]:
            return states.reshape(count, tiles, length + padding, -1)

        def run(layers, states: Float[Array, "I L D"]) -> Float[Array, "I L D"]:
            of_layer = lambda layer, states, real, key: layer(states, real, tiles=tiles)
            return run_unrolled(layers, states, [real] * len(layers), None, of_layer, remat=self.remat)

        states, between = states.reshape(count, -1, config.hidden_size), {}
        for index, layer in enumerate(self.transformer.layers):
            if index in config.feature_layers:
                between[index] = states
            states = run([layer], states)
        states = self.post_tile_positional_embedding(by_tile(self.layernorm_post(states)), aspect_ratio_ids)
        states = states.reshape(count, -1, config.hidden_size)
        states = run(self.global_transformer.layers, states)
        mixed = [jnp.stack([between[index] for index in config.feature_layers], axis=-1)] if between else []
        features = jnp.concatenate([by_tile(states), *map(by_tile, mixed)], axis=-1)
        return features[:, :, :length]

    @property
    def all_layers(self) -> list[MllamaVisionLayer]:
        """The layers of the tower, which adapters may stand beside."""
        return [*self.transformer.layers, *self.global_transformer.layers]


def _patches(pixels: Float[Array, "I M channels size size"], patch: int) -> Float[Array, "I M patches K"]:
    """Cut tiles into patches, row by row; the numbers of a patch go channel by channel."""
    count, tiles, channels, size, _ = pixels.shape
    side = size // patch
    cut = pixels.reshape(count, tiles, channels, side, patch, side, patch)
    return cut.transpose(0, 1, 3, 5, 2, 4, 6).reshape(count, tiles, side * side, channels * patch * patch)
