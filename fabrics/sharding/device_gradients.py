"""The gradients that the devices of an island have before they are added up, where a batch test asks for them.

The gradient of a device's part of a micro-batch is whole in it for one layer at a time: when FSDP2 reduces that layer.
Where it is looked at, every device sends the others their rows of it and adds up what it got, which moves as many bytes
as the reduction does (each sends (J - 1) / J of a layer) and holds the layer's gradient once more. The inner products
of these rows, added up over layers and devices, are those of the whole gradients.
"""

from typing import TYPE_CHECKING

import torch

from algorithms.batch.across_workers import GradientMoments, inner_product, within_island_estimate
from algorithms.batch.gradient_statistics import SampleEstimate
from utils.distributed.placement import share_of

if TYPE_CHECKING:
    from fabrics.sharding.sharded_model import ShardedModel


class DeviceProbe:
    """The devices' gradients beside each other in a pass that they make together; afterwards all know the same.

    Args:
        working: of this device.
        examples: of the pass, in all devices.
    """

    def __init__(self, working: "ShardedModel", examples: int):
        devices = working.island.size
        self._working = working
        self._batches = [len(share_of(range(examples), device, devices)) for device in range(devices)]
        self._products = torch.zeros(2, devices, dtype=torch.float64, device=working.device)

    def __enter__(self) -> "DeviceProbe":
        self._working.reduction.probe = self
        return self

    def __exit__(self, *exception) -> None:
        self._working.reduction.probe = None
        if exception[0] is None:
            self._working.island.sum(self._products)

    def add(self, rows: torch.Tensor, total: torch.Tensor) -> None:
        """rows: [devices, numbers] of some gradient, of each device. total: their sum."""
        for beside, row in enumerate(rows):
            self._products[0, beside] += inner_product(row, row)
            self._products[1, beside] += inner_product(row, total)

    def moments(self, examples: int) -> tuple[list[GradientMoments], list[int]]:
        """Of the devices that had examples, and how many; examples: of the step, in whose mean loss each counts."""
        batches = [batch for batch in self._batches if batch]
        # What devices without one have is zero, so that the mean over the others is the sum through their number.
        squares, products = (self._products[:, : len(batches)] * examples**2).tolist()
        whole, devices = sum(products), len(batches)
        each = [
            GradientMoments(square, product / devices, whole / devices**2)
            for square, product in zip(squares, products, strict=True)
        ]
        return each, batches


def devices_estimate(working: "ShardedModel", probes: list[DeviceProbe], examples: int) -> SampleEstimate:
    """What the devices' gradients say of a step of so many examples, whose gradient the working model has now."""
    gradient = working.gradient
    squared_norm = working.island.sum(inner_product(gradient, gradient)).item() * examples**2
    return within_island_estimate([probe.moments(examples) for probe in probes], squared_norm)
