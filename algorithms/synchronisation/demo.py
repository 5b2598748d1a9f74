"""DeMo: the largest DCT coefficients of a worker's momentum leave it in every step (arXiv 2411.19870)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from algorithms.synchronisation.encodings.cosines import Matrices, cut_matrices
from algorithms.synchronisation.encodings.sparse import add_at
from algorithms.synchronisation.method import Block, Group, Member, Method, Outer, put, take


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

    inner_optimizer = None
    temporaries = staticmethod(lambda settings, workers: 1.3)
    worker_state = ("momentum",)
    exchanges_gradients, plannable = True, False
    shards = whole_tensors = True
    encodings = ("float32", "bfloat16")

    @classmethod
    def outer_keys(cls, settings) -> tuple[str, ...]:
        return ("outer_momentum_at_merge",)

    def __init__(self, settings: Settings, outer: Outer, blocks: Sequence[Block]):
        super().__init__(settings, outer, blocks)
        self._matrices = self._cut(blocks)

    def _cut(self, blocks: Sequence[Block]) -> tuple[Matrices, ...]:
        return cut_matrices(tuple(blocks), self.settings.chunk, self.settings.top_k)

    def exchange(self, group: Group) -> None:
        here, wholes, dtype = self._cut(group.wholes.blocks), group.wholes, group.message_dtype
        sizes, counted = ([sum(each.top_k.sizes(dtype)) for each in them] for them in (here, self._matrices))
        arrived = group.deliver(lambda member: self._message(group, member, here), sum(sizes), counted=sum(counted))
        if not arrived:
            return
        weights = [group.weights[worker] for worker in arrived]
        messages = zip(*(message.split(sizes) for message in arrived.values()), strict=True)
        shared = wholes.gather(group.shared["parameters"])
        shared.mul_(1.0 - group.learning_rate * group.weight_decay)
        for each, theirs in zip(here, messages, strict=True):
            mean = each.top_k.mean(theirs, weights, dtype, shared.dtype, over_senders=True)
            direction = each.inverse(mean).sign_()
            put(shared, each.part, take(shared, each.part).sub_(direction, alpha=group.learning_rate))
        wholes.spread(shared, group.shared["parameters"])

    def _message(self, group: Group, member: Member, matrices: Sequence[Matrices]) -> torch.Tensor:
        """What leaves a worker's momentum of these matrices."""
        state = member.state["momentum"].mul_(self.settings.decay)
        state.add_(group.clipped(member.gradient), alpha=group.learning_rate)
        momentum = group.wholes.gather(state)
        messages = [momentum.new_empty(0, dtype=torch.uint8)]  # there may be no matrix
        for each in matrices:
            coefficients = each.coefficients(momentum)
            messages.append(each.top_k.encode(coefficients, group.message_dtype))
            arriving = add_at(coefficients.zero_(), each.top_k.decode(messages[-1], group.message_dtype))
            put(momentum, each.part, take(momentum, each.part).sub_(each.inverse(arriving)))
        group.wholes.spread(momentum, state)
        return torch.cat(messages)
