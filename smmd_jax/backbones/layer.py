"""One layer of the decoder: attention and feed-forward, each behind its norm."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from smmd_jax.backbones.attention import Attention
from smmd_jax.backbones.config import DecoderConfig
from smmd_jax.backbones.norm import RMSNorm

_GATES = {
    "silu": jax.nn.silu,
    "gelu": lambda gate: jax.nn.gelu(gate, approximate=False),
    "gelu_tanh": lambda gate: jax.nn.gelu(gate, approximate=True),
}


class FeedForward(nnx.Module):
    """Gate, widen, narrow: down(activation(gate(x)) * up(x)), on flat tokens [B * T, D]."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype, param_dtype):
        def linear(inputs: int, outputs: int, std: float) -> nnx.Linear:
            return nnx.Linear(
                inputs, outputs, use_bias=config.mlp_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs,
                kernel_init=nnx.initializers.normal(std),
            )

        width, inner, std = config.hidden_size, config.intermediate_size, config.hidden_size**-0.5
        self.activation = config.activation
        self.gate_proj = linear(width, inner, std)
        self.up_proj = linear(width, inner, std)
        self.down_proj = linear(inner, width, std * (2 * config.num_layers) ** -0.5)

    def __call__(self, flat: Float[Array, "tokens D"]) -> Float[Array, "tokens D"]:
        # The sigmoid of the gate is computed again on the way back: kept, it is one more [tokens, F] array a layer.
        gated = jax.checkpoint(lambda gate, up: _GATES[self.activation](gate) * up)
        return self.down_proj(gated(self.gate_proj(flat), self.up_proj(flat)))


class DecoderLayer(nnx.Module):
    """Add attention and feed-forward to the residual stream, each behind a norm (and, for gemma3, followed by one)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype, param_dtype):
        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config, rngs=rngs, param_dtype=param_dtype)

        # Names are those of the Hugging Face files. There `post_attention_layernorm` is the norm before the
        # feed-forward, except in gemma3, where it follows attention and `pre_feedforward_layernorm` stands before.
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm = norm() if config.post_norms else None
        self.post_feedforward_layernorm = norm() if config.post_norms else None
        self.self_attn = Attention(config, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.mlp = FeedForward(config, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, flat: Float[Array, "tokens D"], visible, rotation, *, rngs: nnx.Rngs | None = None, **attention):
        def drop(outputs: Array) -> Array:
            return self.dropout(outputs, deterministic=rngs is None, rngs=rngs)

        mixed, keys_values = self.self_attn(self.input_layernorm(flat), visible, rotation, **attention)
        if self.pre_feedforward_layernorm is None:
            flat = flat + drop(mixed)
            return flat + drop(self.mlp(self.post_attention_layernorm(flat))), keys_values
        flat = flat + drop(self.post_attention_layernorm(mixed))
        outputs = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(flat)))
        return flat + drop(outputs), keys_values
