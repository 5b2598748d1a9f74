"""`objective: time`: the facts for `algorithms.schedule.controller`, which plans every round of such a run.

The method is chosen once, before the run: workers that step apart, or that exchange gradients in every step where the
link is fast. They keep different tensors, so that a run cannot change between them. Workers, batch and inner steps are
chosen in every round. Seconds are those of the virtual clock.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from algorithms.schedule.controller import (
    LEAST_LONE_ROUNDS,
    LEAST_ROUNDS,
    MEASURED_NOISE,
    METHOD_APART,
    METHOD_TOGETHER,
    NOISE_SCALE,
    RoundPlan,
    Situation,
    next_plan,
    remaining_worth,
)
from algorithms.synchronisation import METHODS
from fabrics.training.flat_model import FlatModel
from fabrics.training.method_config import method_of, round_bytes
from fabrics.training.optimizers import learning_rate_schedule
from fabrics.training.worker import Node
from utils.config.schema import Config

if TYPE_CHECKING:
    from trainers import Trainer


def with_best_method(
    config: Config, model: FlatModel, nodes: Sequence[Node], examples: int, resumed: str | None
) -> Config:
    """Return the configuration with the method that is worth more for its link.

    If one worker is worth the same with both, the number of its rounds decides whether it makes outer steps. A method
    that does not support `communication_dtype` has float32.

    Args:
        examples: of the training data.
        resumed: the method of the run that is resumed, which it keeps.
    """

    def worth(candidate: Config) -> tuple[float, bool]:
        situation = _situation(candidate, model, nodes, config.max_requested_batch or examples)
        plan = next_plan(situation)
        lone_rounds = situation.seconds_left * situation.speeds[0] / (plan.batch * plan.inner_steps)
        return remaining_worth(situation, plan), situation.synchronous == (lone_rounds < LEAST_LONE_ROUNDS)

    candidates = []
    both = (METHOD_APART, METHOD_TOGETHER)
    for name in (resumed,) if resumed in both else both:
        encodings = METHODS[name]().capabilities.encodings
        supported = encodings is None or config.communication_dtype in encodings
        encoding = config.communication_dtype if supported else "float32"
        candidates.append(dataclasses.replace(config, distributed_algo=name, communication_dtype=encoding))
    return max(candidates, key=worth)


def plan_round(config: Config, trainer: "Trainer", nodes: Sequence[Node], seconds: float, progress: float) -> RoundPlan:
    """Return the plan of the only trainer's next round; nodes: the fastest first; seconds: that the run has used."""
    group = trainer.worker_group
    situation = _situation(config, group.model, nodes, trainer.largest_request)
    measured = trainer.batch_control.noise_scale
    situation = dataclasses.replace(
        situation,
        joining_seconds=config.simulated_link.seconds(group.sizes.trainer + group.sizes.worker),
        seconds_left=config.time_budget - seconds,
        noise_scale=NOISE_SCALE if measured is None else MEASURED_NOISE * measured,
        workers=len(trainer.nodes) if trainer.rounds else 0,
        batch=trainer.requested_batch,
        decays=progress >= learning_rate_schedule(config).decay_begins,
    )
    return next_plan(situation)


def _situation(config: Config, model: FlatModel, nodes: Sequence[Node], largest_batch: int) -> Situation:
    method = method_of(config, model)
    exchanges = [0.0]
    for workers in range(2, len(nodes) + 1):
        sent = round_bytes(config, method, model, workers, measures=False) / workers
        exchanges.append(config.simulated_link.seconds(sent))
    synchronous = method.capabilities.exchanges_gradients
    # The reason for a smallest share is AdamW's division of a step by the noise of the worker's own gradient.
    smallest_share = 1 if synchronous else config.smallest_worker_batch or 1
    return Situation(
        speeds=tuple(node.speed for node in nodes),
        exchange_seconds=tuple(exchanges),
        joining_seconds=0.0,
        seconds_left=config.time_budget,
        longest_round=config.time_budget / LEAST_ROUNDS,
        noise_scale=NOISE_SCALE,
        smallest_batch=config.INITIAL_BATCH_SIZE,
        smallest_share=smallest_share,
        largest_batch=max(largest_batch, smallest_share, config.INITIAL_BATCH_SIZE),
        free_steps=config.number_of_inner_steps_between_outers,
        synchronous=synchronous,
    )
