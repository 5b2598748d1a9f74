"""Whole tensors of a model whose parts are shared out over the devices of an island, for what cannot do without.

Each tensor has one device, decided once, that gets it whole from all others and hands the parts back: two all-to-alls,
in which a device sends and gets as much as it has of the model, for all tensors together. So a device has as much whole
at a time as in parts, or one tensor that is larger.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from algorithms.synchronisation.method import Block, Wholes
from fabrics.sharding.shard_layout import Layout
from utils.distributed.shard_groups import Island


def shared_out(sizes: Sequence[int], devices: int) -> list[list[int]]:
    """The numbers of the tensors that each device has whole: the largest first, each in the one with least so far."""
    found: list[list[int]] = [[] for _ in range(devices)]
    loads = [0] * devices
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        device = loads.index(min(loads))
        found[device].append(number)
        loads[device] += sizes[number]
    return [sorted(numbers) for numbers in found]


def most_whole(sizes: Sequence[int], devices: int) -> int:
    """Numbers of all that the device with most of them has whole."""
    return max(sum(sizes[number] for number in numbers) for numbers in shared_out(sizes, devices))


class WholeTensors(Wholes):
    """Those of one layout; all devices of the island ask together. See Wholes.

    Every tensor takes `size` times as much as its part in a device, with what zeros follow its last row.
    """

    def __init__(self, layout: Layout, island: Island):
        lengths, self._island, self._places = layout.lengths, island, layout.places
        by_device = shared_out(lengths, island.size)
        own = by_device[island.index]
        self._order = [number for numbers in by_device for number in numbers]
        self._parts = [lengths[number] for number in self._order]
        self._given = [sum(lengths[number] for number in numbers) for numbers in by_device]
        self._own, self._here = [lengths[number] for number in own], [self._given[island.index]] * island.size
        starts = list(accumulate((island.size * length for length in self._own), initial=0))
        super().__init__(
            Block(layout.wholes[number].name, start, stop, layout.wholes[number].shape)
            for number, start, stop in zip(own, starts[:-1], starts[1:], strict=True)
        )

    def gather(self, flat: torch.Tensor) -> torch.Tensor:
        sent = torch.cat([flat[self._places[number]] for number in self._order])
        came = self._island.trade(sent, self._given, self._here).view(self._island.size, -1)
        # From each device its parts of all tensors of this one.
        return torch.cat([part.flatten() for part in came.split(self._own, 1)]) if self._own else came.flatten()

    def spread(self, whole: torch.Tensor, flat: torch.Tensor) -> None:
        size = self._island.size
        wholes = whole.split([size * length for length in self._own]) if self._own else ()
        sent = torch.cat([whole.new_empty(size, 0), *(each.view(size, -1) for each in wholes)], 1).flatten()
        came = self._island.trade(sent, self._here, self._given)
        for number, part in zip(self._order, came.split(self._parts), strict=True):
            flat[self._places[number]] = part
