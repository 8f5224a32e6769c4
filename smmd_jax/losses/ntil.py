"""NTIL: each digit's distance, weighted by its place, and the error of the whole numbers that the digits spell."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from smmd_jax.losses.digit_runs import (
    DigitRuns,
    check_digits,
    check_segment_ids,
    check_sequence,
    over_sequences,
)
from smmd_jax.operands import Vocabulary, absolute, numeric_operands

_PLACE_WEIGHT = 1.2
_TEMPERATURE = 0.1
_NOISE_SCALE = 0.01
_SHARE_OF_NUMBER = 0.2
# Leading digits of a number that are added as integers, exactly; the rest adds less than 1e-7 of them.
_EXACT_DIGITS = 8
# A leading digit of a long number has a derivative of 10^place: beyond float32. Forward values are not affected.
_LARGEST_DERIVATIVE_POWER = 15
# 1.2^400 = 5e31: digits further left than 400 places weigh no more than that, so that sums stay finite.
_LARGEST_WEIGHT_PLACE = 400


class NtilTerms(NamedTuple):
    """The parts of NTIL of each sequence; with segment ids, means over the sequence's samples.

    Attributes:
      emd: [...] place-weighted earth mover's distance of the digits.
      rel: [...] relative error of the numbers.
      mag: [...] error of their magnitude.
      total: [...] emd + 0.2 rel + 0.2 mag.
      samples: [...] int32, the number of packed samples, 1 without segment ids: total * samples is their sum.
    """

    emd: Float[Array, "*batch"]
    rel: Float[Array, "*batch"]
    mag: Float[Array, "*batch"]
    total: Float[Array, "*batch"]
    samples: Int[Array, "*batch"]


def ntil_loss(
    logits: Float[Array, "*batch T V"],
    targets: Int[Array, "*batch T"],
    kernel: Vocabulary,
    *,
    mask: Bool[Array, "*batch T"] | None = None,
    segment_ids: Int[Array, "*batch T"] | None = None,
    key: Key[Array, ""] | None = None,
) -> Float[Array, "*batch"]:
    """Compute the Numerical Token Integrity Loss of each sequence, as the authors' code computes it.

        loss = emd + 0.2 rel + 0.2 mag

    For a number y_0 .. y_{n-1}, a maximal run of digit targets, p_i the softmax over the ten digit logits:

        emd = mean over digits of 1.2^(n-i-1) sum_j p_ij |j - y_i|
        rel = mean over numbers of |X - Y| / (max(X, Y) + 1)
        mag = mean over numbers of log((max(X, Y) + 1) / (min(X, Y) + 1))

    Y is the number, X the one that the arg-max digits spell; the gradient of X goes through softmax(logits / 0.1)
    (straight-through Gumbel softmax). The authors train on CE + stop_gradient(CE / NTIL) * 0.3 * NTIL.

    Args:
      logits: [..., T, V] of any floating dtype; the arithmetic is float32. T is the order of the text.
      targets: [..., T] token ids.
      kernel: a `NumericKernel` or `NumericVocab` of exactly the ten digits.
      mask: [..., T] bool; a masked position is no digit and ends a number.
      segment_ids: [..., T] ints of packed samples, 0 for padding; a number ends where the segment does, and the value
        is the mean over the row's samples.
      key: adds Gumbel noise of scale 0.01 to the digit logits, as the authors do; None is deterministic.

    Returns:
      [...] float32, one value per sequence: 0 without a number. Finite for numbers of any length: a digit more than 400
      places from the right weighs 1.2^400, and derivatives with respect to a digit are held to 1e15.

    Raises:
      ValueError: a vocabulary that is not the ten digits, no T axis, shapes that do not fit.
      TypeError: as `smmd_loss`.

    Example:
      >>> from smmd_jax import make_numeric_vocab
      >>> vocab = make_numeric_vocab([str(digit) for digit in range(10)])
      >>> logits = 100 * jax.nn.one_hot(jnp.array([1, 3]), 10)                  # says 13
      >>> round(float(ntil_loss(logits, jnp.array([1, 2]), vocab)), 5)     # for 12: 0.5 + 0.2 / 14 + 0.2 log(14 / 13)
      0.52911

    References:
      Fei et al., "Advancing Sequential Numerical Prediction in Autoregressive Models", ACL 2025, arXiv 2505.13077.
    """
    return _terms("ntil_loss", logits, targets, kernel, mask, segment_ids, key).total


def ntil_terms(
    logits: Float[Array, "*batch T V"],
    targets: Int[Array, "*batch T"],
    kernel: Vocabulary,
    *,
    mask: Bool[Array, "*batch T"] | None = None,
    segment_ids: Int[Array, "*batch T"] | None = None,
    key: Key[Array, ""] | None = None,
) -> NtilTerms:
    """Compute the parts of `ntil_loss`; the authors' total has the value of 1.3 CE and says nothing by itself.

    Args, Raises: as `ntil_loss`.

    Returns:
      `NtilTerms`, each [...].

    Example:
      >>> from smmd_jax import make_numeric_vocab
      >>> vocab = make_numeric_vocab([str(digit) for digit in range(10)])
      >>> logits = 100 * jax.nn.one_hot(jnp.array([1, 3]), 10)
      >>> round(float(ntil_terms(logits, jnp.array([1, 2]), vocab).rel), 5)     # 1 / 14
      0.07143

    References: as `ntil_loss`.
    """
    return _terms("ntil_terms", logits, targets, kernel, mask, segment_ids, key)


def _terms(name, logits, targets, kernel, mask, segment_ids, key) -> NtilTerms:
    scores, match = numeric_operands(name, logits, targets, kernel, mask)
    check_digits(name, kernel)
    check_sequence(name, match[..., 0])
    segment_ids = check_segment_ids(name, match[..., 0], segment_ids)
    return ntil_columns(scores, match, kernel, segment_ids=segment_ids, key=key)


def ntil_columns(scores, match, kernel, *, segment_ids=None, key=None) -> NtilTerms:
    """`NtilTerms` of float32 digit logits [..., T, 10]."""
    noise = 0.0 if key is None else _NOISE_SCALE * jax.random.gumbel(key, scores.shape, jnp.float32)
    both = jnp.stack([scores, scores + noise], axis=-1)

    def of_one(both, match, runs: DigitRuns) -> NtilTerms:
        scores, noisy = both[..., 0], both[..., 1]
        digits = jnp.arange(10)
        target = jnp.sum(jnp.where(match, digits, 0), axis=-1)
        distance = jnp.sum(jax.nn.softmax(scores) * jnp.abs(digits - target[:, None]), axis=-1)
        weight = _PLACE_WEIGHT ** jnp.minimum(runs.place, _LARGEST_WEIGHT_PLACE).astype(jnp.float32)
        emd = runs.mean_over_samples(weight * distance, runs.is_digit)

        soft = jax.nn.softmax(noisy / _TEMPERATURE) @ digits.astype(jnp.float32)
        rel, mag = _number_errors(jnp.argmax(noisy, axis=-1), soft - jax.lax.stop_gradient(soft), target, runs)
        rel = runs.mean_over_samples(rel, runs.is_first)
        mag = runs.mean_over_samples(mag, runs.is_first)
        total = emd + _SHARE_OF_NUMBER * rel + _SHARE_OF_NUMBER * mag
        return NtilTerms(emd=emd, rel=rel, mag=mag, total=total, samples=runs.samples)

    return over_sequences(of_one, both, match, segment_ids)


def _number_errors(
    digit: Int[Array, "T"], variation: Float[Array, "T"], target: Int[Array, "T"], runs: DigitRuns
) -> tuple[Float[Array, "T"], Float[Array, "T"]]:
    """Relative error and magnitude error of the number at each digit of its run.

    X = sum_i 10^place_i digit_i leaves float32 at 39 digits, so X and Y are kept as mantissa and power of ten, and
    their difference is taken digit by digit (8 leading digits as integers): 1000 against 999 loses nothing.

    Args:
      digit: the predicted digits.
      variation: 0 in value; its gradient is the gradient of the predicted digit.
    """
    log_x, power_x = _log_of_number(digit, variation, runs)
    log_y, power_y = _log_of_number(target, None, runs)
    power = jnp.maximum(power_x, power_y)
    scaled = lambda digits: _mantissa(digits, power, runs)
    difference = scaled(digit - target) + _scaled_variation(variation, power, runs)
    one = _power_of_ten(-power)
    larger = jnp.maximum(scaled(digit) + _scaled_variation(variation, power, runs), scaled(target)) + one
    rel = absolute(difference) / larger

    # (min + 1) / (max + 1) = 1 - rel: exact for near numbers, where the logarithms would cancel.
    is_near = rel < 0.5
    near = -jnp.log1p(-jnp.where(is_near, rel, 0.0))
    return rel, jnp.where(is_near, near, absolute(log_x - log_y))


def _log_of_number(digits, variation, runs):
    """log(X + 1), and the power of ten of X's first non-zero digit."""
    power = runs.largest_place(digits > 0)
    mantissa = _mantissa(digits, power, runs)
    if variation is not None:
        mantissa = mantissa + _scaled_variation(variation, power, runs)
    # mantissa + 10^-power >= 1 in every run; elsewhere it is 1 as well.
    return jnp.log(mantissa + _power_of_ten(-power)) + power * math.log(10.0), power


def _mantissa(digits, power, runs):
    """sum_i digit_i 10^(place_i - power) of each run, with the leading digits summed as integers."""
    behind = power - runs.place
    exact = (behind >= 0) & (behind < _EXACT_DIGITS)
    integer_weight = jnp.array([10**k for k in range(_EXACT_DIGITS)][::-1])[jnp.clip(behind, 0, _EXACT_DIGITS - 1)]
    leading = runs.sum_over_run(jnp.where(exact, digits * integer_weight, 0)).astype(jnp.float32)
    rest = runs.sum_over_run(jnp.where(behind >= _EXACT_DIGITS, digits * _power_of_ten(-behind), 0.0))
    return leading * 10.0 ** -(_EXACT_DIGITS - 1) + rest


def _scaled_variation(variation, power, runs):
    return runs.sum_over_run(variation * _power_of_ten(jnp.minimum(runs.place - power, _LARGEST_DERIVATIVE_POWER)))


def _power_of_ten(exponent):
    return jnp.power(10.0, exponent.astype(jnp.float32))
