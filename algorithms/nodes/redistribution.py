"""The distribution of nodes of different speeds: a trainer's share of compute, not of nodes, follows its request.

A trainer with request r on nodes of speeds s_1, ..., s_n needs r / (s_1 + ... + s_n) seconds for an inner step of all;
trainers that share a node take turns there. All wait for the slowest, so moves are judged by what becomes of its
seconds, and by what they cost. Pure functions beside those of `distribution`, to which nodes are alike.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from algorithms.nodes.distribution import fill, worker_places

# The nodes of every trainer, worker by worker.
Assignment = dict[int, tuple[int, ...]]
# What every owner holds: a trainer its nodes, or where there are fewer of them a node the trainers that it serves.
Held = dict[int, tuple[int, ...]]
# From an owner and what it would hold to its seconds.
Seconds = Callable[[int, Sequence[int]], float]


def differ(speeds: Iterable[float | None]) -> bool:
    """Whether all speeds are known, and not all the same."""
    found = set(speeds)
    return None not in found and len(found) > 1


def slowest_seconds(requests: Mapping[int, int], speeds: Mapping[int, float], assignment: Assignment) -> float:
    """Seconds of an inner step until the last trainer is done."""
    of_nodes: dict[tuple[int, ...], int] = {}
    for trainer, nodes in assignment.items():  # those on the same nodes take turns
        of_nodes[nodes] = of_nodes.get(nodes, 0) + requests[trainer]
    return max(request / sum(speeds[node] for node in nodes) for nodes, request in of_nodes.items())


def _changes(held: Held, slowest: int) -> Iterator[tuple[int, tuple[int | None, int | None]]]:
    """Every other owner, with what it would get from the slowest one and what it would give; None: nothing."""
    for other in sorted(held.keys() - {slowest}):
        for given in (None, *held[slowest]):
            for taken in (None, *held[other]):
                if given is not None or taken is not None:
                    yield other, (given, taken)


def _exchanged(held: Sequence[int], gone: int | None, come: int | None) -> tuple[int, ...]:
    return (*(item for item in held if item != gone), *([] if come is None else [come]))


def evened(held: Held, seconds: Seconds, groups: Mapping[int, int] | None = None) -> list[Held]:
    """From a distribution on, step by step, until no step lets the slowest owner be done earlier.

    A step gives one item from or to the slowest, or exchanges one for another, so that the later of the two is done as
    early as can be; among equal ones nothing comes where nothing else of its group (item -> group) is, if that can be.
    """
    found, groups = [held], groups or {}
    while True:
        now = found[-1]
        slowest = min(sorted(now), key=lambda owner: -seconds(owner, now[owner]))
        best, least = None, (seconds(slowest, now[slowest]) * (1.0 - 1e-9), 0)
        for other, (given, taken) in _changes(now, slowest):
            own, theirs = _exchanged(now[slowest], given, taken), _exchanged(now[other], taken, given)
            strange = sum(
                item is not None and groups.get(item) not in {groups.get(one) for one in kept if one != item}
                for item, kept in ((taken, own), (given, theirs))
            )
            later = max(seconds(slowest, own), seconds(other, theirs))
            if (later, strange) < least:
                best, least = now | {slowest: own, other: theirs}, (later, strange)
        if best is None:
            return found
        found.append(best)


def _first_nodes(requests: Mapping[int, int], speeds: Mapping[int, float], kept: Mapping[int, Sequence[int]]) -> Held:
    """The nodes of every trainer where those that nobody has are given away, the fastest first.

    Each goes to the trainer with the largest request for the compute that it would then have, while there are
    enough for those that have none. For who finds none the trainer gives one that is then done earliest.
    """
    held = {trainer: list(kept[trainer]) for trainer in requests}
    used = {node for nodes in held.values() for node in nodes}
    free = sorted(speeds.keys() - used, key=lambda node: (-speeds[node], node))

    def compute(trainer: int) -> float:
        return sum(speeds[node] for node in held[trainer])

    while len(free) < sum(not nodes for nodes in held.values()):
        able = ((giver, node) for giver, nodes in held.items() if len(nodes) > 1 for node in nodes)
        giver, node = min(able, key=lambda one: (requests[one[0]] / (compute(one[0]) - speeds[one[1]]), one))
        held[giver].remove(node)
        free.append(node)
    while free:
        without, node = [trainer for trainer in held if not held[trainer]], free.pop(0)
        able = without if len(without) > len(free) else held
        held[max(able, key=lambda t: (requests[t] / (compute(t) + speeds[node]), -t))].append(node)
    return {trainer: tuple(nodes) for trainer, nodes in held.items()}


def _first_turns(
    requests: Mapping[int, int], speeds: Mapping[int, float], present: Mapping[int, Sequence[int]]
) -> Held:
    """The trainers that every node serves in turn: those it has, and the others where they are done earliest, the
    largest request first."""
    served: dict[int, list[int]] = {node: [] for node in speeds}
    homes = {trainer: next((n for n in present.get(trainer, ()) if n in served), None) for trainer in requests}
    for trainer, home in homes.items():
        if home is not None:
            served[home].append(trainer)
    for trainer in sorted((t for t, home in homes.items() if home is None), key=lambda t: (-requests[t], t)):
        loads = {node: sum(requests[t] for t in (*own, trainer)) / speeds[node] for node, own in served.items()}
        served[min(loads, key=lambda node: (loads[node], node))].append(trainer)
    return {node: tuple(own) for node, own in served.items()}


def distributions(
    requests: Mapping[int, int],
    speeds: Mapping[int, float],
    groups: Mapping[int, int],
    present: Mapping[int, Sequence[int]],
) -> list[Assignment]:
    """The distributions that a change of nodes may end with: the first moves no more than it has to, the last most.

    Workers keep their nodes as far as their trainer does, and a node that comes for another takes its place. With fewer
    nodes than trainers a node serves several in turn, and one that is much slower than the others may serve none.

    Args:
        requests: trainer id -> requested batch, in examples.
        speeds, groups: of every node that works; between groups communication is dear.
        present: trainer id -> its nodes now, by worker; those without a speed are gone.
    """
    requests, speeds = dict(sorted(requests.items())), dict(sorted(speeds.items()))
    if len(requests) > len(speeds):
        steps = evened(
            _first_turns(requests, speeds, present), lambda node, own: sum(requests[t] for t in own) / speeds[node]
        )
        return [dict(sorted((t, (node,)) for node, own in held.items() for t in own)) for held in steps]
    kept: dict[int, list[int]] = {}
    taken: set[int] = set()
    for trainer in sorted(requests, key=lambda trainer: (-requests[trainer], trainer)):
        kept[trainer] = [node for node in present.get(trainer, ()) if node in speeds and node not in taken]
        taken |= set(kept[trainer])

    def seconds(trainer: int, nodes: Sequence[int]) -> float:
        return requests[trainer] / sum(speeds[node] for node in nodes) if nodes else math.inf

    found = []
    for held in evened(_first_nodes(requests, speeds, kept), seconds, groups):
        found.append({})
        for trainer, nodes in held.items():
            own = present.get(trainer, ())
            places = worker_places(own, nodes, len(nodes))
            fill(places, [node for node in nodes if node not in own])
            found[-1][trainer] = tuple(places)
    return found


def worthwhile(seconds: Sequence[float], costs: Sequence[float], inner_steps: int, hysteresis: float) -> int:
    """Which of several distributions to go on with, by number.

    That after which most time is gained in `inner_steps`, what it costs more than the first being subtracted, if any
    is; of equal ones the first. Gains of less than `hysteresis` are none.

    Args:
        seconds: of an inner step, with each; costs: seconds until each is there.
    """

    def gain(number: int) -> float:
        gained = inner_steps * (seconds[0] - seconds[number]) - (costs[number] - costs[0])
        return gained if seconds[0] > (1.0 + hysteresis) * seconds[number] else 0.0

    return max(range(len(seconds)), key=lambda number: (gain(number), -number))
