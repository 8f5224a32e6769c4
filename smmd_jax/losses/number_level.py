"""The relative error of whole numbers, read from the expected value of each digit."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smmd_jax.losses.digit_runs import check_digits, check_segment_ids, check_sequence, over_sequences
from smmd_jax.operands import Vocabulary, absolute, numeric_operands


def number_level_loss(
    logits: Float[Array, "*batch T V"],
    targets: Int[Array, "*batch T"],
    kernel: Vocabulary,
    *,
    mask: Bool[Array, "*batch T"] | None = None,
    segment_ids: Int[Array, "*batch T"] | None = None,
) -> Float[Array, "*batch"]:
    """Compute the relative error of the numbers in each sequence, from expected digits.

        loss = mean over numbers of |X - Y| / (X + Y),   X = sum_i 10^(n-i-1) sum_j p_ij j,   0 where X = Y = 0

    A number is a maximal run of digit targets; "12.34" is two of them. In contrast to the losses of single tokens, a
    wrong first digit weighs more than a wrong last one.

    Args, Raises: as `ntil_loss` (no key).

    Returns:
      [...] float32 in [0, 1], one value per sequence; 0 without a number.

    Example:
      >>> from smmd_jax import make_numeric_vocab
      >>> vocab = make_numeric_vocab([str(digit) for digit in range(10)])
      >>> logits = 100 * jax.nn.one_hot(jnp.array([1, 3]), 10)                  # says 13
      >>> round(float(number_level_loss(logits, jnp.array([1, 2]), vocab)), 5)  # for 12: 1 / 25
      0.04

    References:
      Zausinger et al., "Regress, Don't Guess", ICML 2025, arXiv 2411.02083; the number-level form is `NumberLevelLoss`
      of the authors' package ntloss 0.3.2.
    """
    scores, match = numeric_operands("number_level_loss", logits, targets, kernel, mask)
    check_digits("number_level_loss", kernel)
    check_sequence("number_level_loss", match[..., 0])
    segment_ids = check_segment_ids("number_level_loss", match[..., 0], segment_ids)
    return number_level_columns(scores, match, kernel, segment_ids=segment_ids)


def number_level_columns(scores, match, kernel, *, segment_ids=None):
    """`number_level_loss` of float32 digit logits [..., T, 10]."""

    def of_one(scores, match, runs):
        digits = jnp.arange(10.0)
        target = jnp.sum(jnp.where(match, digits, 0.0), axis=-1)
        p = jax.nn.softmax(scores)
        # The largest place becomes 1, so that numbers of any length are finite; the ratio does not change.
        scale = jnp.power(10.0, (runs.place - runs.largest_place(runs.is_digit)).astype(jnp.float32))
        difference = runs.sum_over_run(scale * jnp.sum(p * (digits - target[:, None]), axis=-1))
        total = runs.sum_over_run(scale * (p @ digits + target))
        # Not total > 0: NaN must stay NaN.
        has_value = total != 0
        error = jnp.where(has_value, absolute(difference) / jnp.where(has_value, total, 1.0), 0.0)
        return runs.mean_over_samples(error, runs.is_first)

    return over_sequences(of_one, scores, match, segment_ids)
