"""Forward and backward passes of a model over examples, with or without per-example statistics."""

import numpy as np
import torch

from algorithms.batch.losses import example_losses
from algorithms.batch.per_example import PerExampleProbe, compared_micro_batches
from algorithms.batch.switch_mode import ExecutionPlan
from fabrics.data.examples import Examples
from fabrics.models.attention import unmasked
from fabrics.training.flat_model import FlatModel


def backward(
    model: FlatModel, examples: Examples, indices: np.ndarray, weight: float = 1.0, hooked: bool = False
) -> torch.Tensor:
    """Add the gradient of `weight` times the mean loss of these examples; return that product, detached.

    Devices that share the model take a share of the examples, and of the loss, each. hooked: the module's layers have
    hooks.
    """
    own, share = model.local_slice(len(indices))
    batch = examples.batch(indices[own], model.device)
    labels = batch.pop("labels")
    with unmasked(model.module, batch):
        loss = example_losses(model.logits(batch, hooked), labels).mean() * (weight * share)
        with model.shard_group.explaining():
            loss.backward()
    return loss.detach()


def probed_backward(
    model: FlatModel, examples: Examples, indices: np.ndarray, weight: float = 1.0, products: bool = True
) -> tuple[torch.Tensor, PerExampleProbe]:
    """As `backward`, with the probe of these examples; products: with the gradient as it is then."""
    with model.probe(len(indices), products) as probe:
        loss = backward(model, examples, indices, weight, hooked=True)
    return loss, probe


def accumulate_gradients(
    model: FlatModel, examples: Examples, plan: ExecutionPlan, indices: np.ndarray, probe: bool
) -> tuple[torch.Tensor, list[PerExampleProbe]]:
    """Compute the gradient of the mean loss of these examples in the plan's micro-batches.

    probe: take per-example statistics; the gradient must be zero before.

    Returns:
        The mean loss, and the probe of every micro-batch if wanted.
    """
    total = 0.0
    probes = []
    start = 0
    compared = compared_micro_batches(plan.micro_batches)
    for number, size in enumerate(plan.micro_batches):
        micro_batch = indices[start : start + size]
        weight = size / plan.effective_batch
        if probe:
            with model.probe(size, products=number in compared) as taken:
                total = total + backward(model, examples, micro_batch, weight, hooked=True)
            probes.append(taken)
        else:
            total = total + backward(model, examples, micro_batch, weight)
        start += size
    return total, probes
