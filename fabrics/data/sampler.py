"""Data order: a pure function of (seed, walk, epoch, position).

It does not depend on the reader or on what was read before. So a run resumes from a few integers, and reads the same
data on any number of processes. Orders are drawn only where they are read.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fabrics.data.examples import Examples

# Streams of random numbers derived from one seed; stream 0 shuffles reviews (imdb).
_SUBSETS = 1
_ORDER = 2
_SHARES = 3
DEALING = 4
CLUSTERS = 5


class Reading(NamedTuple):
    """Workers that read consecutive slices of the same examples.

    Attributes:
        places: from (offset, count) to example indices (int64); offset 0 is the start of the round.
        size: examples that they have together.
    """

    places: Callable[[int, int], np.ndarray]
    workers: tuple[int, ...]
    size: int


def tokens_ahead(readings: Iterable[Reading], examples_each: Sequence[int], examples: Examples) -> int:
    """Return the tokens of the next `examples_each` examples of the workers; draws nothing if all have equal length."""
    if examples.tokens_per_example is not None:
        return sum(examples_each) * examples.tokens_per_example
    return sum(
        examples.tokens(reading.places(0, sum(examples_each[worker] for worker in reading.workers)))
        for reading in readings
    )


def _index_type(examples: int) -> type:
    return np.int32 if examples < 2**31 else np.int64


@dataclass(frozen=True)
class Subsets:
    """Disjoint random subsets of the examples, one per trainer: consecutive parts of one random permutation."""

    seed: int
    examples: int
    trainers: int = 1

    def first(self, trainer: int, trainers: int) -> list[int]:
        return [trainer]

    def key(self, trainer: int) -> tuple[int, ...]:
        return _ORDER, trainer, 0

    def bounds(self, trainer: int) -> tuple[int, int]:
        return trainer * self.examples // self.trainers, (trainer + 1) * self.examples // self.trainers

    def size(self, trainers: Iterable[int]) -> int:
        bounds = [self.bounds(trainer) for trainer in trainers]
        return sum(end - start for start, end in bounds)

    def draw(self, trainers: Iterable[int]) -> np.ndarray:
        """Return the examples of these trainers, sorted."""
        chosen = np.zeros(self.trainers, dtype=bool)
        chosen[list(trainers)] = True
        return np.flatnonzero(chosen[_owners(self)]).astype(_index_type(self.examples))

    def unite(self, walks: list[tuple["Walk", int]]) -> list[tuple["Walk", int]]:
        """Return one walk through the data of merged trainers."""
        stream, trainer, generation = walks[0][0].key
        return [(Walk(self, (stream, trainer, generation + 1), walks), 0)]


@functools.lru_cache(maxsize=1)
def _owners(subsets: Subsets) -> np.ndarray:
    """The trainer of each example, drawn once per process; one byte per example up to 256 trainers."""
    order = np.arange(subsets.examples, dtype=_index_type(subsets.examples))
    np.random.default_rng([subsets.seed, _SUBSETS]).shuffle(order)
    owners = np.empty(subsets.examples, dtype=np.min_scalar_type(subsets.trainers - 1))
    for trainer in range(subsets.trainers):
        start, end = subsets.bounds(trainer)
        owners[order[start:end]] = trainer
    return owners


@dataclass(frozen=True)
class Shares:
    """The shares of non-IID data; each is walked on its own, and moves with its position from trainer to trainer.

    sizes: examples of each share; examples are sorted by share.
    """

    seed: int
    sizes: tuple[int, ...]

    def first(self, trainer: int, trainers: int) -> range:
        """Return the shares that a trainer starts with: consecutive ones, equally many up to one."""
        count = len(self.sizes)
        return range(trainer * count // trainers, (trainer + 1) * count // trainers)

    def key(self, share: int) -> tuple[int, ...]:
        return _SHARES, share

    def size(self, shares: Iterable[int]) -> int:
        return sum(self.sizes[share] for share in shares)

    def draw(self, shares: Iterable[int]) -> np.ndarray:
        starts = [0, *np.cumsum(self.sizes).tolist()]
        parts = [np.arange(*starts[share : share + 2], dtype=_index_type(starts[-1])) for share in sorted(shares)]
        return np.concatenate(parts)

    def unite(self, walks: list[tuple["Walk", int]]) -> list[tuple["Walk", int]]:
        """Return the shares of merged trainers."""
        return sorted(walks, key=lambda part: part[0].key)


class Walk:
    """The order in which examples are read, epoch after epoch; it holds no position.

    After a merge epochs continue to count. An epoch that some of the merged walks had begun contains only the examples
    that none of them has seen in it. So no example repeats within an epoch and none is left out, whenever trainers
    merge.

    Args:
        key: numbers of the stream, of the trainer or share, and of the merges of a trainer.
        merged: the merged walks, and how many examples of each had been read.
    """

    def __init__(self, data: Subsets | Shares, key: Sequence[int], merged: Sequence[tuple["Walk", int]] = ()):
        self.data = data
        self.key = tuple(key)
        self.merged = tuple(merged)
        self.members = frozenset({self.number}).union(*(walk.members for walk, _ in merged))
        self.size = data.size(self.members)

    @property
    def number(self) -> int:
        """The trainer or the share."""
        return self.key[1]

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
                    left += walk._length(epoch) - (at if epoch == reached else 0)
            lengths.append(left)
        return first, lengths

    @property
    def _last_begun(self) -> int:
        first, lengths = self._begun
        return first + len(lengths) - 1

    def _length(self, epoch: int) -> int:
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
            order = self.data.draw(self.members)
        np.random.default_rng([self.data.seed, *self.key, epoch]).shuffle(order)
        return order

    def state_dict(self) -> dict:
        merged = [{"walk": walk.state_dict(), "position": position} for walk, position in self.merged]
        return {"key": list(self.key), "merged": merged}

    @classmethod
    def from_state_dict(cls, data: Subsets | Shares, state: dict) -> "Walk":
        merged = [(cls.from_state_dict(data, part["walk"]), part["position"]) for part in state["merged"]]
        return cls(data, state["key"], merged)


def shares_of_workers(shares: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    """Return each worker's shares: worker w of M reads w, w + M, ...; with K < M, w and w + K read the same one."""
    readers = min(len(shares), workers)
    return [tuple(shares[worker % readers :: readers]) for worker in range(workers)]


def next_of_several(positions: Sequence[int], sizes: Sequence[int], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Interleave walks that are read together: the walk of each next example, and its position in that walk.

    The walk that has progressed least, in epochs, comes next: walks with equal progress are read once each in an
    epoch of all, and one that is behind catches up first.
    """
    # No walk passes the progress of all by more than an example for each walk.
    progress = (sum(positions) + count) / sum(sizes)
    most = [math.ceil(progress * size - at) + len(sizes) for at, size in zip(positions, sizes, strict=True)]
    ahead = [np.arange(at, at + min(max(own, 0), count)) for at, own in zip(positions, most, strict=True)]
    epochs = np.concatenate([(own + 1) / size for own, size in zip(ahead, sizes, strict=True)])
    chosen = np.argsort(epochs, kind="stable")[:count]
    which = np.repeat(np.arange(len(sizes)), [len(own) for own in ahead])
    return which[chosen], np.concatenate(ahead)[chosen]


class DataCursor:
    """The positions of a trainer in its walks.

    Args:
        numbers: the trainer, or its shares.
        by_worker: each worker reads its own shares (`shares_of_workers`); otherwise all workers read all.
    """

    def __init__(self, data: Subsets | Shares, numbers: Iterable[int], by_worker: bool = False):
        self._data = data
        self._by_worker = by_worker
        self._set_walks([(Walk(data, data.key(number)), 0) for number in numbers])

    def _set_walks(self, walks: Iterable[tuple[Walk, int]]) -> None:
        self._walks = {walk.number: walk for walk, _ in walks}
        self.positions = {walk.number: position for walk, position in walks}
        # A batch touches two epochs of a walk at most while it crosses from one into the next.
        self._order = functools.lru_cache(2 * len(self._walks))(lambda number, epoch: self._walks[number].order(epoch))

    def __len__(self) -> int:
        return sum(walk.size for walk in self._walks.values())

    @property
    def smallest(self) -> int:
        """Examples of the reader with the fewest, if every share has its own worker."""
        return min(walk.size for walk in self._walks.values()) if self._by_worker else len(self)

    def _readers(self, workers: int) -> list[tuple[int, ...]]:
        if self._by_worker:
            return shares_of_workers(list(self._walks), workers)
        return [tuple(self._walks)] * workers

    def readings(self, workers: int) -> list[Reading]:
        """Return where the workers read; workers with the same walks read together."""
        together: dict[tuple[int, ...], list[int]] = {}
        for worker, numbers in enumerate(self._readers(workers)):
            together.setdefault(numbers, []).append(worker)
        return [
            Reading(self._places(numbers), tuple(own), sum(self._walks[number].size for number in numbers))
            for numbers, own in together.items()
        ]

    def _next(self, numbers: Sequence[int], count: int) -> tuple[np.ndarray, np.ndarray]:
        positions = [self.positions[number] for number in numbers]
        return next_of_several(positions, [self._walks[number].size for number in numbers], count)

    def _read(self, number: int, position: int, count: int) -> np.ndarray:
        parts = [np.empty(0, dtype=np.int64)]
        epoch, at = self._walks[number].place(position)
        while count > 0:
            part = self._order(number, epoch)[at : at + count]
            parts.append(part)
            count -= len(part)
            epoch += 1
            at = 0
        return np.concatenate(parts)

    def _places(self, numbers: tuple[int, ...]) -> Callable[[int, int], np.ndarray]:
        if len(numbers) == 1:
            (number,) = numbers
            return lambda offset, count: self._read(number, self.positions[number] + offset, count)
        # Looked up in every inner step, computed a few times per round.
        ahead = functools.lru_cache(maxsize=1)(functools.partial(self._next, numbers))

        def places(offset: int, count: int) -> np.ndarray:
            end = offset + count
            which, positions = ahead(1 << max(end - 1, 0).bit_length())
            found = np.empty(count, dtype=np.int64)
            for place, number in enumerate(numbers):
                own = which[offset:end] == place
                if own.any():  # its positions are consecutive
                    found[own] = self._read(number, int(positions[offset:end][own][0]), int(own.sum()))
            return found

        return places

    def advance(self, examples_each: Sequence[int]) -> None:
        """Move past the examples that each worker has read."""
        counts: dict[tuple[int, ...], int] = {}
        for numbers, examples in zip(self._readers(len(examples_each)), examples_each, strict=True):
            counts[numbers] = counts.get(numbers, 0) + examples
        for numbers, count in counts.items():
            which, _ = self._next(numbers, count)
            for number, seen in zip(numbers, np.bincount(which, minlength=len(numbers)).tolist(), strict=True):
                self.positions[number] += seen

    def _parts(self) -> list[tuple[Walk, int]]:
        return [(walk, self.positions[number]) for number, walk in self._walks.items()]

    def unite(self, others: Iterable["DataCursor"]) -> None:
        """Take over the data of merged trainers; see `Subsets.unite` and `Shares.unite`."""
        self._set_walks(self._data.unite([part for cursor in (self, *others) for part in cursor._parts()]))

    def state_dict(self) -> dict:
        return {"walks": [{"walk": walk.state_dict(), "position": position} for walk, position in self._parts()]}

    def load_state_dict(self, state: dict) -> None:
        self._set_walks([(Walk.from_state_dict(self._data, part["walk"]), part["position"]) for part in state["walks"]])
