"""The layers of a model: which of them the devices of a node gather one by one."""

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
