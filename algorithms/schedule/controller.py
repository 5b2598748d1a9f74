"""The plan of a round for `objective: time`: workers, batch and inner steps that make the most of the seconds left.

Progress per second is the number of examples per second times the value of an example. Pollux (OSDI 2021) does this for
synchronous training; here rounds of DiLoCo also lose by the inner steps that workers make apart. How well the value
predicts recorded runs is in docs/results/which_method.md.
"""

import math
from dataclasses import dataclass

# The methods of a run, of workers that step apart and of workers that exchange gradients in every step.
METHOD_APART = "DiLoCo"
METHOD_TOGETHER = "Synchronous"
# Fitted to 29 recorded plans (docs/results/which_method.md).
NOISE_SCALE = 248.0
DRIFT_STEPS = 2.4
DRIFT = 0.114
# The fitted scale is that many times the mean of V / ||G||^2 measured during a run of DiLoCo, in which it grows.
MEASURED_NOISE = 2.6
# The recorded runs have rounds of this many inner steps, and at least this many rounds.
INNER_STEPS = (10, 150)
LEAST_ROUNDS = 15
# One worker ends higher with 44 or 58 outer steps than without any, but not with 191 (docs/results/objective_time.md).
LEAST_LONE_ROUNDS = 100
# A plan that promises less than this more than the present one is not worth a change: its error is as large.
HYSTERESIS = 0.02
_BATCH_GRID = 1.25


def example_value(batch: float, workers: int, inner_steps: float, noise_scale: float = NOISE_SCALE) -> float:
    """Return the value of an example relative to one of a very small batch on one worker, 0 to 1.

    A step with batch B lowers the loss by B / (B + B_noise) of a step with the exact gradient (arXiv 1812.06162), so an
    example is worth B_noise / (B_noise + B). M workers that make H steps apart drift from each other, which costs a
    factor (1 + H / DRIFT_STEPS) ** (-DRIFT log2(M)); it is fitted, not derived.

    Args:
        inner_steps: of a round; 0: the workers are never apart.
    """
    return noise_scale / (noise_scale + batch) * (1.0 + inner_steps / DRIFT_STEPS) ** (-DRIFT * math.log2(workers))


@dataclass(frozen=True)
class RoundPlan:
    """The plan of a round: the number of workers, their examples in an inner step, and their inner steps."""

    workers: int
    batch: int
    inner_steps: int


@dataclass(frozen=True)
class Situation:
    """The facts on which the plan of a round depends.

    Attributes:
        speeds: examples per second of the nodes that work, the fastest first.
        exchange_seconds: of one exchange between one worker (nothing), two workers, and so on.
        joining_seconds: until workers that join have their state.
        seconds_left: until the end of the run.
        longest_round: in seconds.
        noise_scale: in examples, for `example_value`.
        smallest_batch: fewest examples of an inner step.
        smallest_share: fewest examples of a worker in it.
        largest_batch: most examples of an inner step; one worker can make its smallest step with them.
        free_steps: inner steps of a round whose length costs nothing: of one worker, or of synchronous ones.
        synchronous: workers exchange gradients in every inner step, instead of parameters at the end of a round.
        workers: of the round before; 0: there is none.
        batch: of the round before.
        decays: the last part of the run, in which a learning rate decays; meanwhile workers and batch stay.
    """

    speeds: tuple[float, ...]
    exchange_seconds: tuple[float, ...]
    joining_seconds: float
    seconds_left: float
    longest_round: float
    noise_scale: float
    smallest_batch: int
    smallest_share: int
    largest_batch: int
    free_steps: int
    synchronous: bool
    workers: int = 0
    batch: int = 0
    decays: bool = False


def best_inner_steps(step_seconds: float, exchange_seconds: float, workers: int) -> float:
    """Return the H with the largest progress per second, of workers that exchange after every H inner steps.

    With s seconds of a step, e of an exchange, c = DRIFT log2(M) and h = DRIFT_STEPS it maximises
    H / (H s + e) (1 + H / h)^-c, whose derivative is zero where c s H^2 + (c - 1) e H = h e.
    """
    c = DRIFT * math.log2(workers)
    middle = (1.0 - c) * exchange_seconds
    root = math.sqrt(middle**2 + 4.0 * c * step_seconds * DRIFT_STEPS * exchange_seconds)
    return (middle + root) / (2.0 * c * step_seconds)


def remaining_worth(situation: Situation, plan: RoundPlan) -> float:
    """Return the examples that a plan reads in the seconds left, times their value."""
    step = plan.batch / plan.workers / situation.speeds[plan.workers - 1]
    exchange = situation.exchange_seconds[plan.workers - 1]
    seconds = situation.seconds_left
    if 0 < situation.workers < plan.workers:
        seconds -= situation.joining_seconds
    exchanges_per_step = 1.0 if situation.synchronous else 1.0 / plan.inner_steps
    steps = max(seconds, 0.0) / (step + exchanges_per_step * exchange)
    apart = 0 if situation.synchronous else plan.inner_steps
    return steps * plan.batch * example_value(plan.batch, plan.workers, apart, situation.noise_scale)


def next_plan(situation: Situation) -> RoundPlan:
    """Return the plan of the next round: the one of the largest worth, or the present one if it is nearly as good."""
    present = None
    if situation.workers:
        present = _plan(situation, situation.workers, situation.batch)
        if situation.decays:
            return present
    plans = []
    for workers in range(1, len(situation.speeds) + 1):
        share = max(situation.smallest_share, math.ceil(situation.smallest_batch / workers))
        while workers * share <= situation.largest_batch:
            plans.append(_plan(situation, workers, workers * share))
            share = math.ceil(_BATCH_GRID * share)
    best = max(plans, key=lambda plan: remaining_worth(situation, plan))
    if present is None or remaining_worth(situation, best) > (1.0 + HYSTERESIS) * remaining_worth(situation, present):
        return best
    return present


def _plan(situation: Situation, workers: int, batch: int) -> RoundPlan:
    exchange = situation.exchange_seconds[workers - 1]
    if workers == 1 or situation.synchronous:
        return RoundPlan(workers, batch, situation.free_steps)
    step = batch / workers / situation.speeds[workers - 1]
    least, most = INNER_STEPS
    longest = (situation.longest_round - exchange) / step
    steps = min(max(best_inner_steps(step, exchange, workers), least), most, longest)
    return RoundPlan(workers, batch, max(1, round(steps)))
