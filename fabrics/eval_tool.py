"""Evaluation: mean loss and the task's metric on held-out examples, in batches, padding excluded."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from algorithms.losses import example_loss_sums
from fabrics.dataset_loader import Examples


@dataclass(frozen=True)
class Evaluation:
    """loss: mean over predicted targets, in nats. metric: perplexity, or accuracy between 0 and 1."""

    loss: float
    metric: float


@dataclass(frozen=True)
class Metric:
    """How a task is judged. value: from (mean loss, share of correct targets) to the metric."""

    name: str
    higher_is_better: bool
    value: Callable[[float, float], float]


def _perplexity(loss: float, correct: float) -> float:
    return math.exp(loss) if loss < 700.0 else math.inf


METRICS = {
    "causal_lm": Metric("perplexity", False, _perplexity),
    "classification": Metric("accuracy", True, lambda loss, correct: correct),
}


@torch.no_grad()
def evaluate(module: nn.Module, examples: Examples, task: str, batch_size: int, device: torch.device) -> Evaluation:
    """Evaluate a module (in eval mode) on all of `examples`.

    The loss is the sum of the losses of all predicted targets divided by their number (not a mean of batch
    means), accumulated in float64 on the device: one synchronisation at the end.

    Raises:
        ValueError: there is nothing to predict in the examples.
    """
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    for start in range(0, len(examples), batch_size):
        batch = examples.batch(range(start, min(start + batch_size, len(examples))), device)
        labels = batch.pop("labels")
        logits = module(**batch).logits
        sums, counts = example_loss_sums(logits, labels)
        totals[0] += sums.sum(dtype=torch.float64)
        totals[1] += counts.sum()
        if labels.dim() == 1:
            totals[2] += (logits.argmax(-1) == labels).sum()
    loss, count, correct = totals.tolist()
    if count == 0:
        raise ValueError("the evaluation examples hold no target to predict")
    return Evaluation(loss / count, METRICS[task].value(loss / count, correct / count))
