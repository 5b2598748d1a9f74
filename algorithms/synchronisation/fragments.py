"""A model in fragments of whole layers (arXiv 2501.18512)."""

from collections.abc import Sequence

import torch

from algorithms.synchronisation.group import Group
from algorithms.synchronisation.method import Block, Outer, Part, by_layer, put, take
from algorithms.synchronisation.outer_step import nesterov_step


def fragment_parts(blocks: Sequence[Block], fragments: int, order: str) -> list[Part | None]:
    """Where every fragment is in the flat tensors; None: everywhere.

    Of B blocks, the first of which is all that is in no layer and the others the layers, block b is in fragment b % P
    ("strided") or b P // B ("sequential").

    Raises:
        ValueError: there are fewer blocks than fragments.
    """
    layers, parts = by_layer(blocks), [[] for _ in range(fragments)]
    for number, layer in enumerate(layers):
        fragment = number % fragments if order == "strided" else number * fragments // len(layers)
        parts[fragment] += [slice(block.start, block.start + block.size) for block in layer]
    if not all(parts):
        raise ValueError(f"fragments: must be at most {len(layers)}, one more than layers, got {fragments}")
    return parts if fragments > 1 else [None]


def fragment_step(group: Group, part: Part | None, delta: torch.Tensor, outer: Outer) -> torch.Tensor:
    """DiLoCo's step of a fragment of the shared parameters and of their velocity; the fragment, as it is now."""
    parameters, velocity = (take(group.shared[name], part) for name in ("parameters", "velocity"))
    nesterov_step(parameters, delta, velocity, outer.learning_rate, outer.momentum)
    put(group.shared["parameters"], part, parameters)
    put(group.shared["velocity"], part, velocity)
    return parameters
