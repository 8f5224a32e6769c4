"""Distribution metrics and regression-aware decoding against sums written out, and their extremes."""

import math
from fractions import Fraction

import numpy as np
import pytest

from train.distribution_metrics import (
    calibration_error,
    crps,
    expected_distance,
    measure_distributions,
    negative_log_likelihood,
)
from train.regression_decoding import expected_value, mean_of_samples, median_of_samples, median_value


def case(seed=0, n=40, numbers=7):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(numbers + 2), size=n)[:, :numbers]  # the rest is the mass on other tokens
    return p, rng.integers(0, numbers, n), rng.permutation(np.array([0, 1, 1.5, 1.5, 4, 10, -3.0])[:numbers])


def test_crps_is_the_difference_of_expected_distances():
    p, t, v = case()
    q = p / p.sum(1, keepdims=True)
    for row, target, got in zip(q, t, crps(p, t, v), strict=True):
        to_target = sum(row[i] * abs(v[i] - v[target]) for i in range(len(v)))
        apart = sum(row[i] * row[j] * abs(v[i] - v[j]) for i in range(len(v)) for j in range(len(v)))
        assert got == pytest.approx(to_target - apart / 2, abs=1e-14)


def test_expected_distance_and_likelihood_are_sums_written_out():
    p, t, v = case(1)
    for row, target, distance, nll in zip(
        p, t, expected_distance(p, t, v), negative_log_likelihood(p, t), strict=True
    ):
        assert distance == pytest.approx(sum(x / row.sum() * abs(y - v[target]) for x, y in zip(row, v, strict=True)))
        assert nll == pytest.approx(-math.log(row[target]))


def test_certainty_of_the_target_is_perfect_and_of_another_is_its_distance():
    values, p = np.arange(10.0), np.eye(10)
    perfect = measure_distributions(p, np.arange(10), values)
    assert (perfect.nll, perfect.numeric_mass, perfect.expected_distance, perfect.crps, perfect.calibration_error) == (
        0, 1, 0, 0, 0,
    )  # fmt: skip
    wrong = measure_distributions(p, (np.arange(10) + 1) % 10, values)
    assert wrong.nll == math.inf and wrong.calibration_error == 1
    assert wrong.expected_distance == wrong.crps == (9 * 1 + 9) / 10


def test_a_near_miss_costs_less_than_a_far_one_only_where_distance_counts():
    values, t = np.arange(10.0), [3]
    near, far = np.zeros((1, 10)), np.zeros((1, 10))
    near[0, [3, 4]] = far[0, [3, 9]] = 0.5
    assert crps(near, t, values) < crps(far, t, values)
    assert expected_distance(near, t, values) < expected_distance(far, t, values)
    assert negative_log_likelihood(near, t) == negative_log_likelihood(far, t)


def test_crps_is_proper():
    rng, values = np.random.default_rng(2), np.arange(6.0)
    truth = rng.dirichlet(np.ones(6))
    cost = lambda q: float(truth @ crps(np.tile(q, (6, 1)), np.arange(6), values))
    assert all(cost(truth) <= cost(rng.dirichlet(np.ones(6))) for _ in range(50))


def test_calibration_by_hand():
    # Bin of 0.9: two of two right, off by 0.1 each; bin of 0.6: one of two right, off by 0.1 on average.
    p = [[0.9, 0.1], [0.1, 0.9], [0.6, 0.4], [0.6, 0.4]]
    assert calibration_error(p, [0, 1, 0, 1]) == pytest.approx((0.2 + 0.2) / 4)
    # Mass off the numbers changes nothing.
    assert calibration_error(np.array(p) / 2, [0, 1, 0, 1]) == pytest.approx(0.1)
    assert calibration_error(p, [0, 1, 0, 1], bins=1) == pytest.approx(0)


def test_the_numeric_mass_is_that_of_the_whole_vocabulary():
    assert measure_distributions([[0.25, 0.25], [0.5, 0.5]], [0, 1], [0, 1]).numeric_mass == 0.75


def test_no_targets_give_none():
    metrics = measure_distributions(np.zeros((0, 3)), [], [1, 2, 3])
    assert metrics.n == 0 and metrics.nll is metrics.crps is metrics.calibration_error is metrics.numeric_mass is None


@pytest.mark.parametrize(
    ("p", "t", "v", "message"),
    [
        ([[0.5, 0.5]], [0], [1.0], "shapes"),
        ([[0.5, 0.5]], [0, 1], [1.0, 2.0], "shapes"),
        ([0.5, 0.5], [0], [1.0, 2.0], "shapes"),
        ([[0.5, 0.5]], [2], [1.0, 2.0], "integers from 0 to 1"),
        ([[0.5, 0.5]], [-1], [1.0, 2.0], "integers from 0 to 1"),
        ([[0.5, 0.5]], [0.0], [1.0, 2.0], "integers from 0 to 1"),
        ([[0.0, 0.0]], [0], [1.0, 2.0], "sum to more than 0"),
        ([[0.9, 0.9]], [0], [1.0, 2.0], "at most 1"),
        ([[1.2, -0.3]], [0], [1.0, 2.0], "at least 0"),
        ([[math.nan, 0.3]], [0], [1.0, 2.0], "finite"),
        ([[0.5, 0.3]], [0], [1.0, math.inf], "values of the numeric tokens"),
    ],
)
def test_what_is_no_distribution_is_refused(p, t, v, message):
    with pytest.raises(ValueError, match=message):
        measure_distributions(p, t, v)


def test_decoding_minimises_its_error():
    p, _, v = case(3)
    q = p / p.sum(1, keepdims=True)
    grid = np.linspace(-4, 11, 1501)
    errors = np.abs(grid[:, None] - v)
    for row, mean, median in zip(q, expected_value(p, v), median_value(p, v), strict=True):
        assert (row * (mean - v) ** 2).sum() <= (row * errors**2).sum(1).min() + 1e-12
        assert (row * np.abs(median - v)).sum() <= (row * errors).sum(1).min() + 1e-12
        assert median in v


def test_decoding_keeps_leading_axes_and_refuses_rows_of_nothing():
    p, v = np.full((2, 3, 4), 0.1), np.array([1, 2, 3, 4.0])
    assert expected_value(p, v).shape == median_value(p, v).shape == (2, 3)
    assert (expected_value(p, v) == pytest.approx(2.5)) and (median_value(p, v) == 2).all()
    for function in (expected_value, median_value):
        with pytest.raises(ValueError, match="not all 0"):
            function([0.0, 0.0], [1, 2])
        with pytest.raises(ValueError, match="shapes"):
            function([0.5, 0.5], [1, 2, 3])


def test_samples():
    numbers = [Fraction(5), None, Fraction(1, 3), Fraction(10**30)]
    assert mean_of_samples(numbers) == (5 + Fraction(1, 3) + 10**30) / 3
    assert median_of_samples(numbers) == 5
    assert median_of_samples([Fraction(2), Fraction(1)]) == 1
    assert mean_of_samples([None]) is median_of_samples([]) is None
