"""Merge policies: which trainers merge, as a function of their requested batches (AdLoCo, section 3)."""

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


def merge_of(requests: Mapping[int, int], chosen: Collection[int]) -> Merge:
    """Return the merge of these trainers, which a policy has chosen, into that with the largest request."""
    representative = min(chosen, key=lambda trainer: (-requests[trainer], trainer))
    total = sum(requests[trainer] for trainer in chosen)
    return Merge(representative, {trainer: requests[trainer] / total for trainer in sorted(chosen)})


def worst_with_worst(requests: Mapping[int, int], count: int = 2) -> list[int]:
    """Choose the `count` trainers with the smallest requests (the paper's policy).

    count: trainers that become one; all of them if fewer live. Ties go to the smaller id.
    """
    ranked = sorted(requests, key=lambda trainer: (requests[trainer], trainer))
    return ranked[:count]


def best_with_worst(requests: Mapping[int, int], count: int = 2) -> list[int]:
    """Choose the trainer with the largest request and the `count - 1` with the smallest; see `worst_with_worst`."""
    best = min(requests, key=lambda trainer: (-requests[trainer], trainer))
    others = sorted((t for t in requests if t != best), key=lambda trainer: (requests[trainer], trainer))
    return [best, *others[: count - 1]]


MERGE_POLICIES = Registry({"worst_with_worst": worst_with_worst, "best_with_worst": best_with_worst})
