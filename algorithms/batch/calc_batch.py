"""Batch tests: from gradient statistics to the batch that a trainer should request.

Every test answers in examples of the whole trainer. The tests never see the config: `bounded_request` applies what it
allows.

Notation as in algorithms.batch.gradient_statistics: G the true gradient, V, P and R; B the trainer's effective
batch, whose
mean gradient g has E ||g||^2 = ||G||^2 + V/B, and other examples E Var <g_i, g> = P + R/B. The papers divide by ||g||^2
and take the variance of <g_i, g>: that is the plain form. The debiased form has what B tends to: ||G||^2 and P.

An estimate that is lowered by its error: with `confidence` z a test answers with the smallest batch that is not ruled
out at z standard errors. As a request never shrinks, the largest of many point estimates would decide otherwise.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from algorithms.batch.gradient_statistics import GradientStatistics
from algorithms.registry import Registry


def _ceil(value: float) -> int:
    """Ceiling that forgives rounding: 6.4 / 0.8**2 is 10 on paper and 9.999999999999998 or more here."""
    return max(1, math.ceil(value * (1.0 - 1e-12)))


def _decide(value: float) -> int | None:
    """ceil(value), or None where the value says nothing."""
    return _ceil(value) if math.isfinite(value) else None


def lower_ratio(
    numerator: float, numerator_error: float, denominator: float, denominator_error: float, confidence: float
) -> float:
    """The smallest ratio r of two estimated numbers with numerator - r denominator <= confidence * its error (Fieller).

    What is estimated is not negative: a denominator below zero counts as zero, and its error alone bounds the ratio.

    Args:
        confidence: z; with 0 the ratio itself.

    Returns:
        0 where the numerator is not above its own error; infinite for a denominator of zero without an error.
    """
    n, d = max(numerator, 0.0), max(denominator, 0.0)
    upper, lower = confidence * denominator_error, n**2 - (confidence * numerator_error) ** 2
    if math.isnan(lower) or lower <= 0.0:
        return lower if math.isnan(lower) else 0.0
    # The smaller root of r^2 (d^2 - upper^2) - 2 r n d + lower = 0, in the form that holds for any sign of the first.
    scale = n * d + math.sqrt((d * confidence * numerator_error) ** 2 + upper**2 * lower)
    return lower / scale if scale != 0.0 else math.inf


def _squared_norm(statistics: GradientStatistics, batch: int, debias: bool) -> tuple[float, float]:
    """The squared norm that the tests divide by, and its error."""
    squared_norm = max(statistics.squared_norm, 0.0)
    if debias:
        return squared_norm, statistics.squared_norm_error
    error = math.hypot(statistics.squared_norm_error, statistics.variance_error / batch)
    return squared_norm + statistics.variance / batch, error


def norm_test(
    statistics: GradientStatistics, eta: float, batch: int, debias: bool = False, confidence: float = 0.0
) -> int | None:
    """Norm test (Byrd et al. 2012; arXiv 2402.11215): the batch at which V / B <= eta^2 ||grad||^2.

    Args:
        statistics: of all workers.
        eta: allowed ratio of the noise to the norm of the gradient.
        batch: the trainer's effective batch B, in examples over all its workers.
        debias: divide by ||G||^2 instead of ||g||^2, which holds V/B of noise, so that the papers' form asks for at
            most B / eta^2.
        confidence: by how many standard errors the answer is lowered.

    Returns:
        Requested batch in examples; None where the statistics say nothing.
    """
    s = statistics
    ratio = lower_ratio(s.variance, s.variance_error, s.squared_norm, s.squared_norm_error, confidence)
    if not debias and ratio > 0.0:
        ratio = 1.0 / (1.0 / ratio + 1.0 / batch)  # V / (||G||^2 + V/B)
    return _decide(ratio / eta**2) if s.decisive else None


def inner_product_test(
    statistics: GradientStatistics, theta: float, batch: int, debias: bool = False, confidence: float = 0.0
) -> int | None:
    """Inner product test (arXiv 1710.11258, eq. 2.6): ceil(Var <g_i, g> / (theta^2 ||g||^4))."""
    variance, error = statistics.inner_product_variance_at(math.inf if debias else batch)
    # The square root of the ratio has the squared norm itself in the denominator.
    root, lowest = math.sqrt(max(variance, 0.0)), math.sqrt(max(variance - confidence * error, 0.0))
    root_error = (root - lowest) / confidence if confidence > 0.0 else 0.0
    ratio = lower_ratio(root, root_error, *_squared_norm(statistics, batch, debias), confidence)
    return _decide((ratio / theta) ** 2) if statistics.decisive and not math.isnan(variance) else None


def augmented_inner_product_test(
    statistics: GradientStatistics, theta: float, nu: float, batch: int, debias: bool = False, confidence: float = 0.0
) -> int | None:
    """Inner product test augmented by orthogonality (arXiv 1710.11258, section 2.2), the larger of the two.

    The second is ceil(O / (nu^2 ||g||^2)) with O the variance orthogonal to g, V - Var <g_i, g> / ||g||^2.
    """
    inner = inner_product_test(statistics, theta, batch, debias, confidence)
    squared_norm, error = _squared_norm(statistics, batch, debias)
    along, along_error = statistics.inner_product_variance_at(math.inf if debias else batch)
    largest = squared_norm + confidence * error
    if not statistics.decisive or math.isnan(along) or largest <= 0.0:
        return inner
    along = max(along, 0.0) / largest
    if confidence > 0.0:
        # No direction holds more of the variance than the root of R, which is known long before P is.
        overlap = max(statistics.overlap, 0.0) + confidence * statistics.overlap_error
        along = min(along + confidence * along_error / largest, math.sqrt(overlap))
    orthogonal = max(statistics.variance - along, 0.0)
    ratio = lower_ratio(orthogonal, statistics.variance_error, squared_norm, error, confidence)
    return max(filter(None, (inner, _decide(ratio / nu**2))), default=None)


@dataclass(frozen=True)
class BatchTestParameters:
    """The parameters of all batch tests; each reads its own."""

    eta: float
    theta: float
    nu: float
    debias: bool = False
    confidence: float = 0.0


# How the config names the tests: request(statistics, parameters, batch), which may say nothing; None: the batch stays.
BatchTest = Callable[[GradientStatistics, BatchTestParameters, int], int | None]

BATCH_TESTS: Registry[BatchTest | None] = Registry(
    {
        "norm_test": lambda statistics, p, batch: norm_test(statistics, p.eta, batch, p.debias, p.confidence),
        "inner_product_test": lambda statistics, p, batch: inner_product_test(
            statistics, p.theta, batch, p.debias, p.confidence
        ),
        "augmented_inner_product_test": lambda statistics, p, batch: augmented_inner_product_test(
            statistics, p.theta, p.nu, batch, p.debias, p.confidence
        ),
        "none": None,
    }
)

# The tests that need P and R, and so samples of two sizes.
NEED_INNER_PRODUCTS = ("inner_product_test", "augmented_inner_product_test")


def bounded_request(current: int, test: int | None, max_growth: float | None, max_request: int) -> int:
    """The next requested batch: never below the current one, and growing within the config's bounds.

    Args:
        current: requested batch of this round.
        test: what the batch test asks for; None: nothing.
        max_growth: largest factor per round, at least 1; None: no bound. A request of 1 may still become 2.
        max_request: largest request ever; a current request above it stays.
    """
    if test is None:
        return current
    if max_growth is not None:
        smallest_growth = 1 if max_growth > 1.0 else 0
        test = min(test, max(math.floor(current * max_growth), current + smallest_growth))
    return max(current, min(test, max_request))


def scheduled_request(schedule: Sequence[tuple[float, float]], progress: float, current: int) -> int:
    """The request of a schedule by hand.

    Args:
        schedule: (share of the run, requested batch from there on), the shares growing.
        progress: how much of the run is done, 0 to 1.
        current: the request before the first of them.
    """
    return [current, *(int(batch) for share, batch in schedule if share <= progress)][-1]
