"""Processes, and where a trainer's workers live: the one interface through which it reaches them all.

Every process (rank) runs the same program and takes the same decisions from the same gathered values; it owns some of
the nodes. Algorithms, trainers and the cluster speak of nodes and workers, and only this module knows ranks. One
process is `LocalProcesses`, many are `DistributedProcesses` over torch.distributed: gloo for values and for moving
state, and for means gloo on CPUs or nccl where every rank has GPUs of its own.

A mean sums in worker order where it must not depend on who owns what (`in_order`) or where workers send encoded
tensors: every rank gets a part of all workers' tensors, sums it, and sends the part of the mean to all, which costs the
bytes of an all-reduce where a rank has one worker. Otherwise a rank sums its own and one all-reduce joins the ranks.
"""

import datetime
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from utils.compression import PLAIN, Encoding
from utils.heartbeat import Heartbeat
from utils.launch import Launch
from utils.notices import Notices, common_attempt

T = TypeVar("T")

# What a collective works on at a time: it needs a few buffers of this size beside the tensors.
BUCKET_BYTES = 8 * 1024 * 1024
# Waiting is no fault (somebody may evaluate, draw or be slow); who died is the heartbeat's to find out.
_PATIENCE = datetime.timedelta(days=7)
_CONNECTING = datetime.timedelta(minutes=10)


class Workers(Protocol):
    """The workers of one trainer, numbered from 0."""

    local_workers: tuple[int, ...]

    def mean(
        self, tensors: Iterable[tuple[int, torch.Tensor | None]], like: torch.Tensor, encoding: Encoding = PLAIN
    ) -> tuple[torch.Tensor, int]:
        """Mean over the workers that give a tensor, of the shape and device of `like`, and how many they are.

        `tensors` yields (worker, encoded tensor) for the local workers in order; None leaves the worker out. Only the
        latest tensor has to be valid: a worker may be run when its tensor is asked for, and all may share one buffer.
        With nobody left the mean is zero.
        """


class Processes(Protocol):
    """All processes of a run, and who owns which node."""

    count: int
    is_main: bool
    devices: tuple[torch.device, ...]  # those of all nodes of the run, of every machine
    groups: tuple[int, ...]  # per node: nodes with one number communicate for free

    notices: Notices
    first_here: bool  # whether this is the first process of its machine

    def place(self, devices: Sequence[torch.device], nodes_per_device: int, in_order: bool) -> None:
        """Share out the nodes of all devices; everybody calls this, with the devices of its machine.

        Raises:
            ValueError: there are more processes on a machine than nodes.
        """

    def gather(self, value: T) -> list[T]:
        """Everybody's value, everywhere, in one order; also a point that nobody passes before all are there."""

    def in_turn(self, work: Callable[[], T]) -> T:
        """Do something once per machine before the other processes there do it, who find a cache then."""

    def failed(self, reason: str) -> None:
        """Leave the others without waiting for them, and tell them why."""

    def owns(self, node: int) -> bool:
        """Whether the node works in this process."""

    def workers(self, nodes: Sequence[int]) -> Workers:
        """The workers of a trainer with these nodes; every process asks for all trainers', in the same order."""

    def provide(
        self, tensor: torch.Tensor | None, holders: Sequence[int], takers: Sequence[int], like: torch.Tensor
    ) -> torch.Tensor | None:
        """A tensor that the owners of the nodes `holders` have, for the owners of `takers`; None for others.

        Everybody calls this in the same order. Who holds it gets the very tensor back. like: its shape, type and
        device.
        """

    def close(self) -> None:
        """Leave the others in order."""


# The arithmetic of every mean. Plain sums and one product, so that their bits do not depend on how it is cut up.


def _divided(total: torch.Tensor, count: int) -> torch.Tensor:
    return total.mul_(1.0 / count) if count else total


def _add(total: torch.Tensor, rows: torch.Tensor, encoding: Encoding) -> None:
    total.add_(encoding.decode(rows.to(total.device), total.dtype)[: total.numel()])


class LocalWorkers:
    """All workers of a trainer in this process."""

    def __init__(self, count: int):
        self.local_workers = tuple(range(count))

    def mean(
        self, tensors: Iterable[tuple[int, torch.Tensor | None]], like: torch.Tensor, encoding: Encoding = PLAIN
    ) -> tuple[torch.Tensor, int]:
        total, count = torch.zeros_like(like), 0
        for _, rows in tensors:
            if rows is not None:
                _add(total, rows, encoding)
                count += 1
        mean = _divided(total, count)
        return encoding.way_back.round_trip(mean), count


class LocalProcesses:
    """The only process of a run; it owns every node."""

    count, is_main, first_here = 1, True, True

    def __init__(self, devices: Sequence[torch.device] = (), nodes_per_device: int = 1):
        self.notices = Notices(dist.HashStore())
        self.place(devices, nodes_per_device)

    def place(self, devices: Sequence[torch.device], nodes_per_device: int, in_order: bool = True) -> None:
        self.devices = tuple(device for device in devices for _ in range(nodes_per_device))
        self.groups = (0,) * len(self.devices)

    def gather(self, value: T) -> list[T]:
        return [value]

    def in_turn(self, work: Callable[[], T]) -> T:
        return work()

    def failed(self, reason: str) -> None:
        """Nobody to tell."""

    def owns(self, node: int) -> bool:
        return True

    def workers(self, nodes: Sequence[int]) -> Workers:
        return LocalWorkers(len(nodes))

    def provide(self, tensor, holders, takers, like):
        return tensor

    def close(self) -> None:
        """Nobody to leave."""


@dataclass(frozen=True)
class Rank:
    """Which of the processes this is, from the environment that torchrun sets (and `utils.launch` likewise)."""

    number: int
    count: int
    local: int  # among those of this machine
    local_count: int
    machine: int

    @classmethod
    def from_environment(cls) -> "Rank | None":
        """None: nobody started several processes."""
        if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", 1)) == 1:
            return None
        value = {name: int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
        machine = int(os.environ.get("GROUP_RANK", value["RANK"] // value["LOCAL_WORLD_SIZE"]))
        return cls(*value.values(), machine)


def share_of(items: Sequence[T], index: int, parts: int) -> Sequence[T]:
    """Part `index` of items cut into near-equal consecutive parts, the larger ones first."""
    size, larger = divmod(len(items), parts)
    start = index * size + min(index, larger)
    return items[start : start + size + (index < larger)]


class _Group:
    """The ranks that own workers of one trainer, and how they reduce: on GPUs (nccl), or in memory (gloo)."""

    def __init__(self, ranks: tuple[int, ...], handle, device: torch.device, heartbeat: Heartbeat):
        self.ranks, self.device = ranks, device
        self._handle, self._heartbeat = handle, heartbeat

    def all_reduce(self, tensor: torch.Tensor) -> None:
        with self._heartbeat.explaining():
            dist.all_reduce(tensor, group=self._handle)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, receive: list[int], send: list[int]) -> None:
        with self._heartbeat.explaining():
            dist.all_to_all_single(received, sent, receive, send, group=self._handle)

    def all_gather(self, received: list[torch.Tensor], sent: torch.Tensor) -> None:
        with self._heartbeat.explaining():
            dist.all_gather(received, sent, group=self._handle)


_FLAG_BYTES = 16  # for one bit, so that what follows stays aligned


class DistributedWorkers:
    """The workers of a trainer on several ranks.

    Args:
        owners: the rank of each worker.
        rank: this one.
        group: of all owners.
        in_order: sum in worker order whatever the encoding.
    """

    def __init__(self, owners: tuple[int, ...], rank: int, group: _Group, in_order: bool):
        self._owners, self._rank, self._group, self._in_order = owners, rank, group, in_order
        self.local_workers = tuple(worker for worker, owner in enumerate(owners) if owner == rank)

    def mean(
        self, tensors: Iterable[tuple[int, torch.Tensor | None]], like: torch.Tensor, encoding: Encoding = PLAIN
    ) -> tuple[torch.Tensor, int]:
        if self._in_order or not encoding.lossless:
            # Until the last worker is done, the others' tensors wait: one of them each, in its encoding.
            held = [None if rows is None else rows.clone() if encoding.lossless else rows for _, rows in tensors]
            return self._mean_in_order(held, like, encoding)
        return self._mean_of_sums(tensors, like, encoding)

    def _mean_of_sums(self, tensors, like: torch.Tensor, encoding: Encoding) -> tuple[torch.Tensor, int]:
        """One all-reduce; an element more counts the workers in it."""
        joined = torch.zeros(like.numel() + 1, dtype=like.dtype, device=like.device)
        total = joined[:-1]
        for _, rows in tensors:
            if rows is not None:
                _add(total, rows, encoding)
                joined[-1] += 1.0
        for part in joined.split(BUCKET_BYTES // like.element_size()):
            if part.device.type == self._group.device.type:
                self._group.all_reduce(part)
            else:
                staged = part.to(self._group.device)
                self._group.all_reduce(staged)
                part.copy_(staged)
        count = round(joined[-1].item())
        return _divided(total, count), count

    def _mean_in_order(
        self, held: list[torch.Tensor | None], like: torch.Tensor, encoding: Encoding
    ) -> tuple[torch.Tensor, int]:
        """Every rank sums a part of each bucket over all workers, and sends that part of the mean to all."""
        group, device, dtype, back = self._group, self._group.device, like.dtype, encoding.way_back
        ranks, rows, row_bytes = len(group.ranks), encoding.rows(like.numel()), encoding.row_bytes(dtype)
        chunk = -(-min(rows, BUCKET_BYTES // row_bytes) // ranks)  # rows of a rank's part of a bucket
        # Messages come by rank, and within that by worker; each ends with whether the worker takes part.
        order = [worker for rank in group.ranks for worker, owner in enumerate(self._owners) if owner == rank]
        used, width = chunk * row_bytes, chunk * row_bytes + _FLAG_BYTES
        sent_bytes = [len(held) * width] * ranks
        received_bytes = [self._owners.count(rank) * width for rank in group.ranks]
        # Made once, not per bucket; what a smaller last bucket leaves in them is of nobody's part.
        message = torch.zeros(ranks, len(held), width, dtype=torch.uint8, device=device)
        received = torch.empty(len(order), width, dtype=torch.uint8, device=device)
        total = torch.empty(chunk * encoding.block, dtype=dtype, device=device)
        gathered = torch.empty(ranks, back.rows(len(total)), back.row_bytes(dtype), dtype=torch.uint8, device=device)
        mean, count = torch.empty_like(like), 0
        for index, tensor in enumerate(held):
            message[:, index, used] = int(tensor is not None)
        for start in range(0, rows, ranks * chunk):
            for index, tensor in enumerate(held):
                for part in range(ranks) if tensor is not None else ():
                    own = tensor[start + part * chunk : start + (part + 1) * chunk]
                    message[part, index, : own.numel()] = own.flatten()
            group.all_to_all(received.view(-1), message.view(-1), received_bytes, sent_bytes)
            takes_part = received[:, used].tolist()
            total.zero_()
            for index in sorted(range(len(order)), key=order.__getitem__):
                if takes_part[index]:
                    _add(total, received[index, :used].view(chunk, row_bytes), encoding)
            count = sum(takes_part)
            group.all_gather(list(gathered), back.encode(_divided(total, count)).contiguous())
            first = start * encoding.block
            for part in gathered:
                decoded = back.decode(part, dtype)[: max(0, like.numel() - first)]
                mean[first : first + len(decoded)] = decoded
                first += len(total)
        return mean, count


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

    def place(self, devices: Sequence[torch.device], nodes_per_device: int, in_order: bool) -> None:
        self._in_order = in_order
        self.devices, self._owners = self._place(devices, nodes_per_device)
        self.groups = self._owners
        own = [device for device, owner in zip(self.devices, self._owners, strict=True) if owner == self._rank.number]
        self._on_gpus = self._own_gpus_everywhere({str(device) for device in own})
        self._device = own[0] if self._on_gpus else torch.device("cpu")
        if own[0].type == "cuda":
            torch.cuda.set_device(own[0])
        self._known_groups: dict[tuple[int, ...], _Group] = {}

    def _place(
        self, devices: Sequence[torch.device], nodes_per_device: int
    ) -> tuple[tuple[torch.device, ...], tuple[int, ...]]:
        """Device and owner of every node: a machine's nodes go to its ranks in consecutive, near-equal parts."""
        machines: dict[int, tuple[list[int], list[str]]] = {}
        here = (self._rank.machine, self._rank.number, [str(device) for device in devices])
        for machine, number, names in self.gather(here):
            machines.setdefault(machine, ([], names))[0].append(number)
        placed, owners = [], []
        for machine in sorted(machines):
            ranks, names = machines[machine]
            nodes = [torch.device(name) for name in names for _ in range(nodes_per_device)]
            if len(ranks) > len(nodes):
                raise ValueError(
                    f"{len(ranks)} processes on a machine with {len(nodes)} nodes ({', '.join(names)}, "
                    f"nodes_per_gpu {nodes_per_device}); every process needs one"
                )
            placed += nodes
            for index, number in enumerate(ranks):
                owners += [number] * len(share_of(nodes, index, len(ranks)))
        return tuple(placed), tuple(owners)

    def _own_gpus_everywhere(self, own: set[str]) -> bool:
        """Whether nccl can be used: it wants GPUs that no other rank uses."""
        claims = [(machine, name) for machine, names in self.gather((self._rank.machine, own)) for name in names]
        return all(name.startswith("cuda") for _, name in claims) and len(set(claims)) == len(claims)

    def gather(self, value: T) -> list[T]:
        values: list = [None] * self.count
        with self._heartbeat.explaining():
            dist.all_gather_object(values, value)
        return values

    def in_turn(self, work: Callable[[], T]) -> T:
        result = work() if self.first_here else None
        self.gather(None)
        return result if self.first_here else work()

    def failed(self, reason: str) -> None:
        self._heartbeat.failed(reason)
        if not self._on_gpus:  # nccl would wait for them
            dist.destroy_process_group()

    def owns(self, node: int) -> bool:
        return self._owners[node] == self._rank.number

    def workers(self, nodes: Sequence[int]) -> Workers:
        owners = tuple(self._owners[node] for node in nodes)
        ranks, me = tuple(sorted(set(owners))), self._rank.number
        if len(ranks) == 1:
            return LocalWorkers(len(owners) if ranks[0] == me else 0)
        if ranks not in self._known_groups:
            with self._heartbeat.explaining():
                backend = "nccl" if self._on_gpus else "gloo"
                handle = dist.new_group(list(ranks), timeout=_PATIENCE, backend=backend)
            self._known_groups[ranks] = _Group(ranks, handle, self._device, self._heartbeat)
        if me not in ranks:
            return LocalWorkers(0)
        return DistributedWorkers(owners, me, self._known_groups[ranks], self._in_order)

    def provide(
        self, tensor: torch.Tensor | None, holders: Sequence[int], takers: Sequence[int], like: torch.Tensor
    ) -> torch.Tensor | None:
        have, need = {self._owners[node] for node in holders}, {self._owners[node] for node in takers}
        source, me = self._owners[holders[0]], self._rank.number
        for target in sorted(need - have):
            if me == source:
                for part in tensor.flatten().split(BUCKET_BYTES // like.element_size()):
                    with self._heartbeat.explaining():
                        dist.send(part.cpu(), target)
            elif me == target:
                tensor = torch.empty_like(like)
                for part in tensor.view(-1).split(BUCKET_BYTES // like.element_size()):
                    staged = torch.empty_like(part, device="cpu")
                    with self._heartbeat.explaining():
                        dist.recv(staged, source)
                    part.copy_(staged)
        return tensor if me in need else None

    def close(self) -> None:
        self._heartbeat.close()
        dist.destroy_process_group()


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

    # torchrun's own agent keeps the store; otherwise the first rank does.
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
    notices = Notices(dist.PrefixStore(f"{attempt} notices", client()))
    return DistributedProcesses(rank, dist.PrefixStore(f"{attempt} group", store), heartbeat, notices)


def connect(
    devices: Sequence[torch.device], nodes_per_device: int, in_order: bool, launch: Launch | None = None
) -> Processes:
    """The processes of this run, with their nodes: see `meet` and `Processes.place`."""
    processes = meet(launch)
    try:
        processes.place(devices, nodes_per_device, in_order)
    except ValueError as error:
        processes.failed(str(error))
        raise
    return processes
