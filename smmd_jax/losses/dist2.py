"""DIST2: the divergence from a target distribution that decays with the squared distance of the values."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smmd_jax.losses.cross_entropy import log_normalizer
from smmd_jax.operands import Vocabulary, at_numeric, check_positive, full_operands, numeric_columns, value_differences


def dist2_loss(
    logits: Float[Array, "*batch V"],
    targets: Int[Array, "*batch"],
    kernel: Vocabulary,
    *,
    mask: Bool[Array, "*batch"] | None = None,
    tau: float = 1.0,
) -> Float[Array, "*batch"]:
    """Compute the DIST2 loss at each position.

        loss = KL(d || p),   d_j proportional to exp(-(v_j - y)^2 / tau) over the numeric tokens

    p is the softmax over the whole vocabulary. The minimum 0 lies at p = d, not at the one-hot target.

    Args:
      logits, targets, kernel, mask: as `gce_loss`.
      tau: temperature in squared units of the values, positive.

    Returns:
      [...] float32, at least 0 up to rounding.

    Raises:
      ValueError: tau that is not positive; and as `smmd_loss`.

    Example:
      >>> from smmd_jax import make_numeric_vocab
      >>> vocab = make_numeric_vocab({"0": 0, "1": 1})
      >>> round(float(dist2_loss(jnp.zeros(2), jnp.array(0), vocab)), 5)     # log 2 minus the entropy of d
      0.11094

    References:
      Chung et al., "Teaching Metric Distance to Discrete Autoregressive Language Models", 2025, arXiv 2503.02379.
    """
    check_positive("dist2_loss", tau=tau)
    logits, match = full_operands("dist2_loss", logits, targets, kernel, mask)
    squared = jnp.square(value_differences(match, kernel))
    log_d = jax.nn.log_softmax(-squared / tau, axis=-1)
    log_p = numeric_columns("dist2_loss", logits, kernel) - log_normalizer(logits)[..., None]
    d = jnp.exp(log_d)
    # 0 log 0 = 0, also where a far token is banned with -inf.
    terms = d * jnp.where(d > 0, log_d - log_p, 0.0)
    return at_numeric(jnp.sum(terms, axis=-1), match)
