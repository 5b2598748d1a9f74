"""The layers of a model: which of them the devices of a node gather one by one, and how these are compiled."""

import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn


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
    """Return the largest parts of a module that have parameters of linear layers only."""
    owners = [child for child in module.modules() if next(child.parameters(recurse=False), None) is not None]
    if owners and all(type(owner) is nn.Linear for owner in owners):
        return [module]
    return [part for child in module.children() for part in _linear_parts(child)]


def sharded_parts(module: nn.Module) -> list[nn.Module]:
    """Return the parts of sharded layers that autocast casts, and that are gathered in its type."""
    return [part for layer in sharded_layers(module) for part in _linear_parts(layer)]


def gathered_elements(module: nn.Module) -> int:
    """Return the largest number of elements of a node's model that one device holds whole at a time.

    The root stays whole during a pass. Of the layers there are two (the next one is gathered ahead) and one gradient.
    """
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in sharded_layers(module)]
    root = sum(parameter.numel() for parameter in module.parameters()) - sum(layers)
    return root + max(3 * max(layers, default=0), root)


class CompiledLayers:
    """The forward passes of layers, compiled once for each kind of layer and for any number of examples.

    Hooks around a forward pass, which gather its parameters, are not compiled.

    Attributes:
        on: whether forward passes run compiled. A pass that is recomputed in a backward pass needs the same value.
    """

    def __init__(self, layers: Sequence[nn.Module]):
        self.on = False
        compiled: dict[Any, Callable[..., Any]] = {}
        for layer in layers:
            kind = type(layer), tuple(parameter.shape for parameter in layer.parameters())
            if kind not in compiled:
                compiled[kind] = torch.compile(_forward_of_kind(len(compiled)))
            has_own_forward = "forward" in vars(layer)
            run = torch.compile(layer.forward) if has_own_forward else functools.partial(compiled[kind], layer)
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


def _forward_of_kind(number: int) -> Callable[..., Any]:
    """Copy `_forward` under a name of its own: PyTorch compiles one function at most eight times."""
    return FunctionType(_forward.__code__.replace(co_name=f"_forward_{number}"), globals())


def _forward(layer: nn.Module, *arguments: Any, **named: Any) -> Any:
    """Take the layer as an argument, so that layers of one kind share compiled code."""
    return type(layer).forward(layer, *arguments, **named)
