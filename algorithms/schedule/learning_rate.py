"""Schedules over the run: the inner learning rate, and eta of the norm test."""

import math
from dataclasses import dataclass

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
