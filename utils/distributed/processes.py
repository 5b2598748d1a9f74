"""The processes of a run: what trainers and the cluster reach all nodes through.

Every process (rank) runs the same program and takes the same decisions from the same gathered values; it owns some of
the nodes. Algorithms, trainers and the cluster speak of nodes and workers, and only `utils` knows ranks. One process is
`LocalProcesses`, many are `DistributedProcesses` over torch.distributed: gloo for values, and for means and state that
moves gloo on CPUs or nccl where every rank has GPUs of its own.
"""

import datetime
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from utils.distributed.devices import identity
from utils.distributed.heartbeat import Heartbeat
from utils.distributed.kv_store import Notices, common_attempt
from utils.distributed.launch import Launch, ending_with_its_launch
from utils.distributed.placement import Rank, Site, gpus_of_their_own, island_sites, own_device, share_out
from utils.distributed.reductions import DistributedWorkers, LocalWorkers, ProcessGroup
from utils.distributed.shard_groups import Island, ProcessIsland

T = TypeVar("T")

# Waiting is no fault (somebody may evaluate, draw or be slow); who died is the heartbeat's to find out.
_PATIENCE = datetime.timedelta(days=7)
_CONNECTING = datetime.timedelta(minutes=10)


class Processes(Protocol):
    """All processes of a run, and who owns which node."""

    count: int
    is_main: bool
    devices: tuple[torch.device, ...]  # those of all nodes of the run, of every machine, as their owners call them
    groups: tuple[int, ...]  # per node: nodes with one number share a device, and communicate for nothing
    notices: Notices
    first_here: bool  # whether this is the first process of its machine
    island: Island  # those with which this process shares every model

    def place(
        self, devices: Sequence[torch.device], nodes_per_device: int, in_order: bool, devices_per_node: int = 1
    ) -> None:
        """Share out the nodes of all devices; everybody calls this, with the devices that it may use.

        With more than one device per node, as many consecutive processes are an island, which owns nodes together:
        whoever has the same place in other islands are the others that a process reaches nodes through.

        Raises:
            ValueError: the nodes cannot be shared out; see `share_out` and `island_sites` of
            `utils.distributed.placement`.
        """

    def gather(self, value: T) -> list[T]:
        """Everybody's value, everywhere, in one order; also a point that nobody passes before all are there."""

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This process's part of a list that all have; every item is in the part of one."""

    def failed(self, reason: str) -> None:
        """Leave the others without waiting for them, and tell them why."""

    def owns(self, node: int) -> bool:
        """Whether the node works in this process."""

    def sharing(self, node: int) -> int:
        """How many processes work on the node's device."""

    def workers(self, nodes: Sequence[int]) -> LocalWorkers:
        """The workers of a trainer with these nodes; every process asks for all trainers', in the same order."""

    def provide(
        self,
        tensors: list[torch.Tensor] | None,
        holders: Sequence[int],
        takers: Sequence[int],
        into: Callable[[], list[torch.Tensor]],
    ) -> list[torch.Tensor] | None:
        """Tensors that the owners of the nodes `holders` have, for the owners of `takers`; None for others.

        Everybody calls this in the same order. Who holds them gets the very tensors back, and who lacks them those that
        `into` makes, filled.
        """

    def keep(self, trainers: Iterable[Sequence[int]]) -> None:
        """From now on trainers have these nodes: what only others needed is freed. Everybody calls this together."""

    def close(self) -> None:
        """Leave the others in order."""


class LocalProcesses:
    """The only process of a run; it owns every node."""

    count, is_main, first_here, island = 1, True, True, Island()

    def __init__(self, devices: Sequence[torch.device] = (), nodes_per_device: int = 1):
        self.notices = Notices(dist.HashStore())
        self.place(devices, nodes_per_device)

    def place(
        self,
        devices: Sequence[torch.device],
        nodes_per_device: int,
        in_order: bool = True,
        devices_per_node: int = 1,
    ) -> None:
        if devices_per_node > 1:
            raise ValueError(f"1 process does not make an island of devices_per_node {devices_per_node}")
        self.devices = tuple(device for device in devices for _ in range(nodes_per_device))
        self.groups = tuple(index // nodes_per_device for index in range(len(self.devices)))

    def gather(self, value: T) -> list[T]:
        return [value]

    def share(self, items: Sequence[T]) -> Sequence[T]:
        return items

    def failed(self, reason: str) -> None:
        """Nobody to tell."""

    def owns(self, node: int) -> bool:
        return True

    def sharing(self, node: int) -> int:
        return 1

    def workers(self, nodes: Sequence[int]) -> LocalWorkers:
        return LocalWorkers(len(nodes))

    def provide(self, tensors, holders, takers, into):
        return tensors

    def keep(self, trainers: Iterable[Sequence[int]]) -> None:
        """Nothing to free."""

    def close(self) -> None:
        """Nobody to leave."""


class DistributedProcesses:
    """Many processes over torch.distributed; they have no nodes before `place`.

    Args:
        rank: which one this is.
        store: where they find each other.
        heartbeat: watches the others.
        notices: their notice board.
    """

    def __init__(self, rank: Rank, store: dist.Store, heartbeat: Heartbeat, notices: Notices):
        self._rank, self._heartbeat, self._on_gpus, self.notices = rank, heartbeat, False, notices
        self.count, self.is_main, self.first_here = rank.count, rank.number == 0, rank.local == 0
        with heartbeat.explaining():
            dist.init_process_group("gloo", store=store, rank=rank.number, world_size=rank.count, timeout=_PATIENCE)

    def place(
        self, devices: Sequence[torch.device], nodes_per_device: int, in_order: bool, devices_per_node: int = 1
    ) -> None:
        self._island_size, self._lane = devices_per_node, self._rank.number % devices_per_node
        if devices_per_node > 1:
            devices = [own_device(devices, self._rank)]
        here = Site(self._rank.number, self._rank.machine, {identity(device): str(device) for device in devices})
        sites = self.gather(here)
        if devices_per_node > 1:
            sites = island_sites(sites, devices_per_node, self._lane)
        slots = share_out(sites, nodes_per_device)
        self.devices = tuple(torch.device(slot.device) for slot in slots)
        self.groups = tuple(slot.group for slot in slots)
        self._owners = tuple(slot.owner for slot in slots)
        self._in_order, self._on_gpus = in_order, gpus_of_their_own(slots)
        own = next(torch.device(slot.device) for slot in slots if slot.owner == self._rank.number)
        if own.type == "cuda":
            torch.cuda.set_device(own)
        self._device = own if self._on_gpus else torch.device("cpu")
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        self.island = Island() if devices_per_node == 1 else self._made_island(own)

    def _made_island(self, device: torch.device) -> Island:
        """The island of this process; all processes make all islands, in one order."""
        size, own = self._island_size, self._rank.number - self._lane
        self._heartbeat.placed(f"device {self._lane} of island {own // size}")
        for first in range(0, self.count, size):
            on_hosts = self._new_group(range(first, first + size), "gloo")
            on_gpus = device.type == "cuda"
            handle = self._new_group(range(first, first + size), "nccl") if on_gpus else on_hosts
            if first == own:
                mine = handle, on_hosts
        return ProcessIsland(*mine, size, self._lane, device, self._heartbeat)

    def _new_group(self, ranks: Iterable[int], backend: str) -> dist.ProcessGroup:
        with self._heartbeat.explaining():
            return dist.new_group(list(ranks), timeout=_PATIENCE, backend=backend)

    def gather(self, value: T) -> list[T]:
        values: list = [None] * self.count
        with self._heartbeat.explaining():
            dist.all_gather_object(values, value)
        return values

    def share(self, items: Sequence[T]) -> Sequence[T]:
        return items[self._rank.number :: self.count]

    def failed(self, reason: str) -> None:
        self._heartbeat.failed(reason)
        if not self._on_gpus:  # nccl would wait for them
            dist.destroy_process_group()

    def owns(self, node: int) -> bool:
        return self._owners[node] == self._rank.number

    def sharing(self, node: int) -> int:
        owners = self._ranks(other for other, group in enumerate(self.groups) if group == self.groups[node])
        return len(owners) * (self._island_size if self.devices[node].type == "cpu" else 1)

    def _ranks(self, nodes: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted({self._owners[node] for node in nodes}))

    def _group(self, ranks: tuple[int, ...]) -> ProcessGroup:
        """Of these ranks; all others ask for it as well, in the same order, and do not use it.

        The other processes of an island ask for theirs meanwhile: of the same islands, at their own place in them.
        """
        if ranks not in self._groups:
            for lane in range(self._island_size):
                shifted = [rank - self._lane + lane for rank in ranks]
                handle = self._new_group(shifted, "nccl" if self._on_gpus else "gloo")
                if lane == self._lane:
                    self._groups[ranks] = ProcessGroup(ranks, handle, self._device, self._heartbeat)
        return self._groups[ranks]

    def workers(self, nodes: Sequence[int]) -> LocalWorkers:
        owners, ranks, me = tuple(self._owners[node] for node in nodes), self._ranks(nodes), self._rank.number
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
        unused = sorted(set(self._groups) - {self._ranks(nodes) for nodes in trainers})
        if unused:
            self.gather(None)  # who is ahead must not hang up on who is still at it
        for ranks in unused:
            self._groups.pop(ranks).close()

    def close(self) -> None:
        self._heartbeat.close()
        dist.destroy_process_group()


@ending_with_its_launch()
def meet(launch: Launch | None = None) -> Processes:
    """The processes of this run, as the environment says: one, or those that torchrun or `launch` started.

    They can speak to each other, and have no nodes yet.

    Raises:
        PeerLostError: the others do not come.
    """
    rank = Rank.from_environment()
    if rank is None:
        return LocalProcesses()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    def client() -> dist.Store:
        return dist.TCPStore(host, port, is_master=False, timeout=_CONNECTING)

    # torchrun's own agent keeps the store, but with TORCH_DISABLE_SHARE_RDZV_TCP_STORE; otherwise the first rank does.
    agents_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank.number == 0 and not agents_store:
        listening = {} if launch is None else {"master_listen_fd": launch.detach_socket()}
        store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=_CONNECTING, **listening)
    else:
        store = client()
    attempt = common_attempt(store, rank.number, rank.count, _CONNECTING.total_seconds()) if agents_store else "run"
    # A connection serves one thread at a time.
    heartbeat = Heartbeat(
        dist.PrefixStore(attempt, client()), rank.number, rank.count, {} if launch is None else launch.processes
    )
    notices = Notices(dist.PrefixStore(f"{attempt} notices", client()), rank.number, rank.count)
    return DistributedProcesses(rank, dist.PrefixStore(f"{attempt} group", store), heartbeat, notices)
