"""What nodes send each other, in the rounds that are done and in those to come, as a budget counts it."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Exchange:
    """What nodes send at one time.

    communications: how many it counts as. sent: bytes in all. link: bytes through the link of the node that has most.
    """

    communications: int = 0
    sent: float = 0
    link: float = 0.0


@dataclass(frozen=True)
class Link:
    """What connects every node with the others. latency: seconds until all nodes have begun and ended an exchange."""

    bits_per_second: float
    latency: float

    def seconds(self, link_bytes: float) -> float:
        """Of an exchange that sends so many bytes through each link; nothing overlaps."""
        return self.latency + 8.0 * link_bytes / self.bits_per_second


def synchronised(trainers: Iterable[tuple[int, float]]) -> Exchange:
    """The synchronisations of a round, side by side; of every trainer its workers and the bytes that they send."""
    each = [Exchange(int(workers > 1), sent, sent / workers) for workers, sent in trainers]
    sums = sum(one.communications for one in each), sum(one.sent for one in each)
    return Exchange(*sums, max((one.link for one in each), default=0.0))


def merged(others: int, nodes: int, sent: float) -> Exchange:
    """A merge that sends a model of so many other trainers to a node, and the average from there to the other ones.

    nodes: of the representative. The link is that of the node that makes the average.
    """
    return Exchange(1, sent, sent / (others + nodes - 1) * (others + (nodes > 1)))


def redistributed(nodes: int, sent: float) -> Exchange:
    """State for so many nodes that are new to a trainer, side by side."""
    return Exchange(0, sent, sent / max(nodes, 1))


@dataclass(frozen=True)
class Traffic:
    """Bytes of the exchanges of a run.

    synchronised: what so many workers of a trainer send in the round of that number, counted from 1. merged: what a
    trainer gives in a merge. redistributed: what arrives at a node that is new to a trainer.
    """

    synchronised: Callable[[int, int], float]
    merged: float
    redistributed: float


def even_shares(nodes: int, trainers: int) -> tuple[int, ...]:
    """How many nodes every trainer has where they are shared out evenly, at least one: it may have to share it."""
    each, more = divmod(max(nodes, trainers), trainers)
    return tuple(each + (trainer < more) for trainer in range(trainers))


def rounds_to_come(
    trainers: int,
    nodes: int,
    next_round: int,
    merge_frequency: int,
    merge_count: int,
    traffic: Traffic,
    most_workers: float = math.inf,
) -> Iterator[tuple[tuple[int, ...], list[Exchange]]]:
    """The workers of each trainer, and the exchanges, of every round from the next one on, without end.

    Nodes are taken to be shared out evenly; those of trainers that a merge ends go to the others.

    Args:
        next_round: its number, counted from 1; trainers merge after every `merge_frequency`-th.
        merge_count: how many become one.
        most_workers: of a trainer.
    """
    arriving: list[Exchange] = []
    shares = even_shares(min(nodes, trainers * most_workers), trainers)
    for number in itertools.count(next_round):
        exchanges = [*arriving, synchronised((workers, traffic.synchronised(workers, number)) for workers in shares)]
        arriving = []
        if trainers > 1 and number % merge_frequency == 0:
            others = min(merge_count, trainers) - 1
            exchanges.append(merged(others, shares[0], (others + shares[0] - 1) * traffic.merged))
            trainers -= others
            shares_after = even_shares(min(nodes, trainers * most_workers), trainers)
            came = sum(shares_after) - sum(shares[:trainers])
            arriving = [redistributed(came, came * traffic.redistributed)] if came > 0 else []
            yield shares, exchanges
            shares = shares_after
        else:
            yield shares, exchanges
