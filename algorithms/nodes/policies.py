"""Merge policies: which trainers merge, as a function of their requested batches (AdLoCo, section 3)."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from algorithms.registry import Registry


@dataclass(frozen=True)
class Merge:
    """A merge of several trainers into one.

    weights: trainer id -> weight in the average, in proportion to the requested batches; they sum to 1.
    """

    representative: int
    weights: dict[int, float]

    def problem(self, trainers: Collection[int]) -> str | None:
        """Why this is not a merge of some of these trainers; None if it is."""
        unknown = self.weights.keys() - set(trainers)
        if unknown:
            return f"merges trainers {sorted(unknown)}, and there are {sorted(trainers)}"
        if len(self.weights) < 2 or self.representative not in self.weights:
            return (
                f"merges {sorted(self.weights)} into {self.representative}, which are not two or more and one of them"
            )
        if min(self.weights.values()) < 0.0 or not math.isclose(sum(self.weights.values()), 1.0):
            return f"has weights {self.weights}, which must not be negative and sum to 1"
        return None


def _merge(requests: Mapping[int, int], chosen: list[int]) -> Merge:
    representative = min(chosen, key=lambda trainer: (-requests[trainer], trainer))
    total = sum(requests[trainer] for trainer in chosen)
    return Merge(representative, {trainer: requests[trainer] / total for trainer in sorted(chosen)})


def worst_with_worst(requests: Mapping[int, int], count: int = 2) -> Merge:
    """Merge the `count` trainers with the smallest requests (the paper's policy).

    count: trainers that become one; all of them if fewer live. Ties go to the smaller id.
    """
    ranked = sorted(requests, key=lambda trainer: (requests[trainer], trainer))
    return _merge(requests, ranked[:count])


def best_with_worst(requests: Mapping[int, int], count: int = 2) -> Merge:
    """Merge the trainer with the largest request with the `count - 1` smallest; see `worst_with_worst`."""
    best = min(requests, key=lambda trainer: (-requests[trainer], trainer))
    others = sorted((t for t in requests if t != best), key=lambda trainer: (requests[trainer], trainer))
    return _merge(requests, [best, *others[: count - 1]])


MERGE_POLICIES = Registry({"worst_with_worst": worst_with_worst, "best_with_worst": best_with_worst})
