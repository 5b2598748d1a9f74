"""What changes along the run: the inner learning rate, with its scaling with the batch, and eta of the norm test."""

import math

from algorithms.limits import RoundSchedule

SCHEDULES = {
    "constant": lambda progress: 1.0,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}

LEARNING_RATE_SCALINGS = {
    "none": lambda ratio: 1.0,
    "sqrt": math.sqrt,
    "linear": lambda ratio: ratio,
}


def schedule_factor(
    schedule: str, progress: float, step: int, warmup_steps: int = 0, minimum_ratio: float = 0.0
) -> float:
    """Factor on the base learning rate at one inner step.

    Args:
        schedule: a key of SCHEDULES; it falls from 1 to `minimum_ratio` as `progress` goes from 0 to 1.
        progress: how much of the run is done, 0 to 1.
        step: inner steps already done by the trainer; the first `warmup_steps` grow linearly.
    """
    warmup = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    decay = SCHEDULES[schedule](min(max(progress, 0.0), 1.0))
    return warmup * (minimum_ratio + (1.0 - minimum_ratio) * decay)


def round_factors(
    schedule: str, planned: RoundSchedule, steps_before: int, warmup_steps: int = 0, minimum_ratio: float = 0.0
) -> list[float]:
    """Factors on the base learning rate at the inner steps of a round, its progress shared out evenly over them.

    Args:
        steps_before: inner steps that the trainer has done before the round; see schedule_factor for the others.
    """
    length = planned.progress_after - planned.progress_before
    return [
        schedule_factor(
            schedule,
            planned.progress_before + step / planned.inner_steps * length,
            steps_before + step,
            warmup_steps,
            minimum_ratio,
        )
        for step in range(planned.inner_steps)
    ]


def batch_scaling_factor(rule: str, effective_batch: int, reference_batch: int) -> float:
    """Factor on the base learning rate for a worker's batch, against the batch the rate was chosen for."""
    return LEARNING_RATE_SCALINGS[rule](effective_batch / reference_batch)


def eta_during(eta: float, eta_at_end: float | None, progress: float) -> float:
    """eta when a share `progress`, 0 to 1, of the run is done: a line from eta to eta_at_end, where that is given.

    A test that grows stricter lets the batch grow late, when averaging noise away is worth more than many steps.
    """
    return eta if eta_at_end is None else eta + progress * (eta_at_end - eta)
