"""What changes along the run: the inner learning rate, and eta of the norm test."""

import math
from dataclasses import dataclass

from algorithms.schedule.limits import RoundSchedule

SCHEDULES = ("constant", "cosine", "linear", "warmup_stable_decay")

# Last share of the run, in which warmup_stable_decay falls linearly (MiniCPM, arXiv 2404.06395).
DECAY_SHARE = 0.2


@dataclass(frozen=True)
class LearningRateSchedule:
    """The inner learning rate over the run, as a factor on its base.

    Attributes:
        name: one of SCHEDULES.
        warmup_steps, warmup_tokens: of the trainer, over which the factor grows linearly; the slower of the two counts.
        minimum_ratio: the factor at the end of the run.
    """

    name: str = "constant"
    warmup_steps: int = 0
    warmup_tokens: int = 0
    minimum_ratio: float = 0.0

    @property
    def decay_begins(self) -> float:
        """The share of the run from which it falls; 1 where it falls all along, or never."""
        return 1.0 - DECAY_SHARE if self.name == "warmup_stable_decay" else 1.0

    def without_warmup(self, progress: float) -> float:
        """The factor when a share `progress` of the run is done; below 0 counts as 0, above 1 as 1."""
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

    def factors(self, planned: RoundSchedule, steps_before: int, tokens_before: int, tokens: int) -> list[float]:
        """Those of the inner steps of a round, over which its progress and its tokens are shared out evenly.

        Args:
            steps_before: inner steps that the trainer has done before the round. tokens_before: likewise.
            tokens: of the round, over all workers of the trainer.
        """
        found, count = [], planned.inner_steps
        length = planned.progress_after - planned.progress_before
        for step in range(count):
            warmup = 1.0
            if self.warmup_steps:
                warmup = min(warmup, (steps_before + step + 1) / self.warmup_steps)
            if self.warmup_tokens:
                warmup = min(warmup, (tokens_before + (step + 1) / count * tokens) / self.warmup_tokens)
            found.append(warmup * self.without_warmup(planned.progress_before + step / count * length))
        return found


def eta_during(eta: float, eta_at_end: float | None, progress: float) -> float:
    """eta when a share `progress`, 0 to 1, of the run is done: a line from eta to eta_at_end, where that is given.

    A test that grows stricter lets the batch grow late, when averaging noise away is worth more than many steps.
    """
    return eta if eta_at_end is None else eta + progress * (eta_at_end - eta)
