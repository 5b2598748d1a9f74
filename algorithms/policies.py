"""Merge policies and the distribution of nodes: who merges with whom, and who works for whom.

Both are pure functions of the living trainers' requested batches (AdLoCo, section 3).
"""

import statistics
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


def distribute_nodes(requests: Mapping[int, int], groups: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Nodes of every trainer, in proportion to its request and at least one each.

    Beyond the one node that each keeps, nodes go one by one to the trainer with the largest request per node
    that it would then have (the method of D'Hondt), so a larger request never gets fewer nodes. Ties go to
    the smaller id. With more trainers than nodes, a node serves several trainers in turn. How many nodes a trainer
    gets does not depend on the groups; which ones are as few groups' as a greedy choice finds: the largest trainer
    first, into the fullest group that still holds it, else into the emptiest ones.

    Args:
        requests: trainer id -> requested batch, in examples.
        groups: node -> its group; between groups communication is dear.
    """
    if not groups:
        raise ValueError(f"there must be at least one node, got {len(groups)}")
    trainers = sorted(requests)
    nodes = sorted(groups)
    if len(trainers) >= len(nodes):
        return {trainer: (nodes[index % len(nodes)],) for index, trainer in enumerate(trainers)}
    counts = dict.fromkeys(trainers, 1)
    for _ in range(len(nodes) - len(trainers)):
        neediest = max(trainers, key=lambda trainer: (requests[trainer] / (counts[trainer] + 1), -trainer))
        counts[neediest] += 1
    free: dict[int, list[int]] = {}
    for node in nodes:
        free.setdefault(groups[node], []).append(node)
    assignment: dict[int, tuple[int, ...]] = {}
    for trainer in sorted(trainers, key=lambda trainer: (-counts[trainer], trainer)):
        chosen: list[int] = []
        while len(chosen) < counts[trainer]:
            missing = counts[trainer] - len(chosen)
            fitting = [group for group in free if len(free[group]) >= missing]
            if fitting:
                group = min(fitting, key=lambda group: (len(free[group]), group))
            else:
                group = max(free, key=lambda group: (len(free[group]), -group))
            chosen += free[group][:missing]
            free[group] = free[group][missing:]
        assignment[trainer] = tuple(sorted(chosen))
    return dict(sorted(assignment.items()))


def slow_nodes(seconds_per_example: Mapping[int, float], factor: float) -> frozenset[int]:
    """The nodes that take more than `factor` times the median time per example of the others."""

    def others(node: int) -> float:
        return statistics.median(seconds for other, seconds in seconds_per_example.items() if other != node)

    if len(seconds_per_example) < 2:
        return frozenset()
    return frozenset(node for node, seconds in seconds_per_example.items() if seconds > factor * others(node))
