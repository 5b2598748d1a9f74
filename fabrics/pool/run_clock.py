"""The virtual clock of a run: its rounds, merges and moving nodes on the clocks of all nodes.

Nodes compute side by side and wait for the messages of their trainers' workers (`algorithms.nodes.virtual_clock`). With
`node_speeds` an example takes 1 / speed seconds, and an exchange the time of the configured link, so that times are the
same in every run. Without `node_speeds` inner steps take their measured time, and exchanges no time.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from algorithms.nodes.traffic import Event, Link, merge_exchange, redistribution_exchange
from algorithms.nodes.virtual_clock import Clocks
from utils.config.schema import Config


class Computing(NamedTuple):
    """The work of a worker in a round: its node, its examples, and the measured seconds that they took."""

    node: int
    examples: int
    seconds: float = 0.0


class RunClock:
    """The clocks of a run with `nodes` nodes.

    Every round is `begin_round`, `run` for each trainer, `end_round`, and `merge` after some.
    """

    def __init__(self, config: Config, nodes: int):
        self._speeds = config.node_speeds
        link = Link.parse(config.link) if self._speeds and config.link else Link()
        self.clocks = Clocks(link, nodes)
        self._nodes: dict[int, list[int]] = {}  # of each trainer in the last round
        self._redistributed_bytes = 0  # in all
        self._computing: Mapping[int, Mapping[int, Computing]] = {}
        self._idle: set[int] = set()
        self._before = 0.0  # seconds on the clocks of other nodes, with which the run began

    @property
    def elapsed(self) -> float:
        """Seconds until the last node is ready."""
        return self._before + self.clocks.elapsed

    def begin_round(self, computing: Mapping[int, Mapping[int, Computing]], redistributed_bytes: int) -> None:
        """Begin a round and move nodes between trainers.

        Args:
            computing: the work of each trainer's workers.
            redistributed_bytes: since the start of the run.
        """
        nodes = {trainer: [work.node for work in workers.values()] for trainer, workers in computing.items()}
        self._computing = computing
        self._idle = set(range(len(self.clocks.spent))) - {node for own in nodes.values() for node in own}
        moved = redistributed_bytes - self._redistributed_bytes
        if moved:
            came = sum(len({*own} - {*self._nodes.get(trainer, own)}) for trainer, own in nodes.items())
            self.clocks.exchange_all(redistribution_exchange(came, moved).link, self._idle)
        self._redistributed_bytes = redistributed_bytes
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

    def merge(self, others: int, representative: int, sent: float) -> None:
        """Let all nodes wait for a merge of a trainer with this number of others."""
        exchange = merge_exchange(others, len(self._nodes[representative]), sent)
        self.clocks.exchange_all(exchange.link, self._idle)

    def state_dict(self) -> dict:
        return {
            "before": self._before,
            "elapsed": self.elapsed,
            "clocks": self.clocks.state_dict(),
            "nodes": list(self._nodes.items()),
            "redistributed_bytes": self._redistributed_bytes,
        }

    def load_state_dict(self, state: Mapping) -> None:
        """Restore the clocks; those of another number of nodes end, and new ones begin at that time."""
        self._redistributed_bytes = state["redistributed_bytes"]
        if len(state["clocks"]["ready"]) != len(self.clocks.spent):
            self._before = state["elapsed"]
            return
        self._before = state["before"]
        self.clocks.load_state_dict(state["clocks"])
        self._nodes = dict(state["nodes"])
