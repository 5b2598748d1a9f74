"""The workers of a trainer at a stop of a round, as their synchronisation method sees them.

Everything that workers send each other goes through an accumulator of this file, and is counted here and nowhere else:
make it, `add` each local worker's tensor, then ask for the `result`. All processes make the same accumulators in the
same order, so a method may branch on nothing that only some of them know.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import torch

from algorithms.nodes.async_clock import in_steps
from algorithms.synchronisation.encodings.encoding import BFLOAT16, PLAIN, Encoding
from algorithms.synchronisation.method import ERROR, Event, Part, put, take

# These travel as they are, whatever communication_dtype says.
_PLAIN_KINDS = ("monitor", "parameters")


@dataclass
class LocalWorker:
    """A worker of this process.

    Attributes:
        index: its number among all workers of the trainer.
        parameters: its current parameters, flat [n]. Unless it keeps a replica they live in a buffer that the next
            worker overwrites, and may be overwritten.
        start: the parameters it began the round with. With an anchor this is the anchor: writing to it sets the next
            start. With shared parameters it is the trainer's tensor, on the trainer's device.
        gradient: of the inner step, flat [n], if the method exchanges gradients.
        state: its named tensors.
    """

    index: int
    parameters: torch.Tensor
    start: torch.Tensor
    gradient: torch.Tensor | None
    state: dict[str, torch.Tensor]

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the trainer on this worker's device."""
        return tensor.to(self.parameters.device)

    def difference(self, shared: torch.Tensor) -> torch.Tensor:
        """Return shared - parameters, the worker's part of the pseudo-gradient, in place of its parameters."""
        return torch.sub(self.here(shared), self.parameters, out=self.parameters)


@dataclass(frozen=True)
class Clock:
    """Simulated times of the workers in this round.

    Attributes:
        seconds: of each worker for its inner steps, by number; all 0 without node_speeds.
        own_steps: inner steps that each worker has time for, by number; 0 if it rests.
        batches: examples of one of them, by number.
        step_seconds: of an inner step of the fastest worker.
        server_seconds: from a number of elements to the seconds until a server has received and answered them.
    """

    seconds: Sequence[float]
    own_steps: Sequence[int]
    batches: Sequence[int]
    step_seconds: float
    server_seconds: Callable[[int], float]


class Group:
    """The workers of a trainer at a stop.

    Args:
        workers: the trainer's workers (fabrics.training.worker_group).
        model: the flat model of this process's first device.
        shared: see Attributes.
        values: see Attributes.
        weights: see Attributes.
        clock: see Attributes.
        inner_steps: see Attributes.
        learning_rates: of every inner step of the round.
        generator: from an inner step of the round to random numbers, the same in every process.
        update: makes the inner optimizer's step of the shared parameters with a gradient.

    Attributes:
        shared: the trainer's tensors by name, flat [n], among them "parameters"; the same in every process.
        values: plain numbers that the method keeps, by name; the same in every process.
        weights: the weight of each worker in a mean, by number; 0 if it rests. They sum to 1.
        local: the workers of this process that take part and are well, in order.
        model: for what needs the parts of all devices that share the model: `norm`, `distance`, `sketch`,
            `local_places`, `whole_size`, `wholes` and `shard_group.sum`. [n] is this device's part then.
        clock: simulated times.
        step: inner steps of the round that are done.
        inner_steps: of the round.
        update: see Args.
        events: what has been sent in the round.
    """

    def __init__(
        self,
        workers: Any,
        model: Any,
        shared: dict[str, torch.Tensor],
        values: dict[str, float],
        weights: Sequence[float],
        clock: Clock,
        inner_steps: int,
        learning_rates: Sequence[float],
        generator: Callable[[int], torch.Generator],
        update: Callable[[torch.Tensor], None],
    ):
        self.shared = shared
        self.values = values
        self.weights = weights
        self.local: list[LocalWorker] = []
        self.model = model
        self.clock = clock
        self.step = 0
        self.inner_steps = inner_steps
        self.update = update
        self.events: list[Event] = []
        self._workers = workers
        self._learning_rates = learning_rates
        self._generator = generator
        self._present = [worker for worker, weight in enumerate(weights) if weight]

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last inner step."""
        return self._learning_rates[self.step - 1]

    @property
    def message_dtype(self) -> torch.dtype:
        """The type of numbers in a method's own messages, by communication_dtype."""
        return torch.bfloat16 if self._workers.encoding is BFLOAT16 else self._workers.dtype

    def generator(self) -> torch.Generator:
        """Return random numbers for this place in the run, the same in every process, on the CPU."""
        return self._generator(self.step)

    def mean(
        self,
        like: torch.Tensor | None = None,
        kind: Literal["synchronisation", "gradient", "parameters", "monitor"] = "synchronisation",
        behind: int = 0,
        part: Part | None = None,
        weights: Mapping[int, float] | None = None,
        elements: int | None = None,
    ) -> "MeanOfWorkers":
        """Start a weighted mean over all workers; its result is None if no worker was added.

        Args:
            like: a tensor of the mean's shape, type and device; None: the shared parameters.
            kind: pseudo-gradients ("synchronisation") travel as `communication_dtype` says, with what it lost of the
                worker's last ones; gradients likewise, without; parameters and monitored numbers as they are.
            behind: inner steps that may be made before anybody waits for it.
            part: the part of the flat tensors that is averaged; None: the whole.
            weights: of the workers that send theirs to a server, by number; None: all send, to each other.
            elements: in the mean, over all devices that share the model; None: as many as `like` has on each, or, for
                a monitor, which every device knows, on one.
        """
        like = self.shared["parameters"] if like is None else like
        encoding = PLAIN if kind in _PLAIN_KINDS else self._workers.encoding
        if elements is None:
            elements = like.numel() if kind == "monitor" else self._elements(like)
        each = self._bytes_of_mean(encoding, elements, like.dtype, weights)
        senders = () if weights is None else ("server", tuple(weights))
        event = Event(kind, self.step, *each, behind, *senders)
        by_number = self.weights if weights is None else [weights.get(w, 0.0) for w in range(len(self.weights))]
        # A device may hold none of a few random places.
        accumulator = self._workers.mean(like, encoding, by_number) if like.numel() else None
        return MeanOfWorkers(self, accumulator, encoding, event, like, part)

    def mean_difference(
        self, part: Part | None = None, behind: int = 0, weights: Mapping[int, float] | None = None
    ) -> torch.Tensor | None:
        """Return the pseudo-gradient: the mean of (shared parameters - replica), or a part of it; see `mean`."""
        shared = take(self.shared["parameters"], part)
        incoming = self.mean(shared, behind=behind, part=part, weights=weights)
        for worker in self.local:
            if weights is None or worker.index in weights:
                incoming.add(worker, worker.here(shared) - take(worker.parameters, part))
        return incoming.result()

    def messages(
        self,
        size: int,
        to: Callable[[int], Collection[int]] | None = None,
        through: Literal["all", "groups", "server"] = "all",
        counted: int | None = None,
    ) -> "Deliveries":
        """Start an exchange of one message per worker, uint8 [size]; the result has those that came here, by sender.

        Args:
            to: from a worker to the receivers of its message; None: all.
            through: "server" counts one message up and one down.
            counted: bytes of the message over all devices that share the model; None: size.
        """
        sent = size if counted is None else counted
        return self._deliveries(size, to, (sent, sent), through, None)

    def tensors(
        self,
        count: int,
        to: Callable[[int], Collection[int]] | None = None,
        through: Literal["all", "groups", "server"] = "all",
        senders: Collection[int] | None = None,
    ) -> "Deliveries":
        """As `messages`, with `count` flat tensors [n] per worker, encoded by `communication_dtype`; no error is kept.

        A server answers with one tensor, as it is. senders: the workers that send, by number; None: all.
        """
        encoding = self._workers.encoding
        like = self.shared["parameters"]
        size = encoding.rows(like.numel()) * encoding.row_bytes(like.dtype)
        elements = self.model.parameter_count
        sent = count * encoding.sent_bytes(elements, like.dtype)
        answered = PLAIN.sent_bytes(elements, like.dtype)
        deliveries = self._deliveries(count * size, to, (sent, answered), through, senders)
        deliveries.encode_as(encoding, count, like)
        return deliveries

    def travel(self, part: Part | None = None) -> Fraction:
        """Return the inner steps until a part of the parameters is with a server and its answer back.

        All devices that share the model ask together, as they may hold different amounts of the part.
        """
        elements = self.model.parameter_count
        if part is not None:
            own = torch.tensor(float(sum(each.stop - each.start for each in part)), dtype=torch.float64)
            elements = int(self.model.shard_group.sum(own).item())
        return in_steps(self.clock.server_seconds(elements), self.clock.step_seconds)

    def sent(self, event: Event) -> None:
        """Count an exchange; a lone worker sends nothing."""
        if len(self._present) > 1:
            self.events.append(event)

    def _elements(self, like: torch.Tensor) -> int:
        """Elements of a flat tensor over all devices, without the gaps between the model's tensors."""
        whole = like.numel() == self.shared["parameters"].numel()
        return self.model.parameter_count if whole else like.numel() * self.model.shard_group.size

    def _bytes_of_mean(
        self, encoding: Encoding, elements: int, dtype: torch.dtype, senders: Collection[int] | None
    ) -> tuple[float, float]:
        """Bytes that a worker sends and receives on average; senders: to a server, by number; None: all."""
        workers = len(self._present)
        if senders is None:
            each = encoding.reduction_bytes(workers, elements, dtype) / workers
            return each, each
        share = len(senders) / workers
        return share * encoding.sent_bytes(elements, dtype), share * encoding.way_back.sent_bytes(elements, dtype)

    def _deliveries(
        self,
        size: int,
        to: Callable[[int], Collection[int]] | None,
        counted: tuple[float, float],
        through: Literal["all", "groups", "server"],
        senders: Collection[int] | None,
    ) -> "Deliveries":
        """counted: bytes of a message, and of a server's answer."""
        present = set(self._present)
        sending = present if senders is None else present.intersection(senders)
        everybody = range(len(self.weights))
        takers: list[set[int]] = [set() for _ in everybody]
        for worker in everybody if senders is None else sending:
            # Workers that rest receive as well, as their processes make the same outer step; it is not counted.
            takers[worker] = set(everybody if to is None else to(worker)) - {worker}
        if through == "server":
            share = len(sending) / len(present)
            sent, received = share * counted[0], share * counted[1]
        else:
            sent = sum(len(takers[worker] & present) for worker in sending) * counted[0] / len(present)
            received = sent
        by = None if senders is None else tuple(sorted(sending))
        event = Event("synchronisation", self.step, sent, received, 0, through, by)
        return Deliveries(self, self._workers.messages(size, takers), event)


class MeanOfWorkers:
    """A mean over all workers of a group; see `Group.mean`."""

    def __init__(
        self,
        group: Group,
        accumulator: Any,
        encoding: Encoding,
        event: Event,
        like: torch.Tensor,
        part: Part | None,
    ):
        self._group = group
        self._accumulator = accumulator
        self._encoding = encoding
        self._event = event
        self._like = like
        self._part = part

    def add(self, worker: LocalWorker, tensor: torch.Tensor) -> None:
        """Add the tensor of the next worker of this process; it may be written over."""
        if self._accumulator is None:
            return
        error = worker.state.get(ERROR) if self._event.kind == "synchronisation" else None
        if error is None:
            self._accumulator.add(worker.index, self._encoding.encode(tensor))
        else:
            self._accumulator.add(worker.index, encode_with_error(self._encoding, tensor, error, self._part))

    def result(self) -> torch.Tensor | None:
        """Return the mean; None if no worker was added."""
        mean, count = (self._like, 1) if self._accumulator is None else self._accumulator.result()
        self._group.sent(self._event)
        return mean if count else None


class Deliveries:
    """Messages between the workers of a group; see `Group.messages` and `Group.tensors`."""

    def __init__(self, group: Group, accumulator: Any, event: Event):
        self._group = group
        self._accumulator = accumulator
        self._event = event
        self._encoding: Encoding | None = None

    def encode_as(self, encoding: Encoding, count: int, like: torch.Tensor) -> None:
        """Let each message be `count` tensors like this one."""
        self._encoding = encoding
        self._count = count
        self._like = like

    def add(self, worker: LocalWorker, message: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Add the message, or the tensors, of the next worker of this process."""
        if self._encoding is not None:
            message = torch.cat([self._encoding.encode(tensor).flatten() for tensor in message])
        self._accumulator.add(worker.index, message)

    def result(self) -> dict:
        """Return the messages, or lists of tensors, that came to this process or were added here, by sender."""
        arrived = self._accumulator.result()
        self._group.sent(self._event)
        if self._encoding is None:
            return arrived
        return {worker: self._decode(arrived.pop(worker)) for worker in list(arrived)}  # frees each encoded message

    def _decode(self, message: torch.Tensor) -> list[torch.Tensor]:
        parts = message.view(self._count, -1, self._encoding.row_bytes(self._like.dtype))
        return [self._encoding.decode(part, self._like.dtype)[: self._like.numel()] for part in parts]


def encode_with_error(encoding: Encoding, tensor: torch.Tensor, error: torch.Tensor, part: Part | None) -> torch.Tensor:
    """Encode a tensor plus the error of its part, and keep the new error (error feedback, arXiv 1901.09847).

    The tensor is written over.
    """
    encoded = encoding.encode(tensor.add_(take(error, part)))
    arriving = encoding.decode(encoded, tensor.dtype)[: tensor.numel()]
    if part is None:
        torch.sub(tensor, arriving, out=error)
    else:
        put(error, part, tensor - arriving)
    return encoded
