"""Evaluation: mean loss and the task's metric on held-out examples, in batches, without padding.

`Validation` divides the batches among the workers of a trainer, whose processes evaluate them. Sums are added in the
order of the batches, so that the result does not depend on who evaluated them.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from algorithms.batch.losses import example_loss_sums
from algorithms.registry import Registry
from fabrics.data.examples import Examples, TaskData
from fabrics.models.attention import unmasked
from fabrics.training.flat_model import FlatModel
from fabrics.training.worker_group import WorkerGroup
from utils.progress import progress_bar


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one model. loss: mean over predicted targets, in nats. metric: perplexity, or accuracy."""

    loss: float
    metric: float


@dataclass(frozen=True)
class Metric:
    """The metric of a task. value: from (mean loss, share of correct targets) to the metric."""

    name: str
    higher_is_better: bool
    decimals: int
    value: Callable[[float, float], float]


METRICS = Registry(
    {
        "causal_lm": Metric("perplexity", False, 2, lambda loss, _: math.exp(loss) if loss < 700.0 else math.inf),
        "classification": Metric("accuracy", True, 4, lambda _, correct: correct),
    }
)


# Summed loss, targets and, of a classifier, correct answers of some batches of the evaluation examples.
EvaluationPart = Mapping[int, Sequence[float]]


def batch_count(examples: Examples, batch_size: int) -> int:
    return -(-len(examples) // batch_size)


@torch.no_grad()
def evaluate_batches(model: FlatModel, examples: Examples, batch_size: int, batches: Sequence[int]) -> EvaluationPart:
    """Evaluate a model in eval mode on some batches of the examples."""
    sums = torch.zeros(len(batches), 3, dtype=torch.float64, device=model.device)
    bar = progress_bar(batches, desc="evaluating", unit=" batches", leave=False, delay=1)
    for row, number in enumerate(bar):
        start = number * batch_size
        batch = examples.batch(range(start, min(start + batch_size, len(examples))), model.device)
        labels = batch.pop("labels")
        with unmasked(model.module, batch):
            if labels.dim() == 1:
                logits = model.logits(batch, eager=True)
                losses, counts = example_loss_sums(logits, labels)
                sums[row, 2] = (logits.argmax(-1) == labels).sum()
            else:
                losses, counts = model.example_loss_sums(batch, labels, eager=True)
        sums[row, 0] = losses.sum(dtype=torch.float64)
        sums[row, 1] = counts.sum()
    return dict(zip(batches, sums.tolist(), strict=True))


def combine(parts: Iterable[EvaluationPart], task: str) -> Evaluation:
    """Combine the parts of an evaluation; ValueError: the examples have no target to predict.

    The loss is the summed loss of all predicted targets divided by their number, not a mean of batch means.
    """
    sums = {batch: row for part in parts for batch, row in part.items()}
    loss = 0.0
    count = 0.0
    correct = 0.0
    for _, (batch_loss, targets, answers) in sorted(sums.items()):
        loss += batch_loss
        count += targets
        correct += answers
    if count == 0:
        raise ValueError("the evaluation examples have no target to predict")
    return Evaluation(loss / count, METRICS[task].value(loss / count, correct / count))


class Validation:
    """Evaluates trainers on the validation examples, divided among each trainer's workers."""

    def __init__(self, data: TaskData, model: FlatModel, batch_size: int):
        self.metric = METRICS[data.task]
        self._task = data.task
        self._examples = data.validation
        self._model = model
        self._batch_size = batch_size

    def part(self, worker_group: WorkerGroup) -> EvaluationPart | None:
        """Evaluate a trainer's up-to-date parameters on the batches of this process's workers; None without one."""
        if not worker_group.local:
            return None
        count = batch_count(self._examples, self._batch_size)
        batches = [number for number in range(count) if number % len(worker_group) in worker_group.local]
        own, others = self._model.local_batches(batches)
        with self._model.evaluating(worker_group.shared["parameters"]):
            part = evaluate_batches(self._model, self._examples, self._batch_size, own)
            if others:  # all devices that share a model make every forward pass together
                evaluate_batches(self._model, self._examples, self._batch_size, others)
        return part

    def combine(
        self, parts: Sequence[Mapping[int, EvaluationPart]], trainers: Collection[int]
    ) -> dict[int, Evaluation]:
        """Combine the parts that each process has evaluated, by trainer, into each trainer's evaluation."""
        return {
            trainer: combine([process[trainer] for process in parts if trainer in process], self._task)
            for trainer in trainers
        }

    def best(self, evaluations: Mapping[int, Evaluation]) -> int:
        """The trainer with the best metric; ties go to the smaller id."""
        sign = -1.0 if self.metric.higher_is_better else 1.0
        return min(evaluations, key=lambda trainer: (sign * evaluations[trainer].metric, trainer))
