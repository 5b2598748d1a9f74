"""A virtual clock for every node of a run: nodes compute side by side and wait for what they send each other.

A node's link carries one exchange at a time, while the node computes. Each exchange says which nodes wait for it, and
after how many further inner steps. Nodes without a common exchange do not affect each other.
"""

import dataclasses
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from algorithms.nodes.traffic import Event, Link, busiest_share


def joined(events: Iterable[Event]) -> list[Event]:
    """Join events whose messages travel together into one, and sort them by step."""
    found: dict[tuple, Event] = {}
    for event in events:
        key = (event.step, event.behind, event.through, event.by)
        if key in found:
            before = found[key]
            event = dataclasses.replace(
                before, sent=before.sent + event.sent, received=before.received + event.received
            )
        found[key] = event
    return sorted(found.values(), key=lambda event: event.step)


@dataclass
class NodeTime:
    """Seconds of a node.

    Attributes:
        waiting: it waits for other nodes, or for a link that is in use.
        exchanging: it waits only for its own messages to travel.
    """

    busy: float = 0.0
    waiting: float = 0.0
    exchanging: float = 0.0

    @property
    def total(self) -> float:
        return self.busy + self.waiting + self.exchanging


@dataclass
class _Exchange:
    """An exchange under way. due: the inner step of the round after which its nodes wait for it."""

    due: float
    arrives: dict[int, float]
    seconds: float


class Clocks:
    """One clock for every node."""

    def __init__(self, link: Link, nodes: int):
        self.link = link
        self.spent = [NodeTime() for _ in range(nodes)]
        self._ready = [0.0] * nodes  # when a node has done all that it began
        self._link_free = [0.0] * nodes  # when a node's link is free
        self._under_way: dict[int, list[_Exchange]] = {}  # by trainer
        self._turns = 0

    @property
    def elapsed(self) -> float:
        """Seconds until the last node is ready."""
        return max(self._ready)

    @property
    def waiting_share(self) -> float:
        """The share of the working nodes' time in which they wait for others."""
        total = sum(spent.total for spent in self.spent)
        return sum(spent.waiting for spent in self.spent) / total if total else 0.0

    @property
    def idle_share(self) -> float:
        """The share of the time until the last node is ready in which nodes have no work."""
        everything = len(self._ready) * self.elapsed
        return max(0.0, 1.0 - sum(spent.total for spent in self.spent) / everything) if everything else 0.0

    def ready(self, node: int) -> float:
        """Return the time at which the node has done all that it began."""
        return self._ready[node]

    def barrier(self) -> None:
        """Let all nodes wait for the last one."""
        end = self.elapsed
        for node in range(len(self._ready)):
            self._wait(node, end)

    def skip(self, nodes: Iterable[int]) -> None:
        """Advance idle nodes to when all others are ready, without counting it as their time."""
        end = self.elapsed
        for node in nodes:
            self._ready[node] = end

    def exchange_all(self, link_bytes: float, idle: Collection[int] = ()) -> None:
        """Let all nodes wait for every message under way, and then for an exchange; idle nodes count none of it."""
        seconds = self.link.seconds(link_bytes)
        end = max(self.elapsed, *self._link_free) + seconds
        for node in range(len(self._ready)):
            if node in idle:
                self._ready[node] = end
            self._wait(node, end, seconds)
        self._link_free = [end] * len(self._link_free)
        self._under_way.clear()

    def receive(self, trainer: int, nodes: Collection[int]) -> None:
        """Let these nodes of a trainer wait for its messages under way, which end for its other nodes."""
        for exchange in self._under_way.pop(trainer, []):
            for node in nodes:
                self._wait(node, exchange.arrives.get(node, 0.0), exchange.seconds)

    def round(
        self,
        trainer: int,
        nodes: Mapping[int, int],
        steps: int,
        step_seconds: Sequence[float],
        events: Iterable[Event],
    ) -> None:
        """Advance the nodes of a trainer through a round; nodes: number of a worker -> its node."""
        under_way = self._under_way.pop(trainer, [])
        queue = joined(events)
        done = 0
        while done < steps:
            times = [exchange.due for exchange in under_way] + [event.step for event in queue[:1]]
            next_event = max(done, min([*times, steps]))
            for node, each in zip(nodes.values(), step_seconds, strict=True):
                seconds = (next_event - done) * each
                self._ready[node] += seconds
                self.spent[node].busy += seconds
            done = next_event
            for exchange in [exchange for exchange in under_way if exchange.due <= done]:
                under_way.remove(exchange)
                self._wait_for(exchange)
            while queue and queue[0].step <= done:
                event = queue.pop(0)
                exchange = self._send(nodes, event)
                if event.behind == 0:
                    self._wait_for(exchange)
                else:
                    exchange.due = done + event.behind
                    under_way.append(exchange)
        self._under_way[trainer] = [dataclasses.replace(exchange, due=exchange.due - steps) for exchange in under_way]

    def _wait(self, node: int, until: float, travelling: float = 0.0) -> None:
        """Let a node wait until this time; up to `travelling` seconds of it are its own exchange."""
        idle = max(until - self._ready[node], 0.0)
        exchanging = min(idle, travelling)
        self.spent[node].exchanging += exchanging
        self.spent[node].waiting += idle - exchanging
        self._ready[node] = max(self._ready[node], until)

    def _wait_for(self, exchange: _Exchange) -> None:
        for node, arrives in exchange.arrives.items():
            self._wait(node, arrives, exchange.seconds)

    def _send(self, nodes: Mapping[int, int], event: Event) -> _Exchange:
        """Start an exchange on the links of the senders. Where only some workers send, each waits only for itself."""
        recipients = None
        senders = [node for worker, node in nodes.items() if event.by is None or worker in event.by]
        if event.through.startswith("groups of "):
            size = min(int(event.through.removeprefix("groups of ")), len(senders))
            recipients = size - 1
            order = random.Random(self._turns).sample(senders, len(senders))
            groups = [order[start : start + size] for start in range(0, len(order), size)]
            groups = [group for group in groups if len(group) > 1]  # a single node rests
            self._turns += 1
        elif event.by is not None and event.behind == 0:
            groups = [[node] for node in senders]
        else:
            groups = [senders]
        # What comes down from a server depends on all that went up.
        through_server = event.through == "server"
        mean_bytes = event.sent + event.received if through_server else max(event.sent, event.received)
        link_bytes = mean_bytes * len(nodes) * busiest_share(max(len(senders), 1), recipients)
        exchange = _Exchange(0, {}, self.link.seconds(link_bytes))
        for group in groups:
            share = 1.0 if recipients is None else (len(group) - 1) / recipients
            seconds = self.link.seconds(link_bytes * share)
            begins = max((max(self._ready[node], self._link_free[node]) for node in group), default=0.0)
            for node in group:
                self._link_free[node] = begins + seconds
                exchange.arrives[node] = begins + seconds
        return exchange

    def state_dict(self) -> dict:
        return {
            "ready": self._ready,
            "link_free": self._link_free,
            "spent": [dataclasses.asdict(spent) for spent in self.spent],
            "under_way": [
                [trainer, exchange.due, list(exchange.arrives.items()), exchange.seconds]
                for trainer, exchanges in self._under_way.items()
                for exchange in exchanges
            ],
            "turns": self._turns,
        }

    def load_state_dict(self, state: Mapping) -> None:
        self._ready = list(state["ready"])
        self._link_free = list(state["link_free"])
        self._turns = state["turns"]
        self.spent = [NodeTime(**spent) for spent in state["spent"]]
        self._under_way = {}
        for trainer, due, arrives, seconds in state["under_way"]:
            self._under_way.setdefault(trainer, []).append(_Exchange(due, dict(arrives), seconds))


# The clock of a run


class Computing(NamedTuple):
    """The work of a worker in a round: its node, its examples, and the seconds that they took."""

    node: int
    examples: int
    seconds: float = 0.0


class RunClock:
    """The clocks of the nodes of a run: its rounds, merges and moving nodes.

    Every round is `begin_round`, `run` for each trainer, `end_round`, and `merge` after some.

    Args:
        speeds: examples per second of every node. An example takes 1 / speed seconds, so that times are the same in
            every run. None: inner steps take the seconds that `begin_round` is given.
    """

    def __init__(self, nodes: int, speeds: Sequence[float] | None, link: Link):
        self._speeds = speeds
        self.clocks = Clocks(link, nodes)
        self._nodes: dict[int, list[int]] = {}  # of each trainer in the last round
        self._redistributed = 0.0  # bytes through the busiest link, in all
        self._computing: Mapping[int, Mapping[int, Computing]] = {}
        self._idle: set[int] = set()
        self._before = 0.0  # seconds on the clocks of other nodes, with which the run began

    @property
    def elapsed(self) -> float:
        """Seconds until the last node is ready."""
        return self._before + self.clocks.elapsed

    def begin_round(self, computing: Mapping[int, Mapping[int, Computing]], redistributed: float) -> None:
        """Begin a round and move nodes between trainers.

        Args:
            computing: the work of each trainer's workers.
            redistributed: bytes through the busiest node's link in redistributions since the start of the run.
        """
        nodes = {trainer: [work.node for work in workers.values()] for trainer, workers in computing.items()}
        self._computing = computing
        self._idle = set(range(len(self.clocks.spent))) - {node for own in nodes.values() for node in own}
        moved = redistributed - self._redistributed
        if moved:
            self.clocks.exchange_all(moved, self._idle)
        for trainer, own in nodes.items():
            if {*self._nodes.get(trainer, own)} - {*own}:  # after workers have left, the others start together
                self.clocks.receive(trainer, own)
        self._redistributed = redistributed
        self._nodes = nodes

    def run(self, trainer: int, inner_steps: int, events: Iterable[Event]) -> None:
        """Advance a trainer's nodes by its round."""
        workers = self._computing[trainer]
        seconds = [
            work.seconds if self._speeds is None else work.examples / self._speeds[work.node]
            for work in workers.values()
        ]
        nodes = {worker: work.node for worker, work in workers.items()}
        self.clocks.round(trainer, nodes, inner_steps, [each / inner_steps for each in seconds], events)

    def end_round(self) -> None:
        """Let trainers wait for each other."""
        self.clocks.skip(self._idle)
        if len(self._nodes) > 1:
            self.clocks.barrier()

    def merge(self, link_bytes: float) -> None:
        """Let all nodes wait for a merge; link_bytes: through the busiest node's link."""
        self.clocks.exchange_all(link_bytes, self._idle)

    def state_dict(self) -> dict:
        return {
            "before": self._before,
            "elapsed": self.elapsed,
            "clocks": self.clocks.state_dict(),
            "nodes": list(self._nodes.items()),
            "redistributed": self._redistributed,
        }

    def load_state_dict(self, state: Mapping) -> None:
        """Restore the clocks; those of another number of nodes end, and new ones begin at that time."""
        self._redistributed = state["redistributed"]
        if len(state["clocks"]["ready"]) != len(self.clocks.spent):
            self._before = state["elapsed"]
            return
        self._before = state["before"]
        self.clocks.load_state_dict(state["clocks"])
        self._nodes = dict(state["nodes"])
