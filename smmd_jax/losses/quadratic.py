"""The quadratic form r^T M r of the residual of a softmax, with the gradient that needs no second product."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float


@jax.custom_jvp
def quadratic_loss(
    scores: Float[Array, "*batch N"], match: Bool[Array, "*batch N"], form: Float[Array, "N N"]
) -> Float[Array, "*batch"]:
    """r^T M r for float32 scores; rows without a match hold garbage. The form is a constant: its gradient is 0."""
    return value_and_gradient(scores, match, form)[0]


@quadratic_loss.defjvp
def _quadratic_loss_jvp(primals, tangents):
    value, gradient = value_and_gradient(*primals)
    return value, jnp.sum(gradient * tangents[0], axis=-1)


def value_and_gradient(
    scores: Float[Array, "*batch N"], match: Bool[Array, "*batch N"], form: Float[Array, "N N"]
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch N"]]:
    """The loss and 2 p (u - <p, u>), u = M r, both without cancellation where p is close to the target."""
    p = jax.nn.softmax(scores, axis=-1)
    others = jnp.where(match, 0.0, p)
    # r_t = p_t - 1 would lose its digits; it is minus the sum of the others.
    residual = others - jnp.where(match, jnp.sum(others, axis=-1, keepdims=True), 0.0)
    # The accelerators' default precision would round M r to bfloat16.
    u = jnp.einsum("...i,ij->...j", residual, form, precision=lax.Precision.HIGHEST)
    value = jnp.sum(residual * u, axis=-1)
    # <p, u> = u_t + <others, u - u_t>, since p sums to 1: every term is small where the residual is.
    from_target = u - jnp.sum(jnp.where(match, u, 0.0), axis=-1, keepdims=True)
    gradient = 2.0 * p * (from_target - jnp.sum(others * from_target, axis=-1, keepdims=True))
    return value, gradient
