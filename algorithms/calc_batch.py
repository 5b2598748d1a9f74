"""Batch tests: from gradient statistics to the batch that a trainer should request.

Every test takes one GradientStatistics per worker and answers in examples of the whole trainer. The tests
never see the config: `bounded_request` applies what it allows.

Notation (over the workers m): V = mean V_m, Q = mean ||g_m||^2, s = a worker's sample size, B = the trainer's
effective batch. E ||g_m||^2 = ||grad F||^2 + V/s, so G2 = max(Q - V/s, 0) estimates ||grad F||^2 and
G2 + V/B the squared norm of the gradient that the trainer averages over its B examples.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from algorithms.gradient_statistics import GradientStatistics


def _mean(values) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


def _ceil(value: float) -> int:
    """Ceiling that forgives rounding: 6.4 / 0.8**2 is 10 on paper and 9.999999999999998 or more here."""
    return max(1, math.ceil(value * (1.0 - 1e-12)))


def _squared_true_norm(statistics: Sequence[GradientStatistics]) -> float:
    """G2 before its clamp at zero: an unbiased estimate of ||grad F||^2."""
    return _mean(s.squared_norm - s.variance / s.sample_size for s in statistics)


def _decide(numerator: float, denominator: float, batch: int) -> int:
    """ceil(numerator / denominator), or `batch` where the ratio says nothing (zero or non-finite)."""
    if not (math.isfinite(numerator) and math.isfinite(denominator)) or denominator <= 0.0:
        return batch
    ratio = numerator / denominator
    return _ceil(ratio) if math.isfinite(ratio) else batch


def is_decisive(statistics: Sequence[GradientStatistics]) -> bool:
    """Whether the statistics are finite and the gradient is not zero, so that a test can say something."""
    return all(math.isfinite(s.squared_norm) and math.isfinite(s.variance) for s in statistics) and (
        _mean(s.squared_norm for s in statistics) > 0.0
    )


def norm_test(statistics: Sequence[GradientStatistics], eta: float, batch: int, debias: bool = False) -> int:
    """Norm test (Byrd et al. 2012; arXiv 2402.11215): the batch at which V / B <= eta^2 ||grad||^2.

    Args:
        statistics: one per worker.
        eta: allowed ratio of the noise to the norm of the batch gradient.
        batch: the trainer's effective batch B, in examples over all its workers.
        debias: divide by the estimate of ||grad F||^2 itself. The papers' form divides by the squared norm of
            the batch gradient, which holds V/B of noise, so its answer is at most B / eta^2.

    Returns:
        Requested batch in examples; `batch` where the statistics say nothing.
    """
    variance = _mean(s.variance for s in statistics)
    squared_norm = max(_squared_true_norm(statistics), 0.0)
    if not debias:
        squared_norm += variance / batch
    return _decide(variance, eta**2 * squared_norm, batch)


def inner_product_test(statistics: Sequence[GradientStatistics], theta: float, batch: int) -> int:
    """Inner product test (arXiv 1710.11258, eq. 2.6): ceil(P / (theta^2 ||g||^4)), workers' averages."""
    inner_product_variance = _mean(s.inner_product_variance for s in statistics)
    squared_norm = _mean(s.squared_norm for s in statistics)
    return _decide(inner_product_variance, theta**2 * squared_norm**2, batch)


def augmented_inner_product_test(statistics: Sequence[GradientStatistics], theta: float, nu: float, batch: int) -> int:
    """Inner product test augmented by orthogonality (arXiv 1710.11258, section 2.2), the larger of the two.

    The second is ceil(O / (nu^2 ||g||^2)) with O the trace of the covariance orthogonal to g.
    """
    orthogonal_variance = _mean(s.orthogonal_variance for s in statistics)
    squared_norm = _mean(s.squared_norm for s in statistics)
    orthogonal = _decide(orthogonal_variance, nu**2 * squared_norm, batch)
    return max(inner_product_test(statistics, theta, batch), orthogonal)


@dataclass(frozen=True)
class BatchTestParameters:
    """The parameters of all batch tests; each reads its own."""

    eta: float
    theta: float
    nu: float
    debias: bool = False


# How the config names the tests: request(statistics, parameters, batch), or None for a batch that stays.
BatchTest = Callable[[Sequence[GradientStatistics], BatchTestParameters, int], int]

BATCH_TESTS: dict[str, BatchTest | None] = {
    "norm_test": lambda statistics, p, batch: norm_test(statistics, p.eta, batch, p.debias),
    "inner_product_test": lambda statistics, p, batch: inner_product_test(statistics, p.theta, batch),
    "augmented_inner_product_test": lambda statistics, p, batch: augmented_inner_product_test(
        statistics, p.theta, p.nu, batch
    ),
    "none": None,
}


def bounded_request(current: int, test: int, max_growth: float, max_request: int) -> int:
    """The next requested batch: never below the current one, and growing within the config's bounds.

    Args:
        current: requested batch of this round.
        test: what the batch test asks for.
        max_growth: largest factor per round, at least 1. A request of 1 may still become 2.
        max_request: largest request ever; a current request above it stays.
    """
    ceiling = max(math.floor(current * max_growth), current + 1 if max_growth > 1.0 else current)
    return max(current, min(test, ceiling, max_request))


def scheduled_request(schedule: Sequence[tuple[float, float]], progress: float, current: int) -> int:
    """The request of a schedule by hand, never below the current one.

    Args:
        schedule: (share of the run, requested batch from there on), both growing.
        progress: how much of the run is done, 0 to 1.
    """
    return max([current, *(int(batch) for share, batch in schedule if share <= progress)])


def smoothed(
    previous: GradientStatistics | None, statistics: Sequence[GradientStatistics], decay: float
) -> GradientStatistics:
    """The workers' statistics as one, averaged over the rounds with an exponential moving average.

    The sample size may change from round to round and ||g||^2 depends on it, so it is the estimate of
    ||grad F||^2 that is averaged; the squared norm is put back at the current sample size.

    Args:
        previous: the result of the round before, None in the first.
        statistics: one per worker.
        decay: weight of the past, 0 (none) to below 1.
    """
    sample_size = min(s.sample_size for s in statistics)
    variance = _mean(s.variance for s in statistics)
    current = GradientStatistics(
        sample_size=sample_size,
        squared_norm=_squared_true_norm(statistics) + variance / sample_size,
        variance=variance,
        inner_product_variance=_mean(s.inner_product_variance for s in statistics),
        orthogonal_variance=_mean(s.orthogonal_variance for s in statistics),
    )
    if previous is None or decay == 0.0:
        return current

    def average(old: float, new: float) -> float:
        return decay * old + (1.0 - decay) * new

    smoothed_variance = average(previous.variance, variance)
    true_norm = average(_squared_true_norm([previous]), _squared_true_norm([current]))
    return replace(
        current,
        squared_norm=true_norm + smoothed_variance / sample_size,
        variance=smoothed_variance,
        inner_product_variance=average(previous.inner_product_variance, current.inner_product_variance),
        orthogonal_variance=average(previous.orthogonal_variance, current.orthogonal_variance),
    )
