"""Layers that compute through compiled code, each by itself, as those of a model are that devices share."""

import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn


class CompiledLayers:
    """Layers that are alike have one code, for any number of examples, but for a single one.

    What is done around their forward passes, such as gathering their parameters, is not compiled.

    Attributes:
        on: whether passes that begin now run through it; what a backward pass computes anew must be as it was before.
    """

    def __init__(self, layers: Sequence[nn.Module]):
        self.on = False
        compiled: dict[Any, Callable[..., Any]] = {}
        for layer in layers:
            kind = type(layer), tuple(parameter.shape for parameter in layer.parameters())
            if kind not in compiled:
                compiled[kind] = torch.compile(_forward_of_a_kind(len(compiled)))
            own = "forward" in vars(layer)  # not that of its class: no other layer has this one
            run = torch.compile(layer.forward) if own else functools.partial(compiled[kind], layer)
            layer.forward = self._either(layer.forward, run)

    def _either(self, plain: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def forward(*arguments: Any, **named: Any) -> Any:
            if not self.on:
                return plain(*arguments, **named)
            tensors = [value for value in (*arguments, *named.values()) if isinstance(value, torch.Tensor)]
            for tensor in tensors:
                if tensor.shape[:1] == tensors[0].shape[:1]:
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
            return compiled(*arguments, **named)

        return forward


def _forward_of_a_kind(number: int) -> Callable[..., Any]:
    """`_forward` as a function of its own: of one function PyTorch makes eight codes, and then runs it as it is."""
    return FunctionType(_forward.__code__.replace(co_name=f"_forward_{number}"), globals())


def _forward(layer: nn.Module, *arguments: Any, **named: Any) -> Any:
    """Of a layer that it is given, lest every one has code of its own."""
    return type(layer).forward(layer, *arguments, **named)
