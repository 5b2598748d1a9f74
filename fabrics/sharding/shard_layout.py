"""Where some tensors of a model are in flat ones: in whole flat tensors, and in those of a device that has parts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from algorithms.synchronisation.method import Block
from fabrics.training.flat_model import blocks_of, laid_out
from utils.distributed.shard_groups import ShardGroup


def views_of(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of a flat tensor that holds such tensors, one after the other."""
    offsets, _ = laid_out([tensor.numel() for tensor in tensors])
    return [flat[at : at + each.numel()].view_as(each) for at, each in zip(offsets, tensors, strict=True)]


@dataclass(frozen=True)
class ShardLayout:
    """Some tensors, one after the other.

    Of a tensor every device has as many numbers: a part of its rows, and after the last row zeros.

    Attributes:
        wholes: each one's place in whole flat tensors. whole_size: of these.
        places: that of its part in a device's flat tensors, alike in all devices. size: of these.
    """

    wholes: tuple[Block, ...]
    whole_size: int
    places: tuple[slice, ...]
    size: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], lengths: Sequence[int]) -> "ShardLayout":
        """Of tensors with these names and shapes, of which a device has so many numbers each."""
        starts, whole_size = laid_out([math.prod(shape) for shape in shapes.values()])
        offsets, size = laid_out(lengths)
        places = tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))
        return cls(blocks_of(shapes, starts, whole_size), whole_size, places, size)

    @property
    def lengths(self) -> list[int]:
        """Numbers of each tensor in a device."""
        return [place.stop - place.start for place in self.places]

    def parts(self, index: int) -> Iterator[tuple[slice, slice]]:
        """Of each tensor what the device of this index has: where in whole flat tensors, and where in its own."""
        for whole, place, length in zip(self.wholes, self.places, self.lengths, strict=True):
            first = min(index * length, whole.size)
            last = min(first + length, whole.size)
            yield slice(whole.start + first, whole.start + last), slice(place.start, place.start + last - first)

    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """What the device of this index has of a whole flat tensor."""
        flat = tensor.new_zeros(self.size)
        for theirs, own in self.parts(index):
            flat[own] = tensor[theirs]
        return flat

    def gather(self, flat: torch.Tensor, shard_group: ShardGroup) -> Iterator[tuple[Block, torch.Tensor]]:
        """Every tensor whole, in its shape, one after the other; flat: this device's."""
        for whole, place in zip(self.wholes, self.places, strict=True):
            yield whole, shard_group.gather(flat[place]).flatten()[: whole.size].view(whole.shape)
