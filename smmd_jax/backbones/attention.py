"""Causal attention over real tokens: who sees whom, the weighted mean, and the layer with its projections."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from smmd_jax.backbones.config import DecoderConfig
from smmd_jax.backbones.norm import RMSNorm
from smmd_jax.backbones.products import wide_einsum
from smmd_jax.backbones.rope import rotate

# Finite, so that a query without any visible key (padding) gets a mean of everything instead of NaN.
_HIDDEN_SCORE = -1e30
# Query blocks read only the keys up to their own end: two save a quarter of the products. Shorter blocks gain nothing.
_MIN_BLOCK = 32


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Hold what decides visibility: the column, whether the token is real, its segment, and the real tokens so far.

    `ranks` counts real tokens only, so that a sliding window does not shrink over padding and left padding equals
    right padding.
    """

    columns: Int[Array, "T"]
    real: Bool[Array, "B T"]
    ranks: Int[Array, "B T"]
    segments: Int[Array, "B T"] | None = None


def visible_keys(queries: Tokens, keys: Tokens, window: int | None) -> Bool[Array, "B T S"]:
    """Return True where a query may read a key.

    visible = key is real, not later, in the same segment, and within the window (rank_query - rank_key < window)
    """
    visible = (keys.columns[None, :] <= queries.columns[:, None])[None] & keys.real[:, None, :]
    if queries.segments is not None:
        visible &= queries.segments[:, :, None] == keys.segments[:, None, :]
    if window is not None:
        visible &= queries.ranks[:, :, None] - keys.ranks[:, None, :] < window
    return visible


def _attend_block(queries, keys, values, visible):
    scores = wide_einsum("bgrtc,bgsc->bgrts", queries, keys)
    scores = jnp.where(visible[:, None, None], scores, _HIDDEN_SCORE)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    mean = wide_einsum("bgrts,bgsc->bgrtc", weights.astype(values.dtype), values)
    return mean / weights.sum(-1, keepdims=True)


def attend(
    queries: Float[Array, "B G R T C"],
    keys: Float[Array, "B G S C"],
    values: Float[Array, "B G S C"],
    visible: Bool[Array, "#B T S"],
    *,
    causal_square: bool = False,
) -> Float[Array, "B G R T C"]:
    """Average the values by softmax(queries . keys) over the visible keys; scores and softmax in float32.

    Queries come scaled. The R query heads of a key-value head are one matrix product: keys and values are never
    repeated. Dividing after the product with the values touches C instead of S numbers a query.

    Args:
        queries, keys, values: float [B, G, R, T, C] and [B, G, S, C].
        visible: bool [B or 1, T, S].
        causal_square: query t sees no key beyond t, and S = T: lets the later keys be skipped in blocks.

    Returns:
        float [B, G, R, T, C] in the dtype of the values. A query that sees nothing gets some finite mean.
    """
    count = queries.shape[3]
    blocks = 2 if causal_square and count % 2 == 0 and count // 2 >= _MIN_BLOCK else 1
    size = count // blocks
    means = []
    for start in range(0, count, size):
        end = start + size
        seen = end if causal_square else keys.shape[2]
        means.append(
            _attend_block(
                queries[:, :, :, start:end], keys[:, :, :seen], values[:, :, :seen], visible[:, start:end, :seen]
            )
        )
    return (means[0] if blocks == 1 else jnp.concatenate(means, axis=3)).astype(values.dtype)


class Attention(nnx.Module):
    """Project to heads, rotate, attend, project back: one layer's attention, on flat tokens [B * T, D]."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype, param_dtype):
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale

        def linear(inputs: int, outputs: int, bias: bool, std: float) -> nnx.Linear:
            return nnx.Linear(
                inputs, outputs, use_bias=bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs,
                kernel_init=nnx.initializers.normal(std),
            )

        width, std = config.hidden_size, config.hidden_size**-0.5
        self.q_proj = linear(width, self.heads * self.head_dim, config.qkv_bias, std)
        self.k_proj = linear(width, self.kv_heads * self.head_dim, config.qkv_bias, std)
        self.v_proj = linear(width, self.kv_heads * self.head_dim, config.qkv_bias, std)
        # Every layer adds two outputs to the residual stream: this keeps its variance at 1 whatever the depth.
        self.o_proj = linear(
            self.heads * self.head_dim, width, config.output_bias, std * (2 * config.num_layers) ** -0.5
        )
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config, rngs=rngs, param_dtype=param_dtype)
            self.k_norm = RMSNorm(self.head_dim, config, rngs=rngs, param_dtype=param_dtype)
        else:
            self.q_norm = self.k_norm = None

    def __call__(
        self,
        flat: Float[Array, "tokens D"],
        visible: Bool[Array, "#B T S"],
        rotation: tuple[Float[Array, "#B T half"], Float[Array, "#B T half"]] | None,
        *,
        batch: int,
        query_scale: Float[Array, "#B T"] | None = None,
        past: tuple[Array, Array] | None = None,
        offset: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "tokens D"], tuple[Array, Array]]:
        """Return the output and the keys and values [B, G, S, C] that were read.

        With `past` (static arrays of S slots) the new keys and values are written from slot `offset` on.
        """
        length = flat.shape[0] // batch
        queries = self.q_proj(flat).reshape(batch, length, self.heads, self.head_dim)
        keys = self.k_proj(flat).reshape(batch, length, self.kv_heads, self.head_dim)
        values = self.v_proj(flat).reshape(batch, length, self.kv_heads, self.head_dim)
        if self.q_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        scale = self.scale if query_scale is None else self.scale * query_scale[:, :, None, None]
        queries = queries.astype(jnp.float32) * scale
        if rotation is not None:
            queries, keys = rotate(queries, *rotation), rotate(keys, *rotation)
        queries = jnp.swapaxes(queries.astype(values.dtype), 1, 2)
        queries = queries.reshape(batch, self.kv_heads, -1, length, self.head_dim)
        keys, values = jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2)
        if past is not None:
            start = (0, 0, offset, 0)
            keys = jax.lax.dynamic_update_slice(past[0], keys, start)
            values = jax.lax.dynamic_update_slice(past[1], values, start)
        mean = attend(queries, keys, values, visible, causal_square=past is None)
        mean = mean.reshape(batch, self.heads, length, self.head_dim)
        return self.o_proj(jnp.swapaxes(mean, 1, 2).reshape(flat.shape[0], -1)), (keys, values)
