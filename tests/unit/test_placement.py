"""Placement: the process that owns each node, and the device among those that it sees."""

from types import SimpleNamespace

import pytest
import torch

from fabrics.pool.run_checks import turns_warning
from tests.support.helpers import LocalProcesses, make_config
from utils.distributed import processes
from utils.distributed.devices import (
    Rank,
    Site,
    Slot,
    check_one_device,
    gpus_of_their_own,
    own_device,
    shard_group_sites,
    share_out,
    transport_device,
)


def sites(*seen: str, machine: int = 0, first: int = 0) -> list[Site]:
    """One process for each word. It calls the GPUs of its letters cuda:0, cuda:1 and so on."""
    return [
        Site(first + index, machine, {f"GPU-{gpu}": f"cuda:{place}" for place, gpu in enumerate(gpus)})
        for index, gpus in enumerate(seen)
    ]


def slots_of(found: list[Site], nodes_per_device: int = 1) -> list[tuple[int, str, str]]:
    """Owner, device name and identity of every node."""
    slots = share_out(found, nodes_per_device)
    return [(slot.owner, slot.device, slot.identity.removeprefix("GPU-")) for slot in slots]


def test_processes_that_see_the_same_devices_share_their_nodes():
    assert slots_of(sites("ab", "ab")) == [(0, "cuda:0", "a"), (1, "cuda:1", "b")]
    assert slots_of(sites("ab", "ab", "ab"), 2) == [
        *((0, "cuda:0", "a"), (0, "cuda:0", "a"), (1, "cuda:1", "b"), (2, "cuda:1", "b"))
    ]
    # The same devices in another order have other names.
    assert slots_of(sites("ab", "ba")) == [(0, "cuda:0", "a"), (1, "cuda:0", "b")]


def test_processes_with_a_device_each_own_its_nodes():
    """SLURM wrappers start them so: every process calls its GPU cuda:0."""
    eight = sites(*"abcdefgh")
    assert slots_of(eight) == [(rank, "cuda:0", gpu) for rank, gpu in enumerate("abcdefgh")]
    assert gpus_of_their_own(share_out(eight, 1))
    assert [owner for owner, _, _ in slots_of(sites("ab", "cd"), 2)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_pairs_of_processes_may_share_a_device_each():
    assert [slot[0] for slot in slots_of(sites("a", "b", "a", "b"), 2)] == [0, 2, 1, 3]
    assert [slot.group for slot in share_out(sites("a", "b", "a", "b"), 2)] == [0, 0, 1, 1]


def test_nodes_of_one_device_are_a_group_on_any_number_of_processes():
    for count in (1, 2, 4):
        cpu = [Site(rank, 0, {"cpu": "cpu"}) for rank in range(count)]
        assert [slot.group for slot in share_out(cpu, 4)] == [0] * 4
        gpus = sites(*["ab"] * count)
        assert [slot.group for slot in share_out(gpus, 2)] == [0, 0, 1, 1]


def test_machines_come_in_order_and_own_their_devices():
    two = sites("ab", "ab", machine=1, first=2) + sites("ab", "ab", machine=0)
    assert share_out(two, 1) == (
        Slot(0, "cuda:0", "GPU-a", 0),
        Slot(1, "cuda:1", "GPU-b", 1),
        Slot(2, "cuda:0", "GPU-a", 2),
        Slot(3, "cuda:1", "GPU-b", 3),
    )


def test_nccl_needs_a_gpu_of_its_own_for_every_process():
    assert gpus_of_their_own(share_out(sites("ab", "ab"), 1))
    assert not gpus_of_their_own(share_out(sites("a", "a"), 2))
    assert not gpus_of_their_own(share_out([Site(0, 0, {"cpu": "cpu"}), Site(1, 1, {"cpu": "cpu"})], 1))
    assert not gpus_of_their_own(share_out([*sites("a"), Site(1, 1, {"cpu": "cpu"})], 1))
    # Two agents of torchrun on one host call it two machines; the GPU is one.
    assert not gpus_of_their_own(share_out(sites("a") + sites("a", machine=1, first=1), 1))


@pytest.mark.parametrize(
    ("device", "identities", "backends", "expected"),
    [
        ("cpu", ["cpu", "cpu"], "cpu:gloo,cuda:gloo", "cpu"),
        ("cuda:1", ["GPU-a", "GPU-b"], "cpu:gloo,cuda:nccl", "cuda:1"),
        ("cuda:1", ["GPU-a", "GPU-b"], "cuda:nccl", "cuda:1"),
        ("cuda:0", ["GPU-a", "GPU-a"], "cpu:gloo,cuda:nccl", "cpu"),
        ("cuda:1", ["GPU-a", "GPU-b"], "cpu:gloo,cuda:gloo", "cpu"),
        ("cuda:0", ["GPU-a", "GPU-a"], "cpu:mpi,cuda:mpi", "cuda:0"),
    ],
)
def test_tensors_travel_between_gpus_if_nccl_can(device, identities, backends, expected):
    assert transport_device(torch.device(device), identities, backends) == torch.device(expected)


@pytest.mark.parametrize(("device", "identity"), [("cuda:0", "GPU-a"), ("cpu", "cpu")])
def test_nccl_alone_cannot_connect_processes_that_share_a_device(device, identity):
    with pytest.raises(ValueError, match="2 processes with 1 different devices need a process group with the backend"):
        transport_device(torch.device(device), [identity, identity], "cuda:nccl")


def test_nodes_that_take_turns_on_a_gpu_with_a_small_model_are_a_warning():
    model = SimpleNamespace(
        module=torch.nn.Linear(100_000, 1, device="meta"),
        device=torch.device("cuda", 0),
        compiled=False,
        shard_group=SimpleNamespace(size=1),
    )
    (warning,) = turns_warning(model, 4)
    assert warning.startswith("processes: 4 nodes take turns on cuda:0")
    assert turns_warning(model, 1) == []


def test_impossible_placements_are_refused():
    with pytest.raises(ValueError, match="3 processes on a machine with 2 nodes \\(cuda:0, cuda:1, nodes_per_gpu 1\\)"):
        share_out(sites("ab", "ab", "ab"), 1)
    with pytest.raises(ValueError, match="rank 0 sees GPU-a, GPU-b and rank 1 of the same machine GPU-b"):
        share_out(sites("ab", "b"), 1)


def test_a_process_with_several_devices_is_refused():
    check_one_device(share_out(sites("ab", "ab"), 2))
    check_one_device(share_out([Site(0, 0, {"cpu": "cpu"})], 4))
    with pytest.raises(ValueError, match="rank 0 has 2 devices \\(cuda:0, cuda:1\\)"):
        check_one_device(share_out(sites("ab"), 1))
    with pytest.raises(ValueError, match="rank 0 has 2 devices"):
        check_one_device(share_out([Site(0, 0, {"cpu": "cpu", "GPU-a": "cuda:0"})], 1))


def test_the_rank_comes_from_the_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Rank.from_environment() is None
    values = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert Rank.from_environment() == Rank(number=5, count=8, local=1, local_count=4, machine=1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Rank.from_environment() is None


def test_shard_groups_are_consecutive_processes_that_own_nodes_together():
    """A process connects to those at its own place in other shard groups; ownership is the same at every place."""
    gpus = sites(*"abcd") + sites(*"abcd", machine=1, first=4)
    for place in (0, 1):
        found = share_out(shard_group_sites(gpus, 2, place), 2)
        assert [slot.owner for slot in found] == [place + first for first in (0, 0, 2, 2, 4, 4, 6, 6)]
        assert [slot.group for slot in found] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert gpus_of_their_own(found[:4])
    cpu = [Site(rank, 0, {"cpu": "cpu"}) for rank in range(4)]
    assert [slot.owner for slot in share_out(shard_group_sites(cpu, 2, 1), 4)] == [1, 1, 3, 3]
    assert [slot.group for slot in share_out(shard_group_sites(cpu, 2, 1), 4)] == [0] * 4  # as without shard groups


def test_incomplete_shard_groups_are_refused():
    with pytest.raises(
        ValueError, match="3 processes do not make shard groups of devices_per_node 2; start a multiple"
    ):
        shard_group_sites(sites(*"abc"), 2, 0)
    with pytest.raises(
        ValueError, match="the shard group of ranks 2 to 3 would lie across machines 0, 1; start a multiple"
    ):
        shard_group_sites(sites(*"abc") + sites("a", machine=1, first=3), 2, 0)
    for unfit in (
        sites("a", "a"),
        [*sites("a"), Site(1, 0, {"cpu": "cpu"}), Site(2, 0, {"cpu": "cpu"}), *sites("b", first=3)],
    ):
        with pytest.raises(ValueError, match="devices: with devices_per_node 2 every process needs a GPU of its own"):
            shard_group_sites(unfit, 2, 0)


def test_a_process_of_a_shard_group_has_one_device():
    third = Rank(number=6, count=8, local=2, local_count=4, machine=1)
    assert own_device("a", third) == "a"
    assert own_device("abcd", third) == "c"
    assert own_device("abcdefgh", third) == "c"
    with pytest.raises(ValueError, match="4 processes on a machine with 3 devices"):
        own_device("abc", third)


@pytest.mark.parametrize(
    ("device", "key", "precision"),
    [("cpu", None, "highest"), ("cuda:0", None, "high"), ("cuda:0", "highest", "highest")],
)
def test_the_precision_of_matrix_products_depends_on_the_device(device, key, precision, monkeypatch):
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(processes, "resolve_devices", lambda requested: ([torch.device(device)], []))
    monkeypatch.setattr(processes.Processes, "place", lambda self, *arguments: None)
    config = make_config(float32_matmul_precision=key, deterministic=False)
    try:
        processes.place_nodes(processes.Processes(), config)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_only_process_makes_its_gpu_the_current_one(monkeypatch):
    """Libraries allocate on the current device, and the check for a broken device asks that one."""
    current = []
    monkeypatch.setattr(processes, "identity", str)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    LocalProcesses([torch.device("cuda", 3)], 2)
    assert current == [torch.device("cuda", 3)]
