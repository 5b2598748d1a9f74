"""A plan for nodes, a link and a time, by a formula fitted to recorded runs (docs/results/which_method.md).

    python -m benchmarks.compare.plan --nodes 4 --speed 350 --link 10Mb/s,1ms --seconds 80

Prints the best plan of each kind (one worker, synchronous, DiLoCo) with the settings of run.py.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

from algorithms.nodes.traffic import Link
from algorithms.schedule.controller import LEAST_ROUNDS, NOISE_SCALE, RoundPlan, example_value
from benchmarks.compare.accounting import gradient_bytes

# Only plans in the ranges of the recorded runs are proposed: batches, examples of a worker, workers, and inner steps of
# a round.
BATCHES = (16, 24, 32, 48, 64)
SMALLEST_SHARE = {"synchronous": 4, "DiLoCo": 8}
MOST_WORKERS = 4
INNER_STEPS = (10, 14, 20, 28, 40, 56, 80, 110, 150)


def kind_of(plan: RoundPlan) -> str:
    """Return the kind of a plan; rounds of one inner step are synchronous."""
    if plan.workers == 1:
        return "one worker"
    return "synchronous" if plan.inner_steps == 1 else "DiLoCo"


def candidates(nodes: int) -> Iterator[RoundPlan]:
    """Yield all plans in the ranges of the fit, for all nodes or fewer."""
    for batch in BATCHES:
        yield RoundPlan(1, batch, 1)
        for workers in range(2, min(nodes, MOST_WORKERS) + 1):
            if batch >= workers * SMALLEST_SHARE["synchronous"]:
                yield RoundPlan(workers, batch, 1)
            if batch >= workers * SMALLEST_SHARE["DiLoCo"]:
                yield from (RoundPlan(workers, batch, steps) for steps in INNER_STEPS)


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

    def examples(self, plan: RoundPlan) -> int:
        """Return the examples that a plan reads in the time, in whole rounds; 0 for too few rounds of DiLoCo."""
        seconds = plan.inner_steps * math.ceil(plan.batch / plan.workers) / self.speed
        if plan.workers > 1:
            seconds += self.link.seconds(gradient_bytes(plan.workers, self.parameters) / plan.workers)
        rounds = int(self.seconds / seconds)
        if kind_of(plan) == "DiLoCo" and rounds < LEAST_ROUNDS:
            return 0
        return rounds * plan.inner_steps * plan.batch

    def worth(self, plan: RoundPlan) -> float:
        """Return the examples times their value."""
        apart = plan.inner_steps if kind_of(plan) == "DiLoCo" else 0
        return self.examples(plan) * example_value(plan.batch, plan.workers, apart, self.noise_scale)

    def best_of_each_kind(self) -> list[RoundPlan]:
        """Return the best plan of each kind that makes a step, the best kind first."""
        best: dict[str, RoundPlan] = {}
        for plan in sorted(candidates(self.nodes), key=self.worth, reverse=True):
            if self.worth(plan):
                best.setdefault(kind_of(plan), plan)
        return list(best.values())


def settings(situation: Situation, plan: RoundPlan, link: str) -> str:
    """Return the overrides of run.py that simulate a plan."""
    speeds = "[" + ",".join([f"{situation.speed:g}"] * plan.workers) + "]"
    steps = 100 if plan.inner_steps == 1 else plan.inner_steps
    return (
        f"distributed_algo={'DiLoCo' if kind_of(plan) == 'DiLoCo' else 'Synchronous'} nodes_per_gpu={plan.workers} "
        f"INITIAL_BATCH_SIZE={plan.batch} number_of_inner_steps_between_outers={steps} sampling_method=none "
        f"smallest_worker_batch=null number_of_initial_trainers=1 max_tokens=null time_budget={situation.seconds:g} "
        f"'node_speeds={speeds}' link={link}"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.compare.plan", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, required=True, help="equal nodes")
    parser.add_argument("--speed", type=float, required=True, help="examples per second of a node")
    parser.add_argument("--link", required=True, help="link of a node, such as 10Mb/s,1ms")
    parser.add_argument("--seconds", type=float, required=True, help="time of the run")
    parser.add_argument("--parameters", type=int, default=125_248, help="size of the model (default: the demo's)")
    parser.add_argument("--noise-scale", type=float, default=NOISE_SCALE, help="of the gradient, in examples")
    options = parser.parse_args(arguments)
    try:
        link = Link.parse(options.link)
    except ValueError as error:
        parser.error(f"--link: {error}")
    for name in ("nodes", "speed", "seconds", "parameters", "noise_scale"):
        if not 0 < getattr(options, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')}: must be positive and finite, got {getattr(options, name)}")
    situation = Situation(options.nodes, options.speed, link, options.seconds, options.parameters, options.noise_scale)
    plans = situation.best_of_each_kind()
    if not plans:
        print("no plan makes a step in this time")
    for plan in plans:
        examples = situation.examples(plan)
        print(f"{kind_of(plan)}: {examples:,} examples, worth {situation.worth(plan):,.0f} of a very small batch")
        print(f"  python run.py {settings(situation, plan, options.link)}")


if __name__ == "__main__":
    main()
