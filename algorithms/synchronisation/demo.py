"""DeMo: the largest DCT coefficients of a worker's momentum leave it in every step (arXiv 2411.19870)."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from algorithms.synchronisation.encodings.sparse import TopK, add_at
from algorithms.synchronisation.group import Deliveries, Group, LocalWorker
from algorithms.synchronisation.method import Block, Capabilities, Method, Part, put, take


class DeMo(Method):
    """m = decay m + lr g;  q = top-k(DCT(m));  m = m - IDCT(q);  u = IDCT(mean of q);  x = x (1 - lr wd) - lr sign(u).

    The mean of a coefficient is over those workers who sent it. A matrix is cut into blocks of which each side is the
    largest divisor of the matrix's that is at most `chunk`, a vector likewise; a tensor of more dimensions counts as a
    matrix of the first by the others. A block has its own `top_k`. Gradients are clipped before they enter m. With
    communication_dtype bfloat16 coefficients are rounded so, and what that loses stays in m.
    As published (bloc97/DeMo, demo.py), but for its places, which are int64 there.
    """

    @dataclass(frozen=True)
    class Settings:
        """chunk: the longest side of a block. top_k: coefficients that are sent of each block."""

        chunk: int = 64
        top_k: int = 32
        decay: float = 0.999

        def __post_init__(self):
            for name in ("chunk", "top_k"):
                if getattr(self, name) < 1:
                    raise ValueError(f"{name}: must be a positive integer, got {getattr(self, name)}")
            if self.top_k > self.chunk**2:
                raise ValueError(f"top_k: must be at most chunk x chunk, {self.chunk**2}, got {self.top_k}")
            if not 0.0 <= self.decay <= 1.0:
                raise ValueError(f"decay: must be from 0 to 1, got {self.decay}")

    capabilities = Capabilities(
        inner_optimizer=None,
        exchanges_gradients=True,
        encodings=("float32", "bfloat16"),
        outer_keys=(),
        one_exchange=False,
        temporaries=1.3,
    )
    worker_state = ("momentum",)

    def _cut(self, blocks: Sequence[Block]) -> "tuple[Matrices, ...]":
        return cut_matrices(tuple(blocks), self.settings.chunk, self.settings.top_k)

    def incoming(self, group: Group) -> Deliveries:
        dtype = group.message_dtype
        size = _message_bytes(self._cut(group.model.wholes.blocks), dtype)
        return group.messages(size, counted=_message_bytes(self._cut(self.blocks), dtype))

    def message(self, worker: LocalWorker, group: Group) -> torch.Tensor:
        wholes = group.model.wholes
        state = worker.state["momentum"].mul_(self.settings.decay)
        state.add_(worker.gradient, alpha=group.learning_rate)
        momentum = wholes.gather(state)
        messages = [momentum.new_empty(0, dtype=torch.uint8)]  # there may be no matrix
        for each in self._cut(wholes.blocks):
            coefficients = each.coefficients(momentum)
            messages.append(each.top_k.encode(coefficients, group.message_dtype))
            arriving = add_at(coefficients.zero_(), each.top_k.decode(messages[-1], group.message_dtype))
            put(momentum, each.part, take(momentum, each.part).sub_(each.inverse(arriving)))
        wholes.spread(momentum, state)
        return torch.cat(messages)

    def apply(self, group: Group, arrived: Mapping[int, torch.Tensor]) -> None:
        wholes = group.model.wholes
        dtype = group.message_dtype
        matrices = self._cut(wholes.blocks)
        sizes = [sum(each.top_k.sizes(dtype)) for each in matrices]
        weights = [group.weights[worker] for worker in arrived]
        messages = zip(*(message.split(sizes) for message in arrived.values()), strict=True)
        shared = wholes.gather(group.shared["parameters"])
        shared.mul_(1.0 - group.learning_rate * self.outer.weight_decay)
        for each, theirs in zip(matrices, messages, strict=True):
            mean = each.top_k.mean(theirs, weights, dtype, shared.dtype, over_senders=True)
            direction = each.inverse(mean).sign_()
            put(shared, each.part, take(shared, each.part).sub_(direction, alpha=group.learning_rate))
        wholes.spread(shared, group.shared["parameters"])


def _message_bytes(matrices: "Sequence[Matrices]", dtype: torch.dtype) -> int:
    return sum(sum(each.top_k.sizes(dtype)) for each in matrices)


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
