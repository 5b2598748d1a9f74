"""The records that trainers and the cluster hand to whoever writes them down, and that interface."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from algorithms.gradient_statistics import GradientStatistics
from algorithms.policies import MergePlan
from algorithms.switch_mode import ExecutionPlan
from fabrics.eval_tool import Evaluation, Metric
from fabrics.examples import TaskData
from utils.config import Config


@dataclass(frozen=True)
class WorkerRound:
    """What one worker reports of a round: small enough to send to everybody."""

    node: int
    plan: ExecutionPlan
    losses: list[float]
    learning_rates: list[float]
    tokens: int
    statistics: GradientStatistics | None


@dataclass(frozen=True)
class RoundReport:
    """One trainer's round. bytes_communicated is the sum over its workers; seconds exclude evaluation."""

    trainer: int
    requested_batch: int
    next_requested_batch: int
    workers: dict[int, WorkerRound]
    statistics: GradientStatistics | None
    examples: int
    tokens: int
    communications: int
    bytes_communicated: int
    seconds: float
    warnings: tuple[str, ...] = ()

    @property
    def train_loss(self) -> float:
        """Mean loss over the inner steps of all workers, each weighted by its examples."""
        weights = [w.plan.effective_batch for w in self.workers.values() for _ in w.losses]
        losses = [loss for w in self.workers.values() for loss in w.losses]
        return float(np.average(losses, weights=weights))

    @property
    def effective_batch(self) -> int:
        """Examples per inner step over all workers."""
        return sum(worker.plan.effective_batch for worker in self.workers.values())


@dataclass
class Totals:
    """What the whole run has used so far, all trainers together."""

    outer_steps: int = 0
    examples: int = 0
    tokens: int = 0
    communications: int = 0
    bytes_communicated: int = 0
    training_seconds: float = 0.0


@dataclass(frozen=True)
class Merge:
    """One merge that happened after the round `outer_step`."""

    outer_step: int
    plan: MergePlan


@dataclass(frozen=True)
class ClusterRound:
    """Everything about one round, for whoever writes it down.

    evaluations holds the trainers as they were before the merge, and only where the round was evaluated.
    """

    outer_step: int
    planned_outer_steps: int | None
    reports: dict[int, RoundReport]
    evaluations: dict[int, Evaluation]
    merge: Merge | None
    totals: Totals


class RunView(Protocol):
    """What an observer may see and ask of a cluster."""

    config: Config
    data: TaskData
    metric: Metric
    devices: list[torch.device]
    nodes: Sequence
    trainers: Mapping[int, object]
    merges: list[Merge]
    totals: Totals
    parameter_count: int

    def best(self, evaluations: dict[int, Evaluation]) -> int:
        """The trainer with the best metric."""

    def save_models(self, folder: Path) -> dict[int, Path]:
        """Write every living trainer; where each was written."""


class Observer(Protocol):
    """Whoever follows a run."""

    def on_start(self, run: RunView, initial: dict[int, Evaluation]) -> None:
        """Before the first round; the trainers as they are initialised."""

    def on_round_start(self, outer_step: int, planned: int | None, steps: int) -> None:
        """A round begins with so many inner steps over all workers; planned: rounds in all, where known."""

    def on_step(self) -> None:
        """A worker has made an inner step."""

    def on_round(self, run: RunView, result: ClusterRound) -> None:
        """A round has ended, its merge and redistribution included."""

    def warn(self, message: str) -> None:
        """Something that the user should know and that does not stop the run; may come again and again."""
