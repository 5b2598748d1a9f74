"""How much each worker of a trainer does, where nodes differ: its share of a batch, or its inner steps of a round."""

import functools
import heapq
import math
from collections.abc import Sequence


@functools.lru_cache(maxsize=64)
def batch_shares(examples: int, speeds: tuple[float, ...]) -> tuple[int, ...]:
    """The examples of an inner step, shared out so that the last worker is done as early as can be; one each at least.

    One example after the other goes to whoever would be done with it first, ties to the smaller number: as nearly in
    proportion to speed as whole examples can be, and equal speeds have shares that differ by one at most.

    Args:
        examples: as many as workers, or more; the shares sum to them.
        speeds: of every worker, positive, in any unit.
    """
    if examples < len(speeds):
        raise ValueError(f"there must be an example for each of {len(speeds)} workers, got {examples}")
    shares = [1] * len(speeds)
    queue = [(2 / speed, worker) for worker, speed in enumerate(speeds)]
    heapq.heapify(queue)
    for _ in range(examples - len(speeds)):
        worker = queue[0][1]
        shares[worker] += 1
        heapq.heapreplace(queue, ((shares[worker] + 1) / speeds[worker], worker))
    return tuple(shares)


def steps_each(inner_steps: int, speeds: Sequence[float], least: int = 1) -> list[int]:
    """Inner steps of every worker in a round in which the fastest makes so many: floor(H s_m / max s), `least` at least
    (arXiv 2401.09135, dynamic local updates)."""
    fastest = max(speeds)
    return [min(inner_steps, max(least, math.floor(inner_steps * speed / fastest + 1e-9))) for speed in speeds]


def turns(own: int, inner_steps: int) -> tuple[int, ...]:
    """During which inner steps of a round, from 0, a worker that makes `own` of them does so: its last in the last.

    A worker is done with floor(n own / H) of its steps when the fastest has made n of H.
    """
    return tuple(-(-number * inner_steps // own) - 1 for number in range(1, own + 1))


def places(batches: Sequence[int], workers_turns: Sequence[Sequence[int]]) -> list[list[int]]:
    """Where each worker's slice of every inner step of its own begins among the examples of a round.

    Slices follow each other by inner step of the round, and in it by worker; who makes none has no slice.
    """
    order = sorted((turn, worker) for worker, own in enumerate(workers_turns) for turn in own)
    found, first = [[] for _ in batches], 0
    for _, worker in order:
        found[worker].append(first)
        first += batches[worker]
    return found


def throughput(work: Sequence[int], speeds: Sequence[float]) -> float:
    """Examples per second of workers side by side that have so many examples each, and wait for the last one."""
    return sum(work) / max(examples / speed for examples, speed in zip(work, speeds, strict=True))
