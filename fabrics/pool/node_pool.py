"""The nodes of a run: their max batches and speeds, and which of them work."""

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence

import torch

from fabrics.training.worker import Node, WorkerRound
from utils.config.schema import Config, ConfigError

# A measured speed is that of this many rounds, each without its first inner step.
_MEASURED_ROUNDS = 3


class NodePool:
    """The nodes of a run, the same in every process."""

    def __init__(self, devices: Sequence[torch.device], config: Config):
        count = len(devices)
        speeds = config.node_speeds or [None] * count
        if len(speeds) != count:
            raise ConfigError(f"node_speeds: must be one number for each of the run's {count} nodes, got {len(speeds)}")
        self._schedule = config.node_schedule
        most = max((nodes for _, nodes in self._schedule or ()), default=0)
        if most > count:
            raise ConfigError(
                f"node_schedule: must have at most the {count} nodes that there are (nodes_per_gpu "
                f"{config.nodes_per_gpu} on every device), got {most:.0f}"
            )
        self._max_batch_size = config.max_batch_size
        max_batch = config.max_batch_size or 1  # one that is not given is measured later
        self.nodes = tuple(
            Node(number, device, max_batch, speed)
            for number, (device, speed) in enumerate(zip(devices, speeds, strict=True))
        )
        self._measures_speeds = config.balance != "equal" and config.node_speeds is None
        self._measured: dict[int, deque[tuple[float, int]]] = {}  # by node: seconds and examples of each round

    def working(self, progress: float) -> tuple[Node, ...]:
        """The nodes that work at this progress of the run, 0 to 1: the first ones, as many as scheduled."""
        if self._schedule is None:
            return self.nodes
        # The first entry of the schedule is (0, nodes). The tolerance is for the rounding of sums of seconds.
        count = next(nodes for share, nodes in reversed(self._schedule) if share <= progress + 1e-9)
        return self.nodes[: int(count)]

    def fastest(self, progress: float) -> tuple[Node, ...]:
        """The nodes that work at this progress of a run with `node_speeds`, the fastest first."""
        return tuple(sorted(self.working(progress), key=lambda node: -node.speed))

    def update(self, workers: Sequence[WorkerRound]) -> None:
        """Adopt what a round tells about its nodes: smaller max batches and measured speeds."""
        nodes = list(self.nodes)
        for worker in workers:
            node = nodes[worker.node]
            if worker.max_batch < node.max_batch:
                nodes[worker.node] = dataclasses.replace(node, max_batch=worker.max_batch)
            if worker.steady_examples:
                rounds = self._measured.setdefault(worker.node, deque(maxlen=_MEASURED_ROUNDS))
                rounds.append((worker.steady_seconds, worker.steady_examples))
        self.nodes = tuple(nodes)
        self._adopt_speeds()

    def _adopt_speeds(self) -> None:
        if not self._measures_speeds:
            return
        nodes = list(self.nodes)
        for node, rounds in self._measured.items():
            speed = sum(examples for _, examples in rounds) / sum(seconds for seconds, _ in rounds)
            nodes[node] = dataclasses.replace(nodes[node], speed=speed)
        self.nodes = tuple(nodes)

    def set_max_batches(self, max_batches: Mapping[int, int]) -> None:
        self.nodes = tuple(dataclasses.replace(node, max_batch=max_batches[node.id]) for node in self.nodes)

    def state_dict(self) -> dict:
        """Return the max batches, the key that began them, and measured speeds as JSON values."""
        measured = {str(node): list(map(list, rounds)) for node, rounds in self._measured.items()}
        return {
            "max_batches": [node.max_batch for node in self.nodes],
            "max_batch_size": self._max_batch_size,
            "measured": measured,
        }

    def load_state_dict(self, state: Mapping) -> None:
        """Continue from a state of as many nodes; the state of another number of nodes is ignored.

        A node adopts a saved max batch that is smaller than its own, because only the same micro-batches give the same
        bits. It keeps its own if that is smaller, for lack of memory, or if `max_batch_size` has changed.
        """
        saved = state["max_batches"]
        if len(saved) != len(self.nodes):
            return
        if state["max_batch_size"] == self._max_batch_size:
            self.set_max_batches({node.id: min(node.max_batch, saved[node.id]) for node in self.nodes})
        for node, rounds in state["measured"].items():
            self._measured[int(node)] = deque(map(tuple, rounds), maxlen=_MEASURED_ROUNDS)
        self._adopt_speeds()
