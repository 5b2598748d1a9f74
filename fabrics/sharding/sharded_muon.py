"""Muon for matrices that the devices of an island share: each one's update is made by the device that has it whole."""

from collections.abc import Sequence

import torch
from torch import nn

from algorithms.synchronisation.method import Wholes
from fabrics.sharding.shard_layout import views_of

UPDATE_SIZE = "match_rms_adamw"  # as large as those of AdamW (arXiv 2502.16982)


class ShardedMuon:
    """As torch.optim.Muon, of what is here of the matrices; all devices of the island step together.

    m = mu m + (1 - mu) g;  u = (1 - mu) g + mu m;  x = (1 - lr wd) x - lr 0.2 sqrt(max side) NS(u): all but NS, which
    needs whole matrices, is of every number by itself.

    Args:
        wholes: for flat tensors that hold the matrices alone.
        parts: of the matrices, flat, with their gradients.
        momentum: m, flat.
    """

    def __init__(
        self,
        wholes: Wholes,
        parts: Sequence[nn.Parameter],
        momentum: torch.Tensor,
        weight_decay: float,
        momentum_decay: float,
    ):
        self._wholes, self._parts, self._momentum = wholes, parts, momentum
        self._weight_decay, self._decay = weight_decay, momentum_decay
        self.param_groups = [{"lr": 0.0}]

    @torch.no_grad()
    def step(self) -> None:
        rate = self.param_groups[0]["lr"]
        update = torch.zeros_like(self._momentum)
        views = views_of(update, self._parts)
        for view, part in zip(views, self._parts, strict=True):
            view.copy_(part.grad)
        self._momentum.lerp_(update, 1.0 - self._decay)
        update.lerp_(self._momentum, self._decay)
        whole = self._wholes.gather(update)
        for block in self._wholes.blocks:
            matrix = whole[block.start : block.start + block.size].view(block.shape)
            matrix.copy_(_change(matrix, rate))
        self._wholes.spread(whole, update)
        for view, part in zip(views, self._parts, strict=True):
            part.mul_(1.0 - rate * self._weight_decay).add_(view)


def _change(update: torch.Tensor, rate: float) -> torch.Tensor:
    """What PyTorch's Muon adds to a matrix, without momentum and weight decay."""
    matrix = nn.Parameter(torch.zeros_like(update))
    matrix.grad = update
    torch.optim.Muon([matrix], rate, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn=UPDATE_SIZE).step()
    return matrix.data
