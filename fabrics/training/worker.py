"""A worker: a node while it works for a trainer, what it is assigned in a round, and what it reports.

A worker keeps named tensors from round to round: its inner optimizer's state, and what the synchronisation method and
its encoding need. Its inner steps are in `inner_loop`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from algorithms.batch.gradient_statistics import GradientMoments, SampleEstimate
from algorithms.batch.switch_mode import ExecutionPlan
from algorithms.synchronisation import Method
from algorithms.synchronisation.encodings import COMMUNICATION_DTYPES
from algorithms.synchronisation.group import LocalWorker
from algorithms.synchronisation.method import COPY, ERROR
from fabrics.data.examples import Examples
from fabrics.training.flat_model import FlatModel
from fabrics.training.optimizers import WorkerOptimizer, inner_optimizer_name
from fabrics.training.statistics import Measurement
from utils.config.schema import Config, ConfigError


class TrainingError(RuntimeError):
    """Training cannot continue; the message says why and what would help."""


@dataclass(frozen=True)
class Node:
    """A worker slot on a device; speed: examples per second, None: unknown."""

    id: int
    device: torch.device
    max_batch: int
    speed: float | None = None


class RoundKey(NamedTuple):
    """Identifies a worker's round; its random numbers are functions of this key. Rounds count from 0."""

    seed: int
    trainer: int
    worker: int
    round: int


def method_generator(key: RoundKey, step: int) -> torch.Generator:
    """Return the method's random numbers at an inner step of a trainer's round, the same in every process."""
    sequence = np.random.SeedSequence([key.seed, key.trainer, key.round, step], spawn_key=(1,))
    return torch.Generator().manual_seed(int(sequence.generate_state(1, np.uint64)[0]))


@dataclass(frozen=True)
class Assignment:
    """A worker's part of a round.

    Attributes:
        active_steps: the inner steps of the round, from 0, that the worker makes; slow nodes may make fewer than all.
        read: from (offset, count) to the indices of the trainer's next examples; offset 0 is the start of the round.
        offsets: where the worker's examples of each active step begin.
        probe_indices: draws those of the probe batch, for statistics besides those of an inner step with few examples.
        measurement: what the first inner step takes, where workers with a shared start have the same parameters.
    """

    plan: ExecutionPlan
    learning_rates: Sequence[float]
    active_steps: Sequence[int]
    examples: Examples
    read: Callable[[int, int], np.ndarray]
    offsets: Sequence[int]
    probe_indices: Callable[[], np.ndarray]
    key: RoundKey
    measurement: Measurement


@dataclass(frozen=True)
class WorkerRound:
    """A worker's report of a round, small enough to send to all processes.

    Attributes:
        plan: the micro-batches at the end of the round; after running out of memory they are smaller.
        losses: of each inner step.
        samples: estimates of the gradient statistics, one of each sample of the worker's examples.
        steady_seconds: of the inner steps except the first one, which may compile and fill caches.
        steady_examples: of the same steps.
        left_out: why the worker is not in the mean; None if it is.
        comparison: of its gradient, or its sketch, compared with the mean over the workers.
        active_steps: as in Assignment; None: all inner steps.
    """

    node: int
    plan: ExecutionPlan
    losses: list[float]
    learning_rates: list[float]
    samples: tuple[SampleEstimate, ...]
    seconds: float
    max_batch: int
    steady_seconds: float = 0.0
    steady_examples: int = 0
    left_out: str | None = None
    message_lost: bool = False
    comparison: GradientMoments | None = None
    active_steps: Sequence[int] | None = None

    @property
    def examples(self) -> int:
        """Examples of the whole round."""
        return len(self.learning_rates) * self.plan.effective_batch

    @property
    def losses_by_step(self) -> list[tuple[int, float]]:
        """Pairs of an inner step of the round, from 0, and its loss."""
        steps = range(len(self.losses)) if self.active_steps is None else self.active_steps
        return list(zip(steps, self.losses, strict=False))


class Worker:
    """A node while it works for a trainer: its own tensors, and the model that all workers of its device share.

    Attributes:
        optimizer: of the inner steps; None if the trainer's parameters are updated instead of the worker's.
        state: tensors of the method, of the encoding (`ERROR`) and the worker's own parameters (`COPY`), by name.
        correction: the tensor of `state` that is added to every gradient; None: no tensor.
    """

    def __init__(self, node: Node, model: FlatModel, config: Config, method: Method):
        self.node = node
        self.model = model
        self.config = config
        self.optimizer = None
        if inner_optimizer_name(config) is not None and not method.capabilities.exchanges_gradients:
            self.optimizer = WorkerOptimizer(model, config)
        like = model.parameters.data
        self.state = {name: torch.zeros_like(like) for name in personal_tensors(config, method)}
        correction = method.capabilities.correction
        self.correction = None if correction is None else self.state[correction]

    @property
    def moments(self) -> dict[str, torch.Tensor]:
        """The inner optimizer's state, by reference."""
        return {} if self.optimizer is None else self.optimizer.state_dict()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All tensors of the worker, by reference."""
        return self.moments | self.state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors of `state` whose names the worker has; ConfigError: a tensor has another shape."""
        for name, tensor in self.state_dict().items():
            if name in state:
                if state[name].shape != tensor.shape:
                    raise ConfigError(
                        f"inner_optimizer, distributed_algo: the run's workers have {name} of shape "
                        f"{list(state[name].shape)}, but this configuration needs {list(tensor.shape)}; "
                        f"resume with the run's own values of these keys"
                    )
                tensor.copy_(state[name])


def local_worker(index: int, worker: Worker, parameters: torch.Tensor, method: Method) -> LocalWorker:
    """Return a worker as its method sees it; parameters: the trainer's."""
    start = worker.state.get(COPY, parameters)
    return LocalWorker(
        index=index,
        parameters=start if method.keeps == "replica" else worker.model.parameters.data,
        # After a lost message a worker starts elsewhere, but its message is relative to the shared parameters.
        start=parameters if method.keeps == "shared" else start,
        gradient=worker.model.gradient if method.capabilities.exchanges_gradients else None,
        state=worker.state,
    )


def personal_tensors(config: Config, method: Method) -> tuple[str, ...]:
    """Return the names of a worker's flat tensors that no other worker could start with, besides its moments."""
    error = (ERROR,) if COMMUNICATION_DTYPES[config.communication_dtype].keeps_error else ()
    copy = (COPY,) if method.keeps != "shared" or config.message_loss else ()
    return (*error, *method.worker_state, *copy)
