"""Forward and backward passes of a working model over examples, with or without per-example statistics."""

import numpy as np
import torch

from algorithms.batch.losses import example_losses
from algorithms.batch.per_example import PerExampleProbe, compared_micro_batches
from algorithms.batch.switch_mode import ExecutionPlan
from fabrics.data.examples import Examples
from fabrics.models.attention import unmasked
from fabrics.training.flat_model import WorkingModel


def backward(
    working: WorkingModel, examples: Examples, indices: np.ndarray, weight: float = 1.0, hooked: bool = False
) -> torch.Tensor:
    """Add the gradient of `weight` times the mean loss of these examples; that product, detached.

    Of an island each device has its share of the examples, and of the loss. hooked: layers of the module have hooks.
    """
    own, share = working.share(len(indices))
    batch = examples.batch(indices[own], working.device)
    labels = batch.pop("labels")
    with unmasked(working.module, batch):
        loss = example_losses(working.logits(batch, hooked), labels).mean() * (weight * share)
        working.differentiate(loss)
    return loss.detach()


def probed_backward(
    working: WorkingModel, examples: Examples, indices: np.ndarray, weight: float = 1.0, products: bool = True
) -> tuple[torch.Tensor, PerExampleProbe]:
    """As `backward`, with the probe of these examples; products: with the gradient as it is then."""
    with working.probe(len(indices), products) as probe:
        loss = backward(working, examples, indices, weight, hooked=True)
    return loss, probe


def accumulate(
    working: WorkingModel, examples: Examples, plan: ExecutionPlan, indices: np.ndarray, probe: bool
) -> tuple[torch.Tensor, list[PerExampleProbe]]:
    """Gradient of the mean loss over these examples, in the plan's micro-batches; the loss, and their probes if wanted.

    A gradient that is probed must hold nothing yet. What the probes are of says the working model.
    """
    total, probes, start = 0.0, [], 0
    compared = compared_micro_batches(plan.micro_batches)
    for index, size in enumerate(plan.micro_batches):
        part, weight = indices[start : start + size], size / plan.effective_batch
        if probe:
            loss, found = probed_backward(working, examples, part, weight, index in compared)
            probes.append(found)
        else:
            loss = backward(working, examples, part, weight)
        total, start = total + loss, start + size
    return total, probes
