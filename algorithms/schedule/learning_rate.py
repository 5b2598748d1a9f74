"""What changes along the run: the inner learning rate, with its scaling with the batch, and eta of the norm test."""

import math
from dataclasses import dataclass

from algorithms.registry import Registry
from algorithms.schedule.limits import RoundSchedule

# How the decay of warmup_stable_decay falls from 1 to 0 as it goes on from 0 to 1 (1 - sqrt: arXiv 2405.18392).
DECAY_SHAPES = Registry(
    {
        "linear": lambda done: 1.0 - done,
        "1-sqrt": lambda done: 1.0 - math.sqrt(done),
    }
)

SCHEDULES = ("constant", "cosine", "linear", "warmup_stable_decay")

# How many inner steps a round has as the learning rate falls; and at most.
INNER_STEPS_RULES = ("fixed", "quadratic")
_MOST_STEPS = 2**31

LEARNING_RATE_SCALINGS = Registry(
    {
        "none": lambda ratio: 1.0,
        "sqrt": math.sqrt,
        "linear": lambda ratio: ratio,
    }
)


@dataclass(frozen=True)
class LearningRateSchedule:
    """The inner learning rate over the run, as a factor on its base.

    name: one of SCHEDULES. warmup_steps, warmup_tokens: of the trainer, over which it grows linearly; the slower of the
    two counts. minimum_ratio: what is left at the end of the run. decay_share: the last share of the run, in which
    warmup_stable_decay falls (MiniCPM, arXiv 2404.06395), by a key of DECAY_SHAPES.
    """

    name: str = "constant"
    warmup_steps: int = 0
    warmup_tokens: int = 0
    minimum_ratio: float = 0.0
    decay_share: float = 0.2
    decay_shape: str = "linear"

    @property
    def decay_begins(self) -> float:
        """The share of the run from which it falls; 1 where it falls all along, or never."""
        return 1.0 - self.decay_share if self.name == "warmup_stable_decay" else 1.0

    def without_warmup(self, progress: float) -> float:
        """The factor when a share `progress` of the run is done; below 0 counts as 0, above 1 as 1."""
        progress = min(max(progress, 0.0), 1.0)
        if self.name == "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * progress))
        elif self.name == "linear":
            left = 1.0 - progress
        elif self.name == "warmup_stable_decay":
            left = DECAY_SHAPES[self.decay_shape](max(progress - self.decay_begins, 0.0) / self.decay_share)
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


def round_steps(rule: str, base: int, alpha: float, learning_rate: float) -> int:
    """Inner steps of a round that begins with this learning rate, its warm-up left out.

    quadratic is the Quadratic Synchronization Rule, max(base, floor((alpha / learning rate)^2)) (arXiv 2310.14423):
    what local steps do to the average of the workers is of the order of H eta^2, and stays the same so. The rule has
    no bound; here there is one that no run comes near.
    """
    if rule == "fixed":
        return base
    ratio = alpha / learning_rate if learning_rate > 0.0 else math.inf
    return max(base, int(min(ratio * ratio, _MOST_STEPS)))


def batch_scaling_factor(rule: str, effective_batch: int, reference_batch: int) -> float:
    """Factor on the base learning rate for a worker's batch, against the batch the rate was chosen for."""
    return LEARNING_RATE_SCALINGS[rule](effective_batch / reference_batch)


def eta_during(eta: float, eta_at_end: float | None, progress: float) -> float:
    """eta when a share `progress`, 0 to 1, of the run is done: a line from eta to eta_at_end, where that is given.

    A test that grows stricter lets the batch grow late, when averaging noise away is worth more than many steps.
    """
    return eta if eta_at_end is None else eta + progress * (eta_at_end - eta)
