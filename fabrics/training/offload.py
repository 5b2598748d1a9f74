"""State in host memory that a device does not need all the time (key `offload`).

`outer_state` is the trainer's tensors between outer steps; `idle_moments` is the optimizer state of workers that wait
for their turn on the device.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fabrics.training.flat_model import FlatModel
from fabrics.training.optimizers import WorkerOptimizer
from utils.config.schema import Config


@dataclass(frozen=True)
class StateMemory:
    """Memory for state: a device's own, or the host's.

    Attributes:
        device: where tensors are allocated.
        pinned: page-locked host memory, which a GPU copies without the CPU.
    """

    device: torch.device
    pinned: bool = False

    @classmethod
    def choose(cls, offloaded: bool, device: torch.device) -> "StateMemory":
        """Return the host's memory for offloaded state that `device` works with, otherwise the device's own."""
        return cls(torch.device("cpu"), pinned=device.type == "cuda") if offloaded else cls(device)

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised tensor of this shape and type."""
        return torch.empty(like.shape, dtype=like.dtype, device=self.device, pin_memory=self.pinned)

    def zeros(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of zeros of this shape and type."""
        return self.empty(like).zero_()

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself, or a copy here if it is on another kind of device."""
        return tensor if tensor.device.type == self.device.type else self.empty(tensor).copy_(tensor)


class OptimizerSlot:
    """The inner optimizer of a device, with the state of one worker at a time; other workers' state is in host memory.

    The state stays until another worker needs the slot.
    """

    def __init__(self, optimizer: WorkerOptimizer):
        self.optimizer = optimizer
        self._occupant: Mapping[str, torch.Tensor] | None = None

    def swap_in(self, host_state: Mapping[str, torch.Tensor]) -> None:
        """Bring a worker's state to the device, after writing the previous worker's state back."""
        if self._occupant is host_state:
            return
        if self._occupant is not None:
            self.swap_out(self._occupant)
        for name, tensor in self.optimizer.state_dict().items():
            tensor.copy_(host_state[name], non_blocking=True)
        self._occupant = host_state

    def swap_out(self, host_state: Mapping[str, torch.Tensor]) -> None:
        """Write a worker's state back to host memory, if it is in the slot."""
        if self._occupant is host_state:
            for name, tensor in self.optimizer.state_dict().items():
                host_state[name].copy_(tensor)
            self._occupant = None


def optimizer_slot(model: FlatModel, config: Config) -> OptimizerSlot:
    """Return the one slot of a model's device."""
    if model.optimizer_slot is None:
        model.optimizer_slot = OptimizerSlot(WorkerOptimizer(model, config))
    return model.optimizer_slot
