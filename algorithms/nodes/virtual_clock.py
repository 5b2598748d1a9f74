"""When every node of a simulated run is done: they compute side by side, and wait for what they send each other.

A link carries one exchange at a time, beside the computation of its node. Who waits for an exchange, and how long it
may take before anybody does, says the exchange; nodes that share none know nothing of each other's time.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from algorithms.nodes.traffic import Link

_NEXT = float("inf")  # due at the end of the next round


class Connection(Protocol):
    """What connects the nodes. server_bits_per_second: of a server's link; None: it is as wide as it has to be."""

    server_bits_per_second: float | None

    def link(self, nodes: Iterable[int]) -> Link:
        """The slowest of these nodes' links, for which all of them wait."""


@dataclass(frozen=True)
class Uniform:
    """The same link for all nodes, and a server that is no bottleneck."""

    each: Link = Link(float("inf"), 0.0)
    server_bits_per_second: None = None

    def link(self, nodes: Iterable[int]) -> Link:
        return self.each


@dataclass(frozen=True)
class Sending:
    """Exchanges of a trainer's workers at one time.

    step: after which inner step of the round. sent, received: bytes of each worker. behind: after how many more steps
    it is waited for; None: at the end of the next round. through, kind: see `synchronisation.group.Event`.
    behind_step: it travels while that very step computes, as the gradient of the last layer is there first. by: the
    places of those that send among the trainer's nodes, each by itself where it waits at once; None: all of them.
    """

    step: int
    sent: float
    received: float
    behind: int | None = 0
    through: Literal["all", "groups", "server"] = "all"
    kind: str = "synchronisation"
    behind_step: bool = False
    by: tuple[int, ...] | None = None


def together(sendings: Iterable[Sending]) -> list[Sending]:
    """The same in the order of their steps; what goes out at one time goes out together."""
    found: dict[tuple, Sending] = {}
    for sending in sendings:
        place = (sending.step, sending.behind, sending.through, sending.by)
        if (before := found.get(place)) is not None:
            sent, received = before.sent + sending.sent, before.received + sending.received
            sending = dataclasses.replace(before, sent=sent, received=received)
        found[place] = sending
    return sorted(found.values(), key=lambda sending: sending.step)


def pairs(nodes: Sequence[int], turn: int) -> list[tuple[int, int]]:
    """Who meets whom in that turn, so that everybody meets everybody: the circle method; of an odd number one rests."""
    first, *rest = [*nodes, *([None] if len(nodes) % 2 else [])]
    turn %= max(len(rest), 1)
    circle = [first, *rest[turn:], *rest[:turn]]
    half = len(circle) // 2
    return [pair for pair in zip(circle[:half], reversed(circle[half:]), strict=True) if None not in pair]


@dataclass
class Spent:
    """Seconds of a node. busy: it computes. exchanging: it has nothing to do but wait for what travels to it and from
    it. waiting: for others, or for a link that is taken."""

    busy: float = 0.0
    waiting: float = 0.0
    exchanging: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.busy + self.waiting + self.exchanging


@dataclass
class _Wait:
    """An exchange under way. due: after which inner step of the round it is waited for. arrives: at each node.
    seconds: that it travels."""

    due: float
    arrives: dict[int, float]
    seconds: dict[int, float]


class Clocks:
    """One clock for every node.

    Args:
        connection: what connects them.
        nodes: how many there are.

    Attributes:
        spent: what became of the time of each.
    """

    def __init__(self, connection: Connection, nodes: int):
        self._connection = connection
        self._ready, self._free = [0.0] * nodes, [0.0] * nodes  # of the node, and of its link
        self.spent = [Spent() for _ in range(nodes)]
        self._waits: dict[int, list[_Wait]] = {}
        self._turns = 0

    @property
    def elapsed(self) -> float:
        """Seconds until the last node has done what it began."""
        return max(self._ready)

    @property
    def arrived(self) -> float:
        """Seconds until what travels has arrived as well."""
        return max(self.elapsed, *self._free)

    @property
    def waiting_share(self) -> float:
        """Which part of all nodes' time they wait for others."""
        total = sum(spent.total for spent in self.spent)
        return sum(spent.waiting for spent in self.spent) / total if total else 0.0

    def ready(self, node: int) -> float:
        """When the node has done what it began."""
        return self._ready[node]

    def _compute(self, node: int, seconds: float) -> None:
        self._ready[node] += seconds
        self.spent[node].busy += seconds

    def _wait(self, node: int, until: float, travelling: float = 0.0) -> None:
        """Let a node go on at that time at the earliest. travelling: of the seconds before it."""
        idle = max(until - self._ready[node], 0.0)
        exchanging = min(idle, travelling)
        self.spent[node].exchanging += exchanging
        self.spent[node].waiting += idle - exchanging
        self._ready[node] = max(self._ready[node], until)

    def meet(self) -> None:
        """Nobody goes on before all are there."""
        end = self.elapsed
        for node in range(len(self._ready)):
            self._wait(node, end)

    def rest(self, nodes: Iterable[int]) -> None:
        """Let nodes that have nothing to do go on when all others have done what they began; none of it is spent."""
        end = self.elapsed
        for node in nodes:
            self._ready[node] = end

    def together(self, seconds: float, resting: Collection[int] = ()) -> None:
        """Everybody waits for all that travels, and then for so long; of those that rest none of it is spent."""
        end = self.arrived + seconds
        for node in range(len(self._ready)):
            if node in resting:
                self._ready[node] = end
            self._wait(node, end, seconds)
        self._free = [end] * len(self._free)
        self._waits.clear()

    def round(
        self,
        trainer: int,
        nodes: Sequence[int],
        steps: int,
        step_seconds: Sequence[float],
        first_seconds: Sequence[float],
        sendings: Iterable[Sending],
    ) -> None:
        """A round of a trainer on these nodes.

        Args:
            step_seconds: of each node in an inner step of the round. first_seconds: in the first one, besides.
            sendings: in the order of their steps.
        """
        waits = self._waits.pop(trainer, [])
        for wait in waits:
            wait.due = steps if wait.due == _NEXT else wait.due
        queue, done, in_a_step = list(sendings), 0, dict(zip(nodes, step_seconds, strict=True))
        while done < steps:
            due = [wait.due for wait in waits] + [sending.step for sending in queue[:1]]
            point = max(done, min([*due, steps]))
            for node, first in zip(nodes, first_seconds, strict=True):
                self._compute(node, (point - done) * in_a_step[node] + (first if done == 0 < point else 0.0))
            done = point
            for wait in [wait for wait in waits if wait.due <= point]:
                waits.remove(wait)
                self._await(wait)
            while queue and queue[0].step <= point:
                sending = queue.pop(0)
                wait = self._send(nodes, sending, in_a_step if sending.behind_step else dict.fromkeys(nodes, 0.0))
                if sending.behind == 0:
                    self._await(wait)
                else:
                    wait.due = _NEXT if sending.behind is None else point + sending.behind
                    waits.append(wait)
        self._waits[trainer] = [dataclasses.replace(wait, due=wait.due - steps) for wait in waits]

    def _await(self, wait: _Wait) -> None:
        for node, arrives in wait.arrives.items():
            self._wait(node, arrives, wait.seconds[node])

    def _send(self, nodes: Sequence[int], sending: Sending, begun_before: Mapping[int, float]) -> _Wait:
        """What travels, with so many seconds of every node behind what it has done."""
        senders = nodes if sending.by is None else [nodes[place] for place in sending.by]
        alone = sending.by is not None and sending.behind == 0
        groups: Sequence[Sequence[int]] = [[node] for node in senders] if alone else [senders]
        if sending.through == "groups":
            groups, self._turns = pairs(nodes, self._turns), self._turns + 1
        wait = _Wait(0, {}, {})
        for group in groups:
            begins = max(max(self._ready[node] - begun_before[node], self._free[node]) for node in group)
            seconds = self._seconds(group, sending)
            for node in group:
                wait.arrives[node] = self._free[node] = begins + seconds
                wait.seconds[node] = seconds
        return wait

    def _seconds(self, group: Sequence[int], sending: Sending) -> float:
        link, server = self._connection.link(group), self._connection.server_bits_per_second
        if sending.through != "server":
            return link.seconds(max(sending.sent, sending.received))
        # What comes down depends on all that went up.
        bits = min(link.bits_per_second, server / len(group)) if server else link.bits_per_second
        return Link(bits, link.latency).seconds(sending.sent + sending.received)

    def state_dict(self) -> dict:
        """As JSON values."""
        return {
            "ready": self._ready,
            "free": self._free,
            "spent": [dataclasses.asdict(spent) for spent in self.spent],
            "waits": [
                [trainer, wait.due, list(wait.arrives.items()), list(wait.seconds.items())]
                for trainer, waits in self._waits.items()
                for wait in waits
            ],
            "turns": self._turns,
        }

    def load_state_dict(self, state: Mapping) -> None:
        self._ready, self._free, self._turns = list(state["ready"]), list(state["free"]), state["turns"]
        self.spent = [Spent(**spent) for spent in state["spent"]]
        self._waits = {}
        for trainer, due, arrives, seconds in state["waits"]:
            self._waits.setdefault(trainer, []).append(_Wait(due, dict(arrives), dict(seconds)))
