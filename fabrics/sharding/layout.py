"""Division of a model over the devices of a node: layers that are gathered one by one, and rows of tensors."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from algorithms.flat import Block
from fabrics.training.flat_model import flat_blocks, flat_offsets
from utils.distributed.shard_groups import ShardGroup


def layers_of(module: nn.Module) -> list[nn.Module]:
    """Return the modules in a model's outermost lists, except those without submodules."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            found += [layer for layer in child if next(layer.children(), None) is not None]
        else:
            found += layers_of(child)
    return found


def sharded_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers that share no parameter with the rest of the model: a tied parameter belongs to the root."""
    layers = layers_of(module)
    inside = {child: number for number, layer in enumerate(layers) for child in layer.modules()}
    users: dict[nn.Parameter, set[int]] = {}
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            users.setdefault(parameter, set()).add(inside.get(child, -1))
    return [layer for layer in layers if all(len(users[parameter]) == 1 for parameter in layer.parameters())]


def _linear_parts(module: nn.Module) -> list[nn.Module]:
    """Return the largest parts of a module that have parameters of linear layers only; GPT-2 calls these Conv1D."""
    owners = [child for child in module.modules() if next(child.parameters(recurse=False), None) is not None]
    if owners and all(type(owner).__name__ in ("Linear", "Conv1D") for owner in owners):
        return [module]
    return [part for child in module.children() for part in _linear_parts(child)]


def sharded_parts(module: nn.Module) -> list[list[nn.Module]]:
    """Return for each sharded layer the parts that autocast casts, and that are gathered together in its type."""
    parts = [_linear_parts(layer) for layer in sharded_layers(module)]
    return [of_layer for of_layer in parts if of_layer]


def gathered_elements(module: nn.Module) -> int:
    """Return the largest number of elements of a node's model that one device holds whole at a time.

    The root stays whole during a pass. Of the layers there are two (the next one is gathered ahead) and one gradient.
    """
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in sharded_layers(module)]
    root = sum(parameter.numel() for parameter in module.parameters()) - sum(layers)
    return root + max(3 * max(layers, default=0), root)


@dataclass(frozen=True)
class ShardLayout:
    """Some tensors, one after the other, of which each device has some rows.

    Every device has equally many elements of a tensor: where rows run out, zeros follow.

    Attributes:
        wholes: the place of each tensor in whole flat tensors.
        places: the place of each tensor's part in a device's flat tensors, the same on all devices.
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
