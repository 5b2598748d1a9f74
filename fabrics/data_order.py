"""Which examples come when: a pure function of (seed, trainer, epoch, position).

It does not depend on who reads or on what was read before, so a run resumes from an integer and has the same
data on any number of processes.
"""

import functools

import numpy as np

# Streams of random numbers derived from one seed; documents are shuffled with stream 0 (dataset_loader).
_SUBSETS, _ORDER = 1, 2


def draw_subset(seed: int, trainer: int, trainers: int, examples: int, fraction: float | None) -> np.ndarray:
    """The example indices of one trainer's own random subset, sorted.

    All trainers cut windows of `fraction` of one random permutation, starting 1 / trainers apart. With the
    default, 1 / trainers, the subsets are disjoint and cover everything; with 1.0 each is everything.
    """
    permutation = np.random.default_rng([seed, _SUBSETS]).permutation(examples)
    start, end = trainer * examples // trainers, (trainer + 1) * examples // trainers
    size = end - start if fraction is None else round(fraction * examples)
    return np.sort(np.take(permutation, range(start, start + size), mode="wrap"))


class DataCursor:
    """A walk through seeded permutations of a subset, without replacement within an epoch.

    Args:
        seed: the run's seed.
        trainer: whose walk it is.
        subset: example indices, any order; kept sorted.
    """

    def __init__(self, seed: int, trainer: int, subset: np.ndarray):
        self._seed = seed
        self._trainer = trainer
        self._set_subset(subset)
        self.generation = 0
        self.position = 0

    def _set_subset(self, subset: np.ndarray) -> None:
        self.subset = np.unique(subset)
        if not len(self.subset):
            raise ValueError(f"trainer {self._trainer} has no data")

        # A batch touches two epochs at most while it crosses from one into the next.
        @functools.lru_cache(maxsize=2)
        def permutation(generation: int, epoch: int) -> np.ndarray:
            generator = np.random.default_rng([self._seed, _ORDER, self._trainer, generation, epoch])
            return generator.permutation(self.subset)

        self._permutation = permutation

    def peek(self, offset: int, count: int) -> np.ndarray:
        """The `count` example indices that begin `offset` after the position; nothing moves."""
        parts, start = [], self.position + offset
        while count > 0:
            epoch, at = divmod(start, len(self.subset))
            part = self._permutation(self.generation, epoch)[at : at + count]
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def advance(self, count: int) -> None:
        """Count examples as seen."""
        self.position += count

    def unite(self, others: list["DataCursor"]) -> None:
        """Take over the subsets of merged trainers and begin a new walk through the union."""
        self._set_subset(np.concatenate([self.subset, *(other.subset for other in others)]))
        self.generation += 1
        self.position = 0

    def state_dict(self) -> dict:
        """Where the walk is, as plain values; `subset` says where it walks."""
        return {"generation": self.generation, "position": self.position}

    def load_state_dict(self, state: dict, subset: np.ndarray) -> None:
        self._set_subset(subset)
        self.generation = state["generation"]
        self.position = state["position"]
