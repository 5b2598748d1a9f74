"""A trainer's round on the workers of this process: inner steps up to each stop of the method, and what it does there.

A `Gathering` is what a method sees (`algorithms.synchronisation.method.Group`): its workers, wherever they are, their
means and messages. Whatever is sent is counted here, and nowhere else.

Where workers keep no parameters of their own, a worker is run when its tensor is asked for: its replica lives in the
working model until the next one's turn, and no copy of a model is made.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch

from algorithms.synchronisation.encodings.encoding import BFLOAT16, PLAIN, Encoding
from algorithms.synchronisation.method import Event, Member, Part, put, take
from fabrics.training.inner_loop import InnerSteps, clip
from fabrics.training.optimizers import INNER_OPTIMIZERS, InnerOptimizer, inner_optimizer_name
from fabrics.training.parameter_server import server_seconds
from fabrics.training.participation import lost_messages
from fabrics.training.worker import COPY, ERROR, Assignment, Worker
from fabrics.training.worker_group import Workforce
from utils.config.schema import Config

# What is sent as it is, whatever communication_dtype says: a few numbers, or what no error is kept of.
_PLAIN_KINDS = ("monitor", "parameters")


class Gathering:
    """One round of a trainer.

    Args:
        config: the run's.
        workforce: the trainer's workers, and its method.
        shared: the trainer's tensors by name, which change in place.
        values: the method's plain values, which change in place.
        assignments: what each worker that takes part is to do; the others rest.
        on_step: called after every inner step of every worker of this process.

    Attributes:
        events: what all workers have sent each other.
        steps: inner steps of each local worker that takes part.
        unheard: workers whose messages are lost in this round.
    """

    def __init__(
        self,
        config: Config,
        workforce: Workforce,
        shared: dict[str, torch.Tensor],
        values: dict[str, float],
        assignments: Mapping[int, Assignment],
        on_step: Callable[[], None],
    ):
        first = next(iter(assignments.values()))
        self.shared, self.values, self.wholes = shared, values, workforce.first_working.wholes
        self.workers, self.round, self.step = len(assignments), first.place.round, 0
        self.inner_steps = len(first.learning_rates)
        present = range(len(workforce))
        examples = [assignments[worker].round_examples if worker in assignments else 0 for worker in present]
        # By default every example counts the same, whichever worker it is with.
        weights = [
            count if not count or assignments[worker].weight is None else assignments[worker].weight
            for worker, count in enumerate(examples)
        ]
        self.weights = [weight / sum(weights) for weight in weights]
        speeds = [node.speed if config.node_speeds else math.inf for node in workforce.nodes]
        self.seconds = [count / speed for count, speed in zip(examples, speeds, strict=True)]
        self.own_steps, self.batches = [0] * len(workforce), [0] * len(workforce)
        for worker, own in assignments.items():
            self.own_steps[worker], self.batches[worker] = own.pace, own.plan.effective_batch
        self.step_seconds = min(self.batches[worker] / speeds[worker] for worker in assignments)
        self.events: list[Event] = []
        self.steps = {
            index: InnerSteps(worker, assignments[index], on_step)
            for index, worker in workforce.local.items()
            if index in assignments
        }
        self.unheard = lost_messages(config.message_loss, first.place, assignments)
        self._config, self._workforce, self._method = config, workforce, workforce.method
        self._weights, self._rates, self._place = weights, first.learning_rates, first.place
        self._participants = frozenset(assignments)
        self._until = 0
        self._numbers_at: dict[int, int] = {}  # by where a part begins: see _island_numbers
        self._optimizer: InnerOptimizer | None = None

    @torch.no_grad()
    def run(self) -> None:
        """Every stop of the round.

        Raises:
            TrainingError: not even one example fits into a device's memory.
        """
        method, gradients = self._method, self._method.exchanges_gradients
        every = range(1, self.inner_steps + 1)
        stops = every if gradients else method.begin(self)
        if stops[-1] != self.inner_steps or (len(stops) > 1 and method.own_copy != "replica" and not gradients):
            raise ValueError(
                f"{type(method).__name__}: the last stop must be the round's last inner step, and the only one where "
                f"workers keep no replicas, got {list(stops)} of {self.inner_steps}"
            )
        for stop in stops:
            self._until = stop
            if method.own_copy == "replica":
                for index, steps in self.steps.items():
                    self._advance(index, steps)
            self.step = stop
            method.exchange(self)
            for index, steps in self.steps.items():  # whom nobody asked for
                self._advance(index, steps)
        if self._config.message_loss:
            for index, worker in self._workforce.local.items():
                if index not in self.unheard:
                    worker.state[COPY].copy_(self.shared["parameters"])

    def _advance(self, index: int, steps: InnerSteps) -> None:
        due = steps.due(self._until)
        if steps.done >= due or steps.left_out is not None:
            return
        worker, method = self._workforce.local[index], self._method
        if method.exchanges_gradients:
            steps.gradient(self.shared["parameters"])
            return
        start = worker.state.get(COPY, self.shared["parameters"])
        steps.go(start, due)
        if (method.own_copy == "replica" or index in self.unheard) and steps.left_out is None:
            start.copy_(worker.working.parameters)

    def _member(self, index: int, worker: Worker) -> Member | None:
        """The worker at this stop; None where it rests, its message is lost, or it is left out."""
        steps = self.steps.get(index)
        if steps is None:
            return None
        self._advance(index, steps)
        if steps.left_out is not None or index in self.unheard:
            return None
        working, method, state = worker.working, self._method, worker.state
        # With message_loss a worker's copy is where it began, and yet what it gives is against the shared parameters.
        start = self.shared["parameters"] if method.own_copy == "nothing" else state[COPY]
        own = start if method.own_copy == "replica" else working.parameters.data
        return Member(index, own, start, working.gradient if method.exchanges_gradients else None, state)

    # What a method asks for

    @property
    def learning_rate(self) -> float:
        return self._rates[self.step - 1]

    @property
    def weight_decay(self) -> float:
        return self._config.weight_decay

    @property
    def message_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self._workforce.encoding is BFLOAT16 else self._workforce.dtype

    @property
    def size(self) -> int:
        return self._workforce.first_working.whole_size

    def total(self, numbers: torch.Tensor) -> torch.Tensor:
        return self._workforce.first_working.island.sum(numbers)

    def distance(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self._workforce.first_working.distance(a, b)

    def sketch(self, flat: torch.Tensor, seed: int, size: int, rows: int) -> torch.Tensor:
        return self._workforce.first_working.sketch(flat, seed, size, rows)

    def here(self, places: torch.Tensor) -> torch.Tensor:
        return self._workforce.first_working.here(places)

    def members(self) -> list[Member]:
        found = (self._member(index, worker) for index, worker in self._workforce.local.items())
        return [member for member in found if member is not None]

    def mean(
        self,
        give: Callable[[Member], torch.Tensor],
        like: torch.Tensor,
        kind: str = "synchronisation",
        behind: int = 0,
        part: Part | None = None,
        weights: Mapping[int, float] | None = None,
        numbers: int | None = None,
    ) -> torch.Tensor | None:
        encoding = PLAIN if kind in _PLAIN_KINDS else self._workforce.encoding

        def tensor_of(index: int, worker: Worker) -> torch.Tensor | None:
            member = None if weights is not None and index not in weights else self._member(index, worker)
            if member is None:
                return None
            error = member.state.get(ERROR) if kind == "synchronisation" else None
            return encoding.encode(give(member)) if error is None else _with_error(encoding, give(member), error, part)

        by_number = self._weights if weights is None else [weights.get(w, 0.0) for w in range(len(self._weights))]
        # Of a few random places none may be in this device's part.
        mean, present = self._workforce.mean(tensor_of, like, encoding, by_number) if like.numel() else (like, 1)
        if numbers is None:
            numbers = like.numel() if kind == "monitor" else self._numbers(like)
        each = _bytes_of_mean(encoding, numbers, like.dtype, self.workers, weights)
        how = () if weights is None else ("server", tuple(weights))
        self._sent(Event(kind, self.step, *each, behind, *how))
        return mean if present else None

    def mean_difference(
        self, part: Part | None = None, behind: int = 0, weights: Mapping[int, float] | None = None
    ) -> torch.Tensor | None:
        shared = take(self.shared["parameters"], part)
        # In the working buffer itself where the next replica overwrites it anyway; a part is a copy.
        in_place = part is not None or self._method.own_copy == "nothing"

        def difference(member: Member) -> torch.Tensor:
            own = take(member.parameters, part)
            return (own if in_place else own.clone()).neg_().add_(member.here(shared))

        return self.mean(difference, shared, "synchronisation", behind, part, weights)

    def _numbers(self, like: torch.Tensor) -> int:
        """Of a flat tensor of an island; gaps between the model's tensors are not counted."""
        whole = like.numel() == self.shared["parameters"].numel()
        return self._workforce.parameter_count if whole else like.numel() * self._workforce.first_working.island.size

    def deliver(
        self,
        give: Callable[[Member], torch.Tensor],
        size: int,
        to: Callable[[int], Collection[int]] | None = None,
        behind: int = 0,
        through: str = "all",
        counted: int | None = None,
    ) -> dict[int, torch.Tensor]:
        sent = size if counted is None else counted
        return self._deliver(give, size, to, (sent, sent), behind, through)

    def deliver_tensors(
        self,
        give: Callable[[Member], Sequence[torch.Tensor]],
        count: int,
        to: Callable[[int], Collection[int]] | None = None,
        through: str = "all",
        by: Collection[int] | None = None,
    ) -> dict[int, list[torch.Tensor]]:
        encoding, like, numbers = self._workforce.encoding, self.shared["parameters"], self._workforce.parameter_count
        row_bytes = encoding.row_bytes(like.dtype)
        size = encoding.rows(like.numel()) * row_bytes
        sent, back = count * encoding.sent_bytes(numbers, like.dtype), PLAIN.sent_bytes(numbers, like.dtype)

        def message(member: Member) -> torch.Tensor:
            return torch.cat([encoding.encode(tensor).flatten() for tensor in give(member)])

        def decoded(message: torch.Tensor) -> list[torch.Tensor]:
            parts = message.view(count, -1, row_bytes)
            return [encoding.decode(part, like.dtype)[: like.numel()] for part in parts]

        arrived = self._deliver(message, count * size, to, (sent, back), 0, through, by)
        return {worker: decoded(arrived.pop(worker)) for worker in list(arrived)}  # what is decoded is freed

    def _deliver(
        self,
        give: Callable[[Member], torch.Tensor],
        size: int,
        to: Callable[[int], Collection[int]] | None,
        counted: tuple[float, float],
        behind: int,
        through: str,
        by: Collection[int] | None = None,
    ) -> dict[int, torch.Tensor]:
        """counted: bytes of a message, and of a server's answer."""
        everybody, present = range(len(self._workforce)), self._participants
        senders = present if by is None else present.intersection(by)

        def tensor_of(index: int, worker: Worker) -> torch.Tensor | None:
            member = self._member(index, worker) if index in senders else None
            return None if member is None else give(member)

        # The processes of workers that rest make the same step of the trainer's tensors; what they hear is not counted.
        takers = [
            set(everybody if to is None else to(worker)) - {worker} if by is None or worker in senders else set()
            for worker in everybody
        ]
        arrived = self._workforce.deliver(tensor_of, size, takers)
        each = sum(len(takers[worker] & present) for worker in senders) * counted[0] / self.workers
        share = len(senders) / self.workers
        sent, received = (share * counted[0], share * counted[1]) if through == "server" else (each, each)
        who = None if by is None else tuple(sorted(senders))
        self._sent(Event("synchronisation", self.step, sent, received, behind, through, who))
        return arrived

    def server_seconds(self, part: Part | None) -> float:
        return server_seconds(self._config, self._workforce, self._island_numbers(part))

    def _island_numbers(self, part: Part | None) -> int:
        """Of a part, over all devices of an island, which may have different numbers of it: the same on each."""
        if part is None:
            return self._workforce.parameter_count
        if (place := part[0].start) not in self._numbers_at:
            own = torch.tensor(float(sum(each.stop - each.start for each in part)), dtype=torch.float64)
            self._numbers_at[place] = int(self._workforce.first_working.island.sum(own).item())
        return self._numbers_at[place]

    def _sent(self, event: Event) -> None:
        if self.workers > 1:
            self.events.append(event)

    def clipped(self, gradient: torch.Tensor) -> torch.Tensor:
        clip(self._workforce.first_working, gradient, self._config.gradient_clipping)
        return gradient

    def update(self, gradient: torch.Tensor) -> None:
        working, parameters = self._workforce.first_working, self.shared["parameters"]
        if self._optimizer is None:
            kind = INNER_OPTIMIZERS[inner_optimizer_name(self._config)]
            self._optimizer = kind.build(working, self._config, self.shared)
        working.load(parameters)
        self.clipped(working.gradient.copy_(gradient))
        self._optimizer.step(self.learning_rate)
        working.gradient.zero_()
        parameters.copy_(working.parameters)

    def generator(self) -> torch.Generator:
        place = [self._place.seed, self._place.trainer, self.round, self.step]
        seed = int(np.random.SeedSequence(place, spawn_key=(1,)).generate_state(1, np.uint64)[0])
        return torch.Generator().manual_seed(seed)


def _bytes_of_mean(
    encoding: Encoding, numbers: int, dtype: torch.dtype, workers: int, senders: Collection[int] | None
) -> tuple[float, float]:
    """What each of so many workers sends and receives on average; senders: to a server, by number; None: all."""
    if senders is None:
        each = encoding.reduction_bytes(workers, numbers, dtype) / workers
        return each, each
    share = len(senders) / workers
    return share * encoding.sent_bytes(numbers, dtype), share * encoding.way_back.sent_bytes(numbers, dtype)


def _with_error(encoding: Encoding, tensor: torch.Tensor, error: torch.Tensor, part: Part | None) -> torch.Tensor:
    """A tensor, which is written over, with what its part lost the last time, encoded; what it loses now is kept."""
    lost = take(error, part)
    encoded = encoding.encode(tensor.add_(lost))
    arriving = encoding.decode(encoded, tensor.dtype)[: tensor.numel()]
    if part is None:
        torch.sub(tensor, arriving, out=error)
    else:
        put(error, part, tensor - arriving)
    return encoded
