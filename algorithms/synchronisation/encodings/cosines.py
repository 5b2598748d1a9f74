"""The DCT of matrices that are cut into blocks, of which the largest coefficients travel."""

import functools
import math
from dataclasses import dataclass

import torch

from algorithms.synchronisation.encodings.sparse import TopK
from algorithms.synchronisation.method import Block, Part, take


@functools.lru_cache(maxsize=64)
def dct(size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The orthonormal DCT-II, its inverse is its transpose: row k is cos(pi (2 n + 1) k / (2 size)), of length one."""
    n = torch.arange(size, dtype=torch.float64)
    rows = torch.cos(math.pi / (2 * size) * (2 * n + 1) * n[:, None]) * math.sqrt(2 / size)
    rows[0] = 1 / math.sqrt(size)
    return rows.to(device, dtype)


@dataclass(frozen=True)
class Matrices:
    """All tensors of one shape, cut into blocks: where they are, [high / s0, wide / s1] blocks each of [s0, s1]."""

    part: Part
    grid: tuple[int, int]
    block: tuple[int, int]
    top_k: TopK

    def coefficients(self, flat: torch.Tensor) -> torch.Tensor:
        """Of the blocks of a part of a flat tensor, [blocks, s0 s1]."""
        (high, wide), (s0, s1) = self.grid, self.block
        blocks = take(flat, self.part).view(-1, high, s0, wide, s1).transpose(2, 3)
        columns, rows = dct(s0, flat.device, flat.dtype), dct(s1, flat.device, flat.dtype)
        return (columns @ blocks @ rows.T).reshape(-1, s0 * s1)

    def inverse(self, coefficients: torch.Tensor) -> torch.Tensor:
        """The part of a flat tensor whose blocks have these coefficients."""
        columns, rows = (dct(side, coefficients.device, coefficients.dtype) for side in self.block)
        blocks = columns.T @ coefficients.view(-1, *self.grid, *self.block) @ rows
        return blocks.transpose(2, 3).flatten()


@functools.lru_cache(maxsize=8)
def cut_matrices(blocks: tuple[Block, ...], chunk: int, top_k: int) -> tuple[Matrices, ...]:
    """Tensors of one shape at a time; a vector is a matrix of one row, more dimensions make one of the first by others.

    A block's sides are the largest divisors of the matrix's that are at most `chunk`.
    """
    by_sides: dict[tuple[int, int], list[slice]] = {}
    for block in blocks:
        high = block.shape[0] if len(block.shape) > 1 else 1
        sides = high, block.size // high
        by_sides.setdefault(sides, []).append(slice(block.start, block.start + block.size))
    return tuple(_cut(sides, part, chunk, top_k) for sides, part in by_sides.items())


def _cut(sides: tuple[int, int], part: Part, chunk: int, top_k: int) -> Matrices:
    s0, s1 = (max(s for s in range(1, min(chunk, side) + 1) if side % s == 0) for side in sides)
    grid, length = (sides[0] // s0, sides[1] // s1), s0 * s1
    pieces = ((1, length, min(top_k, length)),)
    return Matrices(part, grid, (s0, s1), TopK(len(part) * math.prod(grid), pieces))
