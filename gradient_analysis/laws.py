"""Statistics of batch gradients: their distribution, their scaling with the batch size, and requested batches.

Pure functions of numbers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from algorithms.batch.calc_batch import (
    BatchTestParameters,
    augmented_inner_product_test,
    inner_product_test,
    norm_test,
)
from algorithms.batch.gradient_statistics import GradientStatistics
from algorithms.batch.per_example import SampleStatistics


@dataclass(frozen=True)
class Fit:
    """A distribution fitted by maximum likelihood.

    Attributes:
        name: name of the distribution in scipy.stats.
        parameters: its parameters in the order of scipy.stats.
        kolmogorov_smirnov: distance between the fitted and the empirical distribution.
        p_value: of that distance; too large, because the distribution was fitted to the same numbers.
        aic: Akaike's information criterion; smaller is better.
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
    """Describe deviations; nothing is fitted to fewer than three values or to equal values."""
    numbers = np.asarray(values, dtype=np.float64)
    spread = float(numbers.std(ddof=1)) if len(numbers) > 1 else 0.0
    kurtosis = math.nan
    fits = []
    if len(numbers) > 2 and spread > 1e-12 * abs(numbers.mean()):
        kurtosis = float(stats.kurtosis(numbers))
        for family in (stats.norm, stats.t):
            parameters = tuple(float(value) for value in family.fit(numbers))
            test = stats.kstest(numbers, family(*parameters).cdf)
            aic = 2 * len(parameters) - 2 * float(family.logpdf(numbers, *parameters).sum())
            fits.append(Fit(family.name, parameters, float(test.statistic), float(test.pvalue), aic))
    return Distribution(len(numbers), float(numbers.mean()), float(np.median(numbers)), spread, kurtosis, tuple(fits))


def noise_scale(statistics: SampleStatistics) -> float | None:
    """Return V / ||G||^2 in examples, with ||G||^2 estimated without bias; None if the estimate is not positive.

    The squared norm of the sample's mean gradient contains V / sample_size of noise, which is subtracted.
    """
    squared_norm = statistics.squared_norm - statistics.variance / statistics.sample_size
    return statistics.variance / squared_norm if squared_norm > 0 else None


def finite_population_factor(sample: int, batch: int, replacement: bool) -> float:
    """Return E ||g_B - F||^2 / (V / batch) for batches drawn from the sample whose mean gradient is F.

    (N - b) / N without replacement, as V is the unbiased variance of the N examples; (N - 1) / N with replacement.
    """
    return (sample - 1) / sample if replacement else (sample - batch) / sample


@dataclass(frozen=True)
class PowerLaw:
    """deviation = scale * batch ^ exponent, fitted by least squares of logarithms.

    Attributes:
        error: standard error of the exponent.
    """

    exponent: float
    error: float
    scale: float


def power_law(batch_sizes: Sequence[int], deviations: Sequence[float]) -> PowerLaw | None:
    """Fit the law to the positive deviations; None if there are fewer than two."""
    points = [(math.log(b), math.log(d)) for b, d in zip(batch_sizes, deviations, strict=True) if d > 0]
    if len(points) < 2:
        return None
    result = stats.linregress(*np.array(points).T)
    return PowerLaw(float(result.slope), float(result.stderr), math.exp(result.intercept))


def root_mean_square(values: Sequence[float]) -> float:
    """Return the root of the mean square, which V / b predicts for deviations."""
    return float(np.sqrt(np.mean(np.square(values))))


def requests(
    statistics: SampleStatistics, batch: int, grids: Mapping[str, Sequence[float]]
) -> list[tuple[str, float, int]]:
    """Return the batch that each test would request at this point.

    Args:
        statistics: exact statistics of the sample.
        batch: batch size of the plain norm test; also returned by tests without an answer.
        grids: values of eta, theta and nu.

    Returns:
        (test, parameter, request in examples), sorted. The inner product tests are debiased. For nu, the request is
        that of the orthogonality test alone.
    """
    count = statistics.sample_size
    variance = statistics.variance
    estimates = GradientStatistics(
        examples=count,
        squared_norm=statistics.squared_norm - variance / count,  # without the noise of the sample's mean gradient
        variance=variance,
        inner_product_variance=statistics.inner_product_variance,
        overlap=0.0,
    )
    rows = []
    for eta in grids["eta"]:
        plain = norm_test(estimates, BatchTestParameters(eta=eta), batch)
        debiased = norm_test(estimates, BatchTestParameters(eta=eta, debias=True), batch)
        rows.append(("norm_test", eta, plain or batch))
        rows.append(("norm_test, debias", eta, debiased or batch))
    for theta in grids["theta"]:
        request = inner_product_test(estimates, BatchTestParameters(theta=theta, debias=True), batch)
        rows.append(("inner_product_test", theta, request or batch))
    for nu in grids["nu"]:
        # A huge theta disables the inner product test, so that only orthogonality is tested.
        request = augmented_inner_product_test(estimates, BatchTestParameters(theta=1e9, nu=nu, debias=True), batch)
        rows.append(("augmented_inner_product_test, orthogonality", nu, request or batch))
    return sorted(rows, key=lambda row: (row[0], row[1]))


def draw_batches(
    indices: np.ndarray, batch: int, count: int | None, replacement: bool, generator: np.random.Generator
) -> list[np.ndarray]:
    """Draw batches from a sample.

    Args:
        count: number of batches; None: as many as the sample fills.
        replacement: draw every example independently. Otherwise batches are cut from random permutations of the
            sample: no example occurs twice in a batch or in two batches of one permutation.
    """
    wanted = count if count is not None else len(indices) // batch
    if replacement:
        return [generator.choice(indices, batch) for _ in range(wanted)]
    batches: list[np.ndarray] = []
    while len(batches) < wanted:
        order = generator.permutation(indices)
        batches += [order[start : start + batch] for start in range(0, len(order) - batch + 1, batch)]
    return batches[:wanted]
