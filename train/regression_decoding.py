"""Regression-aware decoding: the one number to answer with, given a distribution over numbers or sampled answers."""

import statistics
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import numpy as np
from jaxtyping import Float


def expected_value(probabilities: Any, values: Any) -> Float[np.ndarray, "*batch"]:
    """Give the answer of least expected squared error: sum_i q_i v_i with q = p / sum p, in float64.

    Args:
      probabilities: [..., N], of the numeric tokens; they need not sum to one.
      values: [N].

    Raises:
      ValueError: shapes that do not fit, a negative or infinite probability, or a row of zeros.

    Example:
      >>> expected_value([0.2, 0.2, 0.0], [1.0, 4.0, 9.0])
      array(2.5)

    References:
      Lukasik, Narasimhan, Menon, Yu, Kumar, "Regression-aware Inference with LLMs", 2024, section 3.
    """
    q, v = _checked("expected_value", probabilities, values)
    return np.asarray((q * v).sum(-1))


def median_value(probabilities: Any, values: Any) -> Float[np.ndarray, "*batch"]:
    """Give the answer of least expected absolute error: the least v_i with sum of q_j over v_j <= v_i at least 1/2.

    Args, raises: as in `expected_value`.

    Example:
      >>> median_value([0.2, 0.3, 0.1], [1.0, 4.0, 9.0])
      array(4.)
    """
    q, v = _checked("median_value", probabilities, values)
    order = np.argsort(v, kind="stable")
    # A half that was summed up in floating point may fall short of it by rounding.
    reached = np.cumsum(q[..., order], axis=-1) >= 0.5 - 1e-12
    return np.asarray(v[order][reached.argmax(-1)])


def mean_of_samples(numbers: Iterable[Fraction | None]) -> Fraction | None:
    """Give the mean of the numbers that sampled answers state, exactly; None where none states one.

    Args:
      numbers: one for each sample, from the reader of a grader; None for a sample without a number.

    Example:
      >>> mean_of_samples([Fraction(1), None, Fraction(2)])
      Fraction(3, 2)
    """
    parsed = [number for number in numbers if number is not None]
    return sum(parsed, Fraction(0)) / len(parsed) if parsed else None


def median_of_samples(numbers: Iterable[Fraction | None]) -> Fraction | None:
    """Give the lower median of the numbers that sampled answers state: always one of them; None where none states one.

    Example:
      >>> median_of_samples([Fraction(7), Fraction(1), None, Fraction(9), Fraction(8)])
      Fraction(7, 1)
    """
    parsed = [number for number in numbers if number is not None]
    return statistics.median_low(parsed) if parsed else None


def _checked(name: str, probabilities: Any, values: Any) -> tuple[np.ndarray, np.ndarray]:
    p, v = np.asarray(probabilities, np.float64), np.asarray(values, np.float64)
    if v.ndim != 1 or p.shape[-1:] != v.shape or not len(v):
        raise ValueError(
            f"{name}: wanted probabilities [..., N] and values [N], got shapes {list(p.shape)} and {list(v.shape)}."
        )
    sums = p.sum(-1, keepdims=True)
    if p.size and not (np.isfinite(p).all() and p.min() >= 0 and sums.min() > 0):
        raise ValueError(f"{name}: probabilities must be finite, at least 0, and not all 0 in a row.")
    return p / sums, v
