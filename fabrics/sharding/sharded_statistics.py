"""Gradient statistics of passes that the devices of a node make together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from algorithms.batch.gradient_statistics import GradientMoments, SampleEstimate, across_devices_estimate
from algorithms.batch.per_example import PerExampleProbe
from algorithms.flat import inner_product
from utils.distributed.devices import share_of

if TYPE_CHECKING:
    from fabrics.sharding.sharded_model import ShardedModel


class ShardedProbe(PerExampleProbe):
    """The PerExampleProbe of a shared pass; afterwards all devices have the statistics of all examples.

    examples: of the pass on all devices.
    """

    def __init__(self, model: ShardedModel, examples: int, products: bool):
        own, share = model.local_slice(examples)
        super().__init__(model.module, batch_size=own.stop - own.start, products=products)
        self._model = model
        self._own = own
        self._counts = share > 0.0
        self._examples = examples
        # A module's parameter is another tensor while it is gathered.
        self._gathered: dict[str, nn.Parameter] = {}
        self._full_names = {
            (module, name): self._names[parameter]
            for _, module in self._layers
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad
        }

    def _watch_gradients(self) -> None:
        """Do nothing: gradients are looked at after the pass, when they are summed over the devices."""

    def _on_output_gradient(self, module: nn.Module, x: torch.Tensor, delta: torch.Tensor) -> None:
        # A layer's output is that of its last module, whose hook comes before FSDP2's.
        self._model.unshard(module)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                self._gathered[self._full_names[module, name]] = parameter
        super()._on_output_gradient(module, x, delta)

    def _dtype_of(self, module: nn.Module) -> torch.dtype:
        return self._model.parameters.dtype  # layers may be gathered in a smaller one

    def __exit__(self, *exception) -> None:
        try:
            if exception[0] is None:
                self._conclude()
        finally:  # a device may run out of memory here
            super().__exit__(*exception)

    @torch.no_grad()
    def _conclude(self) -> None:
        if self._with_products:
            for block, gradient in self._model.gather(self._model.gradient):
                self._add_uses(block.name, gradient)
                self.squared_norm += gradient.square().sum()
        else:
            for name, parameter in self._gathered.items():
                self._add_uses(name, parameter)
        numbers = self.squared_norms.new_zeros(2, self._examples)
        if self._counts:
            numbers[0, self._own] = self.squared_norms
            numbers[1, self._own] = self.inner_products
        self.squared_norms, self.inner_products = self._model.shard_group.sum(numbers)
        self.batch_size = self._examples

    def _add_uses(self, name: str, against: torch.Tensor) -> None:
        uses = self._uses.pop(self._gathered.get(name), ())
        if uses:
            self._add(name, uses, against)


class DeviceProbe:
    """The gradient of each device in a shared pass; afterwards all devices have its statistics.

    examples: of the pass on all devices.
    """

    def __init__(self, model: ShardedModel, examples: int):
        devices = model.shard_group.size
        self._model = model
        self._batches = [len(share_of(range(examples), device, devices)) for device in range(devices)]
        self._products = torch.zeros(2, devices, dtype=torch.float64, device=model.device)

    def __enter__(self) -> DeviceProbe:
        self._model.gradient_sum.probe = self
        return self

    def __exit__(self, *exception) -> None:
        self._model.gradient_sum.probe = None
        if exception[0] is None:
            self._model.shard_group.sum(self._products)

    def add(self, gradients: torch.Tensor, total: torch.Tensor) -> None:
        """Add some elements of the gradients of all devices, [devices, elements], and of their sum, [elements]."""
        for device, gradient in enumerate(gradients):
            self._products[0, device] += inner_product(gradient, gradient)
            self._products[1, device] += inner_product(gradient, total)

    def moments(self, examples: int) -> tuple[list[GradientMoments], list[int]]:
        """Return the moments of the devices that had examples, and how many each had.

        examples: of the whole step, whose mean loss is differentiated.
        """
        batches = [batch for batch in self._batches if batch]
        # Devices without examples have zero gradients: the mean over the others is the sum through their number.
        squares, products = (self._products[:, : len(batches)] * examples**2).tolist()
        whole = sum(products)
        devices = len(batches)
        moments = [
            GradientMoments(square, product / devices, whole / devices**2)
            for square, product in zip(squares, products, strict=True)
        ]
        return moments, batches


def devices_estimate(model: ShardedModel, probes: Sequence[DeviceProbe], examples: int) -> SampleEstimate:
    """Estimate the statistics of a step of n examples, whose gradient the model has; probes: of each micro-batch."""
    squared_norm = model.shard_group.sum(inner_product(model.gradient, model.gradient)).item() * examples**2
    return across_devices_estimate([probe.moments(examples) for probe in probes], squared_norm)
