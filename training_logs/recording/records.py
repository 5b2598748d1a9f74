"""The records that trainers and the cluster hand to whoever writes them down, and that interface."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from algorithms.batch.gradient_statistics import GradientStatistics
from algorithms.nodes.policies import MergePlan
from algorithms.nodes.transfers import Move
from algorithms.synchronisation.method import Event
from fabrics.data.examples import TaskData
from fabrics.pool.eval_tool import Evaluation, Metric
from fabrics.pool.run_counters import Totals
from fabrics.training.device_models import WorkingModels
from fabrics.training.worker import WorkerRound
from training_logs.recording.memory_monitor import Use
from utils.config.schema import Config
from utils.distributed.processes import Processes


@dataclass(frozen=True)
class RoundReport:
    """One trainer's round. events: what its workers sent each other; seconds exclude evaluation."""

    trainer: int
    requested_batch: int
    next_requested_batch: int
    workers: dict[int, WorkerRound]
    statistics: GradientStatistics | None
    inner_steps: int
    examples: int
    tokens: int
    events: tuple[Event, ...]
    seconds: float
    warnings: tuple[str, ...] = ()

    @property
    def communications(self) -> int:
        """How many of the events count as such."""
        return sum(event.communicates for event in self.events)

    @property
    def bytes_synchronised(self) -> int:
        """By all its workers together, and by the server that they reach, if they do."""
        return round(sum(event.bytes_per_worker for event in self.events) * len(self.workers))

    @property
    def largest_exchange(self) -> float:
        """Bytes that a worker sends or receives at one time, at most."""
        return max((max(event.sent, event.received) for event in self.events), default=0.0)

    @property
    def left_out(self) -> int:
        """Workers whose pseudo-gradients are not in the mean."""
        return sum(worker.left_out is not None for worker in self.workers.values())

    @property
    def lost_messages(self) -> int:
        """Workers whose message did not arrive, so that they are not in the mean either."""
        return sum(worker.unheard for worker in self.workers.values())

    @property
    def train_loss(self) -> float:
        """Mean loss over inner steps, weighted by examples, of workers that are not left out; NaN without any."""
        present = [worker for worker in self.workers.values() if not worker.left_out]
        weights = [w.plan.effective_batch for w in present for _ in w.losses]
        losses = [loss for w in present for loss in w.losses]
        return float(np.average(losses, weights=weights)) if losses else float("nan")

    @property
    def effective_batch(self) -> int:
        """Examples per inner step over all workers."""
        return sum(worker.plan.effective_batch for worker in self.workers.values())


@dataclass(frozen=True)
class Merge:
    """One merge that happened after the round `outer_step`."""

    outer_step: int
    plan: MergePlan

    @classmethod
    def from_values(cls, values: Mapping) -> "Merge":
        """From dataclasses.asdict of one, through JSON."""
        weights = {int(trainer): weight for trainer, weight in values["plan"]["weights"].items()}
        return cls(values["outer_step"], MergePlan(values["plan"]["representative"], weights))


@dataclass(frozen=True)
class ClusterRound:
    """Everything about one round, for whoever writes it down.

    progress: how much of the run is done after it, 0 to 1. evaluations holds the trainers as they were before the
    merge, and only where the round was evaluated. memory is what each process uses after the round. notes: what else to
    say of it. moves: what was sent as nodes changed trainers before the round, and for the merge.
    """

    outer_step: int
    progress: float
    reports: dict[int, RoundReport]
    evaluations: dict[int, Evaluation]
    merge: Merge | None
    totals: Totals
    memory: list[list[Use]]
    notes: tuple[str, ...] = ()
    moves: tuple[Move, ...] = ()


class RunView(Protocol):
    """What an observer may see and ask of a cluster."""

    config: Config
    data: TaskData
    metric: Metric
    devices: list[torch.device]
    nodes: Sequence
    trainers: Mapping[int, object]
    failed_nodes: set[int]
    merges: list[Merge]
    totals: Totals
    parameter_count: int
    working: WorkingModels
    processes: Processes

    def best(self, evaluations: dict[int, Evaluation]) -> int:
        """The trainer with the best metric."""


class Observer:
    """Whoever follows a run; this one does nothing with it."""

    def on_start(self, run: RunView, initial: dict[int, Evaluation]) -> None:
        """Before the first round; the trainers as they are initialised, or nothing where a run is resumed."""

    def on_round_start(self, outer_step: int, progress: float, steps: int) -> None:
        """A round begins with so many inner steps over all workers; progress: how much of the run is done, 0 to 1."""

    def on_step(self) -> None:
        """A worker has made an inner step."""

    def on_round(self, run: RunView, result: ClusterRound) -> None:
        """A round has ended, its merge and redistribution included."""

    def warn(self, message: str) -> None:
        """Something that the user should know and that does not stop the run; may come again and again."""

    def state_dict(self) -> dict:
        """What to hand to the next observer when the run is resumed, as JSON values."""
        return {}
