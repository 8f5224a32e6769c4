"""Products whose operands are narrow and whose sums are float32, on the way forward and on the way back."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def wide_einsum(spec: str, left: Float[Array, "..."], right: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the einsum of two arrays as float32 sums of products in the dtype of the left one.

    The gradient that comes back is float32, and a product with it would drag the other operand up to float32 too.
    It is rounded to the dtype of the left array instead; sums stay float32, and the gradient of the right array is
    rounded once, to the dtype that array is stored in. With float32 operands this is `jnp.einsum`.

    Args:
        spec: every index of an operand stands in the other operand or in the result, as in "td,dv->tv".
        left: decides the dtype of the products.
        right: cast to it.

    Returns:
        float32, of the shape that `spec` says.

    Example:
        >>> wide_einsum("td,dv->tv", jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4))).dtype
        dtype('float32')

    References:
        P. Micikevicius et al., Mixed Precision Training, 2018, section 3.3.
    """
    if left.dtype == jnp.float32:
        return jnp.einsum(spec, left, right.astype(jnp.float32))
    return _narrow_einsum(spec, left, right)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _narrow_einsum(spec, left, right):
    return jnp.einsum(spec, left, right.astype(left.dtype), preferred_element_type=jnp.float32)


def _forward(spec, left, right):
    return _narrow_einsum(spec, left, right), (left, right)


def _backward(spec, operands, gradient):
    left, right = operands
    gradient = gradient.astype(left.dtype)
    operands, out = spec.split("->")
    first, second = operands.split(",")
    to_left = jnp.einsum(
        f"{out},{second}->{first}", gradient, right.astype(left.dtype), preferred_element_type=jnp.float32
    )
    to_right = jnp.einsum(f"{first},{out}->{second}", left, gradient, preferred_element_type=jnp.float32)
    return to_left.astype(left.dtype), to_right.astype(right.dtype)


_narrow_einsum.defvjp(_forward, _backward)
