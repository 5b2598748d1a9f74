"""What the gradients of batches say: their distribution, its law in the batch size, and what batch tests would ask.

Pure functions of numbers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from algorithms.batch.calc_batch import augmented_inner_product_test, inner_product_test, norm_test
from algorithms.batch.gradient_statistics import GradientStatistics
from algorithms.batch.per_example import SampleStatistics


@dataclass(frozen=True)
class Fit:
    """A distribution fitted by maximum likelihood.

    parameters: of scipy.stats' distribution of that name. kolmogorov_smirnov, p_value: against the same numbers it was
    fitted to, which makes the p-value too large. aic: Akaike's criterion; the smaller of two fits is the better one.
    """

    name: str
    parameters: tuple[float, ...]
    kolmogorov_smirnov: float
    p_value: float
    aic: float


@dataclass(frozen=True)
class Distribution:
    """Moments of deviations, and fits of a normal and of a heavier-tailed (Student's t) distribution."""

    count: int
    mean: float
    median: float
    deviation: float
    excess_kurtosis: float
    fits: tuple[Fit, ...]


def distribution(values: Sequence[float]) -> Distribution:
    """Describe deviations; without a scatter (fewer than 3, or all equal) there is nothing to fit."""
    numbers = np.asarray(values, dtype=np.float64)
    spread = float(numbers.std(ddof=1)) if len(numbers) > 1 else 0.0
    fits, kurtosis = [], math.nan
    if len(numbers) > 2 and spread > 1e-12 * abs(numbers.mean()):
        kurtosis = float(stats.kurtosis(numbers))
        for family in (stats.norm, stats.t):
            parameters = tuple(float(value) for value in family.fit(numbers))
            test = stats.kstest(numbers, family(*parameters).cdf)
            aic = 2 * len(parameters) - 2 * float(family.logpdf(numbers, *parameters).sum())
            fits.append(Fit(family.name, parameters, float(test.statistic), float(test.pvalue), aic))
    return Distribution(len(numbers), float(numbers.mean()), float(np.median(numbers)), spread, kurtosis, tuple(fits))


def finite_population_factor(sample: int, batch: int, replacement: bool) -> float:
    """By what a squared deviation is smaller than V / batch, as the batch is part of the sample it is held against.

    Without replacement (N - b) / N, as V is the unbiased variance of the N examples; with replacement (N - 1) / N.
    """
    return (sample - 1) / sample if replacement else (sample - batch) / sample


@dataclass(frozen=True)
class PowerLaw:
    """deviation = scale * batch ^ exponent, by least squares of logarithms; error: standard error of the exponent."""

    exponent: float
    error: float
    scale: float


def power_law(batch_sizes: Sequence[int], deviations: Sequence[float]) -> PowerLaw | None:
    """Fit the law to deviations that do not vanish; None with fewer than two of them."""
    points = [(math.log(b), math.log(d)) for b, d in zip(batch_sizes, deviations, strict=True) if d > 0]
    if len(points) < 2:
        return None
    x, y = np.array(points).T
    result = stats.linregress(x, y)
    return PowerLaw(float(result.slope), float(result.stderr), math.exp(result.intercept))


def root_mean_square(values: Sequence[float]) -> float:
    """The square root of the mean of squares: of deviations it is what V / b predicts."""
    return float(np.sqrt(np.mean(np.square(values))))


def requests(
    statistics: SampleStatistics, batch: int, grids: Mapping[str, Sequence[float]]
) -> list[tuple[str, float, int]]:
    """What each batch test would request at this point, for a grid of its parameter.

    Args:
        statistics: exact ones of the sample.
        batch: the batch that the plain norm test is held against; the inner product tests are debiased.
        grids: values of eta, theta and nu.

    Returns:
        (test, parameter, request) in examples; the augmented test's second part alone for nu. A test that says nothing
        leaves the batch.
    """
    # The sample is one of the data: its mean gradient holds V / examples of noise.
    count, variance = statistics.sample_size, statistics.variance
    estimates = GradientStatistics(
        examples=count,
        squared_norm=statistics.squared_norm - variance / count,
        variance=variance,
        inner_product_variance=statistics.inner_product_variance,
        overlap=0.0,
    )
    rows = []
    for eta in grids["eta"]:
        rows.append(("norm_test", eta, norm_test(estimates, eta, batch) or batch))
        rows.append(("norm_test, debias", eta, norm_test(estimates, eta, batch, debias=True) or batch))
    for theta in grids["theta"]:
        rows.append(("inner_product_test", theta, inner_product_test(estimates, theta, batch, debias=True) or batch))
    for nu in grids["nu"]:
        # With so large a theta only the test of orthogonality asks for anything.
        request = augmented_inner_product_test(estimates, 1e9, nu, batch, debias=True)
        rows.append(("augmented_inner_product_test, orthogonality", nu, request or batch))
    return sorted(rows, key=lambda row: (row[0], row[1]))


def draw_batches(
    indices: np.ndarray, batch: int, count: int | None, replacement: bool, generator: np.random.Generator
) -> list[np.ndarray]:
    """Batches of a sample.

    Args:
        count: how many; None: as many as the sample fills.
        replacement: every example of every batch drawn from the whole sample; otherwise batches are cut from random
            permutations of it, so that no example is twice in a batch, nor in two batches of a permutation.
    """
    wanted = count if count is not None else len(indices) // batch
    if replacement:
        return [generator.choice(indices, batch) for _ in range(wanted)]
    batches: list[np.ndarray] = []
    while len(batches) < wanted:
        order = generator.permutation(indices)
        batches += [order[start : start + batch] for start in range(0, len(order) - batch + 1, batch)]
    return batches[:wanted]
