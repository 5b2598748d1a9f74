"""Layers that compute through compiled code, each by itself, as those of a model are that devices share."""

import functools
from collections.abc import Callable, Sequence
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
        compiled = torch.compile(_forward, dynamic=True)
        for layer in layers:
            own = "forward" in vars(layer)  # not that of its class: no other layer has this one
            run = torch.compile(layer.forward, dynamic=True) if own else functools.partial(compiled, layer)
            layer.forward = self._either(layer.forward, run)

    def _either(self, plain: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def forward(*arguments: Any, **named: Any) -> Any:
            return (compiled if self.on else plain)(*arguments, **named)

        return forward


def _forward(layer: nn.Module, *arguments: Any, **named: Any) -> Any:
    """Of a layer that it is given, lest every one has code of its own."""
    return type(layer).forward(layer, *arguments, **named)
