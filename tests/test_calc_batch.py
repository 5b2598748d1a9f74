"""Batch tests on numbers that anyone can recompute."""

import math

import numpy as np
import pytest

from algorithms.calc_batch import (
    BATCH_TESTS,
    BatchTestParameters,
    augmented_inner_product_test,
    bounded_request,
    inner_product_test,
    is_decisive,
    norm_test,
    scheduled_request,
    smoothed,
)
from algorithms.gradient_statistics import GradientStatistics


def statistics(squared_norm, variance, sample_size=8, inner=0.0, orthogonal=0.0):
    return GradientStatistics(sample_size, squared_norm, variance, inner, orthogonal)


# One worker with ||g||^2 = 3, V = 8, s = 8: G2 = 3 - 8/8 = 2.
@pytest.mark.parametrize(
    ("eta", "batch", "debias", "expected"),
    [
        (1.0, 4, False, 2),  # 8 / (2 + 8/4) = 2
        (1.0, 8, False, 3),  # 8 / (2 + 8/8) = 2.67
        (0.5, 8, False, 11),  # 4 * 2.67 = 10.67
        (1.0, 4, True, 4),  # 8 / 2
        (0.5, 4, True, 16),
        (4.0, 4, True, 1),  # 8 / 32 = 0.25
    ],
)
def test_norm_test_on_paper(eta, batch, debias, expected):
    assert norm_test([statistics(3.0, 8.0)], eta, batch, debias) == expected


def test_norm_test_pools_the_workers():
    """Q = (3 + 5)/2 = 4, V = (8 + 16)/2 = 12, G2 = 4 - 12/8 = 2.5; 12 / (2.5 + 12/6) = 2.67; 12 / 2.5 = 4.8."""
    workers = [statistics(3.0, 8.0), statistics(5.0, 16.0)]
    assert norm_test(workers, 1.0, 6) == 3
    assert norm_test(workers, 1.0, 6, debias=True) == 5


def test_norm_test_grows_at_most_by_one_over_eta_squared():
    """A gradient that is all noise: G2 is clamped at zero, T = V / (eta^2 V / B) = B / eta^2."""
    assert norm_test([statistics(0.5, 8.0)], 0.8, 16) == 25


def test_norm_test_does_not_round_up_a_whole_number():
    """16 / 0.8^2 is 25 on paper; in floating point the quotient may lie a little above."""
    assert [norm_test([statistics(0.0001, 7.0)], 0.8, batch) for batch in (16, 32, 64)] == [25, 50, 100]


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("debias", [False, True])
def test_a_zero_or_non_finite_gradient_leaves_the_batch(bad, debias):
    sample = [statistics(bad, 0.0 if bad == 0.0 else 1.0)]
    assert not is_decisive(sample)
    assert norm_test(sample, 0.8, 12, debias) == 12
    assert inner_product_test([statistics(bad, 1.0, inner=1.0)], 0.9, 12) == 12
    assert augmented_inner_product_test([statistics(bad, 1.0, inner=1.0, orthogonal=1.0)], 0.9, 0.3, 12) == 12


def test_a_sample_of_one_leaves_the_batch():
    sample = [GradientStatistics(1, 2.0, math.nan, math.nan, math.nan)]
    assert not is_decisive(sample)
    assert norm_test(sample, 0.8, 5) == 5


def test_debiased_norm_test_without_a_visible_gradient_leaves_the_batch():
    assert norm_test([statistics(0.5, 8.0)], 0.8, 16, debias=True) == 16


# P = 6, O = 5, ||g||^2 = 2.
@pytest.mark.parametrize(("theta", "expected"), [(1.0, 2), (0.5, 6), (0.1, 150)])
def test_inner_product_test_on_paper(theta, expected):
    assert inner_product_test([statistics(2.0, 8.0, inner=6.0)], theta, 4) == expected


@pytest.mark.parametrize(("theta", "nu", "expected"), [(1.0, 1.0, 3), (1.0, 0.5, 10), (0.5, 1.0, 6), (0.5, 5.84, 6)])
def test_augmented_inner_product_test_on_paper(theta, nu, expected):
    """The larger of 6 / (theta^2 4) and 5 / (nu^2 2)."""
    sample = [statistics(2.0, 8.0, inner=6.0, orthogonal=5.0)]
    assert augmented_inner_product_test(sample, theta, nu, 4) == expected


def test_inner_product_tests_average_the_workers():
    workers = [statistics(1.0, 8.0, inner=4.0, orthogonal=2.0), statistics(3.0, 8.0, inner=8.0, orthogonal=8.0)]
    assert inner_product_test(workers, 1.0, 4) == 2
    assert augmented_inner_product_test(workers, 1.0, 1.0, 4) == 3


def test_norm_test_finds_the_batch_at_which_noise_equals_eta_times_the_gradient():
    """Synthetic gradients with known mean and covariance: the debiased test recovers V / (eta^2 ||mean||^2)."""
    generator = np.random.default_rng(0)
    mean, deviation, dimension = 0.2, 1.5, 40
    workers = []
    for _ in range(5000):
        gradients = mean + deviation * generator.normal(size=(16, dimension))
        g = gradients.mean(0)
        workers.append(statistics(g @ g, gradients.var(0, ddof=1).sum(), sample_size=16))
    truth = dimension * deviation**2 / (0.5**2 * dimension * mean**2)
    assert norm_test(workers, 0.5, 64, debias=True) == pytest.approx(truth, rel=0.04)


@pytest.mark.parametrize(
    ("current", "test", "growth", "maximum", "expected"),
    [
        (8, 5, 2.0, 100, 8),  # never shrinks
        (8, 12, 2.0, 100, 12),
        (8, 40, 2.0, 100, 16),  # growth
        (8, 40, 1.5, 100, 12),
        (8, 40, 1.0, 100, 8),
        (1, 40, 1.2, 100, 2),  # a request of one can grow at all
        (8, 40, 10.0, 20, 20),  # maximum
        (30, 40, 10.0, 20, 30),  # never shrinks, not even to the maximum
    ],
)
def test_bounded_request(current, test, growth, maximum, expected):
    assert bounded_request(current, test, growth, maximum) == expected


def test_smoothing_without_a_past_is_the_mean_of_the_workers():
    pooled = smoothed(None, [statistics(3.0, 8.0, 8, 1.0, 2.0), statistics(5.0, 16.0, 8, 3.0, 4.0)], 0.9)
    assert pooled == statistics(4.0, 12.0, 8, 2.0, 3.0)


def test_smoothing_averages_the_true_norm_when_the_sample_size_changes():
    """Past: V = 8, ||g||^2 = 3, s = 8, so G2 = 2. Now: V = 4, ||g||^2 = 4.25, s = 16, so G2 = 4."""
    result = smoothed(statistics(3.0, 8.0, 8), [statistics(4.25, 4.0, 16)], 0.75)
    assert result.variance == pytest.approx(7.0)
    assert result.squared_norm == pytest.approx(2.5 + 7.0 / 16)


def test_each_registered_test_reads_its_own_parameters():
    sample = [statistics(2.0, 8.0, inner=6.0, orthogonal=5.0)]
    parameters = BatchTestParameters(eta=0.5, theta=0.5, nu=0.5, debias=True)
    answers = {name: test and test(sample, parameters, 4) for name, test in BATCH_TESTS.items()}
    # G2 = 2 - 8/8 = 1: 8 / 0.25 = 32.  6 / (0.25 * 4) = 6.  5 / (0.25 * 2) = 10.
    assert answers == {"norm_test": 32, "inner_product_test": 6, "augmented_inner_product_test": 10, "none": None}


def test_a_schedule_by_hand_never_shrinks_the_request():
    schedule = [(0.0, 8.0), (0.5, 16.0), (0.9, 64.0)]
    assert [scheduled_request(schedule, progress, 4) for progress in (0.0, 0.49, 0.5, 0.9, 1.0)] == [8, 8, 16, 64, 64]
    assert scheduled_request(schedule, 0.6, 20) == 20
    assert scheduled_request([(0.3, 9.0)], 0.2, 4) == 4
