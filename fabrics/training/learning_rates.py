"""The inner learning rate that a configuration asks for."""

from algorithms.schedule.learning_rate import LearningRateSchedule
from fabrics.training.optimizers import inner_optimizer_name
from utils.config.schema import Config


def learning_rate_schedule(config: Config) -> LearningRateSchedule:
    """The schedule of the inner learning rate that the configuration asks for."""
    return LearningRateSchedule(
        config.learning_rate_schedule,
        config.warmup_steps,
        config.warmup_tokens,
        config.minimum_learning_rate_ratio,
    )


def base_learning_rate(config: Config) -> float:
    """What the factors of the inner learning rate are on."""
    of_its_own = config.lr_sgd if inner_optimizer_name(config) == "sgd" else None
    return of_its_own or config.learning_rate_for_inner_opt
