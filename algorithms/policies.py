"""Merge policies and the distribution of nodes: who merges with whom, and who works for whom.

Both are pure functions of the living trainers' requested batches (AdLoCo, section 3).
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class MergePlan:
    """One merge: the trainers in `weights` become one, which keeps the identity of `representative`.

    weights: trainer id -> share of the weighted average, in proportion to the requested batches; sums to 1.
    """

    representative: int
    weights: dict[int, float]


def _plan(requests: Mapping[int, int], chosen: list[int]) -> MergePlan:
    total = sum(requests[trainer] for trainer in chosen)
    weights = {trainer: requests[trainer] / total for trainer in sorted(chosen)}
    return MergePlan(min(chosen, key=lambda trainer: (-requests[trainer], trainer)), weights)


def _check(requests: Mapping[int, int], count: int) -> int:
    if count < 2:
        raise ValueError(f"a merge needs a count of at least 2, got {count}")
    if len(requests) < 2:
        raise ValueError(f"a merge needs at least 2 trainers, got {len(requests)}")
    if min(requests.values()) < 1:
        raise ValueError(f"requested batches must be positive, got {dict(requests)}")
    return min(count, len(requests))


def worst_with_worst(requests: Mapping[int, int], count: int = 2) -> MergePlan:
    """The `count` trainers with the smallest requests (the paper's policy).

    Args:
        requests: trainer id -> requested batch, in examples.
        count: how many trainers merge into one; all of them where fewer live. Ties go to the smaller id.
    """
    count = _check(requests, count)
    ranked = sorted(requests, key=lambda trainer: (requests[trainer], trainer))
    return _plan(requests, ranked[:count])


def best_with_worst(requests: Mapping[int, int], count: int = 2) -> MergePlan:
    """The trainer with the largest request together with the `count - 1` smallest; ties as above."""
    count = _check(requests, count)
    best = min(requests, key=lambda trainer: (-requests[trainer], trainer))
    others = sorted((t for t in requests if t != best), key=lambda trainer: (requests[trainer], trainer))
    return _plan(requests, [best, *others[: count - 1]])


MERGE_POLICIES = {"worst_with_worst": worst_with_worst, "best_with_worst": best_with_worst}


def distribute_nodes(requests: Mapping[int, int], nodes: int) -> dict[int, tuple[int, ...]]:
    """Node indices of every trainer, in proportion to its request and at least one each.

    Beyond the one node that each keeps, nodes go one by one to the trainer with the largest request per node
    that it would then have (the method of D'Hondt), so a larger request never gets fewer nodes. Ties go to
    the smaller id. With more trainers than nodes, a node serves several trainers in turn.

    Args:
        requests: trainer id -> requested batch, in examples.
        nodes: how many nodes there are, numbered from 0.
    """
    if nodes < 1:
        raise ValueError(f"there must be at least one node, got {nodes}")
    trainers = sorted(requests)
    if len(trainers) >= nodes:
        return {trainer: (index % nodes,) for index, trainer in enumerate(trainers)}
    counts = dict.fromkeys(trainers, 1)
    for _ in range(nodes - len(trainers)):
        neediest = max(trainers, key=lambda trainer: (requests[trainer] / (counts[trainer] + 1), -trainer))
        counts[neediest] += 1
    assignment, first = {}, 0
    for trainer in trainers:
        assignment[trainer] = tuple(range(first, first + counts[trainer]))
        first += counts[trainer]
    return assignment
