"""The workers of a trainer and the trainer's tensors: which worker is where, what they share, and what a merge does.

Workers are numbered from 0; each process has the workers whose nodes it owns. All processes of a run call these methods
together and in the same order.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from algorithms.nodes.balance import in_steps
from algorithms.nodes.distribution import HandOver, StateBytes, hand_overs
from algorithms.nodes.traffic import (
    Event,
    Exchange,
    even_exchange,
    merge_bytes,
    merge_exchange,
    redistribution_bytes,
    simultaneous,
)
from algorithms.synchronisation.encodings import BFLOAT16, COMMUNICATION_DTYPES, PLAIN, Encoding
from algorithms.synchronisation.group import Clock, Group, Outer
from fabrics.training.flat_model import FlatModel
from fabrics.training.method_config import method_of, settling_bytes
from fabrics.training.optimizers import inner_optimizer_of
from fabrics.training.worker import COPY, Node, Worker, WorkerRound, local_worker, personal_tensors
from utils.config.schema import Config, ConfigError
from utils.distributed.processes import Processes
from utils.distributed.reductions import Mean, Messages, Workers


class WorkerGroup:
    """The workers of one trainer, and the trainer's tensors.

    In every round `assign` gives the workers their nodes, `note_weights` keeps their weights, the method exchanges
    tensors through `mean` and `messages`, and `end_round` takes over what all processes then know. `refresh` brings the
    parameters up to date for evaluation and checkpoints. `absorb` is a merge.

    Args:
        parameters: flat initial parameters, which become the trainer's own; None in a process without a worker.
        model: the flat model of this process, whose device keeps the trainer's tensors.

    Attributes:
        nodes: of all workers, in order.
        local: the workers of this process, by number.
        shared: the trainer's tensors by name, "parameters" among them; None in a process without a worker.
        values: the method's plain numbers, the same in every process.
        encoding: of pseudo-gradients between several workers.
        to_restart: numbers of the workers whose state is lost, which start anew when nodes are assigned again.
        merged_tensors: names of the tensors that a merge averages. Copies start anew; shared moments stay.
        parameter_bytes: of one model, without the gaps of flat tensors.
        sizes: bytes of the state that moves with nodes, without gaps.
    """

    def __init__(
        self,
        config: Config,
        parameters: torch.Tensor | None,
        model: FlatModel,
        processes: Processes,
    ):
        self.nodes: tuple[Node, ...] = ()
        self.local: dict[int, Worker] = {}
        self.values: dict[str, float] = {}
        self.to_restart: frozenset[int] = frozenset()
        self.model = model
        self.method = method_of(config, self.model)
        self.dtype = self.model.parameters.dtype
        self.parameter_count = self.model.parameter_count
        self.parameter_bytes = self.parameter_count * self.dtype.itemsize
        self._config = config
        self._processes = processes
        self._workers = Workers()
        self._resting: frozenset[int] = frozenset()  # nodes that missed the last round's outer step
        self._weights: list[float] = []  # of the workers in the last round; empty: nothing is left to settle
        self.encoding = COMMUNICATION_DTYPES[config.communication_dtype]
        self._state_device = torch.device("cpu") if config.offload_outer_state else self.model.device
        self._describe_state()
        self.shared = None if parameters is None else self._initial_tensors(parameters)

    def _describe_state(self) -> None:
        model = self.model
        able = self.method.capabilities
        names = ("parameters", *self.method.state)
        self.merged_tensors = tuple(name for name in names if name not in able.copies)
        self._shapes = dict.fromkeys(names, model.parameters.data.to("meta"))
        optimizer = inner_optimizer_of(self._config)
        moment_bytes = 0 if optimizer is None else optimizer.state_bytes(model)
        if able.exchanges_gradients and optimizer is not None:  # it updates the shared parameters
            self._shapes |= optimizer.state(model, "meta")
        self.sizes = StateBytes(
            trainer=len(names) * self.parameter_bytes + (moment_bytes if able.exchanges_gradients else 0),
            worker=0 if able.exchanges_gradients else moment_bytes,
            personal=len(personal_tensors(self._config, self.method)) * self.parameter_bytes,
        )

    def _initial_tensors(self, parameters: torch.Tensor) -> dict[str, torch.Tensor]:
        if parameters.device.type != self._state_device.type:
            parameters = self._empty(parameters).copy_(parameters)
        tensors = {name: self._empty(like).zero_() for name, like in self._shapes.items() if name != "parameters"}
        for name in self.method.capabilities.copies:
            tensors[name].copy_(parameters)
        return {"parameters": parameters} | tensors

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised tensor for the trainer's state, in host memory if that is offloaded."""
        pinned = self._config.offload_outer_state and self.model.device.type == "cuda"
        return torch.empty(like.shape, dtype=like.dtype, device=self._state_device, pin_memory=pinned)

    def __len__(self) -> int:
        return len(self.nodes)

    # Nodes

    def assign(self, nodes: tuple[Node, ...], participants: Collection[int]) -> tuple[Exchange, Exchange]:
        """Let these nodes work from now on; return what workers had to send before, and what arrives at nodes.

        Workers keep their state as far as there are nodes for them, wherever those are. A new worker, and one whose
        state is lost, begins with the optimizer state of the first healthy worker. Surplus workers end, the last ones
        first. A node that rested and takes part again receives the trainer's tensors.

        participants: numbers of the workers that take part in the next round.
        """
        before = [node.id for node in self.nodes]
        after = [node.id for node in nodes]
        settling = Exchange()
        sent = 0
        if self.to_restart or (before and len(before) != len(after)):  # new workers start from the trainer's parameters
            settling = self._settle(some_end=len(after) < len(before))
        if self.to_restart or before != after:
            sent = self._move_workers(before, after, nodes)
        self.nodes = nodes
        self.to_restart = frozenset()
        for index, worker in self.local.items():
            worker.node = nodes[index]
        returning = self._resting & {after[worker] for worker in participants}
        self._resting -= returning
        receiving = len(set(after) - set(before)) + len(returning)
        return settling, even_exchange(receiving, sent + len(returning) * self.sizes.trainer)

    def _move_workers(self, before: Sequence[int], after: Sequence[int], nodes: Sequence[Node]) -> int:
        if before:
            self.shared = self._provide(self.shared, before, after, tuple(self._shapes))
        old_workers = self.local
        self.local = {}
        for index, node in enumerate(nodes):
            if self._processes.owns(node.id):
                worker = None if index in self.to_restart else old_workers.get(index)
                if worker is None:
                    worker = Worker(node, self.model, self._config, self.method)
                    worker.load_state_dict({COPY: self.shared["parameters"]})
                self.local[index] = worker
        # A process without a worker has no part in messages.
        self._workers = self._processes.workers(after) if self.local else Workers()
        moves = hand_overs(before, after, self.to_restart)
        for move in moves:
            self._hand_over(move, old_workers.get(move.worker))
        if len(after) < len(before) and (self.method.keeps == "replica" or self.method.capabilities.averages_copies):
            self._restart()  # the trainer's parameters keep what the workers that end have learned
        return redistribution_bytes(before, after, moves, self.sizes)

    def _hand_over(self, move: HandOver, source: Worker | None) -> None:
        """Copy a worker's state to others, wherever they are; source: None if it is in another process."""
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

    def _provide(
        self,
        tensors: Mapping[str, torch.Tensor] | None,
        holders: Sequence[int],
        takers: Sequence[int],
        names: Sequence[str],
        overwrite: bool = False,
    ) -> dict[str, torch.Tensor] | None:
        """Return tensors of the holders' nodes in the takers' processes, new or over their own; None in others."""

        def received() -> list[torch.Tensor]:
            return [tensors[name] if overwrite else self._empty(self._shapes[name]) for name in names]

        held = None if tensors is None else [tensors[name] for name in names]
        provided = self._processes.provide(held, holders, takers, received)
        return None if provided is None else dict(zip(names, provided, strict=True))

    def parameters_for(self, node: Node) -> torch.Tensor | None:
        """Return the parameters in the process that owns the node, None in others; all processes ask together."""
        self.refresh()
        provided = self._provide(self.shared, [holder.id for holder in self.nodes], [node.id], ("parameters",))
        return None if provided is None else provided["parameters"]

    # Communication between the workers

    @property
    def outer(self) -> Outer:
        dtype = torch.bfloat16 if self.encoding is BFLOAT16 else self.dtype
        return Outer(self._config.learning_rate_for_outer_opt, self._config.outer_momentum, dtype)

    def mean(self, like: torch.Tensor, encoding: Encoding = PLAIN, weights: Sequence[float] | None = None) -> Mean:
        """Start a mean over all workers, of the shape, type and device of `like`; weights: by number, None: equal."""
        return self._workers.mean(like, encoding, weights)

    def messages(self, size: int, takers: Sequence[Collection[int]]) -> Messages:
        """Start an exchange of messages of `size` bytes; takers: the receivers of every worker's message."""
        return self._workers.messages(size, takers, self._state_device)

    def server_seconds(self, elements: int) -> float:
        """Return the seconds until a server has received this many elements of a worker and answered them."""
        if len(self) == 1:
            return 0.0
        sent = self.encoding.sent_bytes(elements, self.dtype) + PLAIN.sent_bytes(elements, self.dtype)
        return self._config.simulated_link.seconds(sent)

    # Rounds

    @property
    def fewer_steps(self) -> bool:
        """True if workers on slower nodes make fewer inner steps of a round."""
        balance = self._config.balance
        return balance == "steps" or (balance == "equal" and self.method.capabilities.fewer_steps)

    def active_steps(
        self, own_steps: Mapping[int, int], inner_steps: int, step_seconds: float
    ) -> Mapping[int, Sequence[int]]:
        """Return the inner steps of the next round, from 0, in which workers with fewer inner steps make them."""
        travel = in_steps(self.server_seconds(self.parameter_count), step_seconds)
        return self.method.capabilities.active_steps(own_steps, inner_steps, self.values, travel)

    def note_weights(self, weights: Sequence[float]) -> None:
        """Keep the weights of the workers in this round, for means after it; in every process."""
        self._weights = list(weights)

    def end_round(self, workers: Mapping[int, WorkerRound], values: dict[str, float]) -> None:
        """Take over what all processes know after a round: the participants' reports, and the method's values."""
        self.values = values
        self.to_restart = frozenset(index for index, worker in workers.items() if worker.left_out)
        if self.to_restart:
            self.method.restarted(self.values, self.to_restart)
        self._resting = frozenset(node.id for index, node in enumerate(self.nodes) if index not in workers)

    # Copies: parameters of the workers' own, whose mean is the trainer's

    def refresh(self) -> None:
        """Update the trainer's parameters from the workers' copies, if these have moved.

        Nothing is done unless the method's capability `averages_copies` is set: other parameters are up to date.
        Every process with a worker takes part. Bytes are not counted here: evaluation and checkpoints are no messages.
        """
        if not (self._weights and self.local and self.method.capabilities.averages_copies):
            return
        # An anchor outlives divergence. A replica is as it was when its worker was last healthy, and counts only if no
        # worker is healthy. During a round each process knows the lost workers of its own only.
        lost = self.to_restart if self.method.keeps == "replica" else frozenset()
        mean, count = self._mean_of_copies(lost)
        if lost and not count:
            mean, count = self._mean_of_copies(frozenset())
        if count:
            self.shared["parameters"].copy_(mean)

    def _mean_of_copies(self, without: Collection[int]) -> tuple[torch.Tensor, int]:
        incoming = self.mean(self.shared["parameters"], weights=self._weights)
        for index, worker in self.local.items():
            if index not in without:
                incoming.add(index, PLAIN.encode(worker.state[COPY]))
        return incoming.result()

    # What workers have learned and not sent yet

    @torch.no_grad()
    def _settle(self, some_end: bool) -> Exchange:
        """Bring the trainer's parameters up to date with what workers have learned; return what is sent for it."""
        exchange = Exchange()
        if self.method.capabilities.averages_copies:
            self.refresh()
            if self._weights:
                exchange = even_exchange(len(self), settling_bytes(self.method, self.model, len(self)))
        elif some_end:
            exchange = self._send_the_rest()
        self._weights = []
        return exchange

    def _send_the_rest(self) -> Exchange:
        working = [weight for weight in self._weights if weight]
        typical = sum(working) / max(len(working), 1)  # for workers that rested
        weights = [0.0 if index in self.to_restart else weight or typical for index, weight in enumerate(self._weights)]
        if not any(weights):
            return Exchange()
        events: list[Event] = []
        group = Group(
            workers=self,
            shared=self._shapes if self.shared is None else self.shared,
            values=self.values,
            weights=[weight / sum(weights) for weight in weights],
            clock=Clock(),
            inner=None,
            outer=self.outer,
            events=events,
        )
        group.local_workers = [
            local_worker(index, worker, self.shared["parameters"], self.method)
            for index, worker in self.local.items()
            if index not in self.to_restart
        ]
        self.method.settle(group)
        senders = sum(weight > 0 for weight in weights)
        return even_exchange(senders, round(senders * sum(event.bytes_per_worker for event in events)))

    def _restart(self) -> None:
        if self.shared is not None:
            for name in self.method.capabilities.copies:
                self.shared[name].copy_(self.shared["parameters"])
        self.method.restarted(self.values, None)
        self._reset_copies()

    def _reset_copies(self) -> None:
        for worker in self.local.values():
            worker.load_state_dict({COPY: self.shared["parameters"]})

    @torch.no_grad()
    def absorb(self, others: Sequence["WorkerGroup"], weights: Sequence[float]) -> Exchange:
        """Make this trainer's tensors the weighted average of its own and the others'; return what is sent for it.

        The process of the first worker computes the averages of `merged_tensors` and sends them to the other workers.

        weights: of this trainer, then of the others; they sum to 1.
        """
        settling = simultaneous([group._settle(some_end=True) for group in (self, *others)])
        own_nodes, *other_nodes = ([node.id for node in group.nodes] for group in (self, *others))
        first = own_nodes[:1]
        if 0 in self.local:
            for name in self.merged_tensors:
                self.shared[name].mul_(weights[0])
        for other, nodes, weight in zip(others, other_nodes, weights[1:], strict=True):
            theirs = other._provide(other.shared, nodes, first, self.merged_tensors)
            if 0 in self.local:
                for name in self.merged_tensors:
                    self.shared[name].add_(theirs[name], alpha=weight)
        self._provide(self.shared, first, own_nodes, self.merged_tensors, overwrite=True)
        self._restart()
        self._resting = frozenset()
        sent = merge_bytes(own_nodes, other_nodes, len(self.merged_tensors) * self.parameter_bytes)
        return settling + merge_exchange(len(others), len(own_nodes), sent)

    # State

    def state_dict(self) -> dict:
        """Return the plain state; tensors are in `shared` and in the workers."""
        return {
            "nodes": [node.id for node in self.nodes],
            "tensors": self._tensor_names(),
            "values": self.values,
            "lost": sorted(self.to_restart),
            "resting": sorted(self._resting),
            "weights": self._weights,
        }

    def _tensor_names(self) -> list[str]:
        """Return the names of the trainer's tensors, and those of a worker's with its owner."""
        optimizer = inner_optimizer_of(self._config)
        own = list(personal_tensors(self._config, self.method))
        if optimizer is not None and not self.method.capabilities.exchanges_gradients:
            own += optimizer.state(self.model, "meta")
        return [*self._shapes, *(f"{name} of a worker" for name in own)]

    def load_state_dict(
        self,
        state: Mapping,
        read_shared: Callable[[str], torch.Tensor],
        read_worker: Callable[[int, str], torch.Tensor],
    ) -> None:
        """Restore the tensors of the trainer and of as many workers as there were, as they are read by name.

        New workers begin with the moments of the first healthy one. Lost state comes back as well, until nodes are
        assigned again. If there are fewer workers than before, the mean keeps what the others have learned.

        Raises:
            ConfigError: tensors that this configuration needs are missing.
        """
        missing = [name for name in self._tensor_names() if name not in state["tensors"]]
        if missing:
            raise ConfigError(
                f"distributed_algo, inner_optimizer, communication_dtype, message_loss: the run has no "
                f"{', '.join(missing)}, as {self._config.distributed_algo} needs with these keys; resume with "
                f"the run's own values"
            )
        self.values = dict(state["values"])
        self._resting = frozenset(state["resting"])
        self._weights = list(state["weights"])
        if self._weights and len(self._weights) != len(self):
            self._weights = [1.0] * len(self)
        if self.local:
            for name, tensor in self.shared.items():
                tensor.copy_(read_shared(name))
            self._reset_copies()
        before = len(state["nodes"])
        lost = frozenset(state["lost"])
        healthy = [index for index in range(before) if index not in lost]
        keeps_mean = len(self) < before and self.method.capabilities.averages_copies
        if keeps_mean:
            self.method.restarted(self.values, None)
        self.to_restart = lost & set(range(len(self)))
        for index, worker in self.local.items():
            if index < before:
                names = worker.state_dict().keys() - ({COPY} if keeps_mean else set())
                worker.load_state_dict({name: read_worker(index, name) for name in names})
            else:
                worker.load_state_dict({name: read_worker(healthy[0], name) for name in worker.moments})
