"""Forward and backward passes of a working model over examples, with or without per-example statistics."""

import numpy as np
import torch

from algorithms.gradient_statistics import GradientStatistics, PerExampleProbe
from algorithms.losses import example_losses
from algorithms.switch_mode import ExecutionPlan
from fabrics.examples import Examples
from fabrics.working_model import WorkingModel


def backward(
    working: WorkingModel, examples: Examples, indices: np.ndarray, weight: float = 1.0, hooked: bool = False
) -> torch.Tensor:
    """Add the gradient of `weight` times the mean loss of these examples; that product, detached.

    hooked: layers of the module have hooks.
    """
    batch = examples.batch(indices, working.device)
    labels = batch.pop("labels")
    loss = example_losses(working.logits(batch, hooked), labels).mean() * weight
    loss.backward()
    return loss.detach()


def probed_backward(
    working: WorkingModel, examples: Examples, indices: np.ndarray, weight: float = 1.0
) -> tuple[torch.Tensor, GradientStatistics]:
    """As `backward`, into a gradient that holds nothing yet, with the statistics of these examples."""
    with PerExampleProbe(working.module, batch_size=len(indices)) as probe:
        loss = backward(working, examples, indices, weight, hooked=True)
    return loss, probe.statistics(loss_weight=weight)


def accumulate(
    working: WorkingModel, examples: Examples, plan: ExecutionPlan, indices: np.ndarray, probe: bool
) -> tuple[torch.Tensor, GradientStatistics | None]:
    """Gradient of the mean loss over these examples, in the plan's micro-batches; the loss, and statistics.

    Only the first micro-batch can be probed: the probe needs the gradient to hold nothing else.
    """
    total, statistics, start = 0.0, None, 0
    for size in plan.micro_batches:
        part, weight = indices[start : start + size], size / plan.effective_batch
        if probe and start == 0:
            loss, statistics = probed_backward(working, examples, part, weight)
        else:
            loss = backward(working, examples, part, weight)
        total, start = total + loss, start + size
    return total, statistics
