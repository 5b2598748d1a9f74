"""The devices of a run, and the placement of nodes on them: the process that owns each node.

The processes of a machine either all see the same devices (torchrun), or each sees its own (SLURM wrappers that set
CUDA_VISIBLE_DEVICES per rank). Then every process calls its GPU cuda:0, and only the devices' identities differ.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")


def resolve_devices(requested: list[str] | None) -> tuple[list[torch.device], list[str]]:
    """Return the devices to train on (None: every visible GPU, else the CPU) and warnings; ValueError: a wrong one."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if requested is None:
        names = [f"cuda:{index}" for index in range(visible)] or ["cpu"]
        return [torch.device(name) for name in names], []
    # "cuda" is another name of the first GPU.
    devices = [torch.device("cuda:0" if name == "cuda" else name) for name in requested]
    cuda = [device for device in devices if device.type == "cuda"]
    if cuda and not visible:
        return [torch.device("cpu")], [f"devices: {requested} requested, but CUDA is not available: running on the CPU"]
    if len(set(devices)) < len(devices):
        raise ValueError(f"every device once, got {requested}")
    for device in cuda:
        if device.index >= visible:
            raise ValueError(
                f"{device} requested, but only {visible} are visible (cuda:0 to cuda:{visible - 1}); indices count "
                "the devices that CUDA_VISIBLE_DEVICES leaves"
            )
    return devices, []


def identity(device: torch.device) -> str:
    """Return a name that is unique on the machine and independent of CUDA_VISIBLE_DEVICES."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else str(device)


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done all work so far; a CPU has always done it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_out_of_memory(error: BaseException) -> bool:
    """True if a device, or a library on it, ran out of memory; the device is still usable."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # cuBLAS and cuDNN, CUDA outside of PyTorch's allocator, and the CPU's allocator have no type of their own.
    signs = ("_STATUS_ALLOC_FAILED", "out of memory", "can't allocate memory")
    return type(error) in (RuntimeError, torch.AcceleratorError) and any(sign in str(error) for sign in signs)


@dataclass(frozen=True)
class Rank:
    """The place of this process among all processes."""

    number: int
    count: int
    local: int  # its number on its machine
    local_count: int  # processes on its machine
    machine: int

    @classmethod
    def from_environment(cls) -> "Rank | None":
        """Read the variables that torchrun or `utils.distributed.launch` set; None for a single process."""
        if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", 1)) == 1:
            return None
        number = int(os.environ["RANK"])
        local_count = int(os.environ["LOCAL_WORLD_SIZE"])
        return cls(
            number=number,
            count=int(os.environ["WORLD_SIZE"]),
            local=int(os.environ["LOCAL_RANK"]),
            local_count=local_count,
            machine=int(os.environ.get("GROUP_RANK", number // local_count)),
        )


@dataclass(frozen=True)
class Site:
    """A process and the devices that it sees."""

    rank: int
    machine: int
    devices: dict[str, str]  # names by identity, which is unique on a machine


@dataclass(frozen=True)
class Slot:
    """The place of a node."""

    owner: int  # rank of the process
    device: str  # its name in that process
    identity: str  # unique on the machine; of a GPU, in the whole run
    group: int  # number of the device in the run


def share_of(items: Sequence[T], index: int, parts: int) -> Sequence[T]:
    """Return part `index` of items cut into near-equal consecutive parts, the larger ones first."""
    size, larger = divmod(len(items), parts)
    start = index * size + min(index, larger)
    return items[start : start + size + (index < larger)]


def share_out(sites: Sequence[Site], nodes_per_device: int) -> tuple[Slot, ...]:
    """Place every node, in the order of machines and devices; ValueError: there are fewer nodes than processes.

    Processes that see the same devices get consecutive, near-equal parts of the nodes on them.
    """
    slots: list[Slot] = []
    groups = 0
    for machine in sorted({site.machine for site in sites}):
        left = sorted((site for site in sites if site.machine == machine), key=lambda site: site.rank)
        while left:
            first = left[0]
            together = [site for site in left if site.devices.keys() == first.devices.keys()]
            left = [site for site in left if site not in together]
            for other in left:
                if other.devices.keys() & first.devices.keys():
                    raise ValueError(
                        f"rank {first.rank} sees {', '.join(sorted(first.devices))} and rank {other.rank} of the same "
                        f"machine {', '.join(sorted(other.devices))}. Let CUDA_VISIBLE_DEVICES give all processes of a "
                        f"machine the same devices, or each its own"
                    )
            nodes = []
            for group, identity in enumerate(first.devices, start=groups):
                nodes += [(identity, group)] * nodes_per_device
            groups += len(first.devices)
            if len(together) > len(nodes):
                raise ValueError(
                    f"{len(together)} processes on a machine with {len(nodes)} nodes "
                    f"({', '.join(first.devices.values())}, nodes_per_gpu {nodes_per_device}); every process needs one"
                )
            for index, site in enumerate(together):
                own = share_of(nodes, index, len(together))
                slots += [Slot(site.rank, site.devices[identity], identity, group) for identity, group in own]
    return tuple(slots)


def shard_group_sites(sites: Sequence[Site], size: int, place: int) -> list[Site]:
    """Join every `size` processes with consecutive ranks to a shard group, and return one site for each.

    It is the site of the process at the given place in the shard group, with the joined identities of all its devices.
    """
    if len(sites) % size:
        raise ValueError(
            f"{len(sites)} processes do not make shard groups of devices_per_node {size}; start a multiple of it"
        )
    every = [(site.machine, identity) for site in sites for identity in site.devices]
    if any(identity != "cpu" for _, identity in every) and len(set(every)) < len(every):
        raise ValueError(f"devices: with devices_per_node {size} every process needs a GPU of its own, or all the CPU")
    found = []
    for first in range(0, len(sites), size):
        shard_group = sites[first : first + size]
        machines = sorted({site.machine for site in shard_group})
        if len(machines) > 1:
            raise ValueError(
                f"the shard group of ranks {first} to {first + size - 1} would lie across machines "
                f"{', '.join(map(str, machines))}; start a multiple of devices_per_node {size} on every machine"
            )
        identities = [identity for site in shard_group for identity in site.devices]
        own = shard_group[place]
        (name,) = own.devices.values()
        found.append(Site(own.rank, own.machine, {"+".join(dict.fromkeys(identities)): name}))
    return found


def own_device(devices: Sequence[T], rank: Rank) -> T:
    """Return the only device that a process sees, or the one with its number on the machine; others stay idle."""
    if len(devices) == 1:
        return devices[0]
    if len(devices) < rank.local_count:
        raise ValueError(
            f"{rank.local_count} processes on a machine with {len(devices)} devices; with devices_per_node every "
            f"device has one process"
        )
    return devices[rank.local]


def check_one_device(slots: Sequence[Slot]) -> None:
    """Raise a ValueError if a process owns nodes on several devices: it would use them one after the other."""
    devices: dict[int, set[str]] = {}
    for slot in slots:
        devices.setdefault(slot.owner, set()).add(slot.device)
    for owner, names in devices.items():
        if len(names) > 1:
            raise ValueError(
                f"rank {owner} has {len(names)} devices ({', '.join(sorted(names))}) and would use them one after the "
                f"other. Start one process for each (processes: auto, or torchrun), or name one in devices"
            )


def gpus_of_their_own(slots: Sequence[Slot]) -> bool:
    """True if all devices are GPUs and no two processes share one, as nccl requires."""
    users: dict[str, set[int]] = {}
    for slot in slots:
        users.setdefault(slot.identity, set()).add(slot.owner)
    return all(slot.device.startswith("cuda") for slot in slots) and all(len(ranks) == 1 for ranks in users.values())


def transport_device(device: torch.device, identities: Sequence[str], backends: str) -> torch.device:
    """Return where tensors of this device travel in a process group: on it, or in host memory.

    gloo moves only tensors of host memory between processes, and nccl refuses processes that share a GPU.

    Args:
        device: the model's device in this process, of one type in all processes.
        identities: of the devices of all processes.
        backends: of the process group, by type of device, such as "cpu:gloo,cuda:nccl".

    Raises:
        ValueError: the group cannot move tensors of host memory, but would have to.
    """
    by_type = dict(pair.split(":") for pair in backends.split(","))
    shared = len(set(identities)) < len(identities)
    backend = by_type.get(device.type)
    through_host = backend in (None, "gloo") or (backend == "nccl" and shared)
    travels_in = torch.device("cpu") if through_host else device
    if travels_in.type not in by_type:
        raise ValueError(
            f"model: {len(identities)} processes with {len(set(identities))} different devices need a process group "
            f"with the backend 'cpu:gloo,cuda:nccl', not '{backends}'"
        )
    return travels_in
