"""Estimates of the true gradient: unbiased over all samples of a tiny population, with errors that hold."""

import itertools
import math

import numpy as np
import pytest
import torch

from algorithms import flat
from algorithms.batch.gradient_statistics import (
    Comparison,
    GradientStatistics,
    SampleEstimate,
    StatisticsSums,
    across_workers_estimate,
    gradient_moments,
    sample_estimate,
)
from algorithms.flat import inner_product, sketch

# Gradients of three examples in the plane, drawn with replacement: every sample of b of them has probability 3^-b.
POPULATION = np.array([[2.0, 1.0], [0.0, -1.0], [1.0, 1.5]])
MEAN = POPULATION.mean(0)
COVARIANCE = np.cov(POPULATION.T, ddof=0)
SQUARED_NORM, VARIANCE = MEAN @ MEAN, np.trace(COVARIANCE)
INNER, OVERLAP = MEAN @ COVARIANCE @ MEAN, np.trace(COVARIANCE @ COVARIANCE)


def samples(count: int) -> list[np.ndarray]:
    """Return all samples of this many examples, [count, 2] each."""
    return [POPULATION[list(choice)] for choice in itertools.product(range(3), repeat=count)]


def comparison(gradients: np.ndarray, n: int, held: int) -> Comparison:
    """Return the comparison of the last `held` of the first n gradients with the mean of these."""
    first, norms = gradients[:n], (gradients**2).sum(1)
    mean = first.mean(0)
    return Comparison(
        n, mean @ mean, norms[:n].sum(), norms[n - held : n].tolist(), (first[n - held :] @ mean).tolist()
    )


def estimate(gradients: np.ndarray, sizes: tuple[int, ...]) -> SampleEstimate:
    """Return the estimate of a step that accumulates over micro-batches of these sizes."""
    part = comparison(gradients, sizes[0], sizes[0]) if len(sizes) > 1 else None
    squares = ((gradients**2).sum(1) ** 2).sum()
    return sample_estimate(comparison(gradients, len(gradients), sizes[-1]), squares, part)


@pytest.mark.parametrize("sizes", [(4,), (5,), (3, 2), (3, 1), (4, 2)])
def test_estimates_are_unbiased(sizes):
    """The mean over all samples is the population's own number, to rounding."""
    found = [estimate(gradients, sizes) for gradients in samples(sum(sizes))]

    def mean(name):
        return np.mean([getattr(one, name) for one in found])

    assert mean("squared_norm") == pytest.approx(SQUARED_NORM, rel=1e-12)
    assert mean("variance") == pytest.approx(VARIANCE, rel=1e-12)
    if len(sizes) > 1:
        assert mean("inner_product_variance") == pytest.approx(INNER, rel=1e-10)
        assert mean("overlap") == pytest.approx(OVERLAP, rel=1e-10)


@pytest.mark.parametrize("sizes", [(4,), (3, 2), (6,)])
def test_the_expected_squared_error_is_known_and_at_least_the_variance(sizes):
    b = sum(sizes)
    found = [estimate(gradients, sizes) for gradients in samples(b)]
    squared = np.mean([one.squared_norm_error**2 for one in found])
    assert squared == pytest.approx(4 * INNER / b + 4 * OVERLAP / (b * (b - 2)), rel=1e-10)
    true = np.var([one.squared_norm for one in found])
    assert true == pytest.approx(4 * INNER / b + 2 * OVERLAP / (b * (b - 1)), rel=1e-10)
    assert true <= squared <= 3.0 * true


def test_two_examples_have_an_error():
    found = [estimate(gradients, (2,)) for gradients in samples(2)]
    squared = np.mean([one.squared_norm_error**2 for one in found])
    assert squared == pytest.approx(np.var([one.squared_norm for one in found]) + SQUARED_NORM**2)


# Workers against each other


def across(gradients: np.ndarray, batches: tuple[int, ...]) -> SampleEstimate:
    """Return the estimate from the sums of the gradients of each worker's examples."""
    ends = np.cumsum(batches)
    sums = [torch.from_numpy(gradients[end - b : end].sum(0)) for b, end in zip(batches, ends, strict=True)]
    mean = torch.stack(sums).mean(0)
    return across_workers_estimate([gradient_moments(vector, mean) for vector in sums], batches)


@pytest.mark.parametrize("batches", [(1, 1), (3, 1), (1, 2, 2), (1, 1, 1, 3)])
def test_workers_with_different_batches_estimate_the_variance_of_one_example(batches):
    found = [across(gradients, batches) for gradients in samples(sum(batches))]
    assert np.mean([one.variance for one in found]) == pytest.approx(VARIANCE, rel=1e-12)
    assert np.mean([one.squared_norm for one in found]) == pytest.approx(SQUARED_NORM, rel=1e-12)
    total = sum(batches)
    assert (found[0].examples, found[0].pairs) == (total, total**2 - sum(b * b for b in batches))


@pytest.mark.parametrize("batches", [(2, 2, 2), (1, 1, 1, 1, 1)])
def test_between_workers_the_inner_product_variance_has_the_overlap_in_it(batches):
    workers, total = len(batches), sum(batches)
    found = [across(gradients, batches).inner_product_variance for gradients in samples(total)]
    assert np.mean(found) == pytest.approx(INNER + OVERLAP / total * workers / (workers - 2), rel=1e-12)


@pytest.mark.parametrize("batches", [(1, 1), (2, 2, 2), (1, 1, 1, 1, 1)])
def test_the_error_between_workers_is_at_least_the_variance(batches):
    found = [across(gradients, batches) for gradients in samples(sum(batches))]
    squared = np.mean([one.squared_norm_error**2 for one in found])
    assert squared >= np.var([one.squared_norm for one in found])


def test_a_gradient_that_overflows_tells_nothing():
    """Its products with the other workers' gradients are infinite, of both signs."""
    assert not math.isfinite(across(np.array([[math.inf], [1.0], [-1.0]]), (1, 1, 1)).variance)


def test_inner_products_by_chunks_lose_nothing():
    """torch.dot takes no more than 2^31 - 1 elements: chunks of 7 of 100 stand for those of a large model."""
    a, b = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    expected = (a.double() * b.double()).sum().item()
    assert inner_product(a, b, chunk=7).item() == pytest.approx(expected, rel=1e-14)
    assert inner_product(a, b).item() == pytest.approx(expected, rel=1e-14)
    assert inner_product(a, a, chunk=7).dtype == torch.float64


def test_a_sketch_keeps_inner_products_in_expectation():
    """2,000 numbers in 64: products scatter by 1/8 of the lengths; the mean of 400 lies within four errors."""
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(2000, generator=generator, dtype=torch.float64)
    b = 0.5 * a + torch.randn(2000, generator=generator, dtype=torch.float64)
    found = np.array([(sketch(a, seed, 64) @ sketch(b, seed, 64)).item() for seed in range(400)])
    assert found.std() == pytest.approx((a.norm() * b.norm()).item() / 8, rel=0.25)
    assert abs(found.mean() - (a @ b).item()) < 4 * found.std() / 20


def test_a_sketch_is_linear_and_does_not_depend_on_chunks(monkeypatch):
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randn(2, 300, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(sketch(a + 2.0 * b, 5, 16), sketch(a, 5, 16) + 2.0 * sketch(b, 5, 16))
    whole = sketch(a, 5, 16)
    monkeypatch.setitem(flat._CHUNK, "cpu", 32)  # in parts, as a large model
    torch.testing.assert_close(sketch(a, 5, 16), whole)
    assert not torch.equal(sketch(a, 6, 16), whole)


# Over the rounds


def one(pairs=6.0, squared_norm=1.0, error=0.5, examples=3, variance=4.0, variance_error=1.0, inner=math.nan):
    overlap = 2.0 * inner
    return SampleEstimate(examples, pairs, squared_norm, error, variance, variance_error, inner, overlap)


def test_one_sample_is_its_own_average():
    found = StatisticsSums().after([one(inner=3.0)], 0.9).statistics
    assert (found.examples, found.squared_norm, found.squared_norm_error) == (3, 1.0, 0.5)
    assert (found.variance, found.variance_error) == (4.0, 1.0)
    assert (found.inner_product_variance, found.overlap) == (3.0, 6.0)
    assert found.inner_product_variance_error == math.inf


def test_samples_are_weighted_by_their_pairs_and_examples():
    """Squared norms 1 and 4 with 6 and 12 pairs: 3; errors (6 * 0.5, 12 * 1): sqrt(9 + 144) / 18."""
    both = [one(), one(pairs=12.0, squared_norm=4.0, error=1.0, examples=9, variance=8.0, variance_error=2.0)]
    found = StatisticsSums().after(both, 0.0).statistics
    assert found.squared_norm == pytest.approx(3.0)
    assert found.squared_norm_error == pytest.approx(math.sqrt(153) / 18)
    assert found.variance == pytest.approx((3 * 4 + 9 * 8) / 12)
    assert found.variance_error == pytest.approx(math.sqrt(9 + 324) / 12)
    assert math.isnan(found.inner_product_variance)
    assert found.examples == 12


def test_a_rounds_weight_shrinks_by_the_decay():
    """Decay 0.5, twice: weights 3, 6 of squared norms 1 and 4, errors 3 * 0.5 and 6 * 1."""
    found = StatisticsSums().after([one()], 0.5).after([one(squared_norm=4.0, error=1.0)], 0.5).statistics
    assert found.squared_norm == pytest.approx((3 * 1 + 6 * 4) / 9)
    assert found.squared_norm_error == pytest.approx(math.sqrt(1.5**2 + 6**2) / 9)


def test_without_decay_the_past_is_forgotten():
    past = StatisticsSums().after([one(squared_norm=100.0, inner=7.0)], 0.0)
    assert past.after([one(inner=2.0)], 0.0) == StatisticsSums().after([one(inner=2.0)], 0.0)


def test_products_between_workers_enter_the_squared_norm_alone():
    between = one(pairs=18.0, squared_norm=2.0, error=0.1, examples=12, variance=1e9)
    found = StatisticsSums().after([one(), one()], 0.9, between).statistics
    assert found.squared_norm == pytest.approx((12 * 1 + 18 * 2) / 30)
    # Of the same examples: the errors of the two add up.
    assert found.squared_norm_error == pytest.approx((math.sqrt(2) * 3 + 1.8) / 30)
    assert (found.variance, found.examples) == (4.0, 6)


def test_the_error_of_p_is_that_of_a_mean_of_samples():
    """Ten equal weights with P = 1 .. 10: variance of the mean 99/12 / 9, widened by 9/7 to that of Student's t."""
    found = StatisticsSums().after([one(inner=float(value)) for value in range(1, 11)], 0.0).statistics
    assert found.inner_product_variance == pytest.approx(5.5)
    assert found.inner_product_variance_error**2 == pytest.approx(99 / 12 / 9 * 9 / 7)
    # R is twice P here: P + R / 4 is 1.5 P, and so is its error.
    value, error = found.inner_product_variance_at(4)
    assert (value, error) == (pytest.approx(8.25), pytest.approx(1.5 * found.inner_product_variance_error))


def test_errors_cover_the_truth():
    """Averages over 12 rounds of two samples, noise far above the gradient: two errors hold at least 95% of them."""
    generator = np.random.default_rng(0)
    hits = []
    for _ in range(300):
        sums = StatisticsSums()
        for _ in range(12):
            drawn = 0.05 + generator.standard_t(5, size=(2, 8, 30))  # heavier tails than normal ones
            sums = sums.after([estimate(gradients, (8,)) for gradients in drawn], 0.9)
        found = sums.statistics
        inside = abs(found.squared_norm - 30 * 0.05**2) <= 2 * found.squared_norm_error
        hits.append((inside, abs(found.variance - 30 * 5 / 3) <= 2 * found.variance_error))
    shares = np.mean(hits, axis=0)
    assert shares[0] > 0.95
    assert shares[1] > 0.88


def test_the_orthogonal_variance_is_what_is_not_along_the_gradient():
    along = MEAN / np.sqrt(SQUARED_NORM)
    orthogonal = POPULATION - np.outer(POPULATION @ along, along)
    expected = ((orthogonal - orthogonal.mean(0)) ** 2).sum(1).mean()
    statistics = GradientStatistics(1, SQUARED_NORM, VARIANCE, INNER, OVERLAP)
    assert statistics.orthogonal_variance == pytest.approx(expected)
    assert math.isnan(GradientStatistics(1, -0.1, VARIANCE, INNER, OVERLAP).orthogonal_variance)
