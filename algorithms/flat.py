"""Flat tensors: all trainable tensors of a model one after the other, and the parts of them that methods exchange."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# A part of a flat tensor, as slices one after the other.
Part = Sequence[slice]


@dataclass(frozen=True)
class Block:
    """The place of one tensor of the model in flat tensors; zeros may fill a gap after it."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements of the tensor, without the gap."""
        return torch.Size(self.shape).numel()

    @property
    def slice(self) -> slice:
        """The tensor's elements, without the gap."""
        return slice(self.start, self.start + self.size)


def read_part(flat: torch.Tensor, part: Part | None) -> torch.Tensor:
    """Return a copy of a part of a flat tensor, or the tensor itself for None."""
    return flat if part is None else torch.cat([flat[piece] for piece in part])


def write_part(flat: torch.Tensor, part: Part | None, values: torch.Tensor) -> None:
    """Write values into a part of a flat tensor, or into all of it for None."""
    if part is None:
        flat.copy_(values)
        return
    start = 0
    for piece in part:
        stop = start + piece.stop - piece.start
        flat[piece] = values[start:stop]
        start = stop


def layers(blocks: Sequence[Block]) -> list[list[Block]]:
    """Return the blocks outside all layers, if any, and those of each layer, whose name ends with its first number."""
    found: dict[tuple[str, ...], list[Block]] = {(): []}
    for block in blocks:
        words = block.name.split(".")
        number = next((place for place, word in enumerate(words) if word.isdigit()), -1)
        found.setdefault(tuple(words[: number + 1]), []).append(block)
    return [group for group in found.values() if group]


def layer_fragments(blocks: Sequence[Block], count: int) -> list[Part | None]:
    """Split a model into fragments of whole layers, strided (Streaming DiLoCo, arXiv 2501.18512).

    Group 0 is everything outside layers, groups 1, 2, ... are the layers. Group g is in fragment g % count. Without
    anything outside layers, as with adapters alone, the layers are groups 0, 1, ...

    Returns:
        The part of each fragment; None for the only one.
    """
    if count == 1:
        return [None]
    parts: list[list[slice]] = [[] for _ in range(count)]
    for number, group in enumerate(layers(blocks)):
        parts[number % count] += [block.slice for block in group]
    return parts


def fragment_problems(blocks: Sequence[Block], count: int) -> list[str]:
    """Return what is wrong with this number of fragments of a model."""
    groups = len(layers(blocks))
    if count <= groups:
        return []
    return [f"synchronisation.fragments: must be at most {groups}, the layers and what is outside them, got {count}"]


def random_positions(size: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw [count] distinct positions of a flat tensor of this size, each equally likely, on the CPU.

    One position from each of `count` pieces of nearly equal length, all shifted cyclically by a random offset. The cost
    is proportional to `count`; a permutation of a large model would take longer than an inner step.
    """
    bounds = torch.arange(count + 1) * size // count
    offsets = (torch.rand(count, generator=generator, dtype=torch.float64) * bounds.diff()).long()
    shift = torch.randint(size, (), generator=generator)
    return offsets.add_(bounds[:-1]).add_(shift).remainder_(size)


def random_elements(blocks: Sequence[Block], size: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw the positions [count] of distinct elements of these tensors, on the CPU, as `random_positions` does.

    The positions are those in the flat tensor; none is in a gap.

    size: of all tensors together.
    """
    elements = random_positions(size, count, generator)
    if blocks[-1].slice.stop == size:  # no gaps, as in most models
        return elements
    sizes = torch.tensor([block.size for block in blocks])
    ends = sizes.cumsum(0)
    gaps = torch.tensor([block.start for block in blocks]) - (ends - sizes)  # before each tensor
    return elements + gaps[torch.bucketize(elements, ends, right=True)]


# Elements of a chunk: a copy of one costs little memory. A GPU takes larger ones, as it has a few kernels for each.
_CHUNK = {"cpu": 2**20, "cuda": 2**22}


def _chunk_of(tensor: torch.Tensor) -> int:
    return _CHUNK.get(tensor.device.type, _CHUNK["cpu"])


def inner_product(a: torch.Tensor, b: torch.Tensor, chunk: int | None = None) -> torch.Tensor:
    """Return <a, b>, summed in float64, so that differences of such sums cancel to float32's last digits only.

    By chunks: no copy of model size is made, and no vector is too long for torch.dot, which takes 2^31 - 1 elements.
    """
    size = chunk or _chunk_of(a)
    parts = zip(a.split(size), b.split(size), strict=True)
    return torch.stack([x.double().dot(y.double()) for x, y in parts]).sum()


# Elements of the sketch of a gradient.
SKETCH_SIZE = 1024


@torch.no_grad()
def sketch(vector: torch.Tensor, seed: int, size: int = SKETCH_SIZE, rows: int = 1, first: int = 0) -> torch.Tensor:
    """Return a count sketch, [rows * size]: sums of every size-th element with random signs (Charikar et al. 2002).

    The map is linear and keeps inner products in expectation. The signs are a function of seed, row and position, and
    so equal on all devices. The sketch of a vector is the sum of the sketches of its parts.

    first: the position of the vector's first element.
    """
    if before := first % size:
        vector = torch.nn.functional.pad(vector, (before, 0))
    found = torch.zeros(rows, size, dtype=torch.float64, device=vector.device)
    chunk = max(_chunk_of(vector) // size, 1) * size
    for start in range(0, len(vector), chunk):
        part = vector[start : start + chunk]
        place = torch.arange(start, start + len(part), dtype=torch.int64, device=vector.device)
        place.add_(first - before)
        place.add_(seed * 0x9E3779B97F4A7C1 % 2**62)
        for factor in (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85):  # int64 wraps around
            place.bitwise_xor_(place >> 29).mul_(factor)
        for row, sums in enumerate(found):
            signed = part.double() * (1 - 2 * (place >> 40 + row & 1))
            sums += torch.nn.functional.pad(signed, (0, -len(part) % size)).view(-1, size).sum(0)
    return found.flatten().to(vector.dtype)
