"""DEL: the entropy of the digit distribution, supervised by binary cross entropy."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smmd_jax.operands import Vocabulary, at_numeric, numeric_operands


def digit_entropy_loss(
    logits: Float[Array, "*batch V"],
    targets: Int[Array, "*batch"],
    kernel: Vocabulary,
    *,
    mask: Bool[Array, "*batch"] | None = None,
) -> Float[Array, "*batch"]:
    """Compute the Digit Entropy Loss at each position.

        loss = 1/N sum_j p_j BCE(l_j, [j is the target]),   p = softmax(l),   l = logits[V_num]

        BCE(l, 1) = log(1 + exp(-l)),   BCE(l, 0) = log(1 + exp(l))

    The binary terms see the logits themselves, so adding a constant to all logits changes the loss. The place weights
    of the authors' script (powers of 1.02 along a number) are left to the caller: multiply the returned values.

    Args, Raises: as `ntl_was_loss`.

    Returns:
      [...] float32, above 0; it tends to 0 as the target's logit grows and the others fall.

    Example:
      >>> from smmd_jax import make_numeric_vocab
      >>> vocab = make_numeric_vocab([str(digit) for digit in range(10)])
      >>> round(float(digit_entropy_loss(jnp.zeros(10), jnp.array(0), vocab)), 6)     # log(2) / 10
      0.069315

    References:
      Zheng et al., "DEL: Digit Entropy Loss for Numerical Learning of Large Language Models", 2026, arXiv 2605.20369.
    """
    scores, match = numeric_operands("digit_entropy_loss", logits, targets, kernel, mask)
    return digit_entropy_columns(scores, match, kernel)


def digit_entropy_columns(scores, match, kernel):
    binary = jax.nn.softplus(jnp.where(match, -scores, scores))
    return at_numeric(jnp.mean(jax.nn.softmax(scores, axis=-1) * binary, axis=-1), match)
