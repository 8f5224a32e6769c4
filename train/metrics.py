"""Scores of an evaluation, in float64: accuracy with its interval, and how far off the numbers are."""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from train.clock_time import dial_gap
from train.graders import Grade

# Two-sided 95 % quantile of the standard normal distribution.
_Z = 1.959963984540054


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metrics:
    """Scores over n predictions. The errors are over the pairs in which both texts are numbers; None without any.

    Both numbers of a pair are taken as they are: none is clipped, and none is left out for its size.

    Args:
      n: predictions.
      accuracy: share that the grader accepted; an unparsable prediction is as wrong as any other.
      accuracy_low, accuracy_high: Wilson's 95 % interval of the accuracy.
      parse_failures: predictions that are no number although the gold answer is one; they count in no error below.
      parse_failure_rate: their share of n.
      pairs: pairs in the errors below.
      mae: mean absolute error.
      median_error: median absolute error; one absurd answer does not move it.
      log_mae: mean absolute difference of sign(x) log10(1 + |x|).
      r2: 1 - sum (value - gold)^2 / sum (gold - mean gold)^2; None for fewer than two pairs or a constant gold.
      time_gap: mean minutes between two times the shorter way round the dial (0 to 360); None where no times are read.
      time_gap_unwrapped: the same without the wrap, 12:59 and 1:00 being 719 minutes apart.
    """

    n: int
    accuracy: float | None
    accuracy_low: float | None
    accuracy_high: float | None
    parse_failures: int
    parse_failure_rate: float | None
    pairs: int
    mae: float | None
    median_error: float | None
    log_mae: float | None
    r2: float | None
    time_gap: float | None = None
    time_gap_unwrapped: float | None = None


def wilson_interval(correct: int, n: int) -> tuple[float, float]:
    """Give Wilson's 95 % interval of a share.

        centre = (p + z^2 / 2n) / (1 + z^2 / n),   half width = z / (1 + z^2 / n) sqrt(p (1 - p) / n + z^2 / 4n^2)

    Raises:
      ValueError: n below 1, or a count outside 0..n.

    Example:
      >>> [round(bound, 4) for bound in wilson_interval(9, 10)]
      [0.5958, 0.9821]

    References:
      Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    if n < 1 or not 0 <= correct <= n:
        raise ValueError(f"wilson_interval: needs 0 <= correct <= n and n >= 1, got correct={correct}, n={n}.")
    share, scale = correct / n, 1 + _Z**2 / n
    centre = (share + _Z**2 / (2 * n)) / scale
    half_width = _Z / scale * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    # Exactly 0 and 1 at the ends, where the formula is off by rounding.
    low = 0.0 if correct == 0 else centre - half_width
    high = 1.0 if correct == n else centre + half_width
    return low, high


def score(grades: Sequence[Grade]) -> Metrics:
    """Summarise the grades of an evaluation.

    Args:
      grades: one for each prediction.

    Returns:
      `Metrics`; without grades, n is 0 and every share and error is None.

    Example:
      >>> from train.graders import grade_math_exact
      >>> metrics = score([grade_math_exact(text, "4") for text in ("4", "6", "four")])
      >>> metrics.n, round(metrics.accuracy, 3), metrics.parse_failures, metrics.mae, metrics.r2
      (3, 0.333, 1, 1.0, None)
    """
    n, correct = len(grades), sum(grade.correct for grade in grades)
    low, high = wilson_interval(correct, n) if n else (None, None)
    pairs = [
        (float(grade.value), float(grade.gold_value))
        for grade in grades
        if grade.value is not None and grade.gold_value is not None
    ]
    errors = [abs(value - gold) for value, gold in pairs]
    # Minutes are whole numbers, so float is exact there.
    times = [
        (float(grade.value), float(grade.gold_value))
        for grade in grades
        if grade.is_time and grade.value is not None and grade.gold_value is not None
    ]
    parse_failures = sum(not grade.parsed and grade.gold_value is not None for grade in grades)
    log_errors = [abs(_signed_log10(value) - _signed_log10(gold)) for value, gold in pairs]
    return Metrics(
        n=n,
        accuracy=correct / n if n else None,
        accuracy_low=low,
        accuracy_high=high,
        parse_failures=parse_failures,
        parse_failure_rate=parse_failures / n if n else None,
        pairs=len(pairs),
        mae=_mean(errors),
        median_error=statistics.median(errors) if pairs else None,
        log_mae=_mean(log_errors),
        r2=_r2(pairs),
        time_gap=_mean([dial_gap(value, gold) for value, gold in times]),
        time_gap_unwrapped=_mean([abs(value - gold) for value, gold in times]),
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _r2(pairs: Sequence[tuple[float, float]]) -> float | None:
    golds = [gold for _, gold in pairs]
    if len(set(golds)) < 2:
        return None
    mean = math.fsum(golds) / len(golds)
    residual = math.fsum((value - gold) ** 2 for value, gold in pairs)
    return 1 - residual / math.fsum((gold - mean) ** 2 for gold in golds)


def _signed_log10(value: float) -> float:
    return math.copysign(math.log10(1 + abs(value)), value)
