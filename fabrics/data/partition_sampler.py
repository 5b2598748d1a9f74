"""Data order of non-IID shares.

Examples are sorted by share. Each share is walked on its own, epoch after epoch: its order is a pure function of
(seed, share, epoch), and its position is an integer that moves with the share from trainer to trainer and from worker
to worker. So no example repeats within an epoch of a share, and none is left out.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fabrics.data.sampler import SHARES, Reading, index_type


@dataclass(frozen=True)
class OrderedShares:
    """The order within each share.

    Attributes:
        sizes: examples of each share; examples are sorted by share.
    """

    seed: int
    sizes: tuple[int, ...]

    def examples(self, share: int) -> range:
        """Return the examples of a share."""
        start = sum(self.sizes[:share])
        return range(start, start + self.sizes[share])

    def order(self, share: int, epoch: int) -> np.ndarray:
        """Return the examples of a share in the order of an epoch."""
        own = self.examples(share)
        order = np.arange(own.start, own.stop, dtype=index_type(sum(self.sizes)))
        np.random.default_rng([self.seed, SHARES, share, epoch]).shuffle(order)
        return order


def first_shares(shares: int, trainer: int, trainers: int) -> range:
    """Return the shares that a trainer starts with: consecutive ones, equally many up to one."""
    return range(trainer * shares // trainers, (trainer + 1) * shares // trainers)


def shares_of_workers(shares: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    """Return the shares of each worker of a trainer.

    Worker w of M reads the shares at places w, w + M, w + 2M, ...; with K < M shares, workers w, w + K, ... read the
    same share together.
    """
    readers = min(len(shares), workers)
    return [tuple(shares[worker % readers :: readers]) for worker in range(workers)]


def next_of_several(positions: Sequence[int], sizes: Sequence[int], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Interleave shares that are read together: the share of each next example, and its place in that walk.

    The share that has progressed least, in epochs, comes next: shares with equal progress are read once each in an
    epoch of all, and one that is behind catches up first.
    """
    each = np.arange(count)
    epochs = np.concatenate([(at + each + 1) / size for at, size in zip(positions, sizes, strict=True)])
    chosen = np.argsort(epochs, kind="stable")[:count]
    which = chosen // count
    return which, np.asarray(positions)[which] + chosen % count


class ShareCursor:
    """The positions of the shares of a trainer; same interface as `sampler.DataCursor`.

    Args:
        shares: all shares of the run.
        own: shares of the trainer.
        by_worker: each worker reads its own shares (`shares_of_workers`); otherwise all workers read all shares.
    """

    def __init__(self, shares: OrderedShares, own: Iterable[int], by_worker: bool):
        self._shares = shares
        self._by_worker = by_worker
        self._set_positions(dict.fromkeys(own, 0))

    def _set_positions(self, positions: Mapping[int, int]) -> None:
        self.positions = dict(sorted(positions.items()))
        # A batch touches two epochs of a share at most while it crosses from one into the next.
        self._order = functools.lru_cache(maxsize=2 * len(self.positions))(self._shares.order)

    def __len__(self) -> int:
        """Number of examples of the trainer."""
        return sum(self._shares.sizes[share] for share in self.positions)

    @property
    def smallest(self) -> int:
        """Examples of the reader with the fewest, if every share has its own worker."""
        return min(self._shares.sizes[share] for share in self.positions) if self._by_worker else len(self)

    @property
    def subset(self) -> np.ndarray:
        """Examples of the trainer, sorted."""
        each = [self._shares.examples(share) for share in self.positions]
        return np.concatenate([np.arange(own.start, own.stop) for own in each])

    def _readers(self, workers: int) -> list[tuple[int, ...]]:
        """The shares that each worker reads."""
        if self._by_worker:
            return shares_of_workers(list(self.positions), workers)
        return [tuple(self.positions)] * workers

    def readings(self, workers: int) -> list[Reading]:
        """Return where the workers read; workers with the same shares read together."""
        readers = self._readers(workers)
        found = []
        for shares in dict.fromkeys(readers):
            together = tuple(worker for worker, own in enumerate(readers) if own == shares)
            size = sum(self._shares.sizes[share] for share in shares)
            found.append(Reading(self._stream(shares), together, size))
        return found

    def _next(self, shares: Sequence[int], count: int) -> tuple[np.ndarray, np.ndarray]:
        positions = [self.positions[share] for share in shares]
        sizes = [self._shares.sizes[share] for share in shares]
        return next_of_several(positions, sizes, count)

    def _stream(self, shares: tuple[int, ...]):
        """Return a function from (offset, count) to the next example indices of these shares (int64)."""
        # Looked up in every inner step, computed a few times per round.
        ahead = functools.lru_cache(maxsize=1)(functools.partial(self._next, shares))

        def places(offset: int, count: int) -> np.ndarray:
            end = offset + count
            all_shares, all_places = ahead(1 << max(end - 1, 0).bit_length())
            which = all_shares[offset:end]
            at = all_places[offset:end]
            found = np.empty(count, dtype=np.int64)
            for number, share in enumerate(shares):
                epochs, within = np.divmod(at, self._shares.sizes[share])
                for epoch in np.unique(epochs[which == number]).tolist():
                    here = (which == number) & (epochs == epoch)
                    found[here] = self._order(share, epoch)[within[here]]
            return found

        return places

    def advance(self, examples_each: Sequence[int]) -> None:
        """Move past the examples that each worker has read."""
        counts: dict[tuple[int, ...], int] = {}
        for shares, examples in zip(self._readers(len(examples_each)), examples_each, strict=True):
            counts[shares] = counts.get(shares, 0) + examples
        for shares, count in counts.items():
            which, _ = self._next(shares, count)
            for share, seen in zip(shares, np.bincount(which, minlength=len(shares)).tolist(), strict=True):
                self.positions[share] += seen

    def unite(self, others: Iterable["ShareCursor"]) -> None:
        """Take over the shares of merged trainers with their positions."""
        merged = dict(self.positions)
        for other in others:
            merged |= other.positions
        self._set_positions(merged)

    def state_dict(self) -> dict:
        """Return the position of each share as plain values."""
        return {"positions": {str(share): position for share, position in self.positions.items()}}

    def load_state_dict(self, state: dict) -> None:
        self._set_positions({int(share): position for share, position in state["positions"].items()})
