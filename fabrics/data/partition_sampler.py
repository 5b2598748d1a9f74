"""Which examples of shares come when, where what a trainer or a worker reads is not drawn at random from everything.

Examples lie in order of share, and each share is walked epoch after epoch on its own: its order is a pure function of
(seed, share, epoch), and how far it has been read is an integer, whoever reads. So shares go from trainer to trainer
and from worker to worker, and nothing is seen twice in an epoch of a share, nor left out.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fabrics.data.sampler import SHARES, Reading, index_type


@dataclass(frozen=True)
class OrderedShares:
    """sizes: examples of each share; those of share 0 come first, then those of share 1, and so on."""

    seed: int
    sizes: tuple[int, ...]

    def examples(self, share: int) -> range:
        """Those of a share."""
        start = sum(self.sizes[:share])
        return range(start, start + self.sizes[share])

    def order(self, share: int, epoch: int) -> np.ndarray:
        """The examples of a share in the order in which they come in an epoch."""
        own = self.examples(share)
        order = np.arange(own.start, own.stop, dtype=index_type(sum(self.sizes)))
        np.random.default_rng([self.seed, SHARES, share, epoch]).shuffle(order)
        return order


def first_shares(shares: int, trainer: int, trainers: int) -> range:
    """The shares that a trainer begins with: consecutive ones, as many as the others have, or one more."""
    return range(trainer * shares // trainers, (trainer + 1) * shares // trainers)


def shares_of_workers(shares: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    """The shares that each of the workers of a trainer reads.

    Worker w of M reads the shares at the places w, w + M, w + 2M and so on; where there are fewer shares than workers,
    workers w, w + K and so on read the same of the K shares, together.
    """
    readers = min(len(shares), workers)
    return [tuple(shares[worker % readers :: readers]) for worker in range(workers)]


def next_of_several(positions: Sequence[int], sizes: Sequence[int], count: int) -> tuple[np.ndarray, np.ndarray]:
    """The next examples of some shares that are read together: of each which share it is, and its place in that walk.

    The share comes next whose walk would have got least far in epochs: so shares that are equally far are seen
    once each in an epoch of all, and one that is behind catches up first.
    """
    each = np.arange(count)
    epochs = np.concatenate([(at + each + 1) / size for at, size in zip(positions, sizes, strict=True)])
    chosen = np.argsort(epochs, kind="stable")[:count]
    which = chosen // count
    return which, np.asarray(positions)[which] + chosen % count


class ShareCursor:
    """A place in the walks of the shares that a trainer has; see `data_order.DataCursor`.

    Args:
        shares: all shares of the run.
        own: those of the trainer.
        by_worker: whether each worker reads shares of its own (`shares_of_workers`), or all workers read all of them.
    """

    def __init__(self, shares: OrderedShares, own: Iterable[int], by_worker: bool):
        self._shares, self._by_worker = shares, by_worker
        self._set_positions(dict.fromkeys(own, 0))

    def _set_positions(self, positions: Mapping[int, int]) -> None:
        self.positions = dict(sorted(positions.items()))
        # A batch touches two epochs of a share at most while it crosses from one into the next.
        self._order = functools.lru_cache(maxsize=2 * len(self.positions))(self._shares.order)

    def __len__(self) -> int:
        """How many examples the trainer has."""
        return sum(self._shares.sizes[share] for share in self.positions)

    @property
    def smallest(self) -> int:
        """Examples of the reader that has the fewest, when every share has a worker of its own."""
        return min(self._shares.sizes[share] for share in self.positions) if self._by_worker else len(self)

    @property
    def subset(self) -> np.ndarray:
        """The examples that the trainer has, sorted."""
        each = [self._shares.examples(share) for share in self.positions]
        return np.concatenate([np.arange(own.start, own.stop) for own in each])

    def _readers(self, workers: int) -> list[tuple[int, ...]]:
        return (
            shares_of_workers(list(self.positions), workers) if self._by_worker else [tuple(self.positions)] * workers
        )

    def readings(self, workers: int) -> list[Reading]:
        """Where so many workers read; those that read the same shares do so together."""
        readers = self._readers(workers)
        return [
            Reading(
                self._stream(shares),
                tuple(worker for worker, own in enumerate(readers) if own == shares),
                sum(self._shares.sizes[share] for share in shares),
            )
            for shares in dict.fromkeys(readers)
        ]

    def _next(self, shares: Sequence[int], count: int) -> tuple[np.ndarray, np.ndarray]:
        positions, sizes = zip(*((self.positions[share], self._shares.sizes[share]) for share in shares), strict=True)
        return next_of_several(positions, sizes, count)

    def _stream(self, shares: tuple[int, ...]):
        """From (offset, count) to the indices of the next examples of these shares, int64; nothing moves."""
        # The sequence is looked up in every inner step and made a few times in a round.
        ahead = functools.lru_cache(maxsize=1)(functools.partial(self._next, shares))

        def places(offset: int, count: int) -> np.ndarray:
            which, at = (part[offset : offset + count] for part in ahead(1 << max(offset + count - 1, 0).bit_length()))
            found = np.empty(count, dtype=np.int64)
            for number, share in enumerate(shares):
                epochs, within = np.divmod(at, self._shares.sizes[share])
                for epoch in np.unique(epochs[which == number]).tolist():
                    here = (which == number) & (epochs == epoch)
                    found[here] = self._order(share, epoch)[within[here]]
            return found

        return places

    def advance(self, examples_each: Sequence[int]) -> None:
        """Count so many examples of every worker as seen."""
        counts: dict[tuple[int, ...], int] = {}
        for shares, examples in zip(self._readers(len(examples_each)), examples_each, strict=True):
            counts[shares] = counts.get(shares, 0) + examples
        for shares, count in counts.items():
            which, _ = self._next(shares, count)
            for share, seen in zip(shares, np.bincount(which, minlength=len(shares)).tolist(), strict=True):
                self.positions[share] += seen

    def unite(self, others: Iterable["ShareCursor"]) -> None:
        """Take over the shares of merged trainers, each from where it has been read to."""
        merged = dict(self.positions)
        for other in others:
            merged |= other.positions
        self._set_positions(merged)

    def state_dict(self) -> dict:
        """How far each share of the trainer has been read, as plain values."""
        return {"positions": {str(share): position for share, position in self.positions.items()}}

    def load_state_dict(self, state: dict) -> None:
        self._set_positions({int(share): position for share, position in state["positions"].items()})
