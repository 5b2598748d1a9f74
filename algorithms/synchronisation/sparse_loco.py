"""SparseLoCo: the largest elements of what a worker has not sent yet, as codes of few bits (arXiv 2508.15706)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from algorithms.flat import Block, Part, read_part, write_part
from algorithms.synchronisation.encodings import PLAIN_BITS, Chunks, TopK, add_at
from algorithms.synchronisation.group import Group, LocalWorker, WorkerMean, WorkerMessages
from algorithms.synchronisation.method import Capabilities, Method, require


@dataclass(frozen=True)
class SparseLoCo(Method):
    """e_m = b e_m + (x - x_m);  s_m = Q(top-k(e_m));  e_m = e_m - s_m;  x = x - lr mean_m s_m.

    e_m, what worker m has not sent yet, takes the place of outer momentum. Of every `chunk` consecutive elements of a
    tensor, and of the rest at its end, a share `density` is sent, at least one. Q rounds to bins with a table for each
    tensor (`quantise`). The published code (tplr-ai/templar) differs from the paper and from this: it takes the mean
    over those who sent a position, cuts matrices into squares of 64 x 64 and scales every worker's values down to the
    median of their norms. A worker that is left out starts with e_m = 0 again.

    A lone worker sends nothing: s_m = e_m. The paper has no merges: before one, and before workers leave,
    x = x - lr mean_m e_m, sent exactly, and e_m = 0.

    Attributes:
        density: share of the elements that is sent.
        chunk: elements of a chunk.
        error_decay: b.
        bits: of a value; 32: exact.
    """

    density: float = 1 / 64
    chunk: int = 4096
    error_decay: float = 0.95
    bits: int = 2

    worker_state = ("unsent",)

    def __post_init__(self):
        require(self, "above 0 and at most 1", lambda value: 0 < value <= 1, "density")
        require(self, "from 1 to 2^31", lambda value: 1 <= value <= 2**31, "chunk")
        require(self, "from 0 to 1", lambda value: 0 <= value <= 1, "error_decay")
        require(self, f"from 2 to 8, or {PLAIN_BITS}", lambda value: value in (*range(2, 9), PLAIN_BITS), "bits")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            encodings=("float32",),
            outer_keys=("learning_rate_for_outer_opt",),
            temporaries=1.7 + 4 * self.density,
            bytes_per_round=self._bytes_per_round,
        )

    def _top_k(self, blocks: Sequence[Block]) -> list[tuple[Part, TopK]]:
        """Return the part of all tensors of one size, and the selection of their largest elements, size by size."""
        by_size: dict[int, list[slice]] = {}
        for block in blocks:
            by_size.setdefault(block.size, []).append(block.slice)
        return [(part, TopK(len(part), self._chunks(size), self.bits)) for size, part in by_size.items() if size]

    def _chunks(self, size: int) -> tuple[Chunks, ...]:
        full, rest = divmod(size, self.chunk)
        chunks = [Chunks(full, self.chunk, self._kept(self.chunk)), Chunks(1, rest, self._kept(rest))]
        return tuple(each for each in chunks if each.number and each.length)

    def _kept(self, length: int) -> int:
        return max(1, round(self.density * length))

    def _bytes_per_round(
        self, workers: int, mean: float, message: float, blocks: Sequence[Block], dtype: torch.dtype
    ) -> float:
        return workers * (workers - 1) * sum(self._sizes(blocks, dtype))

    def _sizes(self, blocks: Sequence[Block], dtype: torch.dtype) -> list[int]:
        return [top_k.bytes(dtype) for _, top_k in self._top_k(blocks)]

    def incoming(self, group: Group) -> WorkerMessages | WorkerMean:
        if group.lone:
            return group.mean(kind="parameters")
        return group.messages(sum(self._sizes(group.model.blocks, group.shared["parameters"].dtype)))

    def message(self, worker: LocalWorker, group: Group) -> torch.Tensor:
        unsent = worker.state["unsent"].mul_(self.error_decay)
        unsent.add_(worker.pseudo_gradient(group.shared["parameters"]))
        if group.lone:
            return unsent
        messages = []
        for part, top_k in self._top_k(group.model.blocks):
            rows = read_part(unsent, part).view(top_k.rows, -1)
            messages.append(top_k.encode(rows, rows.dtype))
            sent = top_k.decode(messages[-1], rows.dtype)
            write_part(unsent, part, add_at(rows, sent, -1.0).flatten())
        return torch.cat(messages)

    def apply(self, group: Group, arrived: Mapping[int, torch.Tensor] | torch.Tensor) -> None:
        if group.lone:
            self._apply_all(group, arrived)
            return
        shared = group.shared["parameters"]
        sizes = self._sizes(group.model.blocks, shared.dtype)
        weights = [group.weights[worker] for worker in arrived]
        messages = zip(*(message.split(sizes) for message in arrived.values()), strict=True)
        for (part, top_k), sent in zip(self._top_k(group.model.blocks), messages, strict=True):
            mean = top_k.mean(sent, weights, shared.dtype, shared.dtype, over_senders=False).flatten()
            write_part(shared, part, read_part(shared, part).sub_(mean, alpha=group.outer.learning_rate))

    def settle(self, group: Group) -> None:
        incoming = group.mean(kind="parameters")
        for worker in group.local_workers:
            incoming.add(worker, worker.state["unsent"])
        unsent = incoming.result()
        if unsent is not None:
            self._apply_all(group, unsent)

    def _apply_all(self, group: Group, unsent: torch.Tensor) -> None:
        group.shared["parameters"].sub_(unsent, alpha=group.outer.learning_rate)
        for worker in group.local_workers:
            worker.state["unsent"].zero_()
