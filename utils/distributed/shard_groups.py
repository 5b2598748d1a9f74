"""A shard group: the processes, one for each of its devices, that own nodes together and share every model among them.

All of them take the same decisions and work for the same workers at the same time; what one sends to other shard
groups goes
to the process with its place there, which has the same part of the model.
"""

import contextlib
import ctypes
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from utils.distributed.devices import is_out_of_memory
from utils.distributed.peers import PeerWatch
from utils.distributed.reductions import ALL_GATHER

_M_MMAP_THRESHOLD, _LARGE_BYTES = -3, 2**18  # of glibc's malloc.h


def _give_back_what_is_freed() -> None:
    """Let large tensors in host memory be the system's again as soon as they are freed.

    glibc keeps what was smaller than the largest freed so far, up to 32 MB, for later; layers that are gathered and
    freed in turn leave holes then: nearly twice as much was resident with 30M parameters. Elsewhere this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


class ShardGroup:
    """The shard group of a process that has its models for itself.

    Attributes:
        size: devices, and processes. index: of this process in it.
    """

    size, index = 1, 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the devices, in place; the same everywhere."""
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Everybody's flat tensor of one size, [size, numbers]."""
        return tensor.unsqueeze(0)

    def least(self, number: int) -> int:
        """The smallest that a device has; the devices themselves are not waited for."""
        return number

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Turn the failure of a collective into an error that says who is gone."""
        yield


class ProcessShardGroup(ShardGroup):
    """Several processes.

    Args:
        handle: of them.
        size: how many they are.
        index: of this one.
        device: this one's.
        peers: explains failed collectives.

    Attributes:
        mesh: they, as FSDP2 wants them, in one dimension.
    """

    def __init__(
        self,
        handle: dist.ProcessGroup,
        size: int,
        index: int,
        device: torch.device,
        peers: PeerWatch,
    ):
        self.size = size
        self.index = index
        self._handle = handle
        self._peers = peers
        self._device = device
        if device.type == "cpu":
            _give_back_what_is_freed()
        self.mesh = DeviceMesh.from_group(handle, device.type, mesh_dim_names=("shard",))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        staged = tensor.to(self._device)  # nccl takes nothing of the host's
        with self.explaining():
            dist.all_reduce(staged, group=self._handle)
        return tensor if staged is tensor else tensor.copy_(staged)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        staged = tensor.to(self._device).contiguous()
        gathered = staged.new_empty(self.size * staged.numel())
        with self.explaining():
            getattr(dist, ALL_GATHER)(gathered, staged, group=self._handle)
        return gathered.view(self.size, -1).to(tensor.device)

    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        """What every device has for this one, [size, numbers], of a flat tensor with a part for each of them."""
        arrived = torch.empty_like(parts)
        with self.explaining():
            dist.all_to_all_single(arrived, parts, group=self._handle)
        return arrived.view(self.size, -1)

    def scatter(self, whole: torch.Tensor | None, part: torch.Tensor) -> None:
        """Fill each device's flat `part`, of one length everywhere, with its piece of a tensor of the first device.

        whole: in the first device; where it ends before the last part does, zeros follow.
        """
        pieces = None
        if self.index == 0:
            padded = torch.zeros(self.size * part.numel(), dtype=part.dtype, device=self._device)
            padded[: whole.numel()].copy_(whole.flatten())
            pieces = list(padded.view(torch.uint8).chunk(self.size))
        with self.explaining():
            dist.scatter(part.view(torch.uint8), pieces, group=self._handle, group_src=0)

    def broadcast(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The first device's tensor, of this shape and type in all of them, on the device."""
        if self.index == 0:
            sent = tensor.to(device).contiguous()
        else:
            sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        with self.explaining():
            dist.broadcast(sent.reshape(-1).view(torch.uint8), group=self._handle, group_src=0)
        return sent

    def least(self, number: int) -> int:
        found = torch.tensor(number, device=self._device)
        with self.explaining():
            dist.all_reduce(found, dist.ReduceOp.MIN, group=self._handle)
        return int(found)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        no_memory = None
        with self._peers.explaining():
            try:
                yield
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                no_memory = error
        if no_memory is not None:
            raise no_memory
