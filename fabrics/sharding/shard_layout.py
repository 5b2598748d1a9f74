"""The places of sharded tensors: in whole flat tensors, and in the flat tensors of one device."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from algorithms.flat import Block
from fabrics.training.flat_model import flat_blocks, flat_offsets
from utils.distributed.shard_groups import ShardGroup


@dataclass(frozen=True)
class ShardLayout:
    """Some tensors, one after the other, of which each device has some rows.

    Every device has equally many elements of a tensor: where rows run out, zeros follow.

    Attributes:
        wholes: the place of each tensor in whole flat tensors.
        whole_size: elements of a whole flat tensor.
        places: the place of each tensor's part in a device's flat tensors, the same on all devices.
        size: elements of a device's flat tensor.
    """

    wholes: tuple[Block, ...]
    whole_size: int
    places: tuple[slice, ...]
    size: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], devices: int) -> "ShardLayout":
        """Lay out tensors with these names and shapes over n devices, as FSDP2 cuts them."""
        starts, whole_size = flat_offsets([math.prod(shape) for shape in shapes.values()])
        lengths = [-(-shape[0] // devices) * math.prod(shape[1:]) for shape in shapes.values()]
        offsets, size = flat_offsets(lengths)
        places = tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))
        return cls(flat_blocks(shapes, starts, whole_size), whole_size, places, size)

    @property
    def lengths(self) -> list[int]:
        """Elements of each tensor on a device."""
        return [place.stop - place.start for place in self.places]

    def parts(self, index: int) -> Iterator[tuple[slice, slice]]:
        """Yield for each tensor the rows of the device `index`: in whole flat tensors, and in the device's own."""
        for whole, place, length in zip(self.wholes, self.places, self.lengths, strict=True):
            first = min(index * length, whole.size)
            last = min(first + length, whole.size)
            yield slice(whole.start + first, whole.start + last), slice(place.start, place.start + last - first)

    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """Return the part of a whole flat tensor that the device `index` has."""
        flat = tensor.new_zeros(self.size)
        for theirs, own in self.parts(index):
            flat[own] = tensor[theirs]
        return flat

    def gather(self, flat: torch.Tensor, shard_group: ShardGroup) -> Iterator[tuple[Block, torch.Tensor]]:
        """Yield the tensors whole, one after the other; `flat` is this device's part of them."""
        for whole, place in zip(self.wholes, self.places, strict=True):
            yield whole, shard_group.gather(flat[place]).flatten()[: whole.size].view(whole.shape)
