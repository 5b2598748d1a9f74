"""Schedules of the requested batch: pairs of shares of the run, thresholds in tokens, Seesaw, critical-batch warm-up.

Every schedule becomes pairs of a share of the run and the request from there on. Seesaw and critical-batch warm-up also
set the inner learning rate.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from algorithms.schedule.learning_rate import LearningRateSchedule

NAMED_SCHEDULES = ("seesaw", "critical_batch")

_THRESHOLD = re.compile(r"(\d+(?:\.\d+)?)([kMB]?):(\d+)")
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9}
# A schedule that ends at zero halves without end; the 10th halving of a cosine is in the last 2% of the run.
_MOST_DOUBLINGS = 10
# Where the published run doubles: at 168 and 503 of 658 billion tokens. The tokens are quoted from a summary; the total
# follows from the 43% fewer steps that its abstract states.
_CRITICAL_BATCH_DOUBLINGS = (168 / 658, 503 / 658)


@dataclass(frozen=True)
class BatchSchedule:
    """The requested batch over the run, and the inner learning rate that goes with it.

    Attributes:
        pairs: share of the run and request from there on; the shares grow.
        scales_rate: multiply the learning rate by the square root of the batch's growth.
        halves_rate: also halve it at every pair.
    """

    pairs: Sequence[Sequence[float]]
    scales_rate: bool = False
    halves_rate: bool = False

    def request(self, progress: float, current: int) -> int:
        """Return the request at this progress of the run, 0 to 1; current: the request before the first pair."""
        return [current, *(int(batch) for share, batch in self.pairs if share <= progress)][-1]

    def rate_factor(self, progress: float, growth: float) -> float:
        """Return the factor of the learning rate; growth: the batch divided by the first one."""
        factor = math.sqrt(growth) if self.scales_rate else 1.0
        if self.halves_rate:
            factor *= 0.5 ** sum(share <= progress for share, _ in self.pairs)
        return factor


def token_thresholds(text: str, run_tokens: int) -> list[tuple[float, float]]:
    """Return the pairs of thresholds in tokens, as in `0:16 500k:32 1M:64`; k, M and B are thousands to billions.

    Raises:
        ValueError: the text has another form.
    """
    pairs = []
    for part in text.split():
        match = _THRESHOLD.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is no TOKENS:BATCH")
        number, unit, batch = match.groups()
        pairs.append((float(number) * _UNITS[unit] / run_tokens, float(batch)))
    return pairs


def seesaw(learning_rate: LearningRateSchedule, batch: int) -> BatchSchedule:
    """Seesaw (arXiv 2510.14717): where a schedule halves the learning rate, divide it by sqrt(2) and double the batch.

    A batch that cannot double any more, because of its limit, leaves the halving to the learning rate.

    Args:
        learning_rate: the schedule that Seesaw replaces; its warm-up stays.
        batch: in the first round.
    """
    places = []
    for doubling in range(1, _MOST_DOUBLINGS + 1):
        if 0.5**doubling >= learning_rate.minimum_ratio:
            places.append((learning_rate.progress_at(0.5**doubling), float(batch * 2**doubling)))
    pairs = [(share, request) for share, request in places if share < 1.0]
    return BatchSchedule(pairs, scales_rate=True, halves_rate=True)


def critical_batch(batch: int) -> BatchSchedule:
    """Critical-batch warm-up (arXiv 2505.23971): the batch doubles when the critical batch is twice as large.

    The learning rate is multiplied by sqrt(2) each time. The critical batch itself is not measured: the doublings are
    at the shares of the run where the published run (OLMo, 1B parameters) has them.

    Args:
        batch: in the first round.
    """
    pairs = [(share, float(batch * 2**number)) for number, share in enumerate(_CRITICAL_BATCH_DOUBLINGS, start=1)]
    return BatchSchedule(pairs, scales_rate=True)
