"""A plan for nodes, a link and a time, by a formula fitted to recorded runs (docs/results/which_method.md).

    python -m benchmarks.compare.plan --nodes 4 --speed 350 --link 10Mb/s,1ms --seconds 80

Prints the best plan of each kind (one worker, synchronous, DiLoCo) by the formula of `objective: time`, with the
settings of run.py, and what the formula is fitted to.
"""

import argparse
import math

from algorithms.nodes.traffic import Link
from algorithms.schedule.controller import (
    INNER_STEPS,
    LEAST_ROUNDS,
    NOISE_SCALE,
    RoundPlan,
    Situation,
    next_plan,
    remaining_worth,
)
from benchmarks.compare.accounting import gradient_bytes

# The ranges of the recorded runs: parameters, batches, examples of a worker in an inner step, and workers.
PARAMETERS = 125_248
BATCHES = (16, 64)
SMALLEST_SHARE = {"one worker": 1, "synchronous": 4, "DiLoCo": 8}
LARGEST_SHARE = 16  # where that is more than the largest batch
MOST_WORKERS = 8
# Inner steps of a round whose length costs nothing.
FREE_STEPS = 100


def situations(options: argparse.Namespace, link: Link) -> dict[str, Situation]:
    """Return the facts on which a plan of each kind depends."""
    found = {}
    for kind, smallest_share in SMALLEST_SHARE.items():
        workers = 1 if kind == "one worker" else min(options.nodes, MOST_WORKERS)
        sent = [gradient_bytes(count, options.parameters) / count for count in range(1, workers + 1)]
        found[kind] = Situation(
            speeds=(options.speed,) * workers,
            exchange_seconds=(0.0, *map(link.seconds, sent[1:])),
            joining_seconds=0.0,
            seconds_left=options.seconds,
            longest_round=options.seconds / LEAST_ROUNDS,
            noise_scale=options.noise_scale,
            smallest_batch=BATCHES[0],
            smallest_share=smallest_share,
            largest_batch=max(BATCHES[1], LARGEST_SHARE * workers),
            free_steps=FREE_STEPS,
            synchronous=kind == "synchronous",
        )
    return found


def step_seconds(options: argparse.Namespace, plan: RoundPlan) -> float:
    return plan.batch / plan.workers / options.speed


def settings(options: argparse.Namespace, kind: str, plan: RoundPlan) -> str:
    """Return the overrides of run.py that simulate a plan."""
    speeds = "[" + ",".join([f"{options.speed:g}"] * plan.workers) + "]"
    return (
        f"distributed_algo={'DiLoCo' if kind == 'DiLoCo' else 'Synchronous'} nodes_per_gpu={plan.workers} "
        f"INITIAL_BATCH_SIZE={plan.batch} number_of_inner_steps_between_outers={plan.inner_steps} sampling_method=none "
        f"smallest_worker_batch=null number_of_initial_trainers=1 max_tokens=null time_budget={options.seconds:g} "
        f"'node_speeds={speeds}' link={options.link}"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.compare.plan", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, required=True, help="equal nodes")
    parser.add_argument("--speed", type=float, required=True, help="examples per second of a node")
    parser.add_argument("--link", required=True, help="link of a node, such as 10Mb/s,1ms")
    parser.add_argument("--seconds", type=float, required=True, help="time of the run")
    parser.add_argument("--parameters", type=int, default=PARAMETERS, help="size of the model (default: the demo's)")
    parser.add_argument("--noise-scale", type=float, default=NOISE_SCALE, help="of the gradient, in examples")
    options = parser.parse_args(arguments)
    try:
        link = Link.parse(options.link)
    except ValueError as error:
        parser.error(f"--link: {error}")
    for name in ("nodes", "speed", "seconds", "parameters", "noise_scale"):
        if not 0 < getattr(options, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')}: must be positive and finite, got {getattr(options, name)}")
    plans = [(kind, situation, next_plan(situation)) for kind, situation in situations(options, link).items()]
    plans.sort(key=lambda plan: -remaining_worth(*plan[1:]))
    for kind, situation, plan in plans:
        if kind != "one worker" and plan.workers == 1:
            print(f"{kind}: worth less than one worker")
        elif step_seconds(options, plan) > options.seconds:
            print(f"{kind}: makes no step in this time")
        else:
            print(f"{kind}: worth {remaining_worth(situation, plan):,.0f} examples of a very small batch")
            print(f"  python run.py {settings(options, kind, plan)}")
    if options.nodes > MOST_WORKERS:
        print(f"{options.nodes - MOST_WORKERS} nodes are idle: recorded runs have at most {MOST_WORKERS} workers")
    print(
        f"The formula is fitted to runs of {PARAMETERS:,} parameters, at least {LEAST_ROUNDS} rounds and "
        f"{INNER_STEPS[0]} to {INNER_STEPS[1]} inner steps per round; other plans are extrapolated. The commands "
        "simulate the plans with the demo's model."
    )


if __name__ == "__main__":
    main()
