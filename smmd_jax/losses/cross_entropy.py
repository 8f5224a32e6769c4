"""Cross entropy, in float32 whatever comes in, with masked positions that change nothing."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from smmd_jax.operands import check_operands, live_rows


def cross_entropy_loss(
    logits: Float[Array, "*batch V"],
    targets: Int[Array, "*batch"],
    *,
    mask: Bool[Array, "*batch"] | None = None,
) -> Float[Array, "*batch"]:
    """Compute the cross entropy of each position's target.

        loss = logsumexp(logits) - logits[target]

    Args:
      logits: [..., V] of any floating dtype; the arithmetic is float32.
      targets: [...] token ids. One outside [0, V) that is not masked gives NaN, in value and gradient: `check_targets`
        finds it on the host.
      mask: [...] bool, true where the position counts; masked positions may hold anything and give 0.

    Returns:
      [...] float32.

    Raises:
      ValueError: shapes that do not fit.
      TypeError: logits that are not floating point, targets that are not integers, a mask that is not boolean.

    Example:
      >>> cross_entropy_loss(jnp.zeros((2, 4)), jnp.array([1, -100]), mask=jnp.array([True, False]))
      Array([1.3862944, 0.       ], dtype=float32)

    References:
      Goodfellow, Bengio, Courville, "Deep Learning", 2016, section 6.2.2.3 (softmax units under maximum likelihood).
    """
    logits, targets, mask = check_operands("cross_entropy_loss", logits, targets, mask)
    in_range = (targets >= 0) & (targets < logits.shape[-1])
    safe_targets = jnp.where(in_range, targets, 0)
    if mask is not None:
        logits = live_rows(logits, mask)
    nll = negative_log_likelihood(logits, safe_targets)
    # optax would let -1 mean the last class and train on with a NaN of zero gradient for -100.
    nll = nll * jnp.where(in_range, 1.0, jnp.nan)
    return nll if mask is None else jnp.where(mask, nll, 0.0)


def cross_entropy_of_all(logits, targets, kernel=None, *, mask=None):
    """`cross_entropy_loss` with the call of the other rows of the table of losses; it needs no kernel."""
    return cross_entropy_loss(logits, targets, mask=mask)


def negative_log_likelihood(logits: Float[Array, "*batch V"], targets: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Cross entropy for targets that are known to lie in [0, V); an empty vocabulary gives NaN."""
    if logits.shape[-1] == 0:
        return jnp.full(targets.shape, jnp.nan, jnp.float32)
    if logits.dtype == jnp.float32:
        return log_normalizer(logits) - _target_logits(logits, targets)
    return _low_precision_nll(logits, targets)


def log_normalizer(logits):
    """logsumexp in float32."""
    if logits.dtype == jnp.float32 or logits.shape[-1] == 0:
        return jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    top = jnp.max(logits, axis=-1)
    top = jnp.where(jnp.isfinite(top), top, jnp.zeros((), top.dtype))
    # Without the barrier XLA makes one float32 copy of the logits for both passes and keeps it.
    logits, top = lax.optimization_barrier((logits, top.astype(jnp.float32)))
    return jnp.log(jnp.sum(jnp.exp(logits.astype(jnp.float32) - top[..., None]), axis=-1)) + top


def _target_logits(logits, targets):
    return jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0].astype(jnp.float32)


@jax.custom_jvp
def _low_precision_nll(logits, targets):
    return log_normalizer(logits) - _target_logits(logits, targets)


@_low_precision_nll.defjvp
def _low_precision_nll_jvp(primals, tangents):
    """Recompute the softmax from the 16-bit logits: plain differentiation keeps float32 copies, twice the memory.

    In float32 XLA keeps nothing anyway, and recomputing would only cost a second exponential.
    """
    logits, targets = primals
    normalizer = log_normalizer(logits)
    nll = normalizer - _target_logits(logits, targets)
    # Without the barrier XLA shares the forward's exponentials and so keeps them, in float32.
    normalizer, logits = lax.optimization_barrier((normalizer, logits))
    is_target = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]
    residual = jnp.exp(logits.astype(jnp.float32) - normalizer[..., None]) - is_target
    return nll, jnp.sum(residual * tangents[0].astype(jnp.float32), axis=-1)
