"""DeMo: the largest DCT coefficients of a worker's momentum leave it in every step (arXiv 2411.19870)."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from algorithms.flat import Block, Part, read_part, write_part
from algorithms.synchronisation.encodings import Chunks, TopK, add_at
from algorithms.synchronisation.group import Group, LocalWorker, WorkerMean, WorkerMessages
from algorithms.synchronisation.method import Capabilities, Method, require


@dataclass(frozen=True)
class DeMo(Method):
    """m = decay m + lr g;  q = top-k(DCT(m));  m = m - IDCT(q);  u = IDCT(mean of q);  x = x (1 - lr wd) - lr sign(u).

    The mean of a coefficient is over the workers that sent it. Gradients are clipped before they enter m. With
    communication_dtype bfloat16 coefficients are rounded, and the rounding error stays in m. As published
    (bloc97/DeMo, demo.py), except that positions are packed; they are int64 there. `matrices_of` says how tensors are
    cut.

    A lone worker sends nothing: q is all of the DCT, so u = m, and m = 0 after the step. The paper has no merges, and
    no rule for the rest in m, of which only signs would reach x. As AdamW's moments, m stays with its worker in a
    merge, and ends with a worker that leaves.

    Attributes:
        chunk: the longest side of a tile.
        top_k: coefficients of each tile that are sent.
        decay: of the momentum.
    """

    chunk: int = 64
    top_k: int = 32
    decay: float = 0.999

    capabilities = Capabilities(
        inner_optimizer=None,
        exchanges_gradients=True,
        encodings=("float32", "bfloat16"),
        outer_keys=(),
        one_exchange=False,
        temporaries=1.3,
    )
    worker_state = ("momentum",)

    def __post_init__(self):
        require(self, "a positive integer", lambda value: value >= 1, "chunk", "top_k")
        require(self, f"at most chunk x chunk, {self.chunk**2}", lambda value: value <= self.chunk**2, "top_k")
        require(self, "from 0 to 1", lambda value: 0 <= value <= 1, "decay")

    def matrices(self, blocks: Sequence[Block]) -> "tuple[Matrices, ...]":
        """Return the tensors of these blocks as matrices cut into tiles."""
        return matrices_of(tuple(blocks), self.chunk, self.top_k)

    def _sizes(self, group: Group) -> list[int]:
        return [each.top_k.bytes(group.outer.message_dtype) for each in self.matrices(group.model.blocks)]

    def incoming(self, group: Group) -> WorkerMessages | WorkerMean:
        if group.lone:
            return group.mean(kind="parameters")
        return group.messages(sum(self._sizes(group)))

    def message(self, worker: LocalWorker, group: Group) -> torch.Tensor:
        dtype = group.outer.message_dtype
        momentum = worker.state["momentum"].mul_(self.decay)
        momentum.add_(worker.gradient, alpha=group.inner.learning_rate)
        if group.lone:
            return momentum
        messages = []
        for matrices in self.matrices(group.model.blocks):
            coefficients = matrices.coefficients(momentum)
            messages.append(matrices.top_k.encode(coefficients, dtype))
            sent = add_at(coefficients.zero_(), matrices.top_k.decode(messages[-1], dtype))
            write_part(momentum, matrices.part, read_part(momentum, matrices.part).sub_(matrices.inverse(sent)))
        return torch.cat(messages)

    def apply(self, group: Group, arrived: Mapping[int, torch.Tensor] | torch.Tensor) -> None:
        dtype = group.outer.message_dtype
        lr = group.inner.learning_rate
        parameters = group.shared["parameters"].mul_(1.0 - lr * group.inner.weight_decay)
        if group.lone:
            parameters.sub_(arrived.sign_(), alpha=lr)
            for worker in group.local_workers:
                worker.state["momentum"].zero_()
            return
        sizes = self._sizes(group)
        weights = [group.weights[worker] for worker in arrived]
        messages = zip(*(message.split(sizes) for message in arrived.values()), strict=True)
        for matrices, sent in zip(self.matrices(group.model.blocks), messages, strict=True):
            mean = matrices.top_k.mean(sent, weights, dtype, parameters.dtype, over_senders=True)
            direction = matrices.inverse(mean).sign_()
            write_part(parameters, matrices.part, read_part(parameters, matrices.part).sub_(direction, alpha=lr))


@functools.lru_cache(maxsize=64)
def dct(size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the orthonormal DCT-II, [size, size]: row k is cos(pi (2 n + 1) k / (2 size)), scaled to length 1."""
    n = torch.arange(size, dtype=torch.float64)
    rows = torch.cos(math.pi / (2 * size) * (2 * n + 1) * n[:, None]) * math.sqrt(2 / size)
    rows[0] = 1 / math.sqrt(size)
    return rows.to(device, dtype)


@dataclass(frozen=True)
class Matrices:
    """All tensors of one shape, as matrices cut into tiles.

    Attributes:
        part: their part of flat tensors.
        tile: rows and columns of a tile, [s0, s1].
        top_k: the selection of each tile's largest coefficients.
    """

    part: Part
    grid: tuple[int, int]
    tile: tuple[int, int]
    top_k: TopK

    def coefficients(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the DCT of the tiles in a flat tensor, [tiles, s0 s1]."""
        (high, wide), (s0, s1) = self.grid, self.tile
        tiles = read_part(flat, self.part).view(-1, high, s0, wide, s1).transpose(2, 3)
        columns = dct(s0, flat.device, flat.dtype)
        rows = dct(s1, flat.device, flat.dtype)
        return (columns @ tiles @ rows.T).reshape(-1, s0 * s1)

    def inverse(self, coefficients: torch.Tensor) -> torch.Tensor:
        """Return the part of a flat tensor whose tiles have these coefficients."""
        columns = dct(self.tile[0], coefficients.device, coefficients.dtype)
        rows = dct(self.tile[1], coefficients.device, coefficients.dtype)
        tiles = columns.T @ coefficients.view(-1, *self.grid, *self.tile) @ rows
        return tiles.transpose(2, 3).flatten()


@functools.lru_cache(maxsize=8)
def matrices_of(blocks: tuple[Block, ...], chunk: int, top_k: int) -> tuple[Matrices, ...]:
    """Cut matrices into tiles whose sides are the largest divisors of the matrix's sides that are at most `chunk`.

    A vector is a matrix of one row; a tensor of more dimensions is a matrix of the first by all others. The matrices of
    one shape come together.
    """
    by_sides: dict[tuple[int, int], list[slice]] = {}
    for block in filter(lambda block: block.size, blocks):
        high = block.shape[0] if len(block.shape) > 1 else 1
        by_sides.setdefault((high, block.size // high), []).append(block.slice)
    found = []
    for (high, wide), part in by_sides.items():
        s0, s1 = (max(size for size in range(1, min(chunk, side) + 1) if side % size == 0) for side in (high, wide))
        grid = (high // s0, wide // s1)
        kept = Chunks(1, s0 * s1, min(top_k, s0 * s1))
        found.append(Matrices(part, grid, (s0, s1), TopK(len(part) * math.prod(grid), (kept,))))
    return tuple(found)
