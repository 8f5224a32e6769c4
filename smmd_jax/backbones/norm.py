"""Root mean square normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from smmd_jax.backbones.config import DecoderConfig


class RMSNorm(nnx.Module):
    """Divide by the root mean square in float32 and multiply by a weight.

    y = x / sqrt(mean(x^2) + eps) * w          the weight after casting back to the dtype of x
    y = x / sqrt(mean(x^2) + eps) * (1 + w)    with `norm_plus_one` (gemma3), all in float32

    References:
        B. Zhang and R. Sennrich, Root Mean Square Layer Normalization, 2019, eq. 4.
    """

    def __init__(self, width: int, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype):
        self.eps, self.plus_one = config.norm_eps, config.norm_plus_one
        initial = nnx.initializers.zeros if self.plus_one else nnx.initializers.ones
        self.weight = nnx.Param(initial(rngs.params(), (width,), param_dtype))

    def __call__(self, inputs: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        wide = inputs.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.eps)
        if self.plus_one:
            return (normed * (1.0 + self.weight[...].astype(jnp.float32))).astype(inputs.dtype)
        return normed.astype(inputs.dtype) * self.weight[...].astype(inputs.dtype)
