"""The workers of a trainer in a round, as their synchronisation method sees them.

Everything that workers send each other goes through an accumulator of this file and is counted here. Create it, `add`
each local worker's tensor or message, then ask for the `result`. All processes create the same accumulators in the same
order, so a method may branch on nothing that only some of them know.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Literal

import torch

from algorithms.flat import Part, read_part, write_part
from algorithms.nodes.balance import in_steps
from algorithms.nodes.traffic import Event
from algorithms.synchronisation.encodings import PLAIN, Encoding
from algorithms.synchronisation.method import ERROR


@dataclass
class LocalWorker:
    """A worker of this process.

    Attributes:
        index: its number among all workers of the trainer.
        parameters: its current parameters, flat [n]. Unless it keeps a replica they live in a buffer that the next
            worker overwrites, and may be overwritten.
        start: the parameters it began the round with. With an anchor this is the anchor: writing to it sets the next
            start. With shared parameters it is the trainer's tensor, on the trainer's device. With a replica it is
            `parameters` itself.
        gradient: of the inner step, flat [n], if the method exchanges gradients.
        state: its tensors by name, which change in place: `worker_state`, and those of common code.
    """

    index: int
    parameters: torch.Tensor
    start: torch.Tensor
    gradient: torch.Tensor | None
    state: Mapping[str, torch.Tensor]

    def __post_init__(self):
        self.state = MappingProxyType(self.state)  # a tensor that no checkpoint has must not be added

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the trainer on this worker's device."""
        return tensor.to(self.parameters.device)

    def pseudo_gradient(self, start: torch.Tensor) -> torch.Tensor:
        """Return start - parameters, the worker's share of the pseudo-gradient, in place of its parameters."""
        return torch.sub(self.to_device(start), self.parameters, out=self.parameters)


@dataclass
class Clock:
    """The position in the round, random numbers for it, and the simulated times of the workers; by default no round.

    Attributes:
        inner_steps: of the round.
        seconds: of each worker for its inner steps, by number; all 0 without node_speeds.
        own_steps: inner steps that each worker has time for, by number; 0 if it rests.
        batches: examples of one of them, by number.
        step_seconds: of an inner step of the fastest worker.
        server_seconds: from a number of elements to the seconds until a server has received and answered them.
        random: from an inner step of the round to random numbers, the same in every process.
        step: inner steps of the round that are done.
    """

    inner_steps: int = 0
    seconds: Sequence[float] = ()
    own_steps: Sequence[int] = ()
    batches: Sequence[int] = ()
    step_seconds: float = 0.0
    server_seconds: Callable[[int], float] = lambda elements: 0.0
    random: Callable[[int], torch.Generator] = lambda step: torch.Generator()
    step: int = 0

    def generator(self) -> torch.Generator:
        """Return random numbers for this place in the run, the same in every process, on the CPU."""
        return self.random(self.step)

    def server_steps(self, elements: int) -> Fraction:
        """Return the inner steps until a server has received and answered n elements."""
        return in_steps(self.server_seconds(elements), self.step_seconds)


@dataclass
class Inner:
    """The inner step: the configured weight decay, the inner optimizer's step of the shared parameters with a gradient
    [n], and the learning rate of the last inner step, or of the first one before it."""

    weight_decay: float
    update: Callable[[torch.Tensor], None]
    learning_rate: float


@dataclass(frozen=True)
class Outer:
    """The configuration of outer steps, and the type of elements in a method's own messages."""

    learning_rate: float
    momentum: float
    message_dtype: torch.dtype = torch.float32


class Group:
    """The workers of a trainer in a round; the clock says at which stop.

    Args:
        workers: the trainer's workers (fabrics.training.worker_group).
        events: receives every exchange of more than one worker.

    Attributes:
        shared: the trainer's tensors by name, flat [n], which change in place: "parameters" and the method's `state`;
            the same in every process.
        values: plain numbers that the method keeps, by name; the same in every process.
        weights: the weight of each worker in a mean, by number; 0 if it rests. They sum to 1.
        local_workers: the workers of this process that take part and are well, in order.
        model: the flat model (fabrics.training.flat_model), which knows about all parts if several devices share it and
            [n] is this device's.
        clock: the position in the round, random numbers for it, and simulated times.
    """

    def __init__(
        self,
        workers: Any,
        shared: Mapping[str, torch.Tensor],
        values: dict[str, float],
        weights: Sequence[float],
        clock: Clock,
        inner: Inner,
        outer: Outer,
        events: list[Event],
    ):
        self.shared = MappingProxyType(shared)  # as the state of a worker
        self.values = values
        self.weights = weights
        self.local_workers: list[LocalWorker] = []
        self.model = workers.model
        self.clock = clock
        self.inner = inner
        self.outer = outer
        self._workers = workers

        self._present = [worker for worker, weight in enumerate(weights) if weight]
        # A lone worker sends nothing.
        self._events = [] if self.lone else events
        self._encoding = PLAIN if self.lone else workers.encoding

    @property
    def lone(self) -> bool:
        """True if one worker takes part: it sends nothing, so its update is applied in full."""
        return len(self._present) == 1

    def elements(self, part: Part | None) -> int:
        """Return the elements of a part over all devices that share the model, without gaps; they ask together."""
        if part is None:
            return self.model.parameter_count
        own = torch.tensor(float(sum(piece.stop - piece.start for piece in part)), dtype=torch.float64)
        return int(self.model.shard_group.sum(own).item())

    def mean(
        self,
        like: torch.Tensor | None = None,
        kind: Literal["synchronisation", "gradient", "parameters", "monitor"] = "synchronisation",
        behind: int = 0,
        part: Part | None = None,
        weights: Mapping[int, float] | None = None,
    ) -> "WorkerMean":
        """Start a weighted mean over all workers; its result is None if no worker was added.

        Args:
            like: a tensor of the mean's shape, type and device; None: the shared parameters.
            kind: pseudo-gradients ("synchronisation") are encoded by `communication_dtype`, with error feedback;
                gradients are encoded without it; parameters and monitored scalars are sent exactly.
            behind: inner steps that may be made before anybody waits for it.
            part: the part of the flat tensors that is averaged; None: all.
            weights: of the workers that send theirs to a server, by number, which answers with as many elements. Their
                bytes count as float32, though the mean is rounded as without a server; None: all send, to each other.
        """
        like = self.shared["parameters"] if like is None else like
        encoding = PLAIN if kind in ("monitor", "parameters") else self._encoding
        if part is not None or like.numel() == self.shared["parameters"].numel():
            elements = self.elements(part)
        else:  # over all devices that share the model; what is monitored is on one
            elements = like.numel() * (1 if kind == "monitor" else self.model.shard_group.size)
        workers = len(self._present)
        if weights is None:
            sent = received = encoding.reduction_bytes(workers, elements, like.dtype) / workers
            event = Event(kind, self.clock.step, sent, received, behind)
            by_number = self.weights
        else:
            share = len(weights) / workers
            sent = share * encoding.sent_bytes(elements, like.dtype)
            received = share * PLAIN.sent_bytes(elements, like.dtype)
            event = Event(kind, self.clock.step, sent, received, behind, "server", tuple(weights))
            by_number = [weights.get(worker, 0.0) for worker in range(len(self.weights))]
        # A device may hold nothing of a part.
        accumulator = self._workers.mean(like, encoding, by_number) if like.numel() else None
        return WorkerMean(accumulator, event, self._events, encoding, like, part)

    def mean_pseudo_gradient(
        self, part: Part | None = None, behind: int = 0, weights: Mapping[int, float] | None = None
    ) -> torch.Tensor | None:
        """Return the mean of (shared parameters - replica), or a part of it; see `mean`."""
        shared = read_part(self.shared["parameters"], part)
        incoming = self.mean(shared, behind=behind, part=part, weights=weights)
        for worker in self.local_workers:
            if weights is None or worker.index in weights:
                incoming.add(worker, worker.to_device(shared) - read_part(worker.parameters, part))
        return incoming.result()

    def messages(
        self,
        size: int = 0,
        tensors: int = 0,
        to: Callable[[int], Collection[int]] | None = None,
        through: str = "all",
        senders: Collection[int] | None = None,
    ) -> "WorkerMessages":
        """Start an exchange of one message per worker; the result has those that came to this process, by sender.

        A message is `size` bytes, uint8 [size], or `tensors` flat tensors [n], encoded by `communication_dtype` without
        error feedback.

        Args:
            to: from a worker to the recipients of its message; None: all.
            through: a server answers with one message, or with one tensor, exactly.
            senders: the workers that send, by number; None: all.
        """
        like = self.shared["parameters"]
        encoding = self._encoding
        sent = size
        answer = sent
        if tensors:
            elements = self.model.parameter_count
            size = tensors * encoding.rows(like.numel()) * encoding.row_bytes(like.dtype)
            sent = tensors * encoding.sent_bytes(elements, like.dtype)
            answer = PLAIN.sent_bytes(elements, like.dtype)
        present = set(self._present)
        sending = present if senders is None else present.intersection(senders)
        everybody = range(len(self.weights))
        recipients: list[set[int]] = [set() for _ in everybody]
        for worker in sending:
            # Workers that rest receive as well, as their processes make the same outer step; that is not counted.
            recipients[worker] = set(everybody if to is None else to(worker)) - {worker}
        if through == "server":
            share = len(sending) / len(present)
            sent = share * sent
            received = share * answer
        else:
            sent = received = sum(len(recipients[worker] & present) for worker in sending) * sent / len(present)
        by = None if senders is None else tuple(sorted(sending))
        event = Event("synchronisation", self.clock.step, sent, received, 0, through, by)
        accumulator = self._workers.messages(size, recipients)
        message = torch.empty(size, dtype=torch.uint8, device="meta")
        return WorkerMessages(accumulator, event, self._events, encoding, tensors, like, message)


def _check_message(message: torch.Tensor, like: torch.Tensor) -> None:
    """Raise ValueError for a message of another size or type, which other processes would misread."""
    if message.numel() != like.numel() or message.dtype != like.dtype:
        raise ValueError(
            f"the method's message must have {like.numel()} elements of {like.dtype}, got {message.numel()} of "
            f"{message.dtype}"
        )


@dataclass
class WorkerMean:
    """A mean over all workers of a group; see `Group.mean`."""

    _accumulator: Any
    _event: Event
    _events: list[Event]
    _encoding: Encoding
    _like: torch.Tensor
    _part: Part | None

    def add(self, worker: LocalWorker, tensor: torch.Tensor) -> None:
        """Add the tensor of the next worker of this process; it may be overwritten."""
        if self._accumulator is None:
            return
        _check_message(tensor, self._like)
        error = worker.state.get(ERROR) if self._event.kind == "synchronisation" else None
        if error is not None:  # error feedback, arXiv 1901.09847
            tensor.add_(read_part(error, self._part))
        encoded = self._encoding.encode(tensor)
        if error is not None:
            arrived = self._encoding.decode(encoded, tensor.dtype)[: tensor.numel()]
            if self._part is None:
                torch.sub(tensor, arrived, out=error)
            else:
                write_part(error, self._part, tensor - arrived)
        self._accumulator.add(worker.index, encoded)

    def result(self) -> torch.Tensor | None:
        """Return the mean; None if no worker was added."""
        self._events.append(self._event)
        if self._accumulator is None:
            return self._like
        mean, count = self._accumulator.result()
        return mean if count else None


@dataclass
class WorkerMessages:
    """Messages between the workers of a group; see `Group.messages`."""

    _accumulator: Any
    _event: Event
    _events: list[Event]
    _encoding: Encoding
    _tensors: int
    _like: torch.Tensor
    _bytes: torch.Tensor

    def add(self, worker: LocalWorker, message: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Add the message, or the tensors, of the next worker of this process."""
        if self._tensors:
            for tensor in message:
                _check_message(tensor, self._like)
            message = torch.cat([self._encoding.encode(tensor).flatten() for tensor in message])
        _check_message(message, self._bytes)
        self._accumulator.add(worker.index, message)

    def result(self) -> dict[int, Any]:
        """Return the messages, or lists of tensors, that came to this process or were added here, by sender."""
        self._events.append(self._event)
        arrived = self._accumulator.result()
        if not self._tensors:
            return arrived
        dtype = self._like.dtype
        found = {}
        for worker in list(arrived):
            encoded = arrived.pop(worker).view(self._tensors, -1, self._encoding.row_bytes(dtype))
            found[worker] = [self._encoding.decode(rows, dtype)[: self._like.numel()] for rows in encoded]
        return found
