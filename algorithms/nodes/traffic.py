"""The traffic between nodes in merges, redistributions and rounds, past and future.

Every node counts as a machine of its own, whatever the processes.
"""

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from algorithms.nodes.distribution import HandOver, StateBytes, distribute_nodes


def redistribution_bytes(old: Sequence[int], new: Sequence[int], moves: Sequence[HandOver], sizes: StateBytes) -> int:
    """Bytes that arrive at nodes when a trainer's nodes change.

    A node that the trainer had holds its tensors, and each worker's state is on the worker's node. Everything else is
    sent once to every node that needs it. At the start (`old` is empty) nothing is sent, because all nodes begin from
    the same seed.
    """
    if not old:
        return 0
    sent = len(set(new) - set(old)) * sizes.trainer
    for move in moves:
        takers = sum(node != move.source for node in move.takers.values())
        sent += takers * (sizes.worker + move.whole * sizes.personal)
    return sent


def merge_bytes(representative: Sequence[int], others: Sequence[Sequence[int]], size: int) -> int:
    """Bytes that arrive at nodes in a merge.

    The first node of the representative receives the tensors of the others, unless it serves them too. It sends the
    average to the representative's other nodes.

    size: bytes that a trainer gives: its parameters, and state that does not start anew.
    """
    first, *rest = representative
    return size * (sum(first not in nodes for nodes in others) + len(rest))


@dataclass(frozen=True)
class Event:
    """Messages that the workers of a trainer send each other at one time.

    Attributes:
        step: the inner step of the round after which it happens; a fraction is within a step.
        sent: bytes that each worker sends, a mean over all workers.
        received: bytes that each worker receives, likewise.
        behind: inner steps that may be made before anybody waits for it.
        through: "all" workers alike (a ring), "groups of 2" or more, or a "server", which is no worker's node.
        by: the workers that send, by number, if the others take no part; None: all.
    """

    kind: str
    step: float
    sent: float
    received: float
    behind: float = 0
    through: str = "all"
    by: tuple[int, ...] | None = None

    @property
    def communicates(self) -> bool:
        """True if it counts as a communication, unlike a few statistics of gradients or of the workers' variance."""
        return self.kind not in ("statistics", "monitor")

    @property
    def bytes_per_worker(self) -> float:
        """All bytes sent, a server's answers included, divided by the workers."""
        return self.sent + (self.received if self.through == "server" else 0.0)


@dataclass(frozen=True)
class Exchange:
    """Messages that nodes send at one time.

    Attributes:
        communications: the number of communications that it counts as.
        link: bytes through the busiest node's link.
    """

    communications: int = 0
    sent: float = 0
    link: float = 0.0

    def __add__(self, later: "Exchange") -> "Exchange":
        """Return both, one after the other."""
        return Exchange(self.communications + later.communications, self.sent + later.sent, self.link + later.link)


def simultaneous(exchanges: Iterable[Exchange]) -> Exchange:
    """Return exchanges of different nodes at the same time as one."""
    exchanges = list(exchanges)
    return Exchange(
        communications=sum(exchange.communications for exchange in exchanges),
        sent=sum(exchange.sent for exchange in exchanges),
        link=max((exchange.link for exchange in exchanges), default=0.0),
    )


_LINK = re.compile(
    r"((?P<rate>\d+(\.\d+)?)(?P<prefix>[kMGT]?)(?P<unit>[bB])/s)?((^|,)(?P<latency>\d+(\.\d+)?)(?P<time>s|ms|us))?"
)


@dataclass(frozen=True)
class Link:
    """The link between a node and the others.

    Attributes:
        bits_per_second: its rate.
        latency: seconds from when all nodes are ready until an exchange without bytes is over.
    """

    bits_per_second: float = math.inf
    latency: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Link":
        """Return a link from a rate in bits (b) or bytes (B), a latency, or both: "1Gb/s,20ms", "100MB/s", "20ms".

        Raises:
            ValueError: it is not written like that.
        """
        found = _LINK.fullmatch(text)
        if not text or found is None or float(found["rate"] or 1.0) == 0.0:
            raise ValueError("must be a rate in bits (b) or bytes (B) and a latency, such as 1Gb/s,20ms or 100MB/s")
        bits_per_second = math.inf
        latency = 0.0
        if found["rate"]:
            bits_per_second = float(found["rate"]) * 1000.0 ** " kMGT".index(found["prefix"] or " ")
            bits_per_second *= 8.0 if found["unit"] == "B" else 1.0
        if found["latency"]:
            latency = float(found["latency"]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[found["time"]]
        return cls(bits_per_second, latency)

    def seconds(self, link_bytes: float) -> float:
        """Seconds of an exchange that sends this many bytes through each link."""
        return self.latency + 8.0 * link_bytes / self.bits_per_second


def busiest_share(workers: int, recipients: int | None) -> float:
    """The share of the busiest worker in what all send, each to all others or in groups; the last may be smaller.

    recipients: workers that receive a message; None: all others.
    """
    if recipients is None or recipients >= workers - 1:
        return 1 / workers
    groups, rest = divmod(workers, recipients + 1)
    return recipients / (groups * (recipients + 1) * recipients + rest * (rest - 1))


def synchronisation_exchange(trainers: Iterable[tuple[int, float]], recipients: int | None) -> Exchange:
    """The simultaneous synchronisations of a round, from the workers and the sent bytes of every trainer.

    recipients: see `busiest_share`.
    """
    return simultaneous(
        Exchange(int(workers > 1), sent, sent * busiest_share(workers, recipients)) for workers, sent in trainers
    )


def merge_exchange(others: int, nodes: int, sent: float) -> Exchange:
    """A merge with this number of other trainers; nodes: of the representative, whose first node makes the average."""
    return Exchange(1, sent, sent / (others + nodes - 1) * (others + (nodes > 1)))


def even_exchange(nodes: int, sent: float) -> Exchange:
    """Bytes that go through the links of `nodes` nodes evenly and at the same time, and are no communication.

    These are the state that nodes receive when they join a trainer, and the mean with which workers settle.
    """
    return Exchange(0, sent, sent / max(nodes, 1))


@dataclass(frozen=True)
class ExchangeSizes:
    """Bytes of future exchanges.

    Attributes:
        round: from the workers of a trainer and the number of the round, from 1, to the bytes that they send.
        merge: that a trainer gives in a merge.
        joining: that arrive at a node that is new to a trainer.
        settling: from a trainer's workers to the bytes of what they have not sent yet, which they send before a merge.
        recipients: of a message in a round; None: all other workers.
    """

    round: Callable[[int, int], float]
    merge: float
    joining: float
    settling: Callable[[int], float] = lambda workers: 0.0
    recipients: int | None = None


def even_split(nodes: int, trainers: int) -> tuple[int, ...]:
    """The number of nodes of each trainer if they are divided evenly; at least one, which trainers may share."""
    each, more = divmod(max(nodes, trainers), trainers)
    return tuple(each + (trainer < more) for trainer in range(trainers))


def rounds_ahead(
    trainers: int,
    nodes: int,
    next_round: int,
    merge_frequency: int,
    merge_count: int,
    sizes: ExchangeSizes,
    most_workers: float = math.inf,
) -> Iterator[tuple[Sequence[Sequence[int]], list[Exchange]]]:
    """Yield the nodes of each trainer and the exchanges of every future round, without end.

    All trainers are assumed to have equal requests. So the first ones merge, into the first of them.

    next_round: number of the next round, from 1; trainers merge after every `merge_frequency`-th.
    most_workers: that a trainer has work for.
    """

    request = int(min(most_workers, nodes))

    def distribution(living: Collection[int], present: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, ...]]:
        return distribute_nodes(dict.fromkeys(living, request), range(nodes), present, smallest_batch=1)

    joining: list[Exchange] = []
    nodes_of = distribution(range(trainers), {})
    known = None
    alike: list[Exchange] = []  # the same list in rounds that are alike, as there may be very many
    for number in itertools.count(next_round):
        workers = tuple(map(len, nodes_of.values()))
        bytes_of = {count: sizes.round(count, number) for count in set(workers)}
        if (workers, bytes_of) != known:
            known = workers, bytes_of
            alike = [synchronisation_exchange([(count, bytes_of[count]) for count in workers], sizes.recipients)]
        exchanges = [*joining, *alike] if joining else alike
        joining = []
        if len(nodes_of) == 1 or number % merge_frequency:
            yield tuple(nodes_of.values()), exchanges
            continue
        representative, *others = list(nodes_of)[:merge_count]
        own = nodes_of[representative]
        sent = merge_bytes(own, [nodes_of[other] for other in others], sizes.merge)
        settling = simultaneous(even_exchange(count, sizes.settling(count)) for count in workers[:merge_count])
        yield tuple(nodes_of.values()), [*exchanges, settling + merge_exchange(len(others), len(own), sent)]
        before = {trainer: nodes for trainer, nodes in nodes_of.items() if trainer not in others}
        nodes_of = distribution(before, before)
        new = sum(len(set(nodes_of[trainer]) - set(nodes)) for trainer, nodes in before.items())
        if new > 0:
            joining = [even_exchange(new, new * sizes.joining)]
