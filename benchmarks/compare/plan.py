"""A plan for nodes, a link and a time, by a formula fitted to recorded runs.

    python -m benchmarks.compare.plan --nodes 4 --speed 350 --link 10Mb/s,1ms --seconds 80

Prints the best plan of each kind (one worker, synchronous, DiLoCo) with the settings of run.py. How well the formula
predicts the runs of docs/results is measured by `prediction_errors` and said in docs/results/which_method.md.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from algorithms.nodes.traffic import Link
from algorithms.schedule.controller import LEAST_ROUNDS, NOISE_SCALE, example_value
from benchmarks.compare.accounting import gradient_bytes
from benchmarks.compare.which_method import Plan

# Only plans in the ranges of the recorded runs are proposed: batches, examples of a worker, workers, and inner steps of
# a round.
BATCHES = (16, 24, 32, 48, 64)
SMALLEST_SHARE = {"synchronous": 4, "DiLoCo": 8}
MOST_WORKERS = 4
INNER_STEPS = (10, 14, 20, 28, 40, 56, 80, 110, 150)


@dataclass(frozen=True)
class Situation:
    """Nodes, link and time of a user.

    Attributes:
        nodes: number of equal nodes.
        speed: of a node, in examples per second.
        link: of a node.
        seconds: for the whole run.
        parameters: of the model, sent as float32.
        noise_scale: of the gradient, in examples.
    """

    nodes: int
    speed: float
    link: Link
    seconds: float
    parameters: int
    noise_scale: float = NOISE_SCALE


@dataclass(frozen=True)
class Candidate:
    """A plan: workers on a node each, examples per inner step, and inner steps of a round; 1: synchronous."""

    workers: int
    batch: int
    inner_steps: int

    @property
    def kind(self) -> str:
        if self.workers == 1:
            return "one worker"
        return "synchronous" if self.inner_steps == 1 else "DiLoCo"

    @property
    def apart(self) -> int:
        """Inner steps that workers make apart."""
        return self.inner_steps if self.kind == "DiLoCo" else 0


def steps_in_time(situation: Situation, plan: Candidate) -> int:
    """Return the inner steps that a plan makes in the time, in whole rounds."""
    computing = plan.inner_steps * math.ceil(plan.batch / plan.workers) / situation.speed
    sending = 0.0
    if plan.workers > 1:
        sending = situation.link.seconds(gradient_bytes(plan.workers, situation.parameters) / plan.workers)
    return int(situation.seconds / (computing + sending)) * plan.inner_steps


def prediction_errors(plans: Sequence[Plan]) -> np.ndarray:
    """Return the errors of the formula for recorded plans with a fixed batch, as parts of their perplexities.

    The logarithm of the perplexity is a parabola in that of the examples times their value, fitted to these plans.
    """
    fixed = [plan for plan in plans if plan.family == "DiLoCo" or plan.workers == 1]
    log_perplexity = np.log([plan.perplexity for plan in fixed])
    rounds = [plan.steps / plan.exchanges if plan.exchanges else 0.0 for plan in fixed]
    values = [example_value(plan.batch, plan.workers, steps) for plan, steps in zip(fixed, rounds, strict=True)]
    amounts = np.log([plan.batch * plan.steps for plan in fixed]) + np.log(values)
    parabola = np.polynomial.Polynomial.fit(amounts, log_perplexity, 2)
    return np.expm1(parabola(amounts) - log_perplexity)


def candidates(nodes: int) -> Iterator[Candidate]:
    """Yield all plans in the ranges of the fit, for all nodes or fewer; no more than 4 workers were recorded."""
    for batch in BATCHES:
        yield Candidate(1, batch, 1)
        for workers in range(2, min(nodes, MOST_WORKERS) + 1):
            if batch >= workers * SMALLEST_SHARE["synchronous"]:
                yield Candidate(workers, batch, 1)
            if batch >= workers * SMALLEST_SHARE["DiLoCo"]:
                yield from (Candidate(workers, batch, steps) for steps in INNER_STEPS)


def effective_examples(situation: Situation, plan: Candidate) -> float:
    """Return the examples that a plan reads in the time, times their value; 0 for too few rounds."""
    if plan.kind == "DiLoCo" and steps_in_time(situation, plan) < LEAST_ROUNDS * plan.inner_steps:
        return 0.0
    examples = steps_in_time(situation, plan) * plan.batch
    return examples * example_value(plan.batch, plan.workers, plan.apart, situation.noise_scale)


def best_of_each_kind(situation: Situation) -> list[Candidate]:
    """Return the best plan of each kind that makes a step, the best kind first."""
    worth = {plan: effective_examples(situation, plan) for plan in candidates(situation.nodes)}
    best: dict[str, Candidate] = {}
    for plan in sorted(worth, key=worth.__getitem__, reverse=True):
        if worth[plan]:
            best.setdefault(plan.kind, plan)
    return list(best.values())


def settings(situation: Situation, plan: Candidate, link: str) -> str:
    """Return the overrides of run.py that simulate a plan."""
    speeds = "[" + ",".join([f"{situation.speed:g}"] * plan.workers) + "]"
    steps = 100 if plan.inner_steps == 1 else plan.inner_steps
    return (
        f"distributed_algo={'DiLoCo' if plan.kind == 'DiLoCo' else 'Synchronous'} nodes_per_gpu={plan.workers} "
        f"INITIAL_BATCH_SIZE={plan.batch} number_of_inner_steps_between_outers={steps} sampling_method=none "
        f"smallest_worker_batch=null number_of_initial_trainers=1 max_tokens=null time_budget={situation.seconds:g} "
        f"'node_speeds={speeds}' link={link}"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.compare.plan", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, required=True, help="equal nodes")
    parser.add_argument("--speed", type=float, required=True, help="examples per second of a node")
    parser.add_argument("--link", required=True, help="of a node, such as 10Mb/s,1ms")
    parser.add_argument("--seconds", type=float, required=True, help="time of the run")
    parser.add_argument("--parameters", type=int, default=125_248, help="of the model (default: the demo's)")
    parser.add_argument("--noise-scale", type=float, default=NOISE_SCALE, help="of the gradient, in examples")
    options = parser.parse_args(arguments)
    try:
        link = Link.parse(options.link)
    except ValueError as error:
        parser.error(f"--link: {error}")
    situation = Situation(options.nodes, options.speed, link, options.seconds, options.parameters, options.noise_scale)
    for plan in best_of_each_kind(situation):
        examples = steps_in_time(situation, plan) * plan.batch
        worth = effective_examples(situation, plan)
        print(f"{plan.kind}: {examples:,} examples, worth {worth:,.0f} of a very small batch")
        print(f"  python run.py {settings(situation, plan, options.link)}")


if __name__ == "__main__":
    main()
