"""Batch tests on numbers that can be recomputed on paper."""

import itertools
import math

import numpy as np
import pytest

from algorithms.batch.calc_batch import (
    BATCH_TESTS,
    BatchTestParameters,
    bounded_request,
    lower_ratio,
)
from algorithms.batch.gradient_statistics import GradientStatistics


def statistics(squared_norm, variance, inner=0.0, overlap=0.0, error=0.0, variance_error=0.0, inner_error=0.0):
    return GradientStatistics(8, squared_norm, variance, inner, overlap, error, variance_error, inner_error)


P = BatchTestParameters
norm_test = BATCH_TESTS["norm_test"]
inner_product_test = BATCH_TESTS["inner_product_test"]
augmented_inner_product_test = BATCH_TESTS["augmented_inner_product_test"]
TESTS = (norm_test, inner_product_test, augmented_inner_product_test)


# ||G||^2 = 2, V = 8.
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
    assert norm_test(statistics(2.0, 8.0), P(eta=eta, debias=debias), batch) == expected


def test_a_batch_grows_at_most_by_one_over_the_square_of_its_parameter():
    """A gradient that is all noise: its estimate is clamped at zero, T = V / (eta^2 V / B) = B / eta^2.

    16 / 0.8^2 is 25 on paper; in floating point the quotient may lie a little above.
    """
    assert [norm_test(statistics(-0.5, 7.0), P(eta=0.8), batch) for batch in (16, 32, 64)] == [25, 50, 100]
    assert inner_product_test(statistics(-0.5, 8.0, inner=6.0, overlap=4.0), P(theta=0.5), 16) == 100


@pytest.mark.parametrize(
    "sample",
    [
        statistics(0.0, 0.0),
        statistics(math.nan, 1.0),
        statistics(math.inf, 1.0),
        statistics(2.0, 8.0, error=math.nan),
        statistics(2.0, 8.0, variance_error=math.inf),
    ],
)
@pytest.mark.parametrize("parameters", [P(), P(debias=True), P(confidence=2.0)])
def test_statistics_that_are_zero_or_not_finite_decide_nothing(sample, parameters):
    assert not sample.decisive
    assert [test(sample, parameters, 12) for test in TESTS] == [None] * 3


@pytest.mark.parametrize("parameters", [P(debias=True), P(confidence=2.0)])
def test_unknown_inner_products_decide_nothing(parameters):
    sample = statistics(2.0, 8.0, inner=math.nan, overlap=math.nan)
    assert inner_product_test(sample, parameters, 5) is None
    assert augmented_inner_product_test(sample, parameters, 5) is None


def test_debiased_norm_test_without_a_visible_gradient():
    """A negative estimate gives no request; with an error of 0.5 the squared norm is at most 1: 8 / 1."""
    assert norm_test(statistics(-0.5, 8.0), P(debias=True), 16) is None
    assert norm_test(statistics(-0.5, 8.0, error=0.5), P(debias=True, confidence=2.0), 4) == 8


# P = 6, ||G||^2 = 2, and at a batch of 4 P + R/4 = 7, ||G||^2 + V/4 = 4.
@pytest.mark.parametrize(
    ("theta", "debias", "expected"),
    [(1.0, True, 2), (0.5, True, 6), (0.1, True, 150), (1.0, False, 1), (0.5, False, 2), (0.1, False, 44)],
)
def test_inner_product_test_on_paper(theta, debias, expected):
    """6 / (theta^2 4), and 7 / (theta^2 16)."""
    sample = statistics(2.0, 8.0, inner=6.0, overlap=4.0)
    assert inner_product_test(sample, P(theta=theta, debias=debias), 4) == expected


@pytest.mark.parametrize(
    ("theta", "nu", "debias", "expected"),
    # 6 / (theta^2 4) or (8 - 6/2) / (nu^2 2), whichever is larger; plain 7 / (theta^2 16) or (8 - 7/4) / (nu^2 4).
    [(1.0, 1.0, True, 3), (1.0, 0.5, True, 10), (0.5, 1.0, True, 6), (0.5, 5.84, True, 6), (1.0, 0.5, False, 7)],
)
def test_augmented_inner_product_test_on_paper(theta, nu, debias, expected):
    sample = statistics(2.0, 8.0, inner=6.0, overlap=4.0)
    assert augmented_inner_product_test(sample, P(theta=theta, nu=nu, debias=debias), 4) == expected


def test_the_plain_form_divides_by_the_published_quantities():
    """Over all batches of 4 of three gradients: mean ||g||^2, and mean variance of <g_i, g> for i not in the batch."""
    population, batch = np.array([[2.0, 1.0], [0.0, -1.0], [1.0, 1.5]]), 4
    mean, covariance = population.mean(0), np.cov(population.T, ddof=0)
    means = [population[list(choice)].mean(0) for choice in itertools.product(range(3), repeat=batch)]
    norm = np.mean([g @ g for g in means])
    inner = np.mean([(population @ g).var() for g in means])
    exact = statistics(mean @ mean, np.trace(covariance), mean @ covariance @ mean, np.trace(covariance @ covariance))
    assert norm_test(exact, P(eta=0.1), batch) == math.ceil(np.trace(covariance) / (0.1**2 * norm))
    assert inner_product_test(exact, P(theta=0.1), batch) == math.ceil(inner / (0.1**2 * norm**2))
    orthogonal = np.trace(covariance) - inner / norm
    augmented = augmented_inner_product_test(exact, P(theta=1e6, nu=0.1), batch)
    assert augmented == math.ceil(orthogonal / (0.1**2 * norm))


# Confidence


@pytest.mark.parametrize(
    ("numerator", "denominator", "confidence"),
    [((8.0, 1.0), (2.0, 0.5), 2.0), ((8.0, 1.0), (0.1, 0.5), 2.0), ((8.0, 0.0), (2.0, 0.5), 1.0), ((5, 1), (0, 3), 2)],
)
def test_the_lower_ratio_is_the_smallest_that_is_not_refuted(numerator, denominator, confidence):
    """At r the difference n - r d is just `confidence` of its errors above zero; below r it is more."""
    (n, n_error), (d, d_error) = numerator, denominator

    def errors_above_zero(r):
        return (n - r * d) / math.hypot(n_error, r * d_error)

    r = lower_ratio(n, n_error, d, d_error, confidence)
    assert errors_above_zero(r) == pytest.approx(confidence)
    assert errors_above_zero(0.9 * r) > confidence


def test_the_lower_ratio_at_its_limits():
    assert lower_ratio(8.0, 1.0, 2.0, 0.5, 0.0) == 4.0
    assert lower_ratio(8.0, 0.0, 2.0, 1.0, 2.0) == pytest.approx(8.0 / (2.0 + 2.0 * 1.0))
    assert lower_ratio(8.0, 0.0, -5.0, 1.0, 2.0) == pytest.approx(8.0 / 2.0)
    assert lower_ratio(8.0, 4.0, 2.0, 0.5, 2.0) == 0.0
    assert lower_ratio(8.0, math.inf, 2.0, 0.5, 2.0) == 0.0
    assert lower_ratio(8.0, 0.0, 2.0, math.inf, 2.0) == 0.0
    assert lower_ratio(8.0, 0.0, 0.0, 0.0, 2.0) == math.inf


@pytest.mark.parametrize(
    ("test", "parameters", "sample", "expected"),
    [
        (norm_test, P(eta=0.5, debias=True), {"error": 1.0}, 8),  # 4 * 8 / (2 + 2)
        (norm_test, P(eta=0.5), {"error": 1.0}, 7),  # 4 * 8 / (2 + 2 + 8/8) = 6.4
        (inner_product_test, P(theta=0.1), {"variance_error": 1.0}, 62),
        (augmented_inner_product_test, P(theta=1e6, nu=0.1, debias=True), {"error": 1.0}, 163),
        (augmented_inner_product_test, P(theta=1e6, nu=0.1, debias=True), {"overlap": 64.0, "inner_error": 2.0}, 150),
        (inner_product_test, P(theta=0.1, debias=True), {"error": 1.0}, 38),  # (sqrt(6) / (2 + 2))^2 / 0.01
        (inner_product_test, P(theta=0.1, debias=True), {"inner_error": 2.0}, 50),  # (sqrt(6 - 2 * 2) / 2)^2 / 0.01
        (inner_product_test, P(theta=0.1, debias=True), {"inner_error": math.inf}, None),
        # With P unknown no direction holds more than the root of R = 16: (8 - 4) / (0.01 * 2).
        (
            augmented_inner_product_test,
            P(theta=1e6, nu=0.1, debias=True),
            {"inner": 0.0, "overlap": 16.0, "inner_error": math.inf},
            200,
        ),
    ],
)
def test_an_answer_falls_with_the_error(test, parameters, sample, expected):
    found = statistics(2.0, 8.0, **({"inner": 6.0, "overlap": 4.0} | sample))
    assert test(found, P(parameters.eta, parameters.theta, parameters.nu, parameters.debias, 2.0), 8) == expected


# Bounds


@pytest.mark.parametrize(
    ("current", "answer", "growth", "maximum", "expected"),
    [
        (8, 5, 2.0, 100, 8),  # never shrinks
        (8, 12, 2.0, 100, 12),
        (8, 40, 2.0, 100, 16),  # growth
        (8, 40, 1.5, 100, 12),
        (8, 40, 1.0, 100, 8),
        (8, 40, math.inf, 100, 40),  # no bound
        (1, 40, 1.2, 100, 2),  # a request of one can grow at all
        (8, 40, 10.0, 20, 20),  # maximum
        (30, 40, 10.0, 20, 30),  # never shrinks, not even to the maximum
        (5, None, 2.0, 100, 5),
        (8, 40, None, 100, 40),
    ],
)
def test_bounded_request(current, answer, growth, maximum, expected):
    assert bounded_request(current, answer, growth, maximum) == expected
