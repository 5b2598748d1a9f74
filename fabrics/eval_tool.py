"""Evaluation: mean loss and the task's metric on held-out examples, in batches, padding excluded."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from algorithms.losses import example_loss_sums
from fabrics.examples import Examples


@dataclass(frozen=True)
class ClassScores:
    """How well one class is found, each between 0 and 1; what nothing was counted for is 0.

    precision: share of what was taken for the class that is of it. recall: share of the class that was found. f1:
    their harmonic mean. examples: how many of the class there are.
    """

    precision: float
    recall: float
    f1: float
    examples: int


@dataclass(frozen=True)
class Evaluation:
    """loss: mean over predicted targets, in nats. metric: perplexity, or accuracy between 0 and 1.

    classes: the scores of each class; empty for a language model.
    """

    loss: float
    metric: float
    classes: tuple[ClassScores, ...] = ()


@dataclass(frozen=True)
class Metric:
    """How a task is judged. value: from (mean loss, share of correct targets) to the metric."""

    name: str
    higher_is_better: bool
    decimals: int
    value: Callable[[float, float], float]


def _perplexity(loss: float, correct: float) -> float:
    return math.exp(loss) if loss < 700.0 else math.inf


METRICS = {
    "causal_lm": Metric("perplexity", False, 2, _perplexity),
    "classification": Metric("accuracy", True, 4, lambda loss, correct: correct),
}


def class_scores(confusion: torch.Tensor) -> tuple[ClassScores, ...]:
    """The scores of each class from counts [true class, predicted class]."""
    found = confusion.diagonal().tolist()
    rows, columns = confusion.sum(1).tolist(), confusion.sum(0).tolist()
    return tuple(
        ClassScores(
            precision=hits / predicted if predicted else 0.0,
            recall=hits / true if true else 0.0,
            f1=2 * hits / (true + predicted) if true + predicted else 0.0,
            examples=int(true),
        )
        for hits, true, predicted in zip(found, rows, columns, strict=True)
    )


@torch.no_grad()
def evaluate(module: nn.Module, examples: Examples, task: str, batch_size: int, device: torch.device) -> Evaluation:
    """Evaluate a module (in eval mode) on all of `examples`.

    The loss is the sum of the losses of all predicted targets divided by their number (not a mean of batch
    means), accumulated in float64 on the device, which is waited for at the end only.

    Raises:
        ValueError: there is nothing to predict in the examples.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    confusion: torch.Tensor | None = None
    for start in range(0, len(examples), batch_size):
        batch = examples.batch(range(start, min(start + batch_size, len(examples))), device)
        labels = batch.pop("labels")
        logits = module(**batch).logits
        sums, counts = example_loss_sums(logits, labels)
        totals[0] += sums.sum(dtype=torch.float64)
        totals[1] += counts.sum()
        if labels.dim() == 1:
            classes = logits.shape[-1]
            if confusion is None:
                confusion = torch.zeros(classes * classes, dtype=torch.int64, device=device)
            cells = labels * classes + logits.argmax(-1)
            confusion.scatter_add_(0, cells, torch.ones_like(cells))
    loss, count = totals.tolist()
    if count == 0:
        raise ValueError("the evaluation examples hold no target to predict")
    scores, correct = (), 0.0
    if confusion is not None:
        confusion = confusion.view(classes, classes).cpu()
        scores, correct = class_scores(confusion), confusion.trace().item() / count
    return Evaluation(loss / count, METRICS[task].value(loss / count, correct), scores)
