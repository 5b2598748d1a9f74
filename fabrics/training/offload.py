"""Where tensors live that a device does not need all the time: in its own memory, or in the host's.

`offload` names the state in host memory: `outer_state` is what a trainer keeps between rounds, `idle_moments` the inner
optimizer state of a worker that waits for its turn on the device.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fabrics.training.flat_model import FlatModel
from fabrics.training.optimizers import INNER_OPTIMIZERS, InnerOptimizer, inner_optimizer_name
from utils.config.schema import Config


@dataclass(frozen=True)
class Home:
    """Where tensors live. pinned: in memory of the host that stays in place, so that a GPU copies it by itself."""

    device: torch.device
    pinned: bool = False

    @classmethod
    def chosen(cls, offloaded: bool, device: torch.device) -> "Home":
        """The home of tensors that `device` works with: the host if they are offloaded, otherwise the device."""
        return cls(torch.device("cpu"), pinned=device.type == "cuda") if offloaded else cls(device)

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor of this shape and type that lives here."""
        return torch.empty(like.shape, dtype=like.dtype, device=self.device, pin_memory=self.pinned)

    def zeros(self, like: torch.Tensor) -> torch.Tensor:
        """Likewise, of zeros."""
        return self.empty(like).zero_()

    def taken_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, or a copy of it where it is of another kind of device."""
        return tensor if tensor.device.type == self.device.type else self.empty(tensor).copy_(tensor)


class Seat:
    """The inner optimiser of a device, with the state of the worker whose turn it is; all others' waits elsewhere.

    A worker that goes on where it was the last to work is not moved.
    """

    def __init__(self, optimizer: InnerOptimizer):
        self.optimizer = optimizer
        self._taken_by: Mapping[str, torch.Tensor] | None = None

    def take(self, waiting: Mapping[str, torch.Tensor]) -> None:
        """Go on with a worker's state, by name; who was here before gets its own back."""
        if self._taken_by is waiting:
            return
        if self._taken_by is not None:
            self.leave(self._taken_by)
        for name, tensor in self.optimizer.state_dict().items():
            tensor.copy_(waiting[name], non_blocking=True)
        self._taken_by = waiting

    def leave(self, waiting: Mapping[str, torch.Tensor]) -> None:
        """Bring a worker's state up to date, if it is the one that is here."""
        if self._taken_by is waiting:
            for name, tensor in self.optimizer.state_dict().items():
                waiting[name].copy_(tensor)
            self._taken_by = None


def seat_of(working: FlatModel, config: Config) -> Seat:
    """The only seat of a working model's device."""
    if working.seat is None:
        working.seat = Seat(INNER_OPTIMIZERS[inner_optimizer_name(config)].build(working, config))
    return working.seat
