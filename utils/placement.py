"""Where the nodes of a run are: which process owns each of them, on which of the devices that it sees.

Processes of a machine either all see the same devices (torchrun as it is), or each has some for itself (wrappers that
set CUDA_VISIBLE_DEVICES per rank, as is common with SLURM): then every process calls its GPU cuda:0, and only the
devices' identities tell them apart.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


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


@dataclass(frozen=True)
class Site:
    """What a process says about itself. devices: by identity, which is unique on a machine, their names there."""

    rank: int
    machine: int
    devices: dict[str, str]


@dataclass(frozen=True)
class Slot:
    """The place of a node.

    owner: the rank. device: its name there. identity: what tells it from others of the machine, and a GPU from all
    others. group: a number for each device of the run.
    """

    owner: int
    device: str
    identity: str
    group: int


def share_of(items: Sequence[T], index: int, parts: int) -> Sequence[T]:
    """Part `index` of items cut into near-equal consecutive parts, the larger ones first."""
    size, larger = divmod(len(items), parts)
    start = index * size + min(index, larger)
    return items[start : start + size + (index < larger)]


def share_out(sites: Sequence[Site], nodes_per_device: int) -> tuple[Slot, ...]:
    """The place of every node, by machine and device; processes that see the same devices share their nodes.

    They get consecutive, near-equal parts of them.

    Raises:
        ValueError: processes see some devices in common, but not all; or there are more of them than nodes.
    """
    slots: list[Slot] = []
    groups = 0
    for machine in sorted({site.machine for site in sites}):
        here = sorted((site for site in sites if site.machine == machine), key=lambda site: site.rank)
        while here:
            first = here[0]
            together = [site for site in here if site.devices.keys() == first.devices.keys()]
            here = [site for site in here if site not in together]
            for other in here:
                if other.devices.keys() & first.devices.keys():
                    raise ValueError(
                        f"rank {first.rank} sees {', '.join(sorted(first.devices))} and rank {other.rank} of the same "
                        f"machine {', '.join(sorted(other.devices))}; let CUDA_VISIBLE_DEVICES give all processes of a "
                        f"machine the same devices, or each its own"
                    )
            nodes = [(identity, groups + index) for index, identity in enumerate(first.devices)]
            groups += len(nodes)
            nodes = [node for node in nodes for _ in range(nodes_per_device)]
            if len(together) > len(nodes):
                raise ValueError(
                    f"{len(together)} processes on a machine with {len(nodes)} nodes "
                    f"({', '.join(first.devices.values())}, nodes_per_gpu {nodes_per_device}); every process needs one"
                )
            for index, site in enumerate(together):
                own = share_of(nodes, index, len(together))
                slots += [Slot(site.rank, site.devices[identity], identity, group) for identity, group in own]
    return tuple(slots)


def gpus_of_their_own(slots: Sequence[Slot]) -> bool:
    """Whether every process has GPUs that no other one uses, and nothing else: nccl wants that."""
    users: dict[str, set[int]] = {}
    for slot in slots:
        users.setdefault(slot.identity, set()).add(slot.owner)
    return all(slot.device.startswith("cuda") for slot in slots) and all(len(ranks) == 1 for ranks in users.values())
