"""The workers of a trainer: who they are, how they come and go with the nodes, and how they are reached.

Workers are numbered from 0; a process has those whose nodes it owns. All processes of a run call these methods together
and in the same order.
"""

from collections.abc import Callable, Iterable, Mapping

import torch

from algorithms.gradient_statistics import GradientMoments, gradient_moments
from fabrics.worker import Node, Worker
from fabrics.working_model import WorkingModel
from utils.compression import PLAIN, Encoding
from utils.config import Config
from utils.distributed import LocalWorkers, Processes, Workers


class Workforce:
    """The workers of one trainer.

    Args:
        config: the run's configuration.
        working: the working model of each device of this process, the first of which keeps the trainer's tensors.
        processes: those of the run.

    Attributes:
        nodes: of all workers, in order.
        local: the workers of this process, by number.
        lost: workers whose state is lost, until nodes are assigned again.
    """

    def __init__(self, config: Config, working: Mapping[torch.device, WorkingModel], processes: Processes):
        self.nodes: tuple[Node, ...] = ()
        self.local: dict[int, Worker] = {}
        self.lost: frozenset[int] = frozenset()
        self._config, self._working, self._processes = config, working, processes
        self._like = next(iter(working.values())).parameters.data
        self._group: Workers = LocalWorkers(0)

    def __len__(self) -> int:
        return len(self.nodes)

    def assign(self, nodes: tuple[Node, ...]) -> Callable[[torch.Tensor | None], torch.Tensor | None] | None:
        """Let these nodes work from now on.

        Workers keep their state as far as there are nodes for them, wherever those are; a new one, and one whose state
        is lost, starts with a copy of that of the first worker that has one. Surplus workers end.

        Returns:
            What hands a tensor of the trainer over from the old nodes to the new ones; None where nothing moves.
        """
        old, lost = self.nodes, self.lost
        self.nodes, self.lost = nodes, frozenset()
        if [node.id for node in nodes] == [node.id for node in old] and not lost:
            for index, worker in self.local.items():
                worker.node = nodes[index]
            return None
        self._group = self._processes.workers([node.id for node in nodes])
        before, self.local = self.local, {}
        healthy = [index for index in range(len(old)) if index not in lost]
        for index, node in enumerate(nodes):
            source = index if index in healthy else healthy[0] if healthy else None
            stays = source == index and self._processes.owns(node.id) and index in before
            if stays and before[index].node.device == node.device:
                self.local[index] = before[index]
                self.local[index].node = node
                continue
            worker = Worker(node, self._working[node.device], self._config) if self._processes.owns(node.id) else None
            if source is not None:
                self._hand_over(before.get(source), worker, old[source], node, with_error=source == index)
            if worker is not None:
                self.local[index] = worker
        return (lambda tensor: self._provide(tensor, old, nodes)) if old else None

    def _hand_over(self, source: Worker | None, target: Worker | None, old: Node, new: Node, with_error: bool) -> None:
        """Copy a worker's state to another, wherever both are: None is one that is not in this process."""
        if not (self._processes.owns(old.id) or self._processes.owns(new.id)):
            return
        states = (source or target).state_dict()
        received = {
            name: self._provide(tensor if source is not None else None, (old,), (new,), tensor)
            for name, tensor in states.items()
            if with_error or name != "error"
        }
        if target is not None:
            target.load_state_dict(target.state_dict() | received)

    def _provide(
        self,
        tensor: torch.Tensor | None,
        old: tuple[Node, ...],
        new: tuple[Node, ...],
        like: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        like = self._like if like is None else like
        return self._processes.provide(tensor, [node.id for node in old], [node.id for node in new], like)

    def provide(self, tensor: torch.Tensor | None, to: tuple[Node, ...]) -> torch.Tensor | None:
        """A tensor that the workers' processes have, in those that own the nodes `to`; None elsewhere."""
        return self._provide(tensor, self.nodes, to)

    def mean(
        self,
        tensor_of: Callable[[int, Worker], torch.Tensor | None],
        like: torch.Tensor,
        encoding: Encoding = PLAIN,
    ) -> tuple[torch.Tensor, int]:
        """Mean over all workers, wherever they are, and how many are in it.

        Args:
            tensor_of: from a worker of this process to its tensor, encoded; None leaves it out. It is asked once per
                worker, one after the other, and the next may overwrite the tensor.
            like: shape, type and device of the mean.
        """
        tensors: Iterable = ((index, tensor_of(index, self.local[index])) for index in self._group.local_workers)
        return self._group.mean(tensors, like, encoding)

    def gradient_moments(
        self, gradients: Mapping[int, torch.Tensor | None], like: torch.Tensor
    ) -> dict[int, GradientMoments]:
        """What each gradient of a local worker says beside the mean over all workers'; None is left out.

        Args:
            gradients: flat, by worker of this process.
            like: shape, type and device of the mean.
        """
        mean, _ = self.mean(lambda index, _: None if gradients[index] is None else PLAIN.encode(gradients[index]), like)
        return {
            index: gradient_moments(gradient.to(mean.device), mean)
            for index, gradient in gradients.items()
            if gradient is not None
        }

    def state_dict(self) -> dict:
        """How many workers there are and whose state is lost, as plain values; each has tensors of its own."""
        return {"workers": len(self.nodes), "lost": sorted(self.lost)}

    def load_state_dict(self, state: Mapping, read: Callable[[int, str], torch.Tensor]) -> None:
        """Give as many workers as there were their state back; others begin as new workers do.

        Args:
            read: from a worker's number and the name of a tensor to that tensor.
        """
        healthy = [index for index in range(state["workers"]) if index not in state["lost"]]
        for index, worker in self.local.items() if healthy else ():
            source = index if index in healthy else healthy[0]
            own = worker.state_dict()
            loaded = {name: read(source, name) for name in own if name != "error" or source == index}
            worker.load_state_dict(own | loaded)
