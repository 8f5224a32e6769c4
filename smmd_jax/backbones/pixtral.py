"""Pixtral, the vision tower of Ministral 3, and the projector that merges its patches."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from smmd_jax.backbones.config import DecoderConfig
from smmd_jax.backbones.images import PatchedImages
from smmd_jax.backbones.layer import FeedForward
from smmd_jax.backbones.norm import RMSNorm
from smmd_jax.backbones.stack import run_unrolled
from smmd_jax.backbones.vision import VisionConfig, attend_within, grid_rotation, linear, run_tower_layer


class PixtralAttention(nnx.Module):
    """Attention within an image, turned by row and column; no biases."""

    def __init__(self, config: VisionConfig, **options):
        width = config.hidden_size
        self.heads = config.num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (linear(width, width, False, **options) for _ in range(4))

    def __call__(self, inputs: Float[Array, "I L D"], rotation, visible) -> Float[Array, "I L D"]:
        queries, keys, values = self.q_proj(inputs), self.k_proj(inputs), self.v_proj(inputs)
        return self.o_proj(attend_within(queries, keys, values, rotation, visible, self.heads))


class PixtralLayer(nnx.Module):
    """Attention and a gated feed-forward, each behind its norm; names are those of the files."""

    def __init__(self, config: VisionConfig, *, rngs, dtype, param_dtype):
        options = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.attention_norm, self.ffn_norm = (
            RMSNorm(config.hidden_size, config, rngs=rngs, param_dtype=param_dtype) for _ in range(2)
        )
        self.attention = PixtralAttention(config, **options)
        self.feed_forward = FeedForward(config, **options)

    def __call__(self, inputs: Float[Array, "I L D"], rotation, visible) -> Float[Array, "I L D"]:
        inputs = inputs + self.attention(self.attention_norm(inputs), rotation, visible)
        return inputs + self.feed_forward(self.ffn_norm(inputs))


class PixtralTransformer(nnx.Module):
    """The layers, under the name that the files give them."""

    def __init__(self, config: VisionConfig, **options):
        self.layers = nnx.List([PixtralLayer(config, **options) for _ in range(config.num_layers)])


class Pixtral(nnx.Module):
    """Turn patches into states: a matrix over each patch, a norm, and layers that see the whole image.

    References:
        P. Agrawal et al., Pixtral 12B, 2024, section 2.
    """

    def __init__(
        self, config: VisionConfig, *, rngs: nnx.Rngs, dtype=jnp.float32, param_dtype=jnp.float32, remat: str = "none"
    ):
        self.config, self.dtype, self.remat = config, dtype, remat
        options = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.patch_conv = linear(config.patch_numbers, config.hidden_size, False, **options)
        self.ln_pre = RMSNorm(config.hidden_size, config, rngs=rngs, param_dtype=param_dtype)
        self.transformer = PixtralTransformer(config, **options)

    def __call__(self, images: PatchedImages) -> Float[Array, "I L D"]:
        frequencies = self.config.rope_theta ** (
            -np.arange(0, self.config.head_dim, 2, dtype=np.float32) / self.config.head_dim
        )
        # Even frequencies serve the rows, odd ones the columns.
        rotation = grid_rotation(images.rows, images.columns, frequencies[0::2], frequencies[1::2])
        visible = images.real[:, None, :] & images.real[:, :, None]
        states = self.ln_pre(self.patch_conv(images.patches.astype(self.dtype)))
        layers = self.transformer.layers
        tables = [(rotation, visible)] * len(layers)
        return run_unrolled(layers, states, tables, None, run_tower_layer, remat=self.remat)

    @property
    def all_layers(self) -> list[PixtralLayer]:
        """The layers of the tower, which adapters may stand beside."""
        return list(self.transformer.layers)


class PatchMerger(nnx.Module):
    """Turn the M x M patches of a block into one; channel by channel, each over the block."""

    def __init__(self, config: VisionConfig, **options):
        self.merging_layer = linear(config.hidden_size * config.merge_size**2, config.hidden_size, False, **options)
        self.cell = config.merge_size**2

    def __call__(self, states: Float[Array, "I L D"]) -> Float[Array, "I cells D"]:
        count, _, width = states.shape
        blocks = jnp.swapaxes(states.reshape(count, -1, self.cell, width), 2, 3)
        return self.merging_layer(blocks.reshape(count, -1, width * self.cell))


class Mistral3Projector(nnx.Module):
    """Norm, merge, and two matrices with an exact GELU between, into the width of the text."""

    def __init__(self, vision: VisionConfig, text: DecoderConfig, *, bias: bool, rngs, dtype, param_dtype):
        options = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        # This norm has the epsilon of the text.
        self.norm = RMSNorm(vision.hidden_size, text, rngs=rngs, param_dtype=param_dtype)
        self.patch_merger = PatchMerger(vision, **options)
        self.linear_1 = linear(vision.hidden_size, text.hidden_size, bias, **options)
        self.linear_2 = linear(text.hidden_size, text.hidden_size, bias, **options)

    def __call__(self, states: Float[Array, "I L D"]) -> Float[Array, "I cells D"]:
        merged = self.patch_merger(self.norm(states))
        return self.linear_2(jax.nn.gelu(self.linear_1(merged), approximate=False))
