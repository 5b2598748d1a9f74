"""The distribution of nodes over trainers, and the state that moves when it changes (AdLoCo, section 3)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

# By this share the requests per node must differ before a node changes trainers, because the new trainer has to send
# it its state.
HYSTERESIS = 0.25


def useful_workers(request: int, smallest_batch: int, present: int) -> int:
    """The number of workers to which a request gives at least `smallest_batch` examples each.

    Very small batches waste workers, because AdamW divides a worker's step by the noise of its own examples. Present
    workers stay until the request is too small for them by more than HYSTERESIS.
    """
    wanted = max(1, request // smallest_batch)
    if wanted < present and request * (1.0 + HYSTERESIS) >= present * smallest_batch:
        return present
    return wanted


def node_counts(
    requests: Mapping[int, int], nodes: int, present: Mapping[int, int], smallest_batch: int | None
) -> dict[int, int]:
    """The number of nodes of every trainer: at least one, and otherwise in proportion to its request.

    Free nodes go one by one to the trainer that then has the largest request per node (the method of D'Hondt). A node
    moves from one trainer to another only if the taker's request per node, including the new one, exceeds the giver's
    by more than HYSTERESIS. In the end r_t / (n_t + 1) <= (1 + HYSTERESIS) r_g / n_g for all trainers t and g with
    n_g > 1. Ties go to the smaller id. Nodes for which no trainer has use (`useful_workers`) are idle.

    Args:
        present: trainer id -> number of its nodes now, together at most `nodes`.
        smallest_batch: fewest examples of a worker; None: trainers have use for all nodes.
    """
    trainers = sorted(requests)
    counts = {}
    most = {}
    for trainer in trainers:
        counts[trainer] = max(present.get(trainer, 0), 1)
        most[trainer] = nodes
        if smallest_batch is not None:
            most[trainer] = useful_workers(requests[trainer], smallest_batch, counts[trainer])
            counts[trainer] = min(counts[trainer], most[trainer])

    def taker() -> int | None:
        able = [trainer for trainer in trainers if counts[trainer] < most[trainer]]
        return max(able, key=lambda trainer: (requests[trainer] / (counts[trainer] + 1), -trainer), default=None)

    def giver() -> int | None:
        able = [trainer for trainer in trainers if counts[trainer] > 1]
        return min(able, key=lambda trainer: (requests[trainer] / counts[trainer], -trainer), default=None)

    while sum(counts.values()) > nodes:
        counts[giver()] -= 1
    while sum(counts.values()) < nodes:
        target = taker()
        if target is None:
            break
        counts[target] += 1
    while True:
        source = giver()
        target = taker()
        if source is None or target is None or source == target:
            return counts
        present_load = requests[source] * (counts[target] + 1)
        new_load = requests[target] * counts[source]
        if new_load <= (1.0 + HYSTERESIS) * present_load:
            return counts
        counts[source] -= 1
        counts[target] += 1


def distribute_nodes(
    requests: Mapping[int, int],
    nodes: Sequence[int],
    present: Mapping[int, Sequence[int]] | None = None,
    smallest_batch: int | None = None,
) -> dict[int, tuple[int, ...]]:
    """The nodes of every trainer, by worker: as many as `node_counts` says, with as few changes as possible.

    Workers keep their nodes, the last workers leave first, and new nodes take the places of those that are gone. The
    trainer with the most nodes takes new ones first, in order. If there are no more nodes than trainers, a node serves
    several trainers in turn.

    present: trainer id -> its nodes now, by worker; nodes that are not in `nodes` are gone.
    """
    present = present or {}
    trainers = sorted(requests)
    if len(trainers) >= len(nodes):
        return _nodes_in_turn(trainers, nodes, present)

    kept: dict[int, set[int]] = {}
    taken: set[int] = set()
    here = set(nodes)
    for trainer in sorted(trainers, key=lambda trainer: (-requests[trainer], trainer)):
        kept[trainer] = {node for node in present.get(trainer, ()) if node in here and node not in taken}
        taken |= kept[trainer]
    counts = node_counts(requests, len(nodes), {t: len(own) for t, own in kept.items()}, smallest_batch)
    places = {t: _worker_places(present.get(t, ()), kept[t], count) for t, count in counts.items()}

    taken = {node for own in places.values() for node in own if node is not None}
    free = [node for node in nodes if node not in taken]
    for trainer in sorted(trainers, key=lambda trainer: (-counts[trainer], trainer)):
        missing = places[trainer].count(None)
        _fill(places[trainer], free[:missing])
        free = free[missing:]
    return {trainer: tuple(places[trainer]) for trainer in trainers}


def _nodes_in_turn(
    trainers: Sequence[int], nodes: Sequence[int], present: Mapping[int, Sequence[int]]
) -> dict[int, tuple[int, ...]]:
    """One node for every trainer; nodes serve nearly equal numbers of trainers."""
    served: dict[int, list[int]] = {node: [] for node in nodes}
    most = -(-len(trainers) // len(nodes))
    homeless = []
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


def _worker_places(present: Sequence[int], staying: Collection[int], count: int) -> list[int | None]:
    """The node of each of `count` workers, or None; nodes that stay keep their workers, the last ones move up."""
    workers: list[int | None] = [node if node in staying else None for node in present]
    workers += [None] * (count - len(workers))
    places = workers[:count]
    _fill(places, [node for node in workers[count:] if node is not None])
    return places


def _fill(places: list[int | None], nodes: Sequence[int]) -> None:
    empty = [place for place, node in enumerate(places) if node is None]
    for place, node in zip(empty, nodes, strict=False):
        places[place] = node


# State that moves


@dataclass(frozen=True)
class HandOver:
    """A worker's state that goes to other workers.

    Attributes:
        worker: the old number of the worker.
        takers: new number of a worker -> its node.
        whole: the worker itself moves, with its encoding error; otherwise new workers get a copy of its moments.
    """

    worker: int
    source: int
    takers: dict[int, int] = field(default_factory=dict)
    whole: bool = True


@dataclass(frozen=True)
class StateBytes:
    """Sizes of state. personal: state that moves only with its worker, such as an encoding error."""

    trainer: int
    worker: int
    personal: int = 0


def hand_overs(old: Sequence[int], new: Sequence[int], lost: frozenset[int]) -> list[HandOver]:
    """The state that moves when a trainer's nodes change.

    Workers keep their numbers as far as there are nodes for them, and take their state along. A worker that is new, or
    whose state is lost, gets a copy of the state of the first worker that has one.

    lost: old workers whose state is lost.
    """
    healthy = [worker for worker in range(len(old)) if worker not in lost]
    if not healthy:
        return []
    found: dict[tuple[int, bool], HandOver] = {}
    for worker, node in enumerate(new):
        stays = worker < len(old) and worker not in lost
        if stays and old[worker] == node:
            continue
        source = worker if stays else healthy[0]
        hand_over = found.setdefault((source, stays), HandOver(source, old[source], whole=stays))
        hand_over.takers[worker] = node
    return list(found.values())
