"""What a layer takes of memory while it computes, by what autograd and PyTorch would allocate and free of it.

Where activations are computed again no layer's are there for longer than that, and what comes and goes meanwhile counts
as much as what is kept: intermediate gradients, weights as autocast casts them. So one layer's forward and backward
pass is made on tensors without numbers, and every storage is followed.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

Call = tuple[tuple, dict[str, Any]]


@dataclass(frozen=True)
class Course:
    """The most bytes that are there at one time, for any number of examples: that of some lines.

    lines: bytes whatever the examples, and of each of them, of moments that may be the one.
    """

    lines: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, one: Sequence[int], two: Sequence[int]) -> "Course":
        """From what is there in every moment with one example, and with two."""
        if len(one) != len(two):  # other kernels for two of them
            one, two = (max(one),), (max(two),)
        lines = sorted({(2 * first - second, second - first) for first, second in zip(one, two, strict=True)})
        best = [line for place, line in enumerate(lines) if all(line[1] > other[1] for other in lines[place + 1 :])]
        return cls(tuple(best))

    def most(self, examples: int) -> int:
        """Bytes with so many examples."""
        return max(fixed + examples * each for fixed, each in self.lines)


class _Living(TorchDispatchMode):
    """Follows the storages that are made in it. moments: their bytes after each that has come or gone."""

    def __init__(self):
        super().__init__()
        self.moments, self._there = [0], set()

    def _change(self, place: int, size: int) -> None:
        (self._there.add if size > 0 else self._there.discard)(place)
        self.moments.append(self.moments[-1] + size)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {leaf.untyped_storage()._cdata for leaf in _tensors((args, kwargs))}
        output = func(*args, **(kwargs or {}))
        for tensor in _tensors(output):
            storage = tensor.untyped_storage()
            place, size = storage._cdata, storage.nbytes()
            if place not in self._there and place not in given:
                self._change(place, size)
                weakref.finalize(storage, self._change, place, -size)
        return output


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def remembered_calls(layer: nn.Module, calls: list[Call]) -> RemovableHandle:
    """Remember how a layer is called from now on."""
    return layer.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)


def boundary_bytes(call: Call) -> int:
    """Of the input of a layer, which comes first: what is kept of it where its activations are computed again."""
    return next((tensor.nbytes for tensor in _tensors(call)), 0)


def layer_moments(
    layer: nn.Module, call: Call, computing: Callable[[], AbstractContextManager]
) -> tuple[list[int], list[int]]:
    """Bytes in every moment of a forward pass of which nothing is kept, less the weights as they are cast in it, which
    are there in the end; and of one of which all is, with its backward pass: what is there beyond the layer's input and
    its parameters' gradients.

    Args:
        call: how the layer is called, in FakeTensorMode, as all of this.
        computing: what its passes compute in.
    """

    def detached(tensor: Any) -> Any:
        return tensor.detach().requires_grad_(tensor.requires_grad) if isinstance(tensor, torch.Tensor) else tensor

    arguments, keywords = tree_map(detached, call)
    for parameter in layer.parameters():
        if parameter.requires_grad:  # so that gradients are added to what is there
            parameter.grad = torch.zeros_like(parameter)
    dropping = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda tensor: tensor)
    with computing(), dropping, _Living() as living:
        layer(*arguments, **keywords)
        forward = [there - living.moments[-1] for there in living.moments]
    with _Living() as both:
        with computing():
            output = _tensors(layer(*arguments, **keywords))[0]
        torch.autograd.backward(output, torch.empty_like(output))
    # The output itself is gone, or never made, when it is only for the backward pass.
    return forward, [max(0, there - output.nbytes) for there in both.moments]
