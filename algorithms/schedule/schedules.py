"""Schedules over the run: the inner learning rate, eta of the norm test, and the requested batch."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from algorithms.schedule.limits import RoundSchedule

SCHEDULES = ("constant", "cosine", "linear", "warmup_stable_decay")

# Last share of the run, in which warmup_stable_decay falls linearly (MiniCPM, arXiv 2404.06395).
DECAY_SHARE = 0.2


@dataclass(frozen=True)
class LearningRateSchedule:
    """The inner learning rate over the run, as a factor of the base learning rate.

    Attributes:
        name: one of SCHEDULES.
        warmup_steps: inner steps of the trainer over which the factor grows linearly.
        warmup_tokens: tokens of the trainer over which it grows linearly; the slower of the two counts.
        minimum_ratio: the factor at the end of the run.
    """

    name: str = "constant"
    warmup_steps: int = 0
    warmup_tokens: int = 0
    minimum_ratio: float = 0.0

    @property
    def decay_begins(self) -> float:
        """The progress at which warmup_stable_decay begins to fall; 1 for the other schedules."""
        return 1.0 - DECAY_SHARE if self.name == "warmup_stable_decay" else 1.0

    def without_warmup(self, progress: float) -> float:
        """The factor at this progress of the run, which is clamped to between 0 and 1."""
        progress = min(max(progress, 0.0), 1.0)
        if self.name == "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * progress))
        elif self.name == "linear":
            left = 1.0 - progress
        elif self.name == "warmup_stable_decay":
            left = 1.0 - max(progress - self.decay_begins, 0.0) / DECAY_SHARE
        else:
            left = 1.0
        return self.minimum_ratio + (1.0 - self.minimum_ratio) * left

    def progress_at(self, factor: float) -> float:
        """The progress at which a falling schedule has this factor, between its minimum_ratio and 1."""
        left = (factor - self.minimum_ratio) / (1.0 - self.minimum_ratio)
        if self.name == "cosine":
            return math.acos(2.0 * left - 1.0) / math.pi
        if self.name == "linear":
            return 1.0 - left
        return self.decay_begins + DECAY_SHARE * (1.0 - left)

    def factors(self, schedule: RoundSchedule, steps_before: int, tokens_before: int, tokens: int) -> list[float]:
        """Return the factor of every inner step of a round, over which progress and tokens are spread evenly.

        Args:
            steps_before: inner steps of the trainer before the round.
            tokens_before: tokens of the trainer before the round.
            tokens: tokens of the round, over all workers of the trainer.
        """
        found = []
        count = schedule.inner_steps
        length = schedule.progress_after - schedule.progress_before
        for step in range(count):
            warmup = 1.0
            if self.warmup_steps:
                warmup = min(warmup, (steps_before + step + 1) / self.warmup_steps)
            if self.warmup_tokens:
                warmup = min(warmup, (tokens_before + (step + 1) / count * tokens) / self.warmup_tokens)
            found.append(warmup * self.without_warmup(schedule.progress_before + step / count * length))
        return found


def eta_during(eta: float, eta_at_end: float | None, progress: float) -> float:
    """eta of the norm test at this progress, 0 to 1: linear from eta to eta_at_end, or constant for None.

    A test that grows stricter lets the batch grow late, when averaging noise is worth more than making many steps.
    """
    return eta if eta_at_end is None else eta + progress * (eta_at_end - eta)


# The requested batch: pairs of a share of the run and the request from there on, or a rule that yields such pairs.
# Seesaw and critical-batch warm-up also set the inner learning rate.

NAMED_SCHEDULES = ("seesaw", "critical_batch")

_THRESHOLD = re.compile(r"(\d+(?:\.\d+)?)([kMB]?):(\d+)")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}
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
    for part in text.split() or [text]:
        match = _THRESHOLD.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is no TOKENS:BATCH")
        number, unit, batch = match.groups()
        share = Fraction(number) * _UNITS[unit] / run_tokens  # exact, to equal the progress of a round that ends there
        pairs.append((float(share), float(batch)))
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
