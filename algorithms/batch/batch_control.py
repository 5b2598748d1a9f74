"""The requested batch of one trainer: its state, and the decision that moves it at the end of a round.

What the workers measured goes in, the next request comes out (AdLoCo, section 3, step 6): the statistics are averaged
over the rounds, the batch test answers what its lower confidence bound asks for, and the answer is kept within bounds.
Without a batch test the request stays, or follows a schedule by hand.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

from algorithms.batch.budget import FREEZE, Ahead, Trend, largest_planned, planned_batch
from algorithms.batch.calc_batch import (
    BATCH_TESTS,
    BatchTestParameters,
    bounded_request,
    scheduled_request,
)
from algorithms.batch.gradient_statistics import GradientStatistics, SampleEstimate, StatisticsSums
from algorithms.schedule.learning_rate import eta_during

# Of the logarithm of a noise scale: with a larger standard error nothing is known.
_LARGEST_ERROR = 2.0
# Of the logarithm of a request, which moves in jumps.
_REQUEST_ERROR = 0.1
# Where the statistics come from: one worker's examples, or the differences between the workers' gradients.
ESTIMATORS = ("per_example", "across_workers")


@dataclass(frozen=True)
class BatchControlSettings:
    """How a request may move.

    test: a key of BATCH_TESTS. first_round: with a test, counted from 1; before it the request stays. smoothing: weight
    of the past in the average of the statistics over rounds. confidence: standard errors by which the test's answer is
    lowered. largest_growth: factor per round. schedule: pairs of (share of the run, request from there on), for a
    request that no test moves. frozen_from: share of the run after which no test moves it: a learning rate that falls
    makes the noise scale rise, and wants steps. planned: exponents of time to go and noise scale (see
    algorithms.batch.budget) where a budget moves the request and no test does.
    """

    test: str
    eta: float
    eta_at_end: float | None
    theta: float
    nu: float
    debias: bool
    first_round: int
    smoothing: float
    confidence: float
    largest_growth: float
    schedule: Sequence[Sequence[float]] | None = None
    frozen_from: float = 1.0
    planned: tuple[float, float] | None = None


def _log_noise_scale(statistics: GradientStatistics) -> tuple[float, float] | None:
    """The logarithm of V / ||G||^2 and its standard error; None where nothing is known of it."""
    s = statistics
    if s.variance <= 0.0 or s.squared_norm <= 0.0:
        return None
    error = math.hypot(s.variance_error / s.variance, s.squared_norm_error / s.squared_norm)
    return (math.log(s.variance / s.squared_norm), error) if error < _LARGEST_ERROR else None


class BatchControl:
    """The requested batch and what it depends on.

    Args:
        settings: how it may move.
        initial_request: in examples over all workers of the trainer.

    Attributes:
        requested_batch: the present request, in examples over all workers.
    """

    def __init__(self, settings: BatchControlSettings, initial_request: int):
        self._settings = settings
        self._test = BATCH_TESTS[settings.test]
        self.requested_batch = initial_request
        self._sums = StatisticsSums()
        self._trend = Trend()  # of the noise scale where a budget moves the request, else of the request
        self._measured: tuple[float, float] | None = None
        self._carry = 0.0

    def plan(self, ahead: Ahead, workers: int, largest_request: int) -> None:
        """Set the request of the round that is at hand, where a budget moves it; else remember how it grows.

        Args:
            workers: of the trainer; the request is a multiple of them, and what is rounded off is made good later.
            largest_request: ever, in examples.
        """
        position = ahead.position(ahead.progress)
        if self._settings.planned is None:
            self._trend = self._trend.after(position, math.log(self.requested_batch), _REQUEST_ERROR)
            return
        if self._measured is not None and ahead.progress < FREEZE:
            self._trend = self._trend.after(position, *self._measured)
        self._measured = None
        most = largest_planned(largest_request, workers)
        bounds = ahead.trainers * workers, ahead.trainers * most
        batch = planned_batch(ahead, self._trend, *self._settings.planned, *bounds) / ahead.trainers
        if ahead.rounds_left == 1:
            self.requested_batch = workers * math.ceil(batch / workers)
            return
        if ahead.rounds_done:
            growth = self._settings.largest_growth
            batch = min(max(batch, self.requested_batch / growth), self.requested_batch * growth)
        self.requested_batch = min(workers * max(1, round((batch + self._carry) / workers)), most)
        self._carry = min(max(self._carry + batch - self.requested_batch, -workers), workers)

    @property
    def growth(self) -> float:
        """With what power of the examples a request that no budget moves grows, as far as it can be told."""
        return self._trend.slope if self._test is not None or self._settings.schedule else 0.0

    def tests_after(self, round_number: int) -> bool:
        """Whether a batch test follows this round, counted from 1."""
        return self._test is not None and round_number >= self._settings.first_round

    def conclude(
        self,
        samples: Sequence[SampleEstimate],
        between: SampleEstimate | None,
        effective_batch: int,
        progress: float,
        largest_request: int,
    ) -> tuple[GradientStatistics | None, str | None]:
        """Move the request at the end of a round.

        Args:
            samples: what the round's samples say; none where nothing was measured.
            between: what products between the workers say, if they are known beside the samples.
            effective_batch: examples of an inner step over all workers.
            progress: how much of the run is done, 0 to 1.
            largest_request: ever, in examples.

        Returns:
            The statistics that the test saw, averaged over the rounds, and what to warn of; None where there is none.

        Raises:
            TypeError: the test gives no number.
        """
        settings = self._settings
        if settings.schedule:
            scheduled = scheduled_request(settings.schedule, progress, self.requested_batch)
            self.requested_batch = min(scheduled, largest_request)
        if self._test is None or not samples:
            return None, None
        alone = StatisticsSums().after(samples, 0.0, between).statistics
        if not alone.decisive:
            return alone, "gradient statistics are zero or not finite: the requested batch stays as it is"
        self._sums = self._sums.after(samples, settings.smoothing, between)
        if settings.planned is not None:
            self._measured = _log_noise_scale(alone)
            return self._sums.statistics, None
        eta = eta_during(settings.eta, settings.eta_at_end, progress)
        parameters = BatchTestParameters(eta, settings.theta, settings.nu, settings.debias, settings.confidence)
        statistics = self._sums.statistics
        if progress > settings.frozen_from:
            return statistics, None
        asked = self._test(statistics, parameters, effective_batch)
        if not (asked is None or (isinstance(asked, Real) and not math.isnan(asked))):
            raise TypeError(f"sampling_method: {settings.test} must give a number of examples or None, got {asked!r}")
        self.requested_batch = bounded_request(self.requested_batch, asked, settings.largest_growth, largest_request)
        return statistics, None

    def state_dict(self) -> dict:
        """As plain values."""
        return {
            "requested_batch": self.requested_batch,
            "statistics": dataclasses.asdict(self._sums),
            "trend": dataclasses.asdict(self._trend),
            "measured": self._measured,
            "carry": self._carry,
        }

    def load_state_dict(self, state: Mapping) -> None:
        """Continue from a state."""
        self.requested_batch = state["requested_batch"]
        self._sums = StatisticsSums(**state["statistics"])
        self._trend = Trend(**state.get("trend", {}))  # runs from before there were budgets have none
        self._measured = state.get("measured")
        self._carry = state.get("carry", 0.0)
