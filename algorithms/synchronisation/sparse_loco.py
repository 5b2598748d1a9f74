"""SparseLoCo: the largest numbers of what a worker has not sent yet, as codes of few bits (arXiv 2508.15706)."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from algorithms.synchronisation.encodings.sparse import PLAIN_BITS, TopK, add_at
from algorithms.synchronisation.group import Deliveries, Group, LocalWorker
from algorithms.synchronisation.method import Block, Capabilities, Method, Part, put, take


class SparseLoCo(Method):
    """e_m = b e_m + (x - x_m);  s_m = Q(top-k(e_m));  e_m = e_m - s_m;  x = x - lr mean_m s_m.

    e_m, what worker m has not sent yet, takes the place of outer momentum. Of every `chunk` consecutive numbers of a
    tensor, and of those left at its end, a share `density` is sent, at least one. Q rounds to bins with a table for
    each tensor (`quantise`). The paper's mean is over all workers. The published code (tplr-ai/templar) takes that over
    those who sent a place, cuts matrices into squares of 64 x 64 and scales every worker's values down to the median of
    their norms; the last two are not done here. A worker that is left out begins with e_m = 0 again.
    """

    @dataclass(frozen=True)
    class Settings:
        """error_decay: b. bits: of a value; 32: as it is. mean_over: who counts at a place."""

        density: float = 1 / 64
        chunk: int = 4096
        error_decay: float = 0.95
        bits: int = 2
        mean_over: Literal["workers", "senders"] = "workers"

        def __post_init__(self):
            if not 0.0 < self.density <= 1.0:
                raise ValueError(f"density: must be above 0 and at most 1, got {self.density}")
            if not 1 <= self.chunk <= 2**31:
                raise ValueError(f"chunk: must be from 1 to 2^31, got {self.chunk}")
            if not 0.0 <= self.error_decay <= 1.0:
                raise ValueError(f"error_decay: must be from 0 to 1, got {self.error_decay}")
            if self.bits not in (*range(1, 9), PLAIN_BITS):
                raise ValueError(f"bits: must be from 1 to 8, or {PLAIN_BITS}, got {self.bits}")

    capabilities = Capabilities(
        encodings=("float32",),
        outer_keys=("learning_rate_for_outer_opt",),
    )
    worker_state = ("unsent",)

    @classmethod
    def configured(cls, settings: Settings) -> Capabilities:
        return dataclasses.replace(cls.capabilities, temporaries=1.7 + 4 * settings.density)

    def _alike(self, blocks: Sequence[Block]) -> list[tuple[Part, TopK]]:
        """Tensors of one size at a time: where they are, and how they travel."""
        by_size: dict[int, list[slice]] = {}
        for block in blocks:
            by_size.setdefault(block.size, []).append(slice(block.start, block.start + block.size))
        return [(part, TopK(len(part), self._pieces(size), self.settings.bits)) for size, part in by_size.items()]

    def _pieces(self, size: int) -> tuple[tuple[int, int, int], ...]:
        whole, rest = divmod(size, self.settings.chunk)
        lengths = [(whole, self.settings.chunk), (1, rest)]
        return tuple(
            (chunks, length, max(1, round(self.settings.density * length)))
            for chunks, length in lengths
            if chunks and length
        )

    def _message_bytes(self, dtype: torch.dtype) -> int:
        """Of a worker's message, from all devices that share the model."""
        return sum(sum(top_k.sizes(dtype)) for _, top_k in self._alike(self.blocks))

    def bytes_per_round(self, workers: int, mean: float, message: float, dtype: torch.dtype) -> float:
        return workers * (workers - 1) * self._message_bytes(dtype)

    def incoming(self, group: Group) -> Deliveries:
        dtype = group.shared["parameters"].dtype
        size = sum(sum(top_k.sizes(dtype)) for _, top_k in self._alike(group.model.wholes.blocks))
        return group.messages(size, counted=self._message_bytes(dtype))

    def message(self, worker: LocalWorker, group: Group) -> torch.Tensor:
        wholes = group.model.wholes
        state = worker.state["unsent"].mul_(self.settings.error_decay)
        state.add_(worker.difference(group.shared["parameters"]))
        unsent = wholes.gather(state)
        messages = [unsent.new_empty(0, dtype=torch.uint8)]  # there may be no tensor
        for part, top_k in self._alike(wholes.blocks):
            rows = take(unsent, part).view(top_k.rows, -1)
            messages.append(top_k.encode(rows, rows.dtype))
            put(unsent, part, add_at(rows, top_k.decode(messages[-1], rows.dtype), -1.0).flatten())
        wholes.spread(unsent, state)
        return torch.cat(messages)

    def apply(self, group: Group, arrived: Mapping[int, torch.Tensor]) -> None:
        shared = group.shared["parameters"]
        wholes = group.model.wholes
        tensors = self._alike(wholes.blocks)
        sizes = [sum(top_k.sizes(shared.dtype)) for _, top_k in tensors]
        weights = [group.weights[worker] for worker in arrived]
        messages = zip(*(message.split(sizes) for message in arrived.values()), strict=True)
        over_senders = self.settings.mean_over == "senders"
        whole = wholes.gather(shared)
        for (part, top_k), each in zip(tensors, messages, strict=True):
            mean = top_k.mean(each, weights, shared.dtype, shared.dtype, over_senders).flatten()
            put(whole, part, take(whole, part).sub_(mean, alpha=self.outer.learning_rate))
        wholes.spread(whole, shared)
