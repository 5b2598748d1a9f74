"""The layers of a model: which there are, and which parts of it devices that share it gather by themselves."""

from collections.abc import Sequence

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


def sharded_parts(module: nn.Module) -> list[nn.Module]:
    """The parts of layers that devices gather by themselves, and in another type, where autocast casts them."""
    return [part for layer in sharded_layers(module) for part in linear_parts(layer)]


def gathered_numbers(blocks: Sequence[Block], module: nn.Module) -> tuple[int, int]:
    """Numbers that a device of an island holds whole at one time: what is in no layer, and two layers.

    Args:
        blocks: of the parameters that are trained.

    Returns:
        Those that are trained; and of those that stay, each as many times as it is there: both layers, and the one that
        is sent and received meanwhile. What is in no layer comes before all others.
    """
    frozen = [Block(name, 0, 0, tuple(p.shape)) for name, p in module.named_parameters() if not p.requires_grad]
    still = {block.name for block in frozen}
    root, *layers = (
        (sum(b.size for b in layer if b.name not in still), sum(b.size for b in layer if b.name in still))
        for layer in by_layer([*blocks, *frozen])
    )
    two = sorted(layers, key=lambda layer: 6 * layer[0] + 3 * layer[1])[-2:]
    trained, staying = (sum(numbers) for numbers in zip(*two, strict=True)) if two else (0, 0)
    staying += max((numbers for _, numbers in two), default=0)
    return root[0] + trained, root[1] + max(staying, root[1] - 3 * trained)


def reduced_numbers(blocks: Sequence[Block]) -> int:
    """Of the largest gradient that is reduced at a time."""
    return max(sum(block.size for block in layer) for layer in by_layer(blocks))


def passing_numbers(gathered: int, compared: int, still: int = 0) -> int:
    """Numbers that a device of an island needs for a moment in a pass.

    Args:
        gathered: of layers; they are there, are sent and received, and have gradients.
        compared: of a gradient of every device's rows, beside what is reduced; 0: none is compared.
        still: of layers without gradients, as many times as they are there.
    """
    return 3 * gathered + still + compared


def momentary_numbers(passing: int, whole: int, copies: int) -> int:
    """The same, in a pass or between passes.

    Args:
        passing: those in a pass.
        whole: of tensors that are looked at whole. copies: as many of these are there at a time, with what is sent and
            received, parts, and what is computed of them.
    """
    return max(passing, copies * whole)
