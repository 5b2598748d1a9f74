"""Data order: a pure function of (seed, trainer, generation, epoch, position).

It does not depend on the reader or on what was read before, so a run resumes from a few integers and reads the same
data on any number of processes. A trainer's walk is stored as its recipe: its trainer, or the walks that were merged
into it and the position of each. Orders are drawn only where they are read.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fabrics.data.examples import Examples

# Streams of random numbers derived from one seed; stream 0 shuffles reviews (imdb).
_SUBSETS = 1
_ORDER = 2
SHARES = 3
DEALING = 4
CLUSTERS = 5


class Reading(NamedTuple):
    """Workers that read consecutive slices of the same examples.

    Attributes:
        places: from (offset, count) to example indices; offset 0 is the start of the round.
        workers: numbers of the workers.
        size: examples that they have together.
    """

    places: Callable[[int, int], np.ndarray]
    workers: tuple[int, ...]
    size: int

    @property
    def share(self) -> float:
        """Examples per worker."""
        return self.size / len(self.workers)


def share_sizes(readings: Iterable[Reading], examples: Sequence[int]) -> list[float]:
    """Return the share size of each worker; 0 if it reads no examples this round."""
    sizes = {worker: reading.share for reading in readings for worker in reading.workers}
    return [sizes[worker] if count else 0 for worker, count in enumerate(examples)]


def tokens_ahead(readings: Iterable[Reading], examples_each: Sequence[int], examples: Examples) -> int:
    """Return the tokens of the next `examples_each` examples of the workers; draws nothing if all have equal length."""
    if examples.tokens_per_example is not None:
        return sum(examples_each) * examples.tokens_per_example
    return sum(
        examples.tokens(reading.places(0, sum(examples_each[worker] for worker in reading.workers)))
        for reading in readings
    )


def index_type(examples: int) -> type:
    """Return the integer type for indices of this many examples."""
    return np.int32 if examples < 2**31 else np.int64


@dataclass(frozen=True)
class Subsets:
    """Disjoint random subsets of the examples, one per trainer: consecutive parts of one random permutation.

    Attributes:
        seed: seed of the run.
        examples: number of examples.
        trainers: trainers at the start of the run.
    """

    seed: int
    examples: int
    trainers: int = 1

    def _bounds(self, trainer: int) -> tuple[int, int]:
        return trainer * self.examples // self.trainers, (trainer + 1) * self.examples // self.trainers

    def size(self, trainers: Iterable[int]) -> int:
        """Return the number of examples of these trainers."""
        bounds = [self._bounds(trainer) for trainer in trainers]
        return sum(end - start for start, end in bounds)

    def draw(self, trainers: Iterable[int]) -> np.ndarray:
        """Return the examples of these trainers, sorted."""
        chosen = np.zeros(self.trainers, dtype=bool)
        chosen[list(trainers)] = True
        return np.flatnonzero(chosen[_owners(self)]).astype(index_type(self.examples))


@functools.lru_cache(maxsize=1)
def _owners(subsets: Subsets) -> np.ndarray:
    """The trainer of each example, drawn once per process; one byte per example up to 256 trainers."""
    order = np.arange(subsets.examples, dtype=index_type(subsets.examples))
    np.random.default_rng([subsets.seed, _SUBSETS]).shuffle(order)
    owners = np.empty(subsets.examples, dtype=np.min_scalar_type(subsets.trainers - 1))
    for trainer in range(subsets.trainers):
        start, end = subsets._bounds(trainer)
        owners[order[start:end]] = trainer
    return owners


class Walk:
    """The order in which a trainer reads its examples, epoch after epoch; it holds no position.

    After a merge epochs continue to count. An epoch that some of the merged walks had begun contains only the examples
    that none of them has seen in it. So no example repeats within an epoch and none is left out, whenever trainers
    merge.

    Args:
        subsets: the subsets of all trainers.
        trainer: number of the trainer.
        generation: number of merges of the trainer.
        merged: the merged walks, and how many examples of each had been read.
    """

    def __init__(self, subsets: Subsets, trainer: int, generation: int = 0, merged: Sequence[tuple["Walk", int]] = ()):
        self.subsets = subsets
        self.trainer = trainer
        self.generation = generation
        self.merged = tuple(merged)
        self.members = frozenset({trainer}).union(*(walk.members for walk, _ in merged))
        self.size = subsets.size(self.members)
        if not self.size:
            raise ValueError(f"trainer {trainer} has no data")

    @cached_property
    def _places(self) -> list[tuple["Walk", int, int]]:
        """The merged walks, with the epoch and the place in it that each had reached."""
        return [(walk, *walk.place(position)) for walk, position in self.merged]

    @cached_property
    def _begun(self) -> tuple[int, list[int]]:
        """The first epoch, and the lengths of all epochs of which the merged walks may have read something."""
        if not self.merged:
            return 0, []
        first = min(reached for _, reached, _ in self._places)
        end = 1 + max(max(reached, walk._last_begun) for walk, reached, _ in self._places)
        lengths = []
        for epoch in range(first, end):
            left = 0
            for walk, reached, at in self._places:
                if epoch >= reached:
                    left += walk.length(epoch) - (at if epoch == reached else 0)
            lengths.append(left)
        return first, lengths

    @property
    def _last_begun(self) -> int:
        first, lengths = self._begun
        return first + len(lengths) - 1

    def length(self, epoch: int) -> int:
        """Return the examples of an epoch, from the walk's first one on."""
        first, lengths = self._begun
        return lengths[epoch - first] if epoch <= self._last_begun else self.size

    def place(self, position: int) -> tuple[int, int]:
        """Return the epoch of a position, and the place within it."""
        epoch, lengths = self._begun
        for length in lengths:
            if position < length:
                return epoch, position
            epoch += 1
            position -= length
        epochs, position = divmod(position, self.size)
        return epoch + epochs, position

    def order(self, epoch: int) -> np.ndarray:
        """Return the examples of an epoch, in order."""
        if epoch <= self._last_begun:
            left = [
                walk.order(epoch)[at if epoch == reached else 0 :]
                for walk, reached, at in self._places
                if epoch >= reached
            ]
            order = np.sort(np.concatenate(left))
        else:
            order = self.subsets.draw(self.members)
        key = [self.subsets.seed, _ORDER, self.trainer, self.generation, epoch]
        np.random.default_rng(key).shuffle(order)
        return order

    def state_dict(self) -> dict:
        """Return the recipe as plain values."""
        merged = [{"walk": walk.state_dict(), "position": position} for walk, position in self.merged]
        return {"trainer": self.trainer, "generation": self.generation, "merged": merged}

    @classmethod
    def from_state_dict(cls, subsets: Subsets, state: dict) -> "Walk":
        """Build the walk of a recipe."""
        merged = [(cls.from_state_dict(subsets, part["walk"]), part["position"]) for part in state["merged"]]
        return cls(subsets, state["trainer"], state["generation"], merged)


class DataCursor:
    """A position in the walk of a trainer.

    Args:
        subsets: the subsets of all trainers.
        trainer: number of the trainer.
    """

    def __init__(self, subsets: Subsets, trainer: int):
        self.position = 0
        self._set_walk(Walk(subsets, trainer))

    def _set_walk(self, walk: Walk) -> None:
        self._walk = walk
        # A batch touches two epochs at most while it crosses from one into the next.
        self._order = functools.lru_cache(maxsize=2)(walk.order)

    def __len__(self) -> int:
        """Number of examples of the trainer."""
        return self._walk.size

    @property
    def smallest(self) -> int:
        """Examples of the reader with the fewest: all workers read all."""
        return len(self)

    @property
    def subset(self) -> np.ndarray:
        """Examples of the trainer, sorted."""
        return self._walk.subsets.draw(self._walk.members)

    def peek(self, offset: int, count: int) -> np.ndarray:
        """Return `count` example indices (int64) from `offset` after the position; the position stays."""
        parts = [np.empty(0, dtype=np.int64)]
        epoch, at = self._walk.place(self.position + offset)
        while count > 0:
            part = self._order(epoch)[at : at + count]
            parts.append(part)
            count -= len(part)
            epoch += 1
            at = 0
        return np.concatenate(parts)

    def readings(self, workers: int) -> list[Reading]:
        """Return where the workers read: all together."""
        return [Reading(self.peek, tuple(range(workers)), len(self))]

    def advance(self, examples_each: Sequence[int]) -> None:
        """Move past the examples that each worker has read."""
        self.position += sum(examples_each)

    def unite(self, others: Iterable["DataCursor"]) -> None:
        """Take over the data of merged trainers: first the rest of begun epochs, then epochs of the union."""
        walk = self._walk
        merged = [(cursor._walk, cursor.position) for cursor in (self, *others)]
        self._set_walk(Walk(walk.subsets, walk.trainer, walk.generation + 1, merged))
        self.position = 0

    def state_dict(self) -> dict:
        """Return the position and the recipe as plain values."""
        return {"walk": self._walk.state_dict(), "position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self._set_walk(Walk.from_state_dict(self._walk.subsets, state["walk"]))
        self.position = state["position"]
