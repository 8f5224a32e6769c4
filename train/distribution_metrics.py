"""How good the predicted distribution over numeric tokens is, at positions whose target is one of them; in float64.

All functions take p [n, N], the probabilities that the softmax over the whole vocabulary gives the N numeric tokens,
the targets' columns t [n], and the tokens' values v [N]. q = p / sum p is the distribution given that the token is
numeric.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import Float

# Rounding of float32 probabilities may lift a sum of N of them over one by this much.
_SLACK = 1e-3
CALIBRATION_BINS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributionMetrics:
    """Means over n numeric targets; None without any.

    Args:
      n: targets.
      nll: mean of -log p_t, in nats, over the whole vocabulary.
      numeric_mass: mean of sum p, the probability that the model gives to numbers at all.
      expected_distance: mean of sum_i q_i |v_i - v_t|.
      crps: mean continuous ranked probability score of q; it is the distance where q is certain.
      calibration_error: of q's most likely token, see `calibration_error`.
    """

    n: int
    nll: float | None
    numeric_mass: float | None
    expected_distance: float | None
    crps: float | None
    calibration_error: float | None


def measure_distributions(probabilities: Any, targets: Any, values: Any) -> DistributionMetrics:
    """Measure predicted distributions in every way of this module.

    Args:
      probabilities: [n, N].
      targets: [n] integers, columns of `probabilities`.
      values: [N], in any order.

    Raises:
      ValueError: shapes that do not fit, a negative, infinite or missing probability, rows that sum to more than one or
        to nothing, a target that is no column.

    Example:
      >>> metrics = measure_distributions([[0.5, 0.25, 0.0]], [0], [0.0, 1.0, 2.0])
      >>> round(metrics.nll, 4), metrics.numeric_mass, round(metrics.expected_distance, 4), round(metrics.crps, 4)
      (0.6931, 0.75, 0.3333, 0.1111)
    """
    return measure_parts([(probabilities, targets)], values)


def measure_parts(parts: Iterable[tuple[Any, Any]], values: Any) -> DistributionMetrics:
    """Measure predicted distributions that come in parts, so that only one part is in memory at a time.

    Args:
      parts: (probabilities [n, N], targets [n]) pairs, as for `measure_distributions`.
      values: [N], in any order.

    Raises:
      ValueError: as in `measure_distributions`.

    Example:
      >>> parts = [([[0.5, 0.5]], [0]), ([[0.25, 0.75]], [0])]
      >>> measure_parts(parts, [0.0, 1.0]).expected_distance
      0.625
    """
    # One row each: negative log-likelihood, mass, distance, CRPS, confidence, hit.
    columns = [np.zeros((6, 0))]
    for probabilities, targets in parts:
        p, t, v = _checked(probabilities, targets, values)
        if not len(p):
            continue
        scores = (negative_log_likelihood(p, t), p.sum(1), expected_distance(p, t, v), crps(p, t, v))
        columns.append(np.stack([*scores, *_confidence(p, t)]))
    table = np.concatenate(columns, axis=1)
    n = table.shape[1]
    means = [float(row.mean()) for row in table[:4]] if n else [None] * 4
    return DistributionMetrics(
        n=n,
        nll=means[0],
        numeric_mass=means[1],
        expected_distance=means[2],
        crps=means[3],
        calibration_error=_binned_gap(*table[4:], bins=CALIBRATION_BINS) if n else None,
    )


def negative_log_likelihood(probabilities: Any, targets: Any) -> Float[np.ndarray, "n"]:
    """Give -log p_t, in nats; infinite where the target has probability 0.

    Example:
      >>> negative_log_likelihood([[0.5, 0.25]], [1]).round(4)
      array([1.3863])
    """
    p, t, _ = _checked(probabilities, targets)
    with np.errstate(divide="ignore"):
        return -np.log(p[np.arange(len(p)), t])


def expected_distance(probabilities: Any, targets: Any, values: Any) -> Float[np.ndarray, "n"]:
    """Give sum_i q_i |v_i - v_t|.

    Example:
      >>> expected_distance([[0.5, 0.0, 0.5]], [0], [0.0, 1.0, 2.0])
      array([1.])
    """
    p, t, v = _checked(probabilities, targets, values)
    return (_given_numeric(p) * np.abs(v[None, :] - v[t][:, None])).sum(1)


def crps(probabilities: Any, targets: Any, values: Any) -> Float[np.ndarray, "n"]:
    """Give the continuous ranked probability score: 0 where q is certain of the target's value, and proper.

        F(x) = sum of q_i with v_i <= x,    crps = integral (F(x) - [x >= v_t])^2 dx = E|X - v_t| - E|X - X'| / 2

    Example:
      >>> crps([[0.5, 0.0, 0.5]], [0], [0.0, 1.0, 2.0])
      array([0.5])

    References:
      Gneiting, Raftery, "Strictly Proper Scoring Rules, Prediction, and Estimation", 2007, equations 20 and 21.
    """
    p, t, v = _checked(probabilities, targets, values)
    order = np.argsort(v, kind="stable")
    ascending = v[order]
    below = np.cumsum(_given_numeric(p)[:, order], axis=1)[:, :-1]
    reached = ascending[None, :-1] >= v[t][:, None]
    return ((below - reached) ** 2 * np.diff(ascending)).sum(1)


def calibration_error(probabilities: Any, targets: Any, *, bins: int = CALIBRATION_BINS) -> float | None:
    """Give the expected calibration error of the most likely numeric token; None without targets.

        c = max_i q_i,    error = sum over bins of c: share of the bin |mean c - share of hits|, with equally wide bins

    Raises:
      ValueError: fewer than one bin.

    Example:
      >>> calibration_error([[0.8, 0.2], [0.8, 0.2]], [0, 1])
      0.30000000000000004

    References:
      Guo, Pleiss, Sun, Weinberger, "On Calibration of Modern Neural Networks", 2017, equation 3.
    """
    if bins < 1:
        raise ValueError(f"calibration_error: bins must be at least 1, got {bins}.")
    p, t, _ = _checked(probabilities, targets)
    if not len(p):
        return None
    return _binned_gap(*_confidence(p, t), bins=bins)


def _confidence(p: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _given_numeric(p).max(1), p.argmax(1) == t


def _binned_gap(confidence: np.ndarray, hit: np.ndarray, *, bins: int) -> float:
    bin_of = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = np.bincount(bin_of, weights=confidence, minlength=bins) - np.bincount(bin_of, weights=hit, minlength=bins)
    return float(np.abs(gaps).sum() / len(confidence))


def _given_numeric(p: np.ndarray) -> np.ndarray:
    return p / p.sum(1, keepdims=True)


def _checked(probabilities: Any, targets: Any, values: Any = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    p, t = np.asarray(probabilities, np.float64), np.asarray(targets)
    p = p.reshape(0, 0 if values is None else len(values)) if p.size == 0 and not len(t) else p
    v = np.zeros(p.shape[-1]) if values is None else np.asarray(values, np.float64)
    if p.ndim != 2 or t.shape != p.shape[:1] or v.shape != p.shape[1:]:
        raise ValueError(
            f"distribution metrics: wanted probabilities [n, N], targets [n] and values [N], got shapes "
            f"{list(p.shape)}, {list(t.shape)} and {list(v.shape)}."
        )
    if len(t) and not (np.issubdtype(t.dtype, np.integer) and t.min() >= 0 and t.max() < p.shape[1]):
        raise ValueError(
            f"distribution metrics: targets are columns of the probabilities, integers from 0 to {p.shape[1] - 1}; got "
            f"{t.dtype} from {t.min()} to {t.max()}."
        )
    sums = p.sum(1)
    if len(p) and not (np.isfinite(p).all() and p.min() >= 0 and sums.min() > 0 and sums.max() <= 1 + _SLACK):
        raise ValueError(
            "distribution metrics: probabilities must be finite, at least 0, and sum to more than 0 and at most 1 in "
            f"each row; got sums from {sums.min():g} to {sums.max():g} and a least entry of {p.min():g}."
        )
    if not np.isfinite(v).all():
        raise ValueError("distribution metrics: the values of the numeric tokens must be finite.")
    return p, t.astype(np.int64) if len(t) else np.zeros(0, np.int64), v
