"""A shard group: the processes, one for each device, that own nodes together and share every model among them.

All of them take the same decisions and work for the same workers at the same time. Tensors for another shard group go
to the process at the same place there, which has the same part of the model.
"""

import contextlib
import ctypes

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from utils.distributed.peers import PeerWatch

# Collectives over one flat tensor. PyTorch 2.13 has renamed them.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# From glibc's malloc.h.
_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 2**18


def _return_freed_memory() -> None:
    """Let glibc return large tensors in host memory to the system as soon as they are freed.

    Otherwise it keeps freed blocks of up to 32 MB, and layers that are gathered and freed in turn leave holes. Nearly
    twice as much was resident with 30M parameters. With other C libraries this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


class ShardGroup:
    """The processes that share every model with this one, by default none; mesh: the devices as FSDP2 takes them."""

    def __init__(
        self,
        size: int = 1,
        index: int = 0,
        communicator: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        peers: PeerWatch | None = None,
    ):
        self.size = size
        self.index = index
        self._communicator = communicator
        self._device = device
        self._peers = peers
        if communicator is not None:
            if device.type == "cpu":
                _return_freed_memory()
            self.mesh = DeviceMesh.from_group(communicator, device.type, mesh_dim_names=("shard",))

    def explaining(self) -> contextlib.AbstractContextManager:
        """Turn the failure of a collective into an error that names the process that is gone."""
        return contextlib.nullcontext() if self._peers is None else self._peers.explaining()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the devices, in place, and return it."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def least(self, number: int) -> int:
        """Return the smallest number that a device has."""
        return int(self._reduce(torch.tensor(number), dist.ReduceOp.MIN))

    def _reduce(self, tensor: torch.Tensor, operation: dist.ReduceOp) -> torch.Tensor:
        if self.size == 1:
            return tensor
        staged = tensor.to(self._device)  # nccl takes no tensor in host memory
        with self.explaining():
            dist.all_reduce(staged, operation, group=self._communicator)
        return tensor if staged is tensor else tensor.copy_(staged)

    # For a size above 1 only.

    def meet_all(self) -> None:
        """Gather and scatter once; nccl takes memory for each collective and algorithm when it is first used."""
        for elements in (1, 2**22):
            whole = torch.zeros(self.size * elements, device=self._device)
            part = torch.zeros(elements, device=self._device)
            with self.explaining():
                all_gather(whole, part, group=self._communicator)
                reduce_scatter(part, whole, group=self._communicator)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the flat tensors of all devices, of one size, as [size, elements]."""
        staged = tensor.to(self._device).contiguous()
        gathered = staged.new_empty(self.size * staged.numel())
        with self.explaining():
            all_gather(gathered, staged, group=self._communicator)
        return gathered.view(self.size, -1).to(tensor.device)

    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        """Send each device its part of a flat tensor; return this device's part of all tensors, [size, elements]."""
        arrived = torch.empty_like(parts)
        with self.explaining():
            dist.all_to_all_single(arrived, parts, group=self._communicator)
        return arrived.view(self.size, -1)

    def scatter(self, whole: torch.Tensor | None, part: torch.Tensor) -> None:
        """Fill each device's flat `part`, of one length on all, from the first device's tensor; zeros follow it."""
        pieces = None
        if self.index == 0:
            padded = torch.zeros(self.size * part.numel(), dtype=part.dtype, device=self._device)
            padded[: whole.numel()].copy_(whole.flatten())
            pieces = list(padded.view(torch.uint8).chunk(self.size))
        with self.explaining():
            dist.scatter(part.view(torch.uint8), pieces, group=self._communicator, group_src=0)

    def broadcast(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the first device's tensor, of one shape and type on all, on the given device."""
        if self.index == 0:
            sent = tensor.to(device).contiguous()
        else:
            sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        with self.explaining():
            dist.broadcast(sent.reshape(-1).view(torch.uint8), group=self._communicator, group_src=0)
        return sent
