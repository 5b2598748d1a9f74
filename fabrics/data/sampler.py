"""Data order: a pure function of (seed, trainer, generation, epoch, position).

It does not depend on the reader or on what was read before, so a run resumes from a few integers and reads the same
data on any number of processes. A trainer's walk is stored as its recipe: its trainer, or the walks that were merged
into it and the position of each. Arrays are drawn only where they are read. Memory for n examples: n bytes (`_cells`),
4 bytes per example of the current epoch (8 from 2^31 examples on), and after a merge one bit per example and epoch
that some merged walk had begun.
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


@dataclass(frozen=True)
class Subsets:
    """The subsets of the trainers: windows of one random permutation that start 1 / trainers apart.

    Attributes:
        seed: seed of the run.
        examples: number of examples.
        trainers: trainers at the start of the run.
        fraction: width of a window; 1.0: all examples. None: up to the next window, so the subsets are disjoint and
            cover everything.
    """

    seed: int
    examples: int
    trainers: int = 1
    fraction: float | None = None

    def _window(self, trainer: int) -> tuple[int, int]:
        """Start and width of a window, which may wrap around."""
        start, end = (number * self.examples // self.trainers for number in (trainer, trainer + 1))
        return start, end - start if self.fraction is None else round(self.fraction * self.examples)

    @cached_property
    def _bounds(self) -> list[int]:
        """Places of the permutation at which a window begins or ends; between two of them lies a cell."""
        windows = [self._window(trainer) for trainer in range(self.trainers)]
        ends = [place % self.examples for start, size in windows for place in (start, start + size)]
        return [*sorted({0, *ends}), self.examples]

    def _contains(self, trainers: Iterable[int]) -> np.ndarray:
        """For each cell, True if it lies in a window of these trainers."""
        cells = np.array(self._bounds[:-1])
        found = np.zeros(len(cells), dtype=bool)
        for trainer in trainers:
            start, size = self._window(trainer)
            found |= (cells - start) % self.examples < size
        return found

    @property
    def smallest(self) -> int:
        """Size of the smallest subset."""
        return min(self.size([trainer]) for trainer in range(self.trainers))

    def size(self, trainers: Iterable[int]) -> int:
        """Return the number of examples of these trainers, each counted once; draws nothing."""
        return int(np.diff(self._bounds)[self._contains(trainers)].sum())

    def mask(self, trainers: Iterable[int]) -> np.ndarray:
        """For each example, True if one of these trainers has it."""
        return self._contains(trainers)[_cells(self)]

    def draw(self, trainers: Iterable[int]) -> np.ndarray:
        """Return the examples of these trainers, sorted."""
        return _indices(self.mask(trainers))


def index_type(examples: int) -> type:
    """Return the integer type for indices of this many examples."""
    return np.int32 if examples < 2**31 else np.int64


def _indices(mask: np.ndarray) -> np.ndarray:
    return np.flatnonzero(mask).astype(index_type(len(mask)))


@functools.lru_cache(maxsize=1)
def _cells(subsets: Subsets) -> np.ndarray:
    """The cell of each example, drawn once per process; one byte per example up to a hundred trainers."""
    bounds = subsets._bounds
    order = np.arange(subsets.examples, dtype=index_type(subsets.examples))
    np.random.default_rng([subsets.seed, _SUBSETS]).shuffle(order)
    cells = np.empty(subsets.examples, dtype=np.min_scalar_type(len(bounds)))
    for cell, (start, end) in enumerate(itertools.pairwise(bounds)):
        cells[order[start:end]] = cell
    return cells


class Walk:
    """The order in which a trainer reads its examples, epoch after epoch; it holds no position.

    After a merge epochs continue to count. An epoch that some of the merged walks had begun contains only the examples
    that none of them has seen in it. So with disjoint subsets no example repeats within an epoch and none is left out,
    whenever trainers merge.

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
        self._found: dict[int, np.ndarray] = {}
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
        """Return the examples of an epoch, from the walk's first one on."""
        first, lengths = self._begun
        return lengths[epoch - first] if epoch <= self._last_begun else self.size

    def place(self, position: int) -> tuple[int, int]:
        """Return the epoch of a position, and the place within it."""
        epoch, lengths = self._begun
        for length in lengths:
            if position < length:
                return epoch, position
            epoch, position = epoch + 1, position - length
        epochs, position = divmod(position, self.size)
        return epoch + epochs, position

    def _missing(self, epoch: int) -> np.ndarray:
        """For each example, True if it is in the union and no merged walk has read it in this epoch.

        The bits are kept while the epoch is read, and until a walk into which this one is merged has its own; so the
        cost of a merge does not grow with earlier merges.
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
        """Drop the bits of earlier epochs."""
        for found in [found for found in self._found if found < epoch]:
            del self._found[found]

    def order(self, epoch: int) -> np.ndarray:
        """Return the examples of an epoch, in order."""
        self._forget(epoch)
        begun = epoch <= self._last_begun
        order = _indices(self._missing(epoch)) if begun else self.subsets.draw(self.members)
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
        parts = []
        epoch, at = self._walk.place(self.position + offset)
        while count > 0:
            part = self._order(epoch)[at : at + count]
            parts.append(part)
            count -= len(part)
            epoch += 1
            at = 0
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, dtype=np.int64)

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
        return {
            "subsets": dataclasses.asdict(self._walk.subsets),
            "walk": self._walk.state_dict(),
            "position": self.position,
        }

    def load_state_dict(self, state: dict) -> None:
        self._set_walk(Walk.from_state_dict(Subsets(**state["subsets"]), state["walk"]))
        self.position = state["position"]
