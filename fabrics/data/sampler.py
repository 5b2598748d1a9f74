"""Which examples come when: a pure function of (seed, trainer, generation, epoch, position).

It does not depend on who reads or on what was read before, so a run resumes from a few integers and has the same
data on any number of processes. What a walk depends on is kept as its recipe: its trainer, or the walks that were
merged into it and how far each had come. Arrays are drawn where somebody reads, and nowhere else: for n examples in
all one byte each (see _cells), and 4 bytes for each example of the epoch that is read (8 from 2^31 examples on); after
a merge a bit for each besides, of every epoch that some of the merged had begun.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fabrics.data.examples import Examples

# Streams of random numbers derived from one seed; stream 0 shuffles reviews (imdb).
_SUBSETS, _ORDER, SHARES, DEALING, CLUSTERS = 1, 2, 3, 4, 5


class Reading(NamedTuple):
    """Workers that read the same examples together, one after the other.

    places: from (offset, count) to the indices of the next examples, counted from where the round begins. workers:
    their numbers. size: examples that they have together.
    """

    places: Callable[[int, int], np.ndarray]
    workers: tuple[int, ...]
    size: int

    @property
    def share(self) -> float:
        """The part of the examples that is each worker's."""
        return self.size / len(self.workers)


def share_sizes(readings: Iterable[Reading], examples: Sequence[int]) -> list[float]:
    """Of every worker, by number; 0 for one that has no examples in a round, of which these are each one's."""
    sizes = {worker: reading.share for reading in readings for worker in reading.workers}
    return [sizes[worker] if count else 0 for worker, count in enumerate(examples)]


def tokens_ahead(readings: Iterable[Reading], examples_each: Sequence[int], examples: Examples) -> int:
    """Tokens of the next examples, so many of every worker; nothing is drawn where all have the same number."""
    if examples.tokens_per_example is not None:
        return sum(examples_each) * examples.tokens_per_example
    return sum(
        examples.tokens(reading.places(0, sum(examples_each[worker] for worker in reading.workers)))
        for reading in readings
    )


@dataclass(frozen=True)
class Subsets:
    """How the examples are shared out: all trainers cut windows of one random permutation, starting 1 / trainers apart.

    Attributes:
        seed: the run's seed.
        examples: how many there are.
        trainers: at the start of the run.
        fraction: the width of a window. None: up to the next one, so that the subsets are disjoint and cover
            everything; with 1.0 each is everything.
    """

    seed: int
    examples: int
    trainers: int = 1
    fraction: float | None = None

    def _window(self, trainer: int) -> tuple[int, int]:
        """Where it begins, and how wide it is; it may go on at the beginning of the permutation."""
        start, end = (number * self.examples // self.trainers for number in (trainer, trainer + 1))
        return start, end - start if self.fraction is None else round(self.fraction * self.examples)

    @cached_property
    def _bounds(self) -> list[int]:
        """The places of the permutation at which a window begins or ends: between two of them lies a cell."""
        windows = [self._window(trainer) for trainer in range(self.trainers)]
        ends = [place % self.examples for start, size in windows for place in (start, start + size)]
        return [*sorted({0, *ends}), self.examples]

    def _contains(self, trainers: Iterable[int]) -> np.ndarray:
        """Of each cell, whether it lies in a window of these trainers."""
        cells, found = np.array(self._bounds[:-1]), np.zeros(len(self._bounds) - 1, dtype=bool)
        for trainer in trainers:
            start, size = self._window(trainer)
            found |= (cells - start) % self.examples < size
        return found

    @property
    def smallest(self) -> int:
        """Examples of the trainer that has the fewest."""
        return min(self.size([trainer]) for trainer in range(self.trainers))

    def size(self, trainers: Iterable[int]) -> int:
        """How many examples these trainers have together, each counted once; nothing is drawn for it."""
        return int(np.diff(self._bounds)[self._contains(trainers)].sum())

    def mask(self, trainers: Iterable[int]) -> np.ndarray:
        """Of each example, whether one of these trainers has it."""
        return self._contains(trainers)[_cells(self)]

    def draw(self, trainers: Iterable[int]) -> np.ndarray:
        """The examples that these trainers have together, sorted."""
        return _indices(self.mask(trainers))


def index_type(examples: int) -> type:
    """Of the indices of so many examples."""
    return np.int32 if examples < 2**31 else np.int64


def _indices(mask: np.ndarray) -> np.ndarray:
    return np.flatnonzero(mask).astype(index_type(len(mask)))


@functools.lru_cache(maxsize=1)
def _cells(subsets: Subsets) -> np.ndarray:
    """The cell that each example lies in, drawn once for all trainers of a process.

    The permutation is numpy's; only what it means is kept, in a byte per example up to a hundred trainers.
    """
    bounds = subsets._bounds
    order = np.arange(subsets.examples, dtype=index_type(subsets.examples))
    np.random.default_rng([subsets.seed, _SUBSETS]).shuffle(order)
    cells = np.empty(subsets.examples, dtype=np.min_scalar_type(len(bounds)))
    for cell, (start, end) in enumerate(itertools.pairwise(bounds)):
        cells[order[start:end]] = cell
    return cells


class Walk:
    """A trainer's way through its examples, epoch after epoch, each in a seeded order; it has no place of its own.

    After a merge every example of the union comes as often as any other: epochs are counted on, and in those that some
    of the merged walks had begun comes what is still missing there. An example that several of them have counts as
    seen in an epoch as soon as one has seen it. So with disjoint subsets nothing is seen twice in an epoch, and nothing
    left out, whenever trainers merge.

    Args:
        subsets: how the examples are shared out.
        trainer: whose walk it is; its own window, unless it is merged.
        generation: how often the trainer has merged.
        merged: the walks that were united, and how many examples of each had been seen.
    """

    def __init__(self, subsets: Subsets, trainer: int, generation: int = 0, merged: Sequence[tuple["Walk", int]] = ()):
        self.subsets, self.trainer, self.generation, self.merged = subsets, trainer, generation, tuple(merged)
        self.members = frozenset({trainer}).union(*(walk.members for walk, _ in merged))
        self.size = subsets.size(self.members)
        self._found: dict[int, np.ndarray] = {}
        if not self.size:
            raise ValueError(f"trainer {trainer} has no data")

    @cached_property
    def _places(self) -> list[tuple["Walk", int, int]]:
        """The merged walks, with the epoch and the place in it that each had come to."""
        return [(walk, *walk.place(position)) for walk, position in self.merged]

    @cached_property
    def _begun(self) -> tuple[int, list[int]]:
        """The first epoch, and the lengths of it and of the others of which something may have been seen before."""
        if not self.merged:
            return 0, []
        first = min(reached for _, reached, _ in self._places)
        begun = range(first, 1 + max(max(reached, walk._last_begun) for walk, reached, _ in self._places))
        if sum(walk.size for walk, _ in self.merged) > self.size:
            return first, [int(self._missing(epoch).sum()) for epoch in begun]
        lengths = [
            sum(
                walk.length(epoch) - (at if epoch == reached else 0)
                for walk, reached, at in self._places
                if epoch >= reached
            )
            for epoch in begun
        ]
        return first, lengths

    @property
    def _last_begun(self) -> int:
        first, lengths = self._begun
        return first + len(lengths) - 1

    def length(self, epoch: int) -> int:
        """Examples of an epoch that is not over before the walk begins."""
        first, lengths = self._begun
        return lengths[epoch - first] if epoch <= self._last_begun else self.size

    def place(self, position: int) -> tuple[int, int]:
        """The epoch, and the place in it, of the example that comes after `position` others."""
        epoch, lengths = self._begun
        for length in lengths:
            if position < length:
                return epoch, position
            epoch, position = epoch + 1, position - length
        epochs, position = divmod(position, self.size)
        return epoch + epochs, position

    def _missing(self, epoch: int) -> np.ndarray:
        """Of each example, whether it is in the union and none of the merged walks has seen it in this epoch.

        It is kept, in bits, while the epoch is read, and until a walk into which this one is merged has its own of it:
        so what a merge costs does not grow with those before it.
        """
        if epoch in self._found:
            return np.unpackbits(self._found[epoch], count=self.subsets.examples).view(bool)
        missing = self.subsets.mask(self.members)
        for walk, reached, at in self._places:
            if epoch <= max(reached, walk._last_begun):
                seen = self.subsets.mask(walk.members)
                if epoch >= reached:
                    seen[walk.order(epoch)[at if epoch == reached else 0 :]] = False
                missing &= ~seen
            walk._forget(epoch + 1)
        self._found[epoch] = np.packbits(missing)
        return missing

    def _forget(self, epoch: int) -> None:
        """What is kept of the epochs before this one."""
        for found in [found for found in self._found if found < epoch]:
            del self._found[found]

    def order(self, epoch: int) -> np.ndarray:
        """The examples of an epoch in the order in which they come."""
        self._forget(epoch)
        begun = epoch <= self._last_begun
        order = _indices(self._missing(epoch)) if begun else self.subsets.draw(self.members)
        key = [self.subsets.seed, _ORDER, self.trainer, self.generation, epoch]
        np.random.default_rng(key).shuffle(order)
        return order

    def state_dict(self) -> dict:
        """The recipe, as plain values: a few numbers for each trainer that was merged into it."""
        merged = [{"walk": walk.state_dict(), "position": position} for walk, position in self.merged]
        return {"trainer": self.trainer, "generation": self.generation, "merged": merged}

    @classmethod
    def from_state_dict(cls, subsets: Subsets, state: dict) -> "Walk":
        """The walk of a recipe."""
        merged = [(cls.from_state_dict(subsets, part["walk"]), part["position"]) for part in state["merged"]]
        return cls(subsets, state["trainer"], state["generation"], merged)


class DataCursor:
    """A place in the walk of a trainer.

    Args:
        subsets: how the examples are shared out; all cursors of a process have the same.
        trainer: whose walk it is.
    """

    def __init__(self, subsets: Subsets, trainer: int):
        self.position = 0
        self._set_walk(Walk(subsets, trainer))

    def _set_walk(self, walk: Walk) -> None:
        self._walk = walk
        # A batch touches two epochs at most while it crosses from one into the next.
        self._order = functools.lru_cache(maxsize=2)(walk.order)

    def __len__(self) -> int:
        """How many examples the trainer has."""
        return self._walk.size

    @property
    def smallest(self) -> int:
        """Examples of the reader that has the fewest: all workers read all."""
        return len(self)

    @property
    def subset(self) -> np.ndarray:
        """The examples that the trainer has, sorted."""
        return self._walk.subsets.draw(self._walk.members)

    def peek(self, offset: int, count: int) -> np.ndarray:
        """The `count` example indices that begin `offset` after the position, int64; nothing moves."""
        parts = []
        epoch, at = self._walk.place(self.position + offset)
        while count > 0:
            part = self._order(epoch)[at : at + count]
            parts.append(part)
            epoch, at, count = epoch + 1, 0, count - len(part)
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, dtype=np.int64)

    def readings(self, workers: int) -> list[Reading]:
        """Where so many workers read: all together."""
        return [Reading(self.peek, tuple(range(workers)), len(self))]

    def advance(self, examples_each: Sequence[int]) -> None:
        """Count so many examples of every worker as seen."""
        self.position += sum(examples_each)

    def unite(self, others: Iterable["DataCursor"]) -> None:
        """Take over the data of merged trainers: first what nobody has seen in this epoch, then epochs of the union."""
        walk = self._walk
        merged = [(cursor._walk, cursor.position) for cursor in (self, *others)]
        self._set_walk(Walk(walk.subsets, walk.trainer, walk.generation + 1, merged))
        self.position = 0

    def state_dict(self) -> dict:
        """Where the walk is, and its recipe, as plain values."""
        return {
            "subsets": dataclasses.asdict(self._walk.subsets),
            "walk": self._walk.state_dict(),
            "position": self.position,
        }

    def load_state_dict(self, state: dict) -> None:
        self._set_walk(Walk.from_state_dict(Subsets(**state["subsets"]), state["walk"]))
        self.position = state["position"]
