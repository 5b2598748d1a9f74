"""Forward and backward passes of a model over examples, with or without per-example statistics."""

import numpy as np
import torch

from algorithms.batch.per_example import PerExampleProbe, compared_micro_batches
from algorithms.batch.switch_mode import ExecutionPlan
from fabrics.data.examples import Examples
from fabrics.models.attention import unmasked
from fabrics.training.flat_model import FlatModel


def accumulate_gradients(
    model: FlatModel, examples: Examples, plan: ExecutionPlan, indices: np.ndarray, probe: bool
) -> tuple[torch.Tensor, list[PerExampleProbe]]:
    """Add the gradient of the mean loss of these examples, computed in the plan's micro-batches.

    Args:
        probe: take per-example statistics. The gradient must be zero before.

    Returns:
        The mean loss, and with `probe` the probe of every micro-batch.
    """
    total = 0.0
    probes = []
    start = 0
    with_products = compared_micro_batches(plan.micro_batches)
    for number, size in enumerate(plan.micro_batches):
        micro_batch = indices[start : start + size]
        weight = size / plan.effective_batch
        if probe:
            with model.probe(size, products=number in with_products) as micro_batch_probe:
                total = total + backward(model, examples, micro_batch, weight, hooked=True)
            probes.append(micro_batch_probe)
        else:
            total = total + backward(model, examples, micro_batch, weight)
        start += size
    return total, probes


def backward(
    model: FlatModel, examples: Examples, indices: np.ndarray, weight: float = 1.0, hooked: bool = False
) -> torch.Tensor:
    """Add the gradient of `weight` times the mean loss of these examples; return that product, detached.

    Devices that share the model divide the examples, and the loss.

    hooked: the module's layers have hooks, which a compiled module would skip.
    """
    own, share = model.local_slice(len(indices))
    batch = examples.batch(indices[own], model.device)
    labels = batch.pop("labels")
    with unmasked(model.module, batch):
        loss = model.example_losses(batch, labels, hooked).mean() * (weight * share)
        with model.shard_group.explaining():
            loss.backward()
    return loss.detach()


def probed_backward(model: FlatModel, examples: Examples, indices: np.ndarray) -> tuple[torch.Tensor, PerExampleProbe]:
    """Add the gradient of the mean loss of these examples; return the loss, and their probe."""
    with model.probe(len(indices), products=True) as probe:
        loss = backward(model, examples, indices, hooked=True)
    return loss, probe
