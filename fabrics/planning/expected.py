"""How many communications the laws of docs/theory.md expect, with a batch that stays and with one that grows.

How fast a batch grows is known only of a run that is done (`training_logs.prediction`). Before one, the largest batch
that the configuration allows bounds it: the laws are those that reach it with the last example, and the fastest that
`max_batch_growth` allows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from algorithms.theory import BatchLaw


@dataclass(frozen=True)
class Expected:
    """Communications of a whole run, merges included, by law; those of growing batches None where nothing bounds them.

    constant: the batch stays. linear, geometric: it grows so that the last round has the largest one. fastest: it grows
    by max_batch_growth in every round, until it is the largest.
    """

    constant: float
    linear: float | None
    geometric: float | None
    fastest: float | None


def _reaching(regime: str, first: float, largest: float, batches: float) -> float:
    """Rounds in which so many batches are used up by a law that goes from the first to the largest."""
    if first >= largest:
        return batches / first

    def total(growth: float) -> tuple[float, float]:
        law = BatchLaw(regime, first, growth)
        rounds = law.rounds(batches, 1)
        return law.batch(rounds), rounds

    low, high = 0.0, (largest - first) if regime == "linear" else math.log(largest / first)
    return _bisected(total, low, high, largest)


def _bisected(total: Callable[[float], tuple[float, float]], low: float, high: float, largest: float) -> float:
    for _ in range(200):
        middle = (low + high) / 2.0
        low, high = (middle, high) if total(middle)[0] < largest else (low, middle)
    return total(high)[1]


def expected_communications(
    examples: float,
    done: tuple[float, int],
    per_round: int,
    batch: int,
    largest: int | None,
    inner_steps: int,
    growth: float,
) -> Expected:
    """Of a run of so many examples.

    Args:
        done: examples and communications up to the last merge, in which the batch is taken to stay.
        per_round: communications of every later round.
        batch, largest: of an inner step over all workers of all trainers then, at first and at most; None: no bound.
        inner_steps: H.
        growth: the largest factor from round to round.
    """
    left, before = max(examples - done[0], 0.0), done[1]

    def whole(rounds: float) -> float:
        return before + per_round * rounds

    constant = whole(BatchLaw("constant", batch).rounds(left, inner_steps))
    if largest is None:
        return Expected(constant, None, None, None)
    fastest = BatchLaw("geometric", batch, math.log(growth), max(largest, batch)).rounds(left, inner_steps)
    linear, geometric = (
        whole(_reaching(regime, batch, largest, left / inner_steps)) for regime in ("linear", "geometric")
    )
    return Expected(constant, linear, geometric, whole(fastest))
