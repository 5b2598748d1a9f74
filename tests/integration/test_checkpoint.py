"""Checkpoints: bits, damage, full disks, and files that several processes write together."""

import errno
import os
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from fabrics.sharding.sharded_model import ShardLayout
from tests.support.helpers import LocalProcesses
from tests.support.threads import together
from utils.checkpoint import checkpoint
from utils.checkpoint.checkpoint import (
    Checkpoint,
    CheckpointError,
    Checkpoints,
    FilePart,
    newest_checkpoint,
    write_parts,
)

ALONE = LocalProcesses([torch.device("cpu")], 1)
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def tensors(value: float) -> dict:
    return {"trainer_0": {"parameters": torch.full((5,), value), "step": torch.tensor(3.0)}}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def checkpoints(folder, warnings):
    return Checkpoints(folder, None, ALONE, warnings.append)


def save(checkpoints: Checkpoints, folder: Path, number: int) -> Path:
    checkpoints.save(number, tensors(number / 3), {"round": number, "loss": 0.1 + 0.2}, {"config.yaml": "ETA: 1\n"})
    return folder / f"round_{number:05d}"


def newest(folder: Path) -> Checkpoint:
    return newest_checkpoint(folder, ALONE)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_read_bit_for_bit(checkpoints, folder, warnings):
    path = save(checkpoints, folder, 7)
    found = newest(folder)
    assert (found.folder, found.problems, warnings) == (path, (), [])
    assert found.state == {"round": 7, "loss": 0.30000000000000004}
    assert torch.equal(found.read("trainer_0", "parameters"), torch.full((5,), 7 / 3))
    assert found.read("trainer_0", "step").item() == 3.0
    assert (path / "config.yaml").read_text() == "ETA: 1\n"
    with pytest.raises(CheckpointError, match="cannot read velocity of trainer_0"):
        found.read("trainer_0", "velocity")


def test_the_newest_checkpoints_are_kept(checkpoints, folder):
    for number in (1, 2, 3, 10):
        save(checkpoints, folder, number)
    assert names(folder) == ["round_00003", "round_00010"]
    assert newest(folder).state["round"] == 10


def spoil(path: Path) -> None:
    (path / "state.json").write_text("damaged")


def test_damaged_checkpoints_do_not_displace_good_ones(checkpoints, folder, monkeypatch):
    """Two are kept. The newest two are damaged; checkpoints written after that have lower numbers."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "KEPT", 3)
        for number in (100, 110, 120):
            save(checkpoints, folder, number)
    for name in ("round_00110", "round_00120"):
        spoil(folder / name)
    found = newest(folder)
    assert (found.folder.name, len(found.problems)) == ("round_00100", 2)
    damaged = ["damaged_round_00110", "damaged_round_00120"]
    save(checkpoints, folder, 105)
    save(checkpoints, folder, 107)
    assert names(folder) == [*damaged, "round_00105", "round_00107"]
    assert newest(folder).folder.name == "round_00107"


def test_without_a_good_checkpoint_nothing_is_renamed(checkpoints, folder):
    with pytest.raises(CheckpointError, match="none was written"):
        newest(folder)
    spoil(save(checkpoints, folder, 1))
    with pytest.raises(CheckpointError, match="round_00001: "):
        newest(folder)
    assert names(folder) == ["round_00001"]


def test_a_repeated_round_replaces_its_checkpoint(checkpoints, folder):
    save(checkpoints, folder, 4)
    checkpoints.save(4, tensors(9.0), {"round": "again"}, {})
    assert names(folder) == ["round_00004"]
    assert newest(folder).state == {"round": "again"}


def test_an_unfinished_checkpoint_does_not_count_and_is_removed(checkpoints, folder, warnings):
    save(checkpoints, folder, 1)
    half = folder / ".round_00002.new"
    half.mkdir()
    (half / "state.json").write_text("{}")
    assert newest(folder).state["round"] == 1
    Checkpoints(folder, None, ALONE, warnings.append)
    assert names(folder) == ["round_00001"]


# Disks


@pytest.mark.parametrize("where", ["write_parts", "_write_text", "_sync_folder"])
def test_a_full_disk_leaves_the_last_checkpoint(checkpoints, folder, warnings, monkeypatch, where):
    save(checkpoints, folder, 1)

    def full(path, *arguments, **keywords):
        if not path.exists():
            path.write_bytes(b"half of i")
        raise FULL

    monkeypatch.setattr(checkpoint, where, full)
    save(checkpoints, folder, 2)
    monkeypatch.undo()
    (warning,) = warnings
    assert "no checkpoint after round 2: No space left on device" in warning
    assert names(folder) == ["round_00001"]
    assert newest(folder).state["round"] == 1
    save(checkpoints, folder, 2)
    assert newest(folder).state["round"] == 2
    assert len(warnings) == 1


# Models that devices share

# No number of devices divides the rows, some devices have none, and there are gaps between the tensors.
SHAPES = {"embedding": (5, 3), "norm": (7,), "row": (1, 33), "matrix": (13, 8)}


def layout_of(devices: int) -> ShardLayout:
    return ShardLayout.of(SHAPES, devices)


def whole_group(seed: int) -> dict[str, torch.Tensor]:
    """Return what a single process has: flat tensors of three types, zeros in gaps, and elements of all devices."""
    layout, generator = layout_of(1), torch.Generator().manual_seed(seed)
    found = {
        "step": torch.tensor(3.0),
        "steps": torch.arange(4),
        "none": torch.zeros(0),
        "flags": torch.tensor([True, False]),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "table": torch.randn(4, 3, generator=generator),
    }
    for name, dtype in (("parameters", torch.float32), ("moment", torch.bfloat16), ("wide", torch.float64)):
        flat = torch.zeros(layout.whole_size, dtype=dtype)
        for block in layout.wholes:
            flat[block.start : block.start + block.size] = torch.randn(block.size, generator=generator).to(dtype)
        found[name] = flat
    return found


def parts_of(group: dict[str, torch.Tensor], index: int, devices: int) -> dict[str, FilePart]:
    layout, found = layout_of(devices), {}
    for name, tensor in group.items():
        if len(tensor.shape) == 1 and len(tensor) == layout.whole_size:
            pieces = tuple((theirs.start, own) for theirs, own in layout.parts(index))
            found[name] = FilePart(layout.part(tensor, index), tuple(tensor.shape), pieces)
        else:
            found[name] = FilePart(tensor, tuple(tensor.shape), ((0, slice(None)),) if index == 0 else ())
    return found


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("at_once", [5, 10**6])
def test_a_file_written_in_parts_has_the_bytes_that_safetensors_writes(tmp_path, monkeypatch, devices, at_once):
    """The order of the parts and the bytes that the system takes at once do not matter."""
    pwrite = os.pwrite
    monkeypatch.setattr(checkpoint.os, "pwrite", lambda file, data, at: pwrite(file, data[:at_once], at))
    group = whole_group(0)
    save_file(group, tmp_path / "whole")
    for index in reversed(range(devices)):
        write_parts(tmp_path / "parts", parts_of(group, index, devices), index == 0)
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_file_may_exceed_four_gigabytes(tmp_path):
    """A process writes the last of 1.5 billion elements and reads them; the rest takes neither disk nor memory."""
    count = 1_500_000_000
    for index in range(2):
        pieces = ((count - 3, slice(1, 4)),) if index else ()
        path = tmp_path / "trainer_0.safetensors"
        write_parts(path, {"moment": FilePart(torch.arange(4.0), (count,), pieces)}, index == 0)
    assert path.stat().st_size > 4 * count
    process = psutil.Process()
    before = process.memory_info().rss
    tensor = Checkpoint(tmp_path, {}).read("trainer_0", "moment")
    assert tensor[-5:].tolist() == [0.0, 0.0, 1.0, 2.0, 3.0]
    assert process.memory_info().rss < before + 2**28


NODES, DEVICES = 2, 2


def save_shared(process, folder: Path, number: int, warnings: list[str]) -> None:
    """Save a checkpoint in which every node has a trainer with a worker."""
    node, index = divmod(process.rank, DEVICES)
    groups = {f"trainer_{node}": whole_group(number), f"trainer_{node}_worker_0": whole_group(number + 1)}
    groups = {name: parts_of(group, index, DEVICES) for name, group in groups.items()}
    state = {"round": number} if process.is_main else {"of": process.rank}  # that of the main process is saved
    Checkpoints(folder, None, process, warnings.append).save(number, groups, state, {})
    process.gather(None)


def all_save(folder: Path, number: int, warnings: list[str]) -> None:
    work = lambda process: save_shared(process, folder, number, warnings)  # noqa: E731
    together(NODES * DEVICES, work, devices_per_node=DEVICES)


def assert_saved(folder: Path, number: int) -> None:
    """Assert that every process finds the checkpoint, and that it has all tensors."""
    read = lambda process: newest_checkpoint(folder, process)  # noqa: E731
    for each in together(NODES * DEVICES, read, devices_per_node=DEVICES):
        assert each.state == {"round": number}
    found = newest(folder)
    assert (found.state, found.problems) == ({"round": number}, ())
    for node in range(NODES):
        for group, seed in ((f"trainer_{node}", number), (f"trainer_{node}_worker_0", number + 1)):
            for name, tensor in whole_group(seed).items():
                assert torch.equal(found.read(group, name), tensor)


@pytest.mark.parametrize("rank", range(NODES * DEVICES))
def test_a_device_that_cannot_write_costs_one_checkpoint(folder, monkeypatch, rank):
    warnings: list[str] = []
    all_save(folder, 1, warnings)
    assert_saved(folder, 1)
    node, index = divmod(rank, DEVICES)

    def full(path, parts, with_header):
        if path.name.startswith(f"trainer_{node}") and with_header == (index == 0):
            raise FULL
        write_parts(path, parts, with_header)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_parts", full)
        all_save(folder, 2, warnings)
    (warning,) = warnings
    assert f"no checkpoint after round 2: {FULL.strerror}" in warning
    assert names(folder) == ["round_00001"]
    all_save(folder, 3, warnings)
    assert_saved(folder, 3)
    assert len(warnings) == 1
