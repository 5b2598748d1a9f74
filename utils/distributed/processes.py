"""The processes of a run: trainers and the cluster reach all nodes through them.

Every process (rank) runs the same program and takes the same decisions from the same gathered values; it owns some of
the nodes. Only `utils` knows ranks. Values travel over gloo. Means and the state that moves with nodes travel over nccl
where every process has GPUs of its own, otherwise over gloo too. All communicators are made when the nodes are placed.

Every collective has a finite timeout, `collective_timeout_minutes` within a round: all processes do their shares of the
same work, so one that is much later than the others has a problem. Between rounds one process may rightly work for long
while the others wait: it tokenises a corpus, or writes models to a slow disk. Then the timeout is twelve hours.
"""

import ctypes
import datetime
import hashlib
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from utils.config.plugins import import_plugins
from utils.config.schema import FIELDS, Config, ConfigError
from utils.distributed.devices import (
    Rank,
    Site,
    Slot,
    check_one_device,
    gpus_of_their_own,
    identity,
    own_device,
    resolve_devices,
    shard_group_sites,
    share_out,
)
from utils.distributed.launch import STARTED_BY, Launch, hide_gpus
from utils.distributed.peers import PeerWatch
from utils.distributed.reductions import Transport, Workers
from utils.distributed.shard_groups import ShardGroup
from utils.distributed.stall import StallWatch

T = TypeVar("T")

_BETWEEN_ROUNDS = datetime.timedelta(hours=12)
_CONNECTING = datetime.timedelta(minutes=10)

# Keys that may differ between machines: where devices, cache and plugins are.
_MAY_DIFFER = ("CUDA_VISIBLE_DEVICES", "devices", "cache_dir", "plugins")


class Processes:
    """All processes of a run, and the owner of each node; there are no nodes before `place`.

    Args:
        rank: this process; None: the only one, which owns every node.

    Attributes:
        first_here: whether this is the first process of its machine.
        devices: the device of each node of the run, as its owner calls it.
        groups: the number of each node's device in the run; nodes of one device communicate at no cost.
        devices_here: the number of devices on this machine.
        shard_group: the processes that share every model with this one.
        stalls: watches, without waiting, that the processes make progress in a round.
    """

    def __init__(self, rank: Rank | None = None, store: dist.Store | None = None, peers: PeerWatch | None = None):
        self._rank = rank or Rank(0, 1, 0, 1, 0)
        self._peers = peers or PeerWatch()
        self._transport: Transport | None = None
        self._owners: tuple[int, ...] = ()
        self.count = self._rank.count
        self.is_main = self._rank.number == 0
        self.first_here = self._rank.local == 0
        self.devices: tuple[torch.device, ...] = ()
        self.groups: tuple[int, ...] = ()
        self.devices_here = 0
        self.shard_group = ShardGroup()
        if self.count > 1:
            with self._peers.explaining():
                own = store.clone()  # while a thread waits with a connection, no other thread can use it
                own.set(f"rank {self._rank.number}", "")
                own.wait([f"rank {other}" for other in range(self.count)], _CONNECTING)
                dist.init_process_group(
                    "gloo", store=own, rank=self._rank.number, world_size=self.count, timeout=_BETWEEN_ROUNDS
                )
        # It would wait in `store` for processes that have not come yet.
        self.stalls = StallWatch(self._rank.number, self._rank.count, store, self._peers)

    def place(
        self,
        devices: Sequence[torch.device],
        nodes_per_device: int,
        in_order: bool = True,
        devices_per_node: int = 1,
        timeout_minutes: float = 30.0,
    ) -> None:
        """Share out the nodes of all devices; all processes call this together. ValueError: that is impossible.

        Args:
            in_order: sum means in worker order, so that bits do not depend on the number of processes.
            devices_per_node: size of a shard group: the processes with consecutive ranks that own nodes together; each
                exchanges tensors with the process at its place in the other shard groups.
        """
        self._in_order = in_order
        self._shard_group_size = devices_per_node
        self._timeout = datetime.timedelta(minutes=timeout_minutes)
        place = self._rank.number % devices_per_node
        if devices_per_node > 1:
            devices = [own_device(devices, self._rank)]
        names = {identity(device): str(device) for device in devices}
        sites = self.gather(Site(self._rank.number, self._rank.machine, names))
        here = {site.rank for site in sites if site.machine == self._rank.machine}
        if devices_per_node > 1:
            sites = shard_group_sites(sites, devices_per_node, place)
        slots = share_out(sites, nodes_per_device)
        check_one_device(slots)
        self.devices = tuple(torch.device(slot.device) for slot in slots)
        self.groups = tuple(slot.group for slot in slots)
        self._owners = tuple(slot.owner for slot in slots)
        self.devices_here = devices_per_node * len({slot.group for slot in slots if slot.owner in here})
        device = self.own_device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if self.count > 1:
            self._connect(slots, place, device)

    def _connect(self, slots: Sequence[Slot], place: int, device: torch.device) -> None:
        """Make the communicators: one for this process's shard group, and one for its place in all shard groups."""
        rank = self._rank.number
        size = self._shard_group_size
        self._round_group = self._new_group(range(self.count), on_gpus=False)
        on_gpus = gpus_of_their_own(slots)
        # All processes make all communicators, in the same order.
        for other in range(size):
            ranks = range(other, self.count, size)
            communicator = self._new_group(ranks, on_gpus)
            if other == place:
                own = device if on_gpus else torch.device("cpu")
                self._transport = Transport(rank, ranks, communicator, own, self._peers)
                if on_gpus:
                    self._transport.meet_all()
        if size > 1:
            for first in range(0, self.count, size):
                communicator = self._new_group(range(first, first + size), device.type == "cuda")
                if first == rank - place:
                    self.shard_group = ShardGroup(size, place, communicator, device, self._peers)
            if device.type == "cuda":
                self.shard_group.meet_all()

    def _new_group(self, ranks: Iterable[int], on_gpus: bool) -> dist.ProcessGroup:
        with self._peers.explaining():
            group = dist.new_group(list(ranks), timeout=self._timeout, backend="nccl" if on_gpus else "gloo")
            if on_gpus and self._rank.number in ranks:
                self.stalls.waits_for_ever = True
                # nccl takes memory for each of its algorithms when it is first used: now, and not when training has
                # filled the GPU.
                for elements in (1, 2**24):
                    dist.all_reduce(torch.zeros(elements, device="cuda"), group=group)
        return group

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, by rank; also a barrier between rounds."""
        if self.count == 1:
            return [value]
        values: list = [None] * self.count
        with self._peers.explaining():
            dist.all_gather_object(values, value)
        return values

    def gather_in_round(self, value: T) -> list[T]:
        """Return the values of all processes, by rank, at the end of a round's work."""
        if self.count == 1:
            return [value]
        values: list = [None] * self.count
        with self._peers.explaining():
            dist.all_gather_object(values, value, group=self._round_group)
        self.stalls.end_round()
        return values

    @property
    def moved(self) -> int:
        """A number that changes whenever this process has exchanged a piece of a tensor with others."""
        return self._transport.moved if self._transport is not None else 0

    @property
    def own_device(self) -> torch.device:
        """The device of this process's nodes."""
        return next(device for node, device in enumerate(self.devices) if self.owns(node))

    def owns(self, node: int) -> bool:
        return self._owners[node] == self._rank.number

    def sharing(self, node: int) -> int:
        """Number of processes that work on the node's device."""
        owners = {self._owners[other] for other, group in enumerate(self.groups) if group == self.groups[node]}
        return len(owners) * (self._shard_group_size if self.devices[node].type == "cpu" else 1)

    def workers(self, nodes: Sequence[int]) -> Workers:
        owners = tuple(self._owners[node] for node in nodes)
        return Workers(owners, self._rank.number, self._transport, self._in_order)

    def provide(
        self,
        tensors: list[torch.Tensor] | None,
        holders: Sequence[int],
        takers: Sequence[int],
        into: Callable[[], list[torch.Tensor]],
    ) -> list[torch.Tensor] | None:
        """Copy tensors from the owners of the nodes `holders` to the owners of the nodes `takers`, and return them.

        All processes call this in the same order; the result is None in a process that owns no taker.

        Args:
            tensors: the tensors, in a process that owns a holder; otherwise None.
            into: makes the tensors to fill, in a process that lacks them.
        """
        have = {self._owners[node] for node in holders}
        need = {self._owners[node] for node in takers}
        rank = self._rank.number
        source = self._owners[holders[0]]
        missing = need - have
        if rank in missing:
            tensors = into()
        if missing and rank in {source} | missing:
            self._transport.copy(tensors, source, missing)
        return tensors if rank in need else None

    def finish_by(self, finish: Callable[[str], None]) -> None:
        """Call `finish` with the reason in another thread if this process must end while its main thread waits."""
        self._peers.finish = finish

    def failed(self, reason: str) -> None:
        """Leave the other processes without waiting for them, and tell them why."""
        self.stalls.close()
        self._peers.failed(self._rank.number, reason)
        # nccl would wait for them.
        on_gpus = self._transport is not None and self._transport.device.type == "cuda"
        if self.count > 1 and not on_gpus:
            dist.destroy_process_group()

    def close(self) -> None:
        """Leave the other processes in order."""
        self.stalls.close()
        self._peers.close()
        if self.count > 1:
            dist.destroy_process_group()


# Agreement of all processes before training
#
# A process with another configuration or other data would not stop the others: it would spoil the average, or wait for
# them in another collective. So the processes compare what each has found by itself. If it differs, or one of them has
# failed, all raise the same error.


def decided(processes: Processes, decide: Callable[[], T]) -> T:
    """Return the main process's decision in all processes; if it fails, raise its ConfigError in all."""
    return _results(processes, decide if processes.is_main else lambda: None)[0]


def done_by_all(processes: Processes, work: Callable[[], T]) -> T:
    """Return the result of work that waits for no other process; if one process fails, raise a ConfigError in all."""
    result: list[T] = []
    _results(processes, lambda: result.append(work()))
    return result[0]


def _results(processes: Processes, work: Callable[[], T]) -> list[T]:
    answer = None
    problems = None
    try:
        answer = work()
    except ConfigError as error:
        problems = error.problems
    except OSError as error:
        problems = [str(error)]
    gathered = processes.gather((answer, problems))
    failed = {rank: problems for rank, (_, problems) in enumerate(gathered) if problems is not None}
    if 0 in failed:
        raise ConfigError(failed[0])  # most often all processes have the same problem
    if failed:
        raise ConfigError([f"rank {rank}: {problem}" for rank, problems in failed.items() for problem in problems])
    return [answer for answer, _ in gathered]


def agree(processes: Processes, what: str, statement: Mapping[str, object]) -> None:
    """Raise a ConfigError in all processes if their statements, values by name, differ; what: for the error."""
    first, *others = processes.gather(dict(statement))
    for rank, other in enumerate(others, start=1):
        found = [
            f"{name}: {first.get(name)!r} on rank 0, {other.get(name)!r} on rank {rank}"
            for name in first | other
            if repr(first.get(name)) != repr(other.get(name))  # 1 and True are equal, but differ
        ]
        if found:
            raise ConfigError(f"the processes have different {what}: {'; '.join(found)}")


def program_digest() -> str:
    """Return a digest of the files that training uses."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for folder in ("algorithms", "fabrics", "utils"):
        for path in sorted(root.joinpath(folder).rglob("*.py")):
            digest.update(path.read_bytes())
    for name in ("cluster.py", "trainers.py"):
        digest.update((root / name).read_bytes())
    return digest.hexdigest()[:12]


def agree_on_config(processes: Processes, config: Config) -> None:
    """Raise a ConfigError in all processes if configurations, except for the keys of a machine, or programs differ."""
    programs = {"code": program_digest(), "torch": torch.__version__, "transformers": version("transformers")}
    agree(processes, "programs", programs)
    statement = {name: getattr(config, name) for name in FIELDS if name not in _MAY_DIFFER}
    for index, plugin in enumerate(import_plugins(config.plugins)):
        statement[f"plugins[{index}], {plugin.name}"] = plugin.sha256
    agree(processes, "configurations", statement)


# The start of the processes


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
    """Return the processes of this run, still without nodes: one, or those that torchrun or a Launch started."""
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
    # The agent's store still holds what an attempt before has left in it. Otherwise every attempt has a new store, and
    # agents that came later have counted fewer restarts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if agents_store else "0"
    store = dist.PrefixStore(f"attempt {attempt}", store)
    return Processes(rank, store, PeerWatch(launch.processes if launch is not None else None, store))


def _own_devices(config: Config) -> tuple[list[torch.device], list[str]]:
    try:
        return resolve_devices(config.devices)
    except ValueError as error:
        raise ConfigError(f"devices: {error}") from None


def place_nodes(processes: Processes, config: Config) -> list[str]:
    """Give the processes of a run their nodes, and return warnings; ConfigError: devices or processes do not fit."""
    hide_gpus(config)
    devices, warnings = done_by_all(processes, lambda: _own_devices(config))
    on_cpu = all(device.type == "cpu" for device in devices)
    in_order = on_cpu if config.deterministic is None else config.deterministic
    precision = config.float32_matmul_precision or ("highest" if on_cpu else "high")
    chosen = {"deterministic": in_order, "float32_matmul_precision": precision}
    agree(processes, "devices, and deterministic or float32_matmul_precision is null", chosen)
    torch.set_float32_matmul_precision(precision)
    if in_order and not on_cpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a kernel per allocation, for memory never read
    try:
        processes.place(
            devices, config.nodes_per_gpu, in_order, config.devices_per_node, config.collective_timeout_minutes
        )
    except ValueError as error:
        raise ConfigError(f"processes: {error}") from None
    return warnings


def join_processes(config: Config) -> Processes:
    """Return the processes of this run, with their nodes."""
    processes = meet()
    place_nodes(processes, config)
    return processes
