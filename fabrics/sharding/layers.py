"""The layers of a model: which of them the devices of a node gather by themselves, and how these are compiled."""

import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The modules in the outermost lists of a model, but for single layers, and those that share a parameter."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            found += [layer for layer in child if next(layer.children(), None) is not None]
        else:
            found += layers_of(child)
    return found


def sharded_layers(module: nn.Module) -> list[nn.Module]:
    """The layers whose parameters are in no other one, nor outside: a tied parameter belongs to the root."""
    layers, users = layers_of(module), {}
    inside = {child: number for number, layer in enumerate(layers) for child in layer.modules()}
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            users.setdefault(parameter, set()).add(inside.get(child, -1))
    return [layer for layer in layers if all(len(users[parameter]) == 1 for parameter in layer.parameters())]


def linear_parts(module: nn.Module) -> list[nn.Module]:
    """The largest parts of a module in which every parameter belongs to a linear layer: what autocast casts."""
    owners = [child for child in module.modules() if next(child.parameters(recurse=False), None) is not None]
    if owners and all(type(owner) is nn.Linear for owner in owners):
        return [module]
    return [part for child in module.children() for part in linear_parts(child)]


def sharded_parts(module: nn.Module) -> list[nn.Module]:
    """The parts of layers that devices gather by themselves, and in another type, where autocast casts them."""
    return [part for layer in sharded_layers(module) for part in linear_parts(layer)]


def gathered_elements(module: nn.Module) -> int:
    """Elements of a node's model that one of its devices has whole at a time.

    What belongs to no layer stays whole during a pass; of layers there are two (the next is gathered ahead) and the
    gradient of one.
    """
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in sharded_layers(module)]
    outside = sum(parameter.numel() for parameter in module.parameters()) - sum(layers)
    return outside + max(3 * max(layers, default=0), outside)


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
