"""The requested batch of one trainer: its state, and the decision that changes it at the end of a round.

AdLoCo, section 3, step 6: the statistics are averaged over the rounds, the batch test answers, and the answer is kept
within bounds. Without a batch test the request stays, or follows a schedule.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

from algorithms.batch.calc_batch import BATCH_TESTS, BatchTestParameters, bounded_request, norm_test
from algorithms.batch.gradient_statistics import GradientStatistics, SampleEstimate, StatisticsSums
from algorithms.schedule.batch_schedule import BatchSchedule
from algorithms.schedule.learning_rate import eta_during

# The values of statistics_estimator: gradients of single examples, of whole workers, or of the devices of a node.
ESTIMATORS = ("per_example", "across_workers", "across_devices")


@dataclass(frozen=True)
class BatchControlSettings:
    """The configuration of a trainer's requested batch.

    Attributes:
        parameters: of the test; eta is that at the beginning of the run.
        eta_at_end: eta at the end of the run; None: constant.
        first_round: the first round with a test, counted from 1; before it the request stays.
        smoothing: weight of the past in the average of the statistics over rounds.
        largest_growth: factor per round; None: no bound.
        frozen_from: share of the run after which no test changes the request. A falling learning rate makes the noise
            scale rise, and then steps are worth more than larger batches. 0: the statistics are only measured.
    """

    test: str
    parameters: BatchTestParameters
    eta_at_end: float | None
    first_round: int
    smoothing: float
    largest_growth: float | None
    schedule: BatchSchedule | None = None
    frozen_from: float = 1.0


class BatchControl:
    """The requested batch of a trainer, in examples over all its workers, and the state that it depends on."""

    def __init__(self, settings: BatchControlSettings, initial_request: int):
        self._settings = settings
        self._initial_request = initial_request
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

    def learning_rate_factor(self, progress: float) -> float:
        """Return the factor of the learning rate that the schedule asks for in a round that begins at this progress."""
        schedule = self._settings.schedule
        return 1.0 if schedule is None else schedule.rate_factor(progress, self.requested_batch / self._initial_request)

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

        Returns:
            The statistics that the test saw, averaged over the rounds, and a warning; None if there is none.

        Raises:
            TypeError: the test returned something else than a number or None.
        """
        settings = self._settings
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
        if not (answer is None or (isinstance(answer, Real) and not math.isnan(answer))):
            raise TypeError(f"sampling_method: {settings.test} must give a number of examples or None, got {answer!r}")
        self.requested_batch = bounded_request(self.requested_batch, answer, settings.largest_growth, largest_request)
        return statistics, None

    def state_dict(self) -> dict:
        return {
            "requested_batch": self.requested_batch,
            "statistics": dataclasses.asdict(self._sums),
        }

    def load_state_dict(self, state: Mapping) -> None:
        self.requested_batch = state["requested_batch"]
        self._sums = StatisticsSums(**state["statistics"])
