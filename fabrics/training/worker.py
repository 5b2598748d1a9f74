"""A worker: a node while it works for a trainer, what it is handed in a round and what it hands back.

What it keeps from round to round are named tensors: its inner optimiser's state, and what the synchronisation and its
encoding keep of it. Its inner steps are in `inner_steps`.

A worker's parameters and gradients are reached through its FlatModel alone, as flat tensors: a worker whose model is
spread over several devices would bring another one of these.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from algorithms.batch.gradient_statistics import GradientMoments, SampleEstimate
from algorithms.batch.switch_mode import ExecutionPlan
from algorithms.synchronisation import Method
from algorithms.synchronisation.encodings.encoding import COMMUNICATION_DTYPES
from algorithms.synchronisation.method import COPY, ERROR
from fabrics.data.examples import Examples
from fabrics.training.flat_model import FlatModel
from fabrics.training.offload import Home, seat_of
from fabrics.training.optimizers import INNER_OPTIMIZERS, inner_optimizer_name
from utils.config.schema import Config, ConfigError


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and what would help."""


class NodeFailedError(RuntimeError):
    """A node cannot work any more; its trainer goes on with the others."""


@dataclass(frozen=True)
class Node:
    """A worker slot on a device. max_batch: its largest micro-batch. speed: examples per second; None: not known."""

    id: int
    device: torch.device
    max_batch: int
    speed: float | None = None


class Place(NamedTuple):
    """Where in a run a worker's round is; `round` counts from 0."""

    seed: int
    trainer: int
    worker: int
    round: int


@dataclass(frozen=True)
class Assignment:
    """What a worker is to do in a round.

    Attributes:
        plan: the micro-batches of an inner step.
        learning_rates: of every inner step of the round.
        turns: during which of these, from 0, each of its own is made. pace: for how many of its own there is time.
        examples: all training examples.
        places: from (offset, count) to the indices of the next examples of all workers that read with it, counted from
            where the round begins.
        first_examples: where its slice of each inner step of its own begins.
        place: in the run; dropout depends on it and on the inner step alone.
        sample: offset of the examples to take statistics of where an inner step has too few.
        probes: into how many micro-batches at least a step is cut for per-example statistics, which are taken at the
            first inner step, where all workers have the same parameters; 0: none are.
        hands_back: what to hand back of the gradient that the statistics are of: nothing, all of it, or a sketch.
        weight: in means over the workers, in any unit; None: examples of the round.
    """

    plan: ExecutionPlan
    learning_rates: Sequence[float]
    turns: Sequence[int]
    pace: int
    examples: Examples
    places: Callable[[int, int], np.ndarray]
    first_examples: Sequence[int]
    place: Place
    sample: int
    probes: int = 0
    hands_back: Literal["nothing", "gradient", "sketch"] = "nothing"
    weight: float | None = None

    @property
    def round_examples(self) -> int:
        """Of all its inner steps."""
        return len(self.turns) * self.plan.effective_batch


@dataclass(frozen=True)
class WorkerRound:
    """What one worker reports of a round: small enough to send to everybody.

    plan: that it ended with. losses: none where its node failed on the way. learning_rates: of its inner steps.
    max_batch: of its node, afterwards. turns: see Assignment; None: it made one in every inner step of the round.
    steady_seconds, steady_examples: of the inner steps but the first, which may compile and fill caches. left_out: why
    it is not in the mean, if it is not. unheard: what it sent was lost. failed: its node works no more. statistics: of
    the samples that it took. moments: of the gradient of its largest sample or of a sketch of it, beside the other
    workers'.
    """

    node: int
    plan: ExecutionPlan
    losses: list[float]
    learning_rates: list[float]
    statistics: tuple[SampleEstimate, ...]
    seconds: float
    max_batch: int
    steady_seconds: float = 0.0
    steady_examples: int = 0
    left_out: str | None = None
    failed: bool = False
    unheard: bool = False
    moments: GradientMoments | None = None
    turns: Sequence[int] | None = None

    @property
    def examples(self) -> int:
        """What it had in the round."""
        return len(self.learning_rates) * self.plan.effective_batch

    @property
    def losses_by_turn(self) -> list[tuple[int, float]]:
        """During which inner step of the round, from 0, it had each loss."""
        turns = range(len(self.losses)) if self.turns is None else self.turns
        return list(zip(turns, self.losses, strict=False))


class Worker:
    """A node while it works for a trainer: its own tensors over the device's working model.

    Attributes:
        optimizer: of its inner steps, in its turn; None where a trainer's parameters are updated as one.
        state: what the method keeps of it, what its last message lost on its way (`ERROR`), and its own copy of the
            parameters (`COPY`), where there are such.
        correction: of it, what is added to every gradient; None: nothing is.
    """

    def __init__(self, node: Node, working: FlatModel, config: Config, method: Method):
        self.node = node
        self.model = working
        self.config = config
        kind, like = inner_optimizer_name(config), working.parameters.data
        local = kind is not None and not method.capabilities.exchanges_gradients
        self._seat = seat_of(working, config) if local and "idle_moments" in config.offload else None
        if self._seat is not None:
            self.optimizer, home = self._seat.optimizer, Home.chosen("cpu", working.device)
            self._waiting = {name: home.zeros(tensor) for name, tensor in self.optimizer.state_dict().items()}
        else:
            self.optimizer = INNER_OPTIMIZERS[kind].build(working, config) if local else None
        self.state = {name: torch.zeros_like(like) for name in personal_tensors(config, method)}
        self.correction = None if method.capabilities.correction is None else self.state[method.capabilities.correction]

    @property
    def moments(self) -> dict[str, torch.Tensor]:
        """The inner optimiser's state, by reference."""
        if self._seat is not None:
            self._seat.leave(self._waiting)
            return dict(self._waiting)
        return self.optimizer.state_dict() if self.optimizer is not None else {}

    def begin_turn(self) -> None:
        """Have the moments on the device: others may have worked there in between."""
        if self._seat is not None:
            self._seat.take(self._waiting)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All that it keeps, by reference."""
        return self.moments | self.state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from a copy of `state`, as far as it goes.

        Raises:
            ConfigError: a tensor of that name is of something else.
        """
        for name, tensor in self.state_dict().items():
            if name in state:
                if state[name].shape != tensor.shape:
                    raise ConfigError(
                        f"inner_optimizer, distributed_algo: what the workers of the run kept as {name} is of shape "
                        f"{list(state[name].shape)}, and would have to be {list(tensor.shape)}: it cannot go on so"
                    )
                tensor.copy_(state[name])


def personal_tensors(config: Config, method: Method) -> tuple[str, ...]:
    """Flat tensors that a worker keeps besides its moments, and that nobody else could begin with."""
    error = (ERROR,) if COMMUNICATION_DTYPES[config.communication_dtype].keeps_error else ()
    copy = (COPY,) if method.keeps != "shared" or config.message_loss else ()
    return (*error, *method.worker_state, *copy)
