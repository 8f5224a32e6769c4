"""The decoder layer that reads images: gated cross-attention over their patches, and a gated feed-forward (mllama)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from smmd_jax.backbones.attention import attend
from smmd_jax.backbones.config import DecoderConfig
from smmd_jax.backbones.layer import FeedForward
from smmd_jax.backbones.norm import RMSNorm


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ImageStates:
    """Hold what the cross-attention layers read.

    Args:
        features: float [B, P, D], the patches of M tiles one tile after another; None: their keys and values are in
            the cache.
        tiles: bool [B, T, M], which tiles a token reads.
    """

    features: Float[Array, "B P D"] | None
    tiles: Bool[Array, "B T M"]

    @classmethod
    def cached(cls, tiles: Bool[Array, "B M"], length: int) -> "ImageStates":
        """Return the states of `length` more tokens, which all read these tiles of the cache."""
        shape = (tiles.shape[0], length, tiles.shape[1])
        return cls(features=None, tiles=jnp.broadcast_to(tiles[:, None], shape))

    def tiles_after(self, real: Bool[Array, "B T"]) -> Bool[Array, "B M"]:
        """Return the tiles that the last real token of each row reads, as those after it will."""
        last = real.shape[1] - 1 - jnp.argmax(real[:, ::-1], axis=1)
        return jnp.take_along_axis(self.tiles, last[:, None, None], axis=1)[:, 0]

    @property
    def reads(self) -> Bool[Array, "B T"]:
        """Whether a token reads any tile."""
        return self.tiles.any(-1)

    def visible(self, patches: int) -> Bool[Array, "B T P"]:
        """Return which of the patches a token attends to: those of its tiles, or all where it has none.

        The released weights were trained so: what such a token gets from attention is a mean over everything.
        """
        tiles = self.tiles | ~self.reads[..., None]
        return jnp.repeat(tiles, patches // tiles.shape[-1], axis=-1)


class CrossAttention(nnx.Module):
    """Attend from text to the patches of images: a norm over each query and key head, no rotation, no order."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype, param_dtype):
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim

        def linear(inputs: int, outputs: int, std: float) -> nnx.Linear:
            return nnx.Linear(
                inputs, outputs, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs,
                kernel_init=nnx.initializers.normal(std),
            )  # fmt: skip

        width, std = config.hidden_size, config.hidden_size**-0.5
        self.q_proj = linear(width, self.heads * self.head_dim, std)
        self.k_proj = linear(width, self.kv_heads * self.head_dim, std)
        self.v_proj = linear(width, self.kv_heads * self.head_dim, std)
        self.o_proj = linear(self.heads * self.head_dim, width, std * (2 * config.num_layers) ** -0.5)
        self.q_norm = RMSNorm(self.head_dim, config, rngs=rngs, param_dtype=param_dtype)
        self.k_norm = RMSNorm(self.head_dim, config, rngs=rngs, param_dtype=param_dtype)

    def __call__(
        self, flat: Float[Array, "tokens D"], states: ImageStates, *, past: tuple[Array, Array] | None = None
    ) -> tuple[Float[Array, "tokens D"], tuple[Array, Array]]:
        """Return the output and the keys and values [B, G, P, C] of the images: those of `past`, where given."""
        batch, length = states.tiles.shape[:2]
        keys, values = self._read(states.features) if past is None else past
        queries = self.q_norm(self.q_proj(flat).reshape(batch, length, self.heads, self.head_dim))
        queries = (queries.astype(jnp.float32) * self.head_dim**-0.5).astype(values.dtype)
        queries = jnp.swapaxes(queries, 1, 2).reshape(batch, self.kv_heads, -1, length, self.head_dim)
        mean = attend(queries, keys, values, states.visible(keys.shape[2]))
        mean = mean.reshape(batch, self.heads, length, self.head_dim)
        return self.o_proj(jnp.swapaxes(mean, 1, 2).reshape(flat.shape[0], -1)), (keys, values)

    def _read(self, features: Float[Array, "B P D"]) -> tuple[Array, Array]:
        batch, patches, width = features.shape
        flat = features.reshape(-1, width)
        keys, values = (
            projection(flat).reshape(batch, patches, self.kv_heads, self.head_dim)
            for projection in (self.k_proj, self.v_proj)
        )
        return jnp.swapaxes(self.k_norm(keys), 1, 2), jnp.swapaxes(values, 1, 2)


class CrossLayer(nnx.Module):
    """Add what attention over images and a feed-forward give, each behind a norm and times the tanh of a gate.

        x = x + tanh(a) * attention(norm(x), images)
        x = x + tanh(f) * reads * feed_forward(norm(x))        reads: 0 for a token that sees no tile, else 1

    It stands in the place of a DecoderLayer and takes the same arguments, with the images in place of the mask.
    Without images it does nothing at all. New gates are 0, so that a model that could not see is not disturbed.

    References:
        A. Dubey et al., The Llama 3 Herd of Models, 2024, section 7.
        J.-B. Alayrac et al., Flamingo, 2022, section 2.2.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype, param_dtype):
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(config.hidden_size, config, rngs=rngs, param_dtype=param_dtype) for _ in range(2)
        )
        self.cross_attn = CrossAttention(config, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.mlp = FeedForward(config, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.cross_attn_attn_gate, self.cross_attn_mlp_gate = (
            nnx.Param(jnp.zeros((1,), param_dtype)) for _ in range(2)
        )
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(
        self, flat: Float[Array, "tokens D"], states: ImageStates | None, rotation=None, *, batch: int,
        query_scale=None, past: tuple[Array | None, Array | None] | None = None, offset=None,
        rngs: nnx.Rngs | None = None,
    ):  # fmt: skip
        del rotation, batch, query_scale, offset  # of layers that read text
        if states is None:
            return flat, (None, None)

        def gated(gate: nnx.Param, outputs: Array) -> Array:
            outputs = self.dropout(outputs, deterministic=rngs is None, rngs=rngs)
            return jnp.tanh(gate[...].astype(jnp.float32)).astype(outputs.dtype) * outputs

        mixed, keys_values = self.cross_attn(self.input_layernorm(flat), states, past=past)
        flat = flat + gated(self.cross_attn_attn_gate, mixed)
        outputs = self.mlp(self.post_attention_layernorm(flat)) * states.reads.reshape(-1, 1).astype(flat.dtype)
        return flat + gated(self.cross_attn_mlp_gate, outputs), keys_values
