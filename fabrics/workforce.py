"""The workers of a trainer: who they are, how they come and go with the nodes, and how they are reached.

Workers are numbered from 0; a process has those whose nodes it owns. All processes of a run call these methods together
and in the same order.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from algorithms.across_workers import GradientMoments, gradient_moments
from algorithms.distribution import HandOver, StateBytes, hand_overs, merged_bytes, redistributed_bytes
from algorithms.exchanges import Traffic
from algorithms.outer_step import DISTRIBUTED_ALGORITHMS
from fabrics.inner_optimizers import INNER_OPTIMIZERS
from fabrics.measures import measures
from fabrics.worker import Node, Worker
from fabrics.working_model import WorkingModel
from utils.compression import COMMUNICATION_DTYPES, PLAIN, Encoding
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
        trainer_tensors: how many flat tensors a trainer has: parameters, and an outer velocity if there is one.
        given_tensors: how many of them it gives in a merge; a velocity that begins anew is not sent.
        parameter_bytes: of one model, without the gaps of the flat tensors. sizes: of the state, likewise.
    """

    def __init__(self, config: Config, working: Mapping[torch.device, WorkingModel], processes: Processes):
        self.nodes: tuple[Node, ...] = ()
        self.local: dict[int, Worker] = {}
        self.lost: frozenset[int] = frozenset()
        self._config, self._working, self._processes = config, working, processes
        self._encoding = COMMUNICATION_DTYPES[config.communication_dtype]
        first, algorithm = next(iter(working.values())), DISTRIBUTED_ALGORITHMS[config.distributed_algo]
        self._like = first.parameters.data
        self.parameter_count = first.parameter_count
        self.trainer_tensors = 1 + algorithm.has_velocity
        self.given_tensors = self.trainer_tensors if config.outer_momentum_at_merge == "average" else 1
        flat = torch.empty(self.parameter_count, dtype=self._like.dtype, device="meta")
        moments = INNER_OPTIMIZERS[algorithm.inner_optimizer].state(flat)
        self.parameter_bytes = flat.nbytes
        self.sizes = StateBytes(
            trainer=self.trainer_tensors * flat.nbytes,
            worker=sum(tensor.nbytes for tensor in moments.values()),
            error=self._encoding.keeps_error * flat.nbytes,
        )
        self._group: Workers = LocalWorkers(0)

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def encoding(self) -> Encoding:
        """How pseudo-gradients travel; as they are where there is one worker, which sends nothing."""
        return self._encoding if len(self) > 1 else PLAIN

    def assign(
        self, nodes: tuple[Node, ...], tensors: list[torch.Tensor] | None
    ) -> tuple[list[torch.Tensor] | None, int]:
        """Let these nodes work from now on.

        Workers keep their state as far as there are nodes for them, wherever those are; what a new one, and one whose
        state is lost, begins with says `new_worker_moments`. Surplus workers end.

        Args:
            tensors: of the trainer, flat; None in a process without a worker.

        Returns:
            The trainer's tensors in the processes that own the new nodes, and the bytes that arrive at nodes.
        """
        old, lost = self.nodes, self.lost
        self.nodes, self.lost = nodes, frozenset()
        before, after = [node.id for node in old], [node.id for node in nodes]
        if before == after and not lost:
            for index, worker in self.local.items():
                worker.node = nodes[index]
            return tensors, 0
        self._group = self._processes.workers(after)
        if old:
            tensors = self.provide(tensors, old, nodes, self.trainer_tensors)
        previous, self.local = self.local, {}
        for index, node in enumerate(nodes):
            if self._processes.owns(node.id):
                here = None if index in lost else previous.get(index)
                if here is None or here.node.device != node.device:
                    here = Worker(node, self._working[node.device], self._config)
                here.node = node
                self.local[index] = here
        moves = hand_overs(before, after, lost, self._config.new_worker_moments == "copy")
        for move in moves:
            self._hand_over(move, previous.get(move.worker))
        return tensors, redistributed_bytes(before, after, moves, self.sizes)

    def _hand_over(self, move: HandOver, source: Worker | None) -> None:
        """Copy a worker's state to others, wherever all are. source: None, where it is not in this process."""
        takers = [self.local[index] for index in move.takers if index in self.local]

        def state(worker: Worker) -> dict[str, torch.Tensor]:
            return {name: tensor for name, tensor in worker.state_dict().items() if move.whole or name != "error"}

        held = None if source is None else list(state(source).values())
        received = self._processes.provide(
            held, [move.source], list(move.takers.values()), lambda: list(state(takers[0]).values())
        )
        for taker in takers:
            if taker is not source:
                taker.load_state_dict(taker.state_dict() | dict(zip(state(taker), received, strict=True)))

    def provide(
        self,
        tensors: list[torch.Tensor] | None,
        holders: Sequence[Node],
        takers: Sequence[Node],
        count: int,
        into: list[torch.Tensor] | None = None,
    ) -> list[torch.Tensor] | None:
        """So many flat tensors of the owners of some nodes, for those of others; None elsewhere.

        into: what is overwritten with them where they are not; None: new ones.
        """
        return self._processes.provide(
            tensors,
            [node.id for node in holders],
            [node.id for node in takers],
            lambda: [torch.empty_like(self._like) for _ in range(count)] if into is None else into,
        )

    def mean(
        self,
        tensor_of: Callable[[int, Worker], torch.Tensor | None],
        like: torch.Tensor,
        encoding: Encoding = PLAIN,
        weights: Sequence[float] | None = None,
    ) -> tuple[torch.Tensor, int]:
        """Mean over all workers, wherever they are, and how many are in it.

        Args:
            tensor_of: from a worker of this process to its tensor, encoded; None leaves it out. It is asked once per
                worker, one after the other, and the next may overwrite the tensor.
            like: shape, type and device of the mean.
            weights: of all workers, by number; None: equal ones.
        """
        tensors: Iterable = ((index, tensor_of(index, self.local[index])) for index in self._group.local_workers)
        return self._group.mean(tensors, like, encoding, weights)

    def round_bytes(self, workers: int, tested: bool) -> int:
        """What so many workers of the trainer send in a round; tested: what a batch test needs of them as well."""
        numbers, dtype = measures(self._config, workers, tested).numbers(self.parameter_count), self._like.dtype
        sent = self._encoding.reduction_bytes(workers, self.parameter_count, dtype)
        return sent + PLAIN.reduction_bytes(workers, numbers, dtype)

    def traffic(self, tested: Callable[[int], bool]) -> Traffic:
        """Bytes of the exchanges of such a trainer; tested: whether a batch test follows the round of that number."""
        copied = self.sizes.worker if self._config.new_worker_moments == "copy" else 0
        return Traffic(
            synchronised=lambda workers, number: self.round_bytes(workers, tested(number)),
            merged=self.given_tensors * self.parameter_bytes,
            redistributed=self.sizes.trainer + copied,
        )

    def gradient_moments(
        self, vectors: Mapping[int, torch.Tensor | None], like: torch.Tensor
    ) -> dict[int, GradientMoments]:
        """What each vector of a local worker says beside the mean over all workers'; None is left out.

        Args:
            vectors: flat, by worker of this process.
            like: shape, type and device of the mean.
        """
        mean, _ = self.mean(lambda index, _: None if vectors[index] is None else PLAIN.encode(vectors[index]), like)
        return {
            index: gradient_moments(vector.to(mean.device), mean)
            for index, vector in vectors.items()
            if vector is not None
        }

    def state_dict(self) -> dict:
        """The workers' nodes and whose state is lost, as plain values; each worker has tensors of its own."""
        return {"nodes": [node.id for node in self.nodes], "lost": sorted(self.lost)}

    def load_state_dict(self, state: Mapping, read: Callable[[int, str], torch.Tensor]) -> None:
        """Give as many workers as there were their state back; others begin with that of the first healthy one.

        Args:
            read: from a worker's number and the name of a tensor to that tensor.
        """
        workers, lost = len(state["nodes"]), frozenset(state["lost"])
        healthy = [index for index in range(workers) if index not in lost]
        self.lost = lost & set(range(len(self.nodes))) if healthy else frozenset()
        for index, worker in self.local.items():
            source = index if index < workers else min(healthy, default=None)
            if source is not None and source not in lost:
                own = worker.state_dict()
                loaded = {name: read(source, name) for name in own if name != "error" or source == index}
                worker.load_state_dict(own | loaded)


@torch.no_grad()
def merge(given: Sequence[tuple[Workforce, list[torch.Tensor] | None]], weights: Sequence[float], count: int) -> int:
    """Make the first trainer's flat tensors, in place, the weighted average of all trainers'.

    The process of its first worker makes the averages, and those of its other workers have them from there.

    Args:
        given: the workers and the tensors of each trainer; None in a process without one of its workers.
        weights: of each; they sum to 1.
        count: tensors of each.

    Returns:
        The bytes that arrive at nodes.
    """
    (workforce, average), others = given[0], given[1:]
    first = workforce.nodes[:1]
    if 0 in workforce.local:
        for tensor in average:
            tensor.mul_(weights[0])
    for (other, tensors), weight in zip(others, weights[1:], strict=True):
        theirs = other.provide(tensors, other.nodes, first, count)
        if 0 in workforce.local:
            for tensor, their in zip(average, theirs, strict=True):
                tensor.add_(their, alpha=weight)
    workforce.provide(average, first, workforce.nodes, count, into=average)
    nodes = [[node.id for node in trainer.nodes] for trainer, _ in given]
    return merged_bytes(nodes[0], nodes[1:], count * workforce.parameter_bytes)
