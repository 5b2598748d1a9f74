"""The workers of a trainer: who they are, how they come and go with the nodes, and how they are reached.

Workers are numbered from 0; a process has those whose nodes it owns. All processes of a run call these methods together
and in the same order.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from algorithms.nodes.async_clock import in_steps
from algorithms.nodes.distribution import HandOver, StateBytes, hand_overs
from algorithms.nodes.traffic import Link, Transfer, merge_transfers, redistribution_transfers
from algorithms.synchronisation.encodings.encoding import COMMUNICATION_DTYPES, PLAIN, Encoding
from fabrics.training.flat_model import FlatModel
from fabrics.training.method_config import method_of, round_bytes
from fabrics.training.offload import Home
from fabrics.training.optimizers import INNER_OPTIMIZERS, inner_optimizer_name
from fabrics.training.work_split import Turns
from fabrics.training.worker import COPY, Node, Worker, personal_tensors
from utils.config.schema import Config
from utils.distributed.processes import Processes
from utils.distributed.reductions import Mean, Messages, Workers


class WorkerGroup:
    """The workers of one trainer.

    Args:
        config: the run's configuration.
        models: the flat model of each device of this process, the first of which keeps the trainer's tensors.
        processes: those of the run.

    Attributes:
        nodes: of all workers, in order.
        local: the workers of this process, by number.
        lost: workers whose state is lost, until nodes are assigned again.
        method: how they come together. fewer_steps: whether those on slower nodes make fewer inner steps of a round.
        trainer_tensors: what a trainer has, by name, on no device: parameters, and what the method keeps of it.
        given_tensors: the names of those that it gives in a merge; what begins anew is not sent.
        parameter_bytes: of one model, without the gaps of the flat tensors. sizes: of the state, likewise.
    """

    def __init__(self, config: Config, models: Mapping[torch.device, FlatModel], processes: Processes):
        self.nodes: tuple[Node, ...] = ()
        self.local: dict[int, Worker] = {}
        self.lost: frozenset[int] = frozenset()
        self._config, self._models, self._processes = config, models, processes
        self._encoding = COMMUNICATION_DTYPES[config.communication_dtype]
        first = self.first_model = next(iter(models.values()))
        method = self.method = method_of(config, first)
        by_itself = config.balance == "equal" and method.capabilities.fewer_steps
        self.fewer_steps = config.balance == "steps" or by_itself
        self._home = Home.chosen("outer_state" in config.offload, first.device)
        self._like = first.parameters.data
        like = self._like.to("meta")
        self.parameter_count = first.parameter_count
        kept = ("parameters", *method.state)
        self.given_tensors = tuple(name for name in kept if name not in method.capabilities.copies)
        kind, self.trainer_tensors = inner_optimizer_name(config), dict.fromkeys(kept, like)
        shapes = {} if kind is None else INNER_OPTIMIZERS[kind].state_shapes(first)
        self._trainer_moments: tuple[str, ...] = ()
        if method.capabilities.exchanges_gradients and kind is not None:
            state = INNER_OPTIMIZERS[kind].state(first, "meta")
            self.trainer_tensors |= state
            self._trainer_moments = tuple(state)
        self.parameter_bytes, moments = self.parameter_count * like.itemsize, sum(t.nbytes for t in shapes.values())
        together = method.capabilities.exchanges_gradients
        self.sizes = StateBytes(
            trainer=len(kept) * self.parameter_bytes + moments * together,
            worker=moments * (not together),
            personal=len(personal_tensors(config, method)) * self.parameter_bytes,
        )
        self._group = Workers()

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def encoding(self) -> Encoding:
        """How pseudo-gradients travel; as they are where there is one worker, which sends nothing."""
        return self._encoding if len(self) > 1 else PLAIN

    @property
    def dtype(self) -> torch.dtype:
        """Of all flat tensors."""
        return self._like.dtype

    def changes(self, nodes: Sequence[Node | int]) -> bool:
        """Whether `assign` with these nodes lets workers begin with the trainer's parameters, or lets some go."""
        return bool(self.lost) or len(nodes) != len(self.nodes) > 0

    def first_tensors(self, parameters: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a trainer with these parameters has at first, by name; they become its own, where they live here."""
        likes = self.trainer_tensors.items()
        tensors = {name: self._home.zeros(like) for name, like in likes if name != "parameters"}
        tensors = {"parameters": self._home.taken_in(parameters), **tensors}
        self.begin(tensors, self.method.capabilities.copies)
        return tensors

    def begin(self, tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
        """Let these of a trainer's tensors be as at first, in place: copies of its parameters, or zeros."""
        for name in names:
            if name in self.method.capabilities.copies:
                tensors[name].copy_(tensors["parameters"])
            else:
                tensors[name].zero_()

    def moves(self, nodes: Sequence[int]) -> tuple[list[HandOver], list[Transfer]]:
        """What workers need of each other's state if these nodes work from now on, and what arrives at them."""
        before = [node.id for node in self.nodes]
        found = hand_overs(before, nodes, self.lost)
        return found, redistribution_transfers(before, nodes, found, self.sizes)

    def assign(
        self, nodes: tuple[Node, ...], tensors: dict[str, torch.Tensor] | None
    ) -> tuple[dict[str, torch.Tensor] | None, list[Transfer]]:
        """Let these nodes work from now on.

        Workers keep their state as far as there are nodes for them, wherever those are. A new worker, and one whose
        state is lost, begins with the optimizer state of the trainer's first worker. Surplus workers end.

        Args:
            tensors: of the trainer, by name; None in a process without a worker.

        Returns:
            The trainer's tensors in the processes that own the new nodes, and what arrives at nodes.
        """
        old, lost = self.nodes, self.lost
        before, after = [node.id for node in old], [node.id for node in nodes]
        moves, arriving = self.moves(after)
        self.nodes, self.lost = nodes, frozenset()
        if before == after and not lost:
            for index, worker in self.local.items():
                worker.node = nodes[index]
            return tensors, []
        self._group = self._processes.workers(after)
        if old:
            tensors = self.provide(tensors, old, nodes, tuple(self.trainer_tensors))
        previous, self.local = self.local, {}
        for index, node in enumerate(nodes):
            if self._processes.owns(node.id):
                here = None if index in lost else previous.get(index)
                if here is None or here.node.device != node.device:
                    here = Worker(node, self._models[node.device], self._config, self.method)
                    here.load_state_dict({COPY: tensors["parameters"]})
                here.node = node
                self.local[index] = here
        for move in moves:
            self._hand_over(move, previous.get(move.worker))
        if len(after) < len(before) and self.method.capabilities.averages_copies:
            for worker in self.local.values():  # what those that go have learned stays in the mean
                worker.load_state_dict({COPY: tensors["parameters"]})
        return tensors, arriving

    def _hand_over(self, move: HandOver, source: Worker | None) -> None:
        """Copy a worker's state to others, wherever all are. source: None, where it is not in this process."""
        takers = [self.local[index] for index in move.takers if index in self.local]

        def state(worker: Worker) -> dict[str, torch.Tensor]:
            return worker.state_dict() if move.whole else worker.moments

        held = None if source is None else list(state(source).values())
        received = self._processes.provide(
            held, [move.source], list(move.takers.values()), lambda: list(state(takers[0]).values())
        )
        for taker in takers:
            if taker is not source:
                taker.load_state_dict(dict(zip(state(taker), received, strict=True)))

    def provide(
        self,
        tensors: Mapping[str, torch.Tensor] | None,
        holders: Sequence[Node],
        takers: Sequence[Node],
        names: Sequence[str],
        overwrite: bool = False,
    ) -> dict[str, torch.Tensor] | None:
        """Tensors of these names that the owners of some nodes have, for those of others; None elsewhere.

        overwrite: tensors that are there already are filled, wherever they are not those of a holder.
        """

        def into() -> list[torch.Tensor]:
            if overwrite:
                return [tensors[name] for name in names]
            return [self._home.empty(self.trainer_tensors[name]) for name in names]

        held = None if tensors is None else [tensors[name] for name in names]
        nodes = [node.id for node in holders], [node.id for node in takers]
        provided = self._processes.provide(held, *nodes, into)
        return None if provided is None else dict(zip(names, provided, strict=True))

    def begin_merged(self, tensors: dict[str, torch.Tensor] | None, values: dict[str, float]) -> None:
        """Let all workers begin with merged parameters.

        Args:
            tensors: of the trainer, by name; None in a process without a worker.
            values: of the method; they change in place.
        """
        self.method.restarted(values, None)
        for worker in self.local.values():
            worker.load_state_dict({COPY: tensors["parameters"]})

    def mean(self, like: torch.Tensor, encoding: Encoding = PLAIN, weights: Sequence[float] | None = None) -> Mean:
        """Start a mean over all workers, wherever they are.

        Args:
            like: a tensor of the mean's shape, type and device.
            encoding: how the added tensors are encoded.
            weights: of all workers, by number; None: equal.
        """
        return self._group.mean(like, encoding, weights)

    def messages(self, size: int, takers: Sequence[Collection[int]]) -> Messages:
        """Start an exchange of messages between workers, of `size` bytes each.

        takers: the receivers of every worker's message, by number of the sender.
        """
        return self._group.messages(size, takers, self._home.device)

    def server_seconds(self, elements: int) -> float:
        """Return the seconds until a server has received so many elements of a worker and answered them."""
        if len(self) == 1:
            return 0.0
        there = self.encoding
        back = PLAIN if self.method.capabilities.message_tensors else there.way_back
        sent = there.sent_bytes(elements, self.dtype) + back.sent_bytes(elements, self.dtype)
        return Link.parse(self._config.link).seconds(sent) if self._config.link else 0.0

    def turns(self, values: Mapping[str, float]) -> Turns:
        """Return when workers make their inner steps in the next round; values: of the method."""

        def found(own_steps: Mapping[int, int], inner_steps: int, step_seconds: float) -> Mapping[int, Sequence[int]]:
            travel = in_steps(self.server_seconds(self.parameter_count), step_seconds)
            return self.method.capabilities.active_steps(own_steps, inner_steps, values, travel)

        return found

    def average_copies(self, parameters: torch.Tensor, weights: Sequence[float]) -> None:
        """Make these the mean of what the workers keep; as they are where nobody keeps any.

        weights: of all workers, by number.
        """
        replicas = self.method.keeps == "replica"

        def averaged(lost: Collection[int]) -> tuple[torch.Tensor, int]:
            mean = self.mean(parameters, weights=weights)
            for index, worker in self.local.items():
                if index not in lost:
                    mean.add(index, PLAIN.encode(worker.state[COPY]))
            return mean.result()

        # What a worker began with is never lost; a replica is as it was when its worker was last well, and counts where
        # there is no other. In the middle of a round each process knows of its own workers alone who is lost.
        mean, count = averaged(self.lost if replicas else ())
        if replicas and not count:
            mean, count = averaged(())
        if count:
            parameters.copy_(mean)

    @property
    def plain_bytes(self) -> int:
        """What all workers send for a mean of parameters."""
        return PLAIN.reduction_bytes(len(self), self.parameter_count, self.dtype)

    def round_bytes(self, workers: int, tested: bool) -> int:
        """Bytes that so many workers of the trainer send in a round; tested: whether a batch test follows."""
        return round_bytes(self._config, self.method, self._encoding, self.first_model, workers, tested)

    def state_dict(self) -> dict:
        """Return the workers' nodes and the workers whose state is lost; each worker has tensors."""
        return {"nodes": [node.id for node in self.nodes], "lost": sorted(self.lost)}

    def load_state_dict(self, state: Mapping, read: Callable[[int, str], torch.Tensor]) -> None:
        """Give as many workers as there were their state back; others begin with moments of the first healthy one.

        State that is lost comes back as well, until nodes are assigned again. With fewer workers than there were copies
        that make up the trainer's parameters do not: what those that are no more have learned stays in the mean.

        Args:
            read: from a worker's number and the name of a tensor to that tensor.
        """
        workers, lost = len(state["nodes"]), frozenset(state["lost"])
        left = {COPY} if len(self.nodes) < workers and self.method.capabilities.averages_copies else set()
        healthy = [index for index in range(workers) if index not in lost]
        self.lost = lost & set(range(len(self.nodes)))
        for index, worker in self.local.items():
            source = index if index < workers else min(healthy, default=None)
            if source is not None:
                names = worker.state_dict().keys() - left if source == index else worker.moments
                worker.load_state_dict({name: read(source, name) for name in names})


@torch.no_grad()
def merge(
    given: Sequence[tuple[WorkerGroup, dict[str, torch.Tensor] | None]], weights: Sequence[float]
) -> list[Transfer]:
    """Make the first trainer's flat tensors, in place, the weighted average of all trainers', or let them begin anew.

    The process of its first worker makes the averages, and those of its other workers have them from there.

    Args:
        given: the workers and the tensors of each trainer; None in a process without one of its workers.
        weights: of each; they sum to 1.

    Returns:
        What arrives at nodes.
    """
    (worker_group, average), others = given[0], given[1:]
    first, names = worker_group.nodes[:1], worker_group.given_tensors
    if 0 in worker_group.local:
        for name in names:
            average[name].mul_(weights[0])
    for (other, tensors), weight in zip(others, weights[1:], strict=True):
        theirs = other.provide(tensors, other.nodes, first, names)
        if 0 in worker_group.local:
            for name in names:
                average[name].add_(theirs[name], alpha=weight)
    worker_group.provide(average, first, worker_group.nodes, names, overwrite=True)
    if average is not None:
        worker_group.begin(average, set(worker_group.method.state) - set(names))
    nodes = [[node.id for node in trainer.nodes] for trainer, _ in given]
    return merge_transfers(nodes[0], nodes[1:], len(names) * worker_group.parameter_bytes)
