"""The work of nodes of unequal speed: shares of a batch, inner steps of a round, and the times when they are done."""

import functools
import heapq
import math
from collections.abc import Collection, Sequence
from fractions import Fraction


@functools.lru_cache(maxsize=64)
def batch_shares(examples: int, speeds: tuple[float, ...]) -> tuple[int, ...]:
    """Divide the examples of an inner step so that the last worker finishes as early as possible.

    Each worker gets one example. Every further example goes to the worker that would finish it first; ties go to the
    smaller number. Equal speeds give shares that differ by at most one.

    examples: at least as many as workers.
    """
    shares = [1] * len(speeds)
    queue = [(2 / speed, worker) for worker, speed in enumerate(speeds)]
    heapq.heapify(queue)
    for _ in range(examples - len(speeds)):
        worker = queue[0][1]
        shares[worker] += 1
        heapq.heapreplace(queue, ((shares[worker] + 1) / speeds[worker], worker))
    return tuple(shares)


def steps_each(inner_steps: int, speeds: Sequence[float], least: int = 1) -> list[int]:
    """Inner steps of every worker while the fastest makes `inner_steps`: floor(H s_m / max s), but at least `least`.

    This is dynamic local updates (arXiv 2401.09135).
    """
    fastest = max(speeds)
    return [min(inner_steps, max(least, math.floor(inner_steps * speed / fastest + 1e-9))) for speed in speeds]


def turns(own: int, inner_steps: int) -> tuple[int, ...]:
    """The inner steps of the round, from 0, during which a worker makes its `own` steps; the last in the last.

    When the fastest worker has made n of H steps, this worker has made floor(n own / H).
    """
    return tuple(-(-number * inner_steps // own) - 1 for number in range(1, own + 1))


def slice_offsets(batches: Sequence[int], workers_turns: Sequence[Sequence[int]]) -> list[list[int]]:
    """The offsets, within the examples of a round, at which each worker's slices begin.

    Slices follow each other by inner step of the round, and within a step by worker.

    workers_turns: the inner steps of the round during which each worker makes its own.
    """
    order = sorted((turn, worker) for worker, own in enumerate(workers_turns) for turn in own)
    found: list[list[int]] = [[] for _ in batches]
    first = 0
    for _, worker in order:
        found[worker].append(first)
        first += batches[worker]
    return found


# Methods without a barrier. A round of H inner steps lasts as long as the fastest worker's H. Another worker makes
# h <= H of its own in that time: its k-th is done at time k H / h, where k <= 0 was in an earlier round and k > h is in
# a later one. Every event takes effect at the first inner step of the round that is not earlier.

PRECISION = 10**6  # of a time, in inner steps


def in_steps(seconds: float, step_seconds: float) -> Fraction:
    """Return a time in inner steps of the round; 0 if their duration is not known."""
    return Fraction(seconds / step_seconds).limit_denominator(PRECISION) if step_seconds else Fraction(0)


def time_of(own_step: int, own_steps: int, inner_steps: int) -> Fraction:
    """Return the time, in inner steps of the round, at which a worker has made this step of its own."""
    return Fraction(own_step * inner_steps, own_steps)


def forget(values: dict[str, float], workers: Collection[int] | None = None) -> None:
    """Drop the values of these workers, or of all: those whose names end with a worker's number."""
    for name in list(values):
        number = name.rpartition("_")[2]
        if number.isdigit() and (workers is None or int(number) in workers):
            del values[name]
