"""Metrics against values worked out by hand, and their behaviour where they are undefined."""

import dataclasses
import json
import math
from fractions import Fraction

import pytest

from train.graders import GRADERS, Grade
from train.metrics import score, wilson_interval


def grades(*pairs: tuple[str, str]) -> list[Grade]:
    return [GRADERS["math_exact"](prediction, gold) for prediction, gold in pairs]


def test_values_by_hand():
    # Errors 0, 2, 9, 1 with golds 1, 2, -9, 10 of mean 1: residuals 0 + 4 + 81 + 1, total 0 + 1 + 100 + 81.
    metrics = score(grades(("1", "1"), ("4", "2"), ("0", "-9"), ("9", "10"), ("x", "3")))
    assert (metrics.n, metrics.pairs, metrics.parse_failures, metrics.parse_failure_rate) == (5, 4, 1, 0.2)
    assert metrics.accuracy == 0.2
    assert metrics.mae == 3.0
    assert metrics.median_error == 1.5
    assert metrics.r2 == pytest.approx(1 - 86 / 182, rel=1e-15)
    logs = [0, math.log10(5) - math.log10(3), math.log10(10), math.log10(11) - math.log10(10)]
    assert metrics.log_mae == pytest.approx(sum(logs) / 4, rel=1e-15)


def test_gold_fed_back_scores_everything():
    metrics = score(grades(*((text, text) for text in ("3", "-7", "1/2", "0.25", "sqrt(2)"))))
    assert (metrics.accuracy, metrics.mae, metrics.median_error, metrics.log_mae, metrics.r2) == (1, 0, 0, 0, 1)
    assert metrics.accuracy_high == 1 and metrics.accuracy_low < 1
    assert (metrics.pairs, metrics.parse_failures) == (
        4,
        0,
    )  # a gold answer that is no number is not a failure to parse


@pytest.mark.parametrize("pairs", [[], [("1", "2")], [("1", "5"), ("2", "5"), ("9", "5")], [("x", "1"), ("3", "2")]])
def test_r2_is_undefined_for_one_pair_or_constant_gold(pairs):
    assert score(grades(*pairs)).r2 is None


def test_nothing_to_score_gives_none_and_not_nan():
    metrics = score([])
    assert (metrics.n, metrics.parse_failures, metrics.pairs) == (0, 0, 0)
    assert metrics.parse_failure_rate is metrics.time_gap is metrics.time_gap_unwrapped is None
    assert metrics.accuracy is metrics.accuracy_low is metrics.mae is metrics.median_error is metrics.log_mae is None
    unparsed = score(grades(("x", "1"), ("", "2")))
    assert (unparsed.accuracy, unparsed.parse_failures, unparsed.mae) == (0, 2, None)


def test_time_gaps_wrap_and_leave_unparsed_answers_out():
    pairs = [("11:58", "12:02"), ("12:55", "1:00"), ("3:00", "9:00"), ("4:20", "4:20"), ("noon", "12:00")]
    metrics = score([GRADERS["clock"](prediction, gold) for prediction, gold in pairs])
    assert (metrics.n, metrics.pairs, metrics.parse_failures, metrics.accuracy) == (5, 4, 1, 0.2)
    assert metrics.time_gap == (4 + 5 + 360 + 0) / 4
    assert metrics.time_gap_unwrapped == metrics.mae == (4 + 715 + 360 + 0) / 4


def test_numbers_have_no_time_gap():
    metrics = score(grades(("4", "4"), ("5", "6")))
    assert metrics.time_gap is metrics.time_gap_unwrapped is None


def test_prediction_and_gold_are_treated_alike():
    # One side clipped, or read by another rule, would tell the two directions apart.
    pairs = [("80000000000000", "2"), ("-1/3", "0.25"), ("5", "464318855471926")]
    forward, backward = score(grades(*pairs)), score(grades(*((gold, prediction) for prediction, gold in pairs)))
    for name in ("mae", "median_error", "log_mae"):
        assert getattr(forward, name) == getattr(backward, name)


def test_one_absurd_answer_leaves_the_median_alone():
    metrics = score(grades(("1" + "0" * 60, "2"), ("3", "3"), ("5", "4")))
    assert metrics.median_error == 1
    assert metrics.mae == pytest.approx(1e60 / 3)
    assert metrics.r2 < -1e100
    json.dumps(dataclasses.asdict(metrics), allow_nan=False)


def test_a_constant_offset_beside_a_large_mean_keeps_its_digits():
    # The expanded form sum x^2 - n mean^2 would lose every digit here.
    rows = [Grade(correct=False, value=Fraction(10**9 + k + 1), gold_value=Fraction(10**9 + k)) for k in range(10)]
    assert score(rows).r2 == pytest.approx(1 - 10 / 82.5, rel=1e-12)


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [
        # Worked from the formula with z = 1.959964: z^2 = 3.841459.
        (0, 10, 0.0, 0.277533),
        (10, 10, 0.722467, 1.0),
        (5, 10, 0.236593, 0.763407),
        (81, 263, 0.255292, 0.366221),
        (1, 1, 0.206549, 1.0),
    ],
)
def test_wilson_interval(correct, n, low, high):
    assert wilson_interval(correct, n) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(("correct", "n"), [(0, 0), (-1, 3), (4, 3)])
def test_wilson_refuses_impossible_counts(correct, n):
    with pytest.raises(ValueError, match="0 <= correct <= n"):
        wilson_interval(correct, n)
