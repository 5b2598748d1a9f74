"""The layers of a model: which there are, and which parts of it devices that share it gather by themselves."""

from torch import nn

from algorithms.synchronisation.method import Block, by_layer


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


def passed_bytes(module: nn.Module, devices: int, cast: int | None) -> int:
    """What the devices of an island, together, send each other in a training pass over a micro-batch.

    Every parameter, in rows of equal number, is gathered for the forward and for the backward pass, and its gradient
    summed, if it has one.

    Args:
        cast: bytes of the numbers as which the linear parts of layers are gathered; None: as they are.
    """
    parts = [part for layer in sharded_layers(module) for part in linear_parts(layer)] if cast else []
    smaller, total = {parameter for part in parts for parameter in part.parameters()}, 0
    for parameter in module.parameters():
        numbers = -(-parameter.shape[0] // devices) * devices * parameter[0].numel()
        total += 2 * numbers * (cast if parameter in smaller else parameter.element_size())
        total += numbers * parameter.element_size() * parameter.requires_grad
    return (devices - 1) * total


def gathered_numbers(blocks: tuple[Block, ...]) -> int:
    """Numbers that a device of an island holds whole at one time: what is in no layer, and two layers."""
    root, *layers = (sum(block.size for block in layer) for layer in by_layer(blocks))
    return root + sum(sorted(layers)[-2:])


def reduced_numbers(blocks: tuple[Block, ...]) -> int:
    """Of the largest gradient that is reduced at a time."""
    return max(sum(block.size for block in layer) for layer in by_layer(blocks))


def passing_numbers(gathered: int, compared: int) -> int:
    """Numbers that a device of an island needs for a moment in a pass.

    Args:
        gathered: of layers; they are there, are sent and received, and have gradients.
        compared: of a gradient of every device's rows, beside what is reduced; 0: none is compared.
    """
    return 3 * gathered + compared


def momentary_numbers(gathered: int, compared: int, whole: int, copies: int) -> int:
    """The same, in a pass or between passes.

    Args:
        whole: of tensors that are looked at whole. copies: as many of these are there at a time, with what is sent and
            received, parts, and what is computed of them.
    """
    return max(passing_numbers(gathered, compared), copies * whole)
