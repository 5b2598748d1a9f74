"""The inner learning rate and the length of rounds, as a configuration says them."""

import math
from collections.abc import Mapping, Sequence

from algorithms.schedule.learning_rate import LearningRateSchedule, batch_scaling_factor, round_steps
from fabrics.training.optimizers import inner_optimizer_name
from utils.config.schema import Config


def learning_rate_schedule(config: Config) -> LearningRateSchedule:
    """The schedule of the inner learning rate that the configuration asks for."""
    return LearningRateSchedule(
        config.learning_rate_schedule,
        config.warmup_steps,
        config.warmup_tokens,
        config.minimum_learning_rate_ratio,
        config.decay_share,
        config.decay_shape,
    )


def base_learning_rate(config: Config) -> float:
    """What the factors of the inner learning rate are on."""
    of_its_own = config.lr_sgd if inner_optimizer_name(config) == "sgd" else None
    return of_its_own or config.learning_rate_for_inner_opt


def learning_rates_each(
    config: Config, step_batches: Mapping[int, int], reference: int, halvings: int, factors: Sequence[float]
) -> dict[int, list[float]]:
    """Of the inner steps of a round, by worker.

    Args:
        step_batches: examples of a step of the inner optimiser, by worker. reference: with which the rate is as given.
        halvings: of a trainer that has diverged. factors: of the schedule, for every inner step.
    """
    found = {}
    for worker, batch in step_batches.items():
        scaling = batch_scaling_factor(config.learning_rate_scaling, batch, reference)
        rate = base_learning_rate(config) * (0.5**halvings * scaling)
        found[worker] = [rate * factor for factor in factors]
    return found


def inner_steps_ahead(config: Config, progress: float) -> int:
    """Inner steps of a whole round that begins when a share `progress` of the run is done."""
    base, steps = base_learning_rate(config), config.number_of_inner_steps_between_outers
    alpha = config.inner_steps_alpha or base * math.sqrt(steps)
    learning_rate = base * learning_rate_schedule(config).without_warmup(progress)
    return round_steps(config.inner_steps_rule, steps, alpha, learning_rate)
