"""The requested batch of a trainer, in examples over all its workers: batch tests, and the state that they change.

A batch test is a function of the statistics, the parameters of all tests and the trainer's effective batch; None: the
statistics say nothing, and the batch stays. `bounded_request` keeps the answer within the configured bounds.
`BatchControl.conclude` is the decision at the end of a round (AdLoCo, section 3, step 6).

Notation as in algorithms.batch.gradient_statistics: G the true gradient, V, P and R; B the effective batch, whose mean
gradient g has E ||g||^2 = ||G||^2 + V / B, and, with other examples, E Var <g_i, g> = P + R / B. The papers divide by
||g||^2 and take the variance of <g_i, g>: that is the plain form. The debiased form has the limits for large B: ||G||^2
and P.

With `confidence` z a test answers with the smallest batch that is not ruled out at z standard errors. As a request
never shrinks, otherwise the largest of many point estimates would decide.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from algorithms.batch.gradient_statistics import GradientStatistics, SampleEstimate, StatisticsSums
from algorithms.registry import Registry
from algorithms.schedule.schedules import BatchSchedule, eta_during

# The values of statistics_estimator: gradients of single examples, of whole workers, or of the devices of a node.
ESTIMATORS = ("per_example", "across_workers", "across_devices")


@dataclass(frozen=True)
class BatchTestParameters:
    """The parameters of all batch tests; each test reads its own.

    Attributes:
        eta: of the norm test: allowed ratio of the noise to the norm of the gradient.
        debias: divide by ||G||^2 instead of ||g||^2. The noise V / B in ||g||^2 keeps the answer of the plain norm test
            below B / eta^2.
        confidence: standard errors by which the answer is lowered.
    """

    eta: float = 1.0
    theta: float = 1.0
    nu: float = 1.0
    debias: bool = False
    confidence: float = 0.0


BatchTest = Callable[[GradientStatistics, BatchTestParameters, int], int | None]


def _ceil(value: float) -> int | None:
    """Return the ceiling, at least 1; None if the value is not finite.

    It forgives rounding: 6.4 / 0.8**2 is 10 on paper and 9.999999999999998 or more in floating point.
    """
    return max(1, math.ceil(value * (1.0 - 1e-12))) if math.isfinite(value) else None


def lower_ratio(
    numerator: float, numerator_error: float, denominator: float, denominator_error: float, confidence: float
) -> float:
    """Return the smallest ratio r of two estimates with numerator - r denominator <= confidence * its error (Fieller).

    The true values are not negative: a negative denominator counts as zero, and its error alone bounds the ratio. The
    ratio is 0 if the numerator is not above its own error, and infinity for a denominator of zero without an error.
    """
    n = max(numerator, 0.0)
    d = max(denominator, 0.0)
    n_margin = confidence * numerator_error
    d_margin = confidence * denominator_error
    excess = n**2 - n_margin**2
    if math.isnan(excess):
        return excess
    if excess <= 0.0:
        return 0.0
    # The smaller root of r^2 (d^2 - d_margin^2) - 2 r n d + excess = 0, in the form for any sign of the first bracket.
    divisor = n * d + math.sqrt((d * n_margin) ** 2 + d_margin**2 * excess)
    return excess / divisor if divisor != 0.0 else math.inf


def _squared_norm(s: GradientStatistics, batch: int, debias: bool) -> tuple[float, float]:
    squared_norm = max(s.squared_norm, 0.0)
    if debias:
        return squared_norm, s.squared_norm_error
    error = math.hypot(s.squared_norm_error, s.variance_error / batch)
    return squared_norm + s.variance / batch, error


def norm_test(s: GradientStatistics, parameters: BatchTestParameters, batch: int) -> int | None:
    """Norm test (Byrd et al. 2012; arXiv 2402.11215): the batch at which V / B <= eta^2 ||g||^2."""
    if not s.decisive:
        return None
    ratio = lower_ratio(s.variance, s.variance_error, s.squared_norm, s.squared_norm_error, parameters.confidence)
    if not parameters.debias and ratio > 0.0:
        ratio = 1.0 / (1.0 / ratio + 1.0 / batch)  # V / (||G||^2 + V / B)
    return _ceil(ratio / parameters.eta**2)


def inner_product_test(s: GradientStatistics, parameters: BatchTestParameters, batch: int) -> int | None:
    """Inner product test (arXiv 1710.11258, eq. 2.6): ceil(Var <g_i, g> / (theta^2 ||g||^4))."""
    z = parameters.confidence
    variance, error = s.inner_product_variance_at(math.inf if parameters.debias else batch)
    if not s.decisive or math.isnan(variance) or (z > 0.0 and math.isinf(error)):
        return None
    # The square root of the ratio has the squared norm itself in the denominator.
    root = math.sqrt(max(variance, 0.0))
    lowest = math.sqrt(max(variance - z * error, 0.0))
    root_error = (root - lowest) / z if z > 0.0 else 0.0
    ratio = lower_ratio(root, root_error, *_squared_norm(s, batch, parameters.debias), z)
    return _ceil((ratio / parameters.theta) ** 2)


def augmented_inner_product_test(s: GradientStatistics, parameters: BatchTestParameters, batch: int) -> int | None:
    """Inner product test augmented by orthogonality (arXiv 1710.11258, section 2.2): the larger of the two.

    The second is ceil(O / (nu^2 ||g||^2)) with O the variance orthogonal to g, V - Var <g_i, g> / ||g||^2.
    """
    z = parameters.confidence
    inner = inner_product_test(s, parameters, batch)
    squared_norm, error = _squared_norm(s, batch, parameters.debias)
    along, along_error = s.inner_product_variance_at(math.inf if parameters.debias else batch)
    largest = squared_norm + z * error
    if not s.decisive or math.isnan(along) or largest <= 0.0:
        return inner
    along = max(along, 0.0) / largest
    if z > 0.0:
        # No direction holds more of the variance than the root of R, which is known long before P is.
        overlap = max(s.overlap, 0.0) + z * s.overlap_error
        along = min(along + z * along_error / largest, math.sqrt(overlap))
    ratio = lower_ratio(max(s.variance - along, 0.0), s.variance_error, squared_norm, error, z)
    answers = [answer for answer in (inner, _ceil(ratio / parameters.nu**2)) if answer is not None]
    return max(answers, default=None)


# The values of sampling_method.
BATCH_TESTS: Registry[BatchTest | None] = Registry(
    {
        "norm_test": norm_test,
        "inner_product_test": inner_product_test,
        "augmented_inner_product_test": augmented_inner_product_test,
        "none": None,
    }
)

# The tests that need P and R, and so samples of two sizes.
NEED_INNER_PRODUCTS = ("inner_product_test", "augmented_inner_product_test")


def bounded_request(current: int, answer: int | None, max_batch_growth: float | None, max_request: int) -> int:
    """Return the next requested batch: never below the current one, and growing within the configured bounds.

    Args:
        answer: of the batch test; None: the request stays.
        max_batch_growth: largest factor per round, at least 1; None: no bound. Above 1 one more example is allowed.
        max_request: largest request ever; a current request above it stays.
    """
    if answer is None:
        return current
    if max_batch_growth is not None and answer > current * max_batch_growth:
        smallest_growth = 1 if max_batch_growth > 1.0 else 0
        answer = max(math.floor(current * max_batch_growth), current + smallest_growth)
    return max(current, min(answer, max_request))


@dataclass(frozen=True)
class BatchControlSettings:
    """The configuration of a trainer's requested batch.

    Attributes:
        parameters: of the test; eta is that at the beginning of the run.
        eta_at_end: eta at the end of the run; None: constant.
        first_round: the first round with a test, counted from 1; before it the request stays.
        smoothing: weight of the past in the average of the statistics over rounds.
        max_batch_growth: factor per round; None: no bound.
        frozen_from: share of the run after which no test changes the request. A falling learning rate makes the noise
            scale rise, and then steps are worth more than larger batches. 0: the statistics are only measured.
    """

    test: str
    parameters: BatchTestParameters
    eta_at_end: float | None
    first_round: int
    smoothing: float
    max_batch_growth: float | None
    schedule: BatchSchedule | None = None
    frozen_from: float = 1.0


class BatchControl:
    """The requested batch of a trainer, in examples over all its workers, and the state that it depends on."""

    def __init__(self, settings: BatchControlSettings, initial_request: int):
        self._settings = settings
        self._first_batch: int | None = None  # effective, of the first round
        self._progress = 0.0  # of the run, expected after the last round
        self._test = BATCH_TESTS[settings.test]
        self.requested_batch = initial_request
        self._sums = StatisticsSums()

    @property
    def grows(self) -> bool:
        """True if a batch test or a schedule may change the request."""
        return self._test is not None or self._settings.schedule is not None

    @property
    def noise_scale(self) -> int | None:
        """V / ||G||^2 of the averaged statistics, in examples; None as long as they do not tell it."""
        if not self._sums.weight:
            return None
        return norm_test(self._sums.statistics, BatchTestParameters(debias=True), batch=1)

    def measures(self, round_number: int) -> bool:
        """Return whether this round, counted from 1, takes gradient statistics."""
        return self._test is not None and round_number >= self._settings.first_round

    def learning_rate_factor(self, effective_batch: int) -> float:
        """Return the factor of the learning rate that the schedule asks for in the next round.

        It follows the batch that is run, which a switch mode may keep below the request.
        """
        schedule = self._settings.schedule
        if schedule is None:
            return 1.0
        return schedule.rate_factor(self._progress, effective_batch / (self._first_batch or effective_batch))

    def conclude(
        self,
        samples: Sequence[SampleEstimate],
        between: SampleEstimate | None,
        effective_batch: int,
        progress: float,
        largest_request: int,
    ) -> tuple[GradientStatistics | None, str | None]:
        """Change the request at the end of a round.

        Args:
            samples: estimates of the round's samples; empty if nothing was measured.
            between: an estimate from products between the workers, if there is one besides the samples.
            effective_batch: examples of an inner step over all workers.
            progress: expected after the round, 0 to 1.

        Returns:
            The statistics, averaged over the rounds, and None; or those of this round alone and why no test saw them.
            No statistics if nothing was measured.
        """
        settings = self._settings
        self._first_batch = self._first_batch or effective_batch
        self._progress = progress
        if settings.schedule is not None:
            scheduled = settings.schedule.request(progress, self.requested_batch)
            self.requested_batch = min(scheduled, largest_request)
        if self._test is None or not samples:
            return None, None
        of_round = StatisticsSums().after(samples, 0.0, between).statistics
        if not of_round.decisive:
            return of_round, "gradient statistics are zero or not finite: the requested batch stays as it is"
        self._sums = self._sums.after(samples, settings.smoothing, between)
        statistics = self._sums.statistics
        if progress > settings.frozen_from:
            return statistics, None
        eta = eta_during(settings.parameters.eta, settings.eta_at_end, progress)
        parameters = dataclasses.replace(settings.parameters, eta=eta)
        answer = self._test(statistics, parameters, effective_batch)
        if answer is None and settings.test in NEED_INNER_PRODUCTS:
            errors = statistics.inner_product_variance_error if parameters.confidence > 0.0 else 0.0
            if not math.isfinite(statistics.inner_product_variance + errors):
                return statistics, f"too few samples for {settings.test}: the requested batch stays as it is"
        if answer is not None and math.isnan(answer):
            return statistics, f"{settings.test} returned NaN: the requested batch stays as it is"
        if answer is not None and math.isfinite(answer):
            answer = math.ceil(answer)
        self.requested_batch = bounded_request(self.requested_batch, answer, settings.max_batch_growth, largest_request)
        return statistics, None

    def state_dict(self) -> dict:
        return {
            "requested_batch": self.requested_batch,
            "first_batch": self._first_batch,
            "progress": self._progress,
            "statistics": dataclasses.asdict(self._sums),
        }

    def load_state_dict(self, state: Mapping) -> None:
        self.requested_batch = state["requested_batch"]
        self._first_batch = state["first_batch"]
        self._progress = state["progress"]
        self._sums = StatisticsSums(**state["statistics"])
