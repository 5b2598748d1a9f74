"""The processes of a run: what trainers and the cluster reach all nodes through.

Every process (rank) runs the same program and takes the same decisions from the same gathered values; it owns some of
the nodes. Algorithms, trainers and the cluster speak of nodes and workers, and only `utils` knows ranks. Values travel
over gloo; means and state that moves over nccl where every rank has GPUs of its own, otherwise over gloo too. A single
process has no process group.
"""

import ctypes
import datetime
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from utils.distributed.devices import identity
from utils.distributed.launch import STARTED_BY, Launch
from utils.distributed.peers import PeerWatch
from utils.distributed.placement import Rank, Site, gpus_of_their_own, own_device, shard_group_sites, share_out
from utils.distributed.reductions import DistributedWorkers, LocalWorkers, ProcessGroup
from utils.distributed.shard_groups import ProcessShardGroup, ShardGroup

T = TypeVar("T")

# A process may wait for one that evaluates, draws or is slow, but not for ever for one that has stopped answering.
_TIMEOUT = datetime.timedelta(hours=2)
_CONNECTING = datetime.timedelta(minutes=10)


class Processes:
    """All processes of a run, and who owns which node; there are no nodes before `place`.

    Args:
        rank: which process this is; None: the only one, which owns every node.
        store: where the processes find each other.
        peers: explains failed collectives.

    Attributes:
        count: number of processes.
        is_main: whether this is the first one, which writes and speaks.
        first_here: whether this is the first process of its machine.
        devices: those of all nodes of the run, of every machine, as their owners call them.
        groups: per node; nodes with one number share a device, and communicate for nothing.
        shard_group: the processes with which this one shares every model.
    """

    def __init__(self, rank: Rank | None = None, store: dist.Store | None = None, peers: PeerWatch | None = None):
        self._rank = rank or Rank(0, 1, 0, 1, 0)
        self._peers = peers or PeerWatch()
        self._on_gpus = False
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        self.count = self._rank.count
        self.is_main = self._rank.number == 0
        self.first_here = self._rank.local == 0
        self.devices: tuple[torch.device, ...] = ()
        self.groups: tuple[int, ...] = ()
        self.shard_group = ShardGroup()
        if self.count > 1:
            with self._peers.explaining():
                dist.init_process_group(
                    "gloo", store=store, rank=self._rank.number, world_size=self.count, timeout=_TIMEOUT
                )

    def place(
        self, devices: Sequence[torch.device], nodes_per_device: int, in_order: bool = True, devices_per_node: int = 1
    ) -> None:
        """Share out the nodes of all devices; all processes call this, with the devices that they may use.

        With more than one device per node, as many consecutive processes are a shard group, which owns nodes together:
        the process with the same place in another shard group is the one that a process reaches that shard group
        through.

        Raises:
            ValueError: the nodes cannot be shared out; see `share_out` and `shard_group_sites` of
            `utils.distributed.placement`.
        """
        self._in_order = in_order
        self._shard_group_size = devices_per_node
        self._lane = self._rank.number % devices_per_node
        if self.count == 1:
            if devices_per_node > 1:
                raise ValueError(f"1 process does not make a shard group of devices_per_node {devices_per_node}")
            self.devices = tuple(device for device in devices for _ in range(nodes_per_device))
            self.groups = tuple(index // nodes_per_device for index in range(len(self.devices)))
            return
        if devices_per_node > 1:
            devices = [own_device(devices, self._rank)]
        here = Site(self._rank.number, self._rank.machine, {identity(device): str(device) for device in devices})
        sites = self.gather(here)
        if devices_per_node > 1:
            sites = shard_group_sites(sites, devices_per_node, self._lane)
        slots = share_out(sites, nodes_per_device)
        self.devices = tuple(torch.device(slot.device) for slot in slots)
        self.groups = tuple(slot.group for slot in slots)
        self._owners = tuple(slot.owner for slot in slots)
        self._on_gpus = gpus_of_their_own(slots)
        own = next(torch.device(slot.device) for slot in slots if slot.owner == self._rank.number)
        if own.type == "cuda":
            torch.cuda.set_device(own)
        self._device = own if self._on_gpus else torch.device("cpu")
        if devices_per_node > 1:
            self.shard_group = self._made_shard_group(own)

    def _made_shard_group(self, device: torch.device) -> ShardGroup:
        """The shard group of this process; all processes make all shard groups, in one order."""
        size, own = self._shard_group_size, self._rank.number - self._lane
        for first in range(0, self.count, size):
            handle = self._new_group(range(first, first + size), "nccl" if device.type == "cuda" else "gloo")
            if first == own:
                mine = handle
        return ProcessShardGroup(mine, size, self._lane, device, self._peers)

    def _new_group(self, ranks: Iterable[int], backend: str) -> dist.ProcessGroup:
        with self._peers.explaining():
            return dist.new_group(list(ranks), timeout=_TIMEOUT, backend=backend)

    def gather(self, value: T) -> list[T]:
        """Every process's value, in all processes, by rank; also a barrier."""
        if self.count == 1:
            return [value]
        values: list = [None] * self.count
        with self._peers.explaining():
            dist.all_gather_object(values, value)
        return values

    def failed(self, reason: str) -> None:
        """Leave the others without waiting for them, and let them know why."""
        self._peers.failed(self._rank.number, reason)
        if self.count > 1 and not self._on_gpus:  # nccl would wait for them
            dist.destroy_process_group()

    def owns(self, node: int) -> bool:
        """Whether the node works in this process."""
        return self.count == 1 or self._owners[node] == self._rank.number

    def sharing(self, node: int) -> int:
        """Number of processes that work on the node's device."""
        if self.count == 1:
            return 1
        owners = self._ranks(other for other, group in enumerate(self.groups) if group == self.groups[node])
        return len(owners) * (self._shard_group_size if self.devices[node].type == "cpu" else 1)

    def _ranks(self, nodes: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted({self._owners[node] for node in nodes}))

    def _group(self, ranks: tuple[int, ...]) -> ProcessGroup:
        """Of these ranks; all others ask for it as well, in the same order, and do not use it.

        The other processes of a shard group ask for theirs meanwhile: of the same shard groups, at their own place in
        them.
        """
        if ranks not in self._groups:
            for lane in range(self._shard_group_size):
                shifted = [rank - self._lane + lane for rank in ranks]
                handle = self._new_group(shifted, "nccl" if self._on_gpus else "gloo")
                if lane == self._lane:
                    self._groups[ranks] = ProcessGroup(ranks, handle, self._device, self._peers)
        return self._groups[ranks]

    def workers(self, nodes: Sequence[int]) -> LocalWorkers:
        """The workers of a trainer with these nodes; every process asks for all trainers', in the same order."""
        if self.count == 1:
            return LocalWorkers(len(nodes))
        owners = tuple(self._owners[node] for node in nodes)
        ranks = self._ranks(nodes)
        me = self._rank.number
        if len(ranks) == 1:
            return LocalWorkers(len(owners) if ranks[0] == me else 0)
        group = self._group(ranks)
        return DistributedWorkers(owners, me, group, self._in_order) if me in ranks else LocalWorkers(0)

    def provide(
        self,
        tensors: list[torch.Tensor] | None,
        holders: Sequence[int],
        takers: Sequence[int],
        into: Callable[[], list[torch.Tensor]],
    ) -> list[torch.Tensor] | None:
        """Move tensors from the owners of the nodes `holders` to the owners of the nodes `takers`.

        All processes call this in the same order. A process that holds the tensors gets them back; one that lacks them
        gets those that `into` makes, filled; one that takes none gets None.
        """
        if self.count == 1:
            return tensors
        have, need = set(self._ranks(holders)), set(self._ranks(takers))
        source, missing, me = self._owners[holders[0]], need - have, self._rank.number
        if missing:
            group = self._group(tuple(sorted({source} | missing)))
            if me in missing:
                tensors = into()
            if me in group.ranks:
                group.broadcast(tensors, source)
        return tensors if me in need else None

    def keep(self, trainers: Iterable[Sequence[int]]) -> None:
        """From now on trainers have these nodes: groups of other processes are freed. All processes call this."""
        if self.count == 1:
            return
        unused = sorted(set(self._groups) - {self._ranks(nodes) for nodes in trainers})
        if unused:
            self.gather(None)  # a process that is ahead must not close a group that others still use
        for ranks in unused:
            self._groups.pop(ranks).close()

    def close(self) -> None:
        """Leave the others in order."""
        self._peers.close()
        if self.count > 1:
            dist.destroy_process_group()


class LocalProcesses(Processes):
    """The only process of a run, with its nodes."""

    def __init__(self, devices: Sequence[torch.device] = (), nodes_per_device: int = 1):
        super().__init__()
        self.place(devices, nodes_per_device)


def _end_with_parent() -> None:
    """Let the system end this process when the one that started it is gone (Linux)."""
    parent = os.environ.get(STARTED_BY)
    if parent is None or not hasattr(ctypes.CDLL(None), "prctl"):
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != int(parent):  # it has gone before
        os._exit(1)


def meet(launch: Launch | None = None) -> Processes:
    """The processes of this run, as the environment says: one, or those that torchrun or `launch` started.

    They have no nodes yet.

    Raises:
        PeerLostError: the others do not come.
    """
    _end_with_parent()
    rank = Rank.from_environment()
    if rank is None:
        return Processes()
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    agents_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeps_store = rank.number == 0 and not agents_store
    listening = {} if launch is None else {"master_listen_fd": launch.detach_socket()}
    with PeerWatch().explaining():
        store = dist.TCPStore(
            host, port, is_master=keeps_store, wait_for_workers=False, timeout=_CONNECTING, **listening
        )
    # The agent's store still holds what an attempt before has left in it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {attempt}", store)
    return Processes(rank, store, PeerWatch(launch.processes if launch is not None else None, store))
