"""The distribution of nodes: who works for whom, and what has to move when that changes.

Pure functions of the living trainers' requested batches (AdLoCo, section 3) and of where their nodes are now.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

# By how much requests per node have to differ before a node moves, whose new trainer has to send it its state.
HYSTERESIS = 0.25


def useful_workers(request: int, smallest_batch: int, present: int, hysteresis: float) -> int:
    """How many workers a trainer has use for: as many as its request gives `smallest_batch` examples each.

    A batch that is cut into very small ones wastes them: AdamW divides a worker's step by the noise of its own few
    examples. Those that are there stay until the request is smaller than what they need by more than `hysteresis`.
    """
    wanted = max(1, request // smallest_batch)
    return present if wanted < present and request * (1.0 + hysteresis) >= present * smallest_batch else wanted


def node_counts(
    requests: Mapping[int, int],
    nodes: int,
    present: Mapping[int, int],
    hysteresis: float,
    smallest_batch: int | None = None,
) -> dict[int, int]:
    """How many of the nodes every trainer gets: at least one, and otherwise in proportion to its request.

    No trainer gets more than it has use for (`useful_workers`); nodes that nobody has use for are idle.

    Nodes that nobody has go one by one to the trainer with the largest request per node that it would then have (the
    method of D'Hondt). A node moves from one trainer to another only where the taker's request per node, the new one
    included, exceeds the giver's by more than `hysteresis`, because the taker's state has to be sent to it. So in the
    end r_t / (n_t + 1) <= (1 + hysteresis) r_g / n_g for all trainers t and g with n_g > 1. Without nodes at present,
    or with a hysteresis of 0, a larger request never gets fewer nodes; with one, a request that is more than
    1 + hysteresis times as large never does. Ties go to the smaller id.

    Args:
        requests: trainer id -> requested batch, in examples; fewer of them than nodes.
        present: trainer id -> nodes that it has; together at most `nodes`.
        smallest_batch: of a worker, in examples; None: trainers have use for all.
    """
    trainers = sorted(requests)
    counts = {trainer: max(present.get(trainer, 0), 1) for trainer in trainers}
    most = dict.fromkeys(trainers, nodes)
    if smallest_batch is not None:
        most = {t: useful_workers(requests[t], smallest_batch, counts[t], hysteresis) for t in trainers}
    counts = {trainer: min(count, most[trainer]) for trainer, count in counts.items()}

    def taker() -> int | None:
        able = [trainer for trainer in trainers if counts[trainer] < most[trainer]]
        return max(able, key=lambda trainer: (requests[trainer] / (counts[trainer] + 1), -trainer), default=None)

    def giver() -> int | None:
        able = [trainer for trainer in trainers if counts[trainer] > 1]
        return min(able, key=lambda trainer: (requests[trainer] / counts[trainer], -trainer), default=None)

    while sum(counts.values()) > nodes:
        counts[giver()] -= 1
    while sum(counts.values()) < nodes and (target := taker()) is not None:
        counts[target] += 1
    while (source := giver()) is not None and (target := taker()) is not None:
        has, would_have = requests[source] * (counts[target] + 1), requests[target] * counts[source]
        if source == target or would_have <= (1.0 + hysteresis) * has:
            break
        counts[source] -= 1
        counts[target] += 1
    return counts


def _in_turn(
    trainers: Sequence[int], nodes: Sequence[int], present: Mapping[int, Sequence[int]]
) -> dict[int, tuple[int, ...]]:
    """A node for every trainer where there are no more nodes than trainers; all nodes have near-equally many."""
    served: dict[int, list[int]] = {node: [] for node in nodes}
    most, homeless = -(-len(trainers) // len(nodes)), []
    for trainer in trainers:
        home = next((node for node in present.get(trainer, ()) if node in served), None)
        if home is None or len(served[home]) == most:
            homeless.append(trainer)
        else:
            served[home].append(trainer)
    for trainer in homeless:
        served[min(nodes, key=lambda node: (len(served[node]), node))].append(trainer)
    while True:
        fullest = max(nodes, key=lambda node: (len(served[node]), -node))
        emptiest = min(nodes, key=lambda node: (len(served[node]), node))
        if len(served[fullest]) < len(served[emptiest]) + 2:
            return dict(sorted((trainer, (node,)) for node, own in served.items() for trainer in own))
        served[emptiest].append(served[fullest].pop())


def distribute_nodes(
    requests: Mapping[int, int],
    groups: Mapping[int, int],
    present: Mapping[int, Sequence[int]] | None = None,
    hysteresis: float = 0.0,
    smallest_batch: int | None = None,
) -> dict[int, tuple[int, ...]]:
    """Nodes of every trainer, worker by worker: so many as `node_counts` says, and as few changes as that allows.

    Workers keep their nodes, the last ones go first, and new nodes take the places of those that are gone. With no more
    nodes than trainers, a node serves several trainers in turn. How many nodes a trainer gets does not depend on the
    groups; which new ones are as few groups' as a greedy choice finds: the trainer with the most nodes first, into
    groups where it has some, then into the fullest one that still holds what is missing, else into the emptiest.

    Args:
        requests: trainer id -> requested batch, in examples.
        groups: node -> its group; between groups communication is dear.
        present: trainer id -> its nodes now, by worker; those not in `groups` are gone.
        hysteresis, smallest_batch: as in `node_counts`.
    """
    if not groups:
        raise ValueError(f"there must be at least one node, got {len(groups)}")
    present = present or {}
    trainers, nodes = sorted(requests), sorted(groups)
    if len(trainers) >= len(nodes):
        return _in_turn(trainers, nodes, present)
    kept: dict[int, list[int]] = {}
    taken: set[int] = set()
    for trainer in sorted(trainers, key=lambda trainer: (-requests[trainer], trainer)):
        kept[trainer] = [node for node in present.get(trainer, ()) if node in groups and node not in taken]
        taken |= set(kept[trainer])
    counts = node_counts(requests, len(nodes), {t: len(own) for t, own in kept.items()}, hysteresis, smallest_batch)
    places = {t: worker_places(present.get(t, ()), kept[t], count) for t, count in counts.items()}
    taken = {node for own in places.values() for node in own if node is not None}
    free: dict[int, list[int]] = {}
    for node in nodes:
        if node not in taken:
            free.setdefault(groups[node], []).append(node)
    for trainer in sorted(trainers, key=lambda trainer: (-counts[trainer], trainer)):
        own = places[trainer]
        fill(own, sorted(_choose(free, own.count(None), [groups[node] for node in own if node is not None])))
    return {trainer: tuple(places[trainer]) for trainer in trainers}


def worker_places(present: Sequence[int], staying: Collection[int], count: int) -> list[int | None]:
    """The node of each of so many workers: those stay that can, the last go first; None: one is missing."""
    workers: list[int | None] = [node if node in staying else None for node in present]
    workers += [None] * (count - len(workers))
    places, surplus = workers[:count], [node for node in workers[count:] if node is not None]
    fill(places, surplus)
    return places


def fill(places: list[int | None], nodes: Sequence[int]) -> None:
    """Put nodes into empty places as far as there are some."""
    for node in nodes[: places.count(None)]:
        places[places.index(None)] = node


def _choose(free: dict[int, list[int]], count: int, own: Sequence[int]) -> list[int]:
    """Take so many nodes out of `free` (group -> nodes). own: the group of every node that the trainer has."""
    chosen: list[int] = []
    while len(chosen) < count:
        missing = count - len(chosen)
        left = [group for group in free if free[group]]
        known = [group for group in left if group in own]
        fitting = [group for group in left if len(free[group]) >= missing]
        if known:
            group = min(known, key=lambda group: (-own.count(group), group))
        elif fitting:
            group = min(fitting, key=lambda group: (len(free[group]), group))
        else:
            group = max(left, key=lambda group: (len(free[group]), -group))
        chosen += free[group][:missing]
        free[group] = free[group][missing:]
    return chosen


# What moves


@dataclass(frozen=True)
class HandOver:
    """The state of a worker that goes to others.

    worker: the old number of whom it is of. source: its node. takers: new number of a worker -> its node. whole: it is
    the same worker in another place, so that what was lost when it sent goes with it; else a new one gets a copy.
    """

    worker: int
    source: int
    takers: dict[int, int] = field(default_factory=dict)
    whole: bool = True


@dataclass(frozen=True)
class StateBytes:
    """Sizes. trainer: its tensors; worker: the inner optimiser's state; personal: what goes with a worker alone, as
    what encodings lost."""

    trainer: int
    worker: int
    personal: int = 0


def hand_overs(old: Sequence[int], new: Sequence[int], lost: frozenset[int]) -> list[HandOver]:
    """What workers need of each other's state when a trainer's nodes change.

    Workers keep their numbers, so far as there are nodes for them, and their state goes where they go. One that is new,
    or whose state is lost, gets a copy of that of the first worker that has one.

    Args:
        old, new: the node of each worker before and after.
        lost: old workers whose state is lost.
    """
    healthy = [worker for worker in range(len(old)) if worker not in lost]
    found: dict[tuple[int, bool], HandOver] = {}
    for worker, node in enumerate(new):
        stays = worker in healthy
        if not healthy or (stays and old[worker] == node):
            continue
        source = worker if stays else healthy[0]
        found.setdefault((source, stays), HandOver(source, old[source], {}, stays)).takers[worker] = node
    return list(found.values())
