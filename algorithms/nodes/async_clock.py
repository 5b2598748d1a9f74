"""A virtual clock of inner steps, for methods without a barrier.

A round of H inner steps lasts as long as the fastest worker's H. Another worker makes h <= H of its own in that time:
its k-th is done at time k H / h, where k <= 0 was in an earlier round and k > h is in a later one. Every event takes
effect at the first inner step of the round that is not earlier.
"""

from collections.abc import Collection
from fractions import Fraction

PRECISION = 10**6  # of a time, in inner steps


def in_steps(seconds: float, step_seconds: float) -> Fraction:
    """Return a time in inner steps of the round; 0 if their duration is not known."""
    return Fraction(seconds / step_seconds).limit_denominator(PRECISION) if step_seconds else Fraction(0)


def time_of(own_step: int, own_steps: int, inner_steps: int) -> Fraction:
    """Return the time, in inner steps of the round, at which a worker has made this step of its own."""
    return Fraction(own_step * inner_steps, own_steps)


def made_at(time: int, own_steps: int, inner_steps: int) -> int:
    """Return the number of its own steps that a worker has made at this time."""
    return time * own_steps // inner_steps


def forget(values: dict[str, float], workers: Collection[int] | None = None) -> None:
    """Drop the values of these workers, or of all: those whose names end with a worker's number."""
    for name in list(values):
        number = name.rpartition("_")[2]
        if number.isdigit() and (workers is None or int(number) in workers):
            del values[name]
