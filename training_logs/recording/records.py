"""Records of rounds that trainers and the cluster hand to an observer, and the observer's interface."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from algorithms.batch.gradient_statistics import GradientStatistics
from algorithms.nodes.policies import Merge
from algorithms.nodes.traffic import Event, Exchange
from algorithms.nodes.virtual_clock import Computing
from algorithms.schedule.limits import RunCounters
from fabrics.pool.eval_tool import Evaluation
from fabrics.training.worker import WorkerRound
from training_logs.recording.memory_monitor import Use

if TYPE_CHECKING:
    from cluster import Cluster


@dataclass(frozen=True)
class RoundReport:
    """One trainer's round. seconds: without evaluation."""

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
    def computing(self) -> dict[int, Computing]:
        """The work of each worker."""
        return {
            index: Computing(worker.node, worker.examples, worker.seconds) for index, worker in self.workers.items()
        }

    @property
    def communications(self) -> int:
        """The number of events that count as communications."""
        return sum(event.communicates for event in self.events)

    @property
    def bytes_synchronised(self) -> int:
        """Bytes sent by all workers together, and by the server if there is one."""
        return round(sum(event.bytes_per_worker for event in self.events) * len(self.workers))

    @property
    def largest_exchange(self) -> float:
        """The largest number of bytes that a worker sends or receives at one time."""
        return max((max(event.sent, event.received) for event in self.events), default=0.0)

    @property
    def left_out(self) -> int:
        """The number of workers whose pseudo-gradients are not in the mean."""
        return sum(worker.left_out is not None for worker in self.workers.values())

    @property
    def lost_messages(self) -> int:
        """The number of workers whose message was lost, so that they are not in the mean."""
        return sum(worker.message_lost for worker in self.workers.values())

    @property
    def train_loss(self) -> float:
        """Mean loss over inner steps, weighted by examples, without workers that are left out; NaN if there is none."""
        present = [worker for worker in self.workers.values() if not worker.left_out]
        weights = [w.plan.effective_batch for w in present for _ in w.losses]
        losses = [loss for w in present for loss in w.losses]
        return float(np.average(losses, weights=weights)) if losses else float("nan")

    @property
    def effective_batch(self) -> int:
        """Examples per inner step over all workers."""
        return sum(worker.plan.effective_batch for worker in self.workers.values())

    @property
    def micro_batch(self) -> int:
        """The largest micro-batch of a worker."""
        return max(max(worker.plan.micro_batches) for worker in self.workers.values())

    @property
    def accumulation_steps(self) -> int:
        """The largest number of micro-batches in a worker's inner step."""
        return max(worker.plan.accumulation_steps for worker in self.workers.values())


@dataclass(frozen=True)
class ClusterRound:
    """One round of the cluster.

    Attributes:
        progress: finished part of the run after the round, 0 to 1.
        evaluations: by trainer, before the merge; empty if the round was not evaluated.
        merged: evaluation of the merged trainer, if the round was evaluated.
    """

    outer_step: int
    progress: float
    reports: dict[int, RoundReport]
    evaluations: dict[int, Evaluation]
    merge: Merge | None
    counters: RunCounters
    memory: list[list[Use]]
    merge_exchange: Exchange = Exchange()
    merged: Evaluation | None = None


class Observer:
    """Follows a run; this base class ignores everything."""

    def on_start(self, run: "Cluster", initial: dict[int, Evaluation]) -> None:
        """Called before the first round; `initial` holds the untrained trainers, or nothing if the run is resumed."""

    def on_round_start(self, outer_step: int, progress: float, steps: int) -> None:
        """Called before a round of `steps` inner steps of this process's workers; `progress` is the finished part."""

    def on_step(self) -> None:
        """Called after an inner step of a worker."""

    def on_round(self, run: "Cluster", result: ClusterRound) -> None:
        """Called after a round and its merge."""

    def note(self, message: str) -> None:
        """Called with a decision that the log should have."""

    def warn(self, message: str) -> None:
        """Called with a problem that does not stop the run; the same message may come repeatedly."""

    def state_dict(self) -> dict:
        """Return JSON values for the observer of the resumed run."""
        return {}
