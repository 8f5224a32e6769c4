"""Gaussian Cross Entropy: targets smoothed over the values near the true one."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smmd_jax.losses.cross_entropy import log_normalizer
from smmd_jax.operands import Vocabulary, at_numeric, check_positive, full_operands, numeric_columns, value_differences


def gce_loss(
    logits: Float[Array, "*batch V"],
    targets: Int[Array, "*batch"],
    kernel: Vocabulary,
    *,
    mask: Bool[Array, "*batch"] | None = None,
    sigma: float = 1.0,
    boost: float = 1.0,
) -> Float[Array, "*batch"]:
    """Compute the cross entropy with Gaussian targets over the numeric tokens, at each numeric position.

        loss = - sum_j w_j log p_j,   w_j proportional to exp(-(v_j - y)^2 / (2 sigma^2)),   sum_j w_j = 1

    p is the softmax over the whole vocabulary. The loss stands in for cross entropy at numeric positions (it is not
    added to it); its minimum is not 0 and lies at p = w, not at the one-hot target.

    Args:
      logits: [..., V] of any floating dtype; the arithmetic is float32.
      targets: [...] token ids; one that is not numeric contributes exactly 0.
      kernel: a `NumericKernel` or `NumericVocab`; only ids and values are used.
      mask: [...] bool, true where the position counts; masked positions may hold anything.
      sigma: width of the target in units of the values, positive.
      boost: factor on the true token's weight before normalising; 1 as in the NTL code, 2 as in Token-Mol.

    Returns:
      [...] float32.

    Raises:
      ValueError: sigma or boost that is not positive; and as `smmd_loss`.

    Example:
      >>> from smmd_jax import make_numeric_vocab
      >>> vocab = make_numeric_vocab([str(digit) for digit in range(10)])
      >>> round(float(gce_loss(jnp.zeros(10), jnp.array(3), vocab)), 5)     # log 10 for uniform p
      2.30259

    References:
      Zausinger et al., "Regress, Don't Guess", ICML 2025, arXiv 2411.02083 (baseline GCE).
      Wang et al., "Token-Mol 1.0: tokenized drug design with large language models", Nature Communications 2025,
      arXiv 2407.07930 (Gaussian cross entropy).
    """
    check_positive("gce_loss", sigma=sigma, boost=boost)
    logits, match = full_operands("gce_loss", logits, targets, kernel, mask)
    distance = value_differences(match, kernel) / sigma
    log_weight = -0.5 * jnp.square(distance) + jnp.where(match, jnp.log(boost), 0.0)
    weight = jax.nn.softmax(log_weight, axis=-1)
    columns = numeric_columns("gce_loss", logits, kernel)
    # A weight that underflows to 0 must not meet the -inf of a banned token.
    expected = jnp.sum(weight * jnp.where(weight > 0, columns, 0.0), axis=-1)
    return at_numeric(log_normalizer(logits) - expected, match)
