"""What the processes of an island write together is what one process would have written, or not there."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from fabrics.sharding.shard_layout import Layout
from tests.integration.test_checkpoint import names, newest
from tests.support.programs import command
from tests.support.threads import together
from utils.checkpoint import checkpoint, parts, writer
from utils.checkpoint.checkpoint import Checkpoints
from utils.checkpoint.files import write_tensors
from utils.checkpoint.parts import FilePart, write_parts
from utils.distributed.heartbeat import PeerLostError

# Rows that no number of devices divides, of which some devices have none; there are gaps between the tensors.
SHAPES = {"embedding": (5, 3), "norm": (7,), "row": (1, 33), "matrix": (13, 8)}
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def layout_of(devices: int) -> Layout:
    return Layout.of(SHAPES, [-(-shape[0] // devices) * torch.Size(shape[1:]).numel() for shape in SHAPES.values()])


def whole_group(seed: int) -> dict[str, torch.Tensor]:
    """As one process has it: flat tensors of two types, zeros in gaps, and numbers that all devices have."""
    layout, generator = layout_of(1), torch.Generator().manual_seed(seed)
    found = {"step": torch.tensor(3.0), "steps": torch.arange(4), "none": torch.zeros(0)}
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
def test_a_file_written_in_parts_has_the_bytes_of_one_written_whole(tmp_path, monkeypatch, devices, at_once):
    """Whoever comes first, and however little the system takes at once."""
    pwrite = os.pwrite
    monkeypatch.setattr(parts.os, "pwrite", lambda file, data, at: pwrite(file, data[:at_once], at))
    group = whole_group(0)
    write_tensors(tmp_path / "whole", group)
    for index in reversed(range(devices)):
        write_parts(tmp_path / "parts", parts_of(group, index, devices), index == 0)
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()


def test_numbers_beyond_four_gigabytes_have_their_place(tmp_path):
    """Of 1.5 billion numbers this one has the last; the rest of the file takes no room."""
    count = 1_500_000_000
    for index in range(2):
        pieces = ((count - 3, slice(1, 4)),) if index else ()
        path = tmp_path / "trainer_0.safetensors"
        write_parts(path, {"moment": FilePart(torch.arange(4.0), (count,), pieces)}, index == 0)
    assert path.stat().st_size > 4 * count
    tensor = checkpoint.Checkpoint(tmp_path, {}).read("trainer_0", "moment")
    assert tensor[-5:].tolist() == [0.0, 0.0, 1.0, 2.0, 3.0]


# Islands of two devices

ISLANDS, DEVICES = 2, 2


def save(process, folder: Path, number: int, warnings: list[str]) -> None:
    """A checkpoint in which every island has a trainer and its worker."""
    island, index = divmod(process.rank, DEVICES)
    groups = {f"trainer_{island}": whole_group(number), f"trainer_{island}_worker_0": whole_group(number + 1)}
    groups = {name: parts_of(group, index, DEVICES) for name, group in groups.items()}
    checkpoints = Checkpoints(folder, 2, None, process, warnings.append)
    checkpoints.save(number, groups, {"round": number}, {"config.yaml": "ETA: 1\n"})
    for group in groups.values():
        for part in group.values():
            part.values.zero_()  # training goes on
    checkpoints.finish()


def all_save(folder: Path, number: int, warnings: list[str]) -> None:
    together(ISLANDS * DEVICES, lambda process: save(process, folder, number, warnings), devices_per_node=DEVICES)


def assert_saved(folder: Path, number: int) -> None:
    found = newest(folder)
    assert (found.state, found.problems) == ({"round": number}, ())
    for island in range(ISLANDS):
        for group, seed in ((f"trainer_{island}", number), (f"trainer_{island}_worker_0", number + 1)):
            for name, tensor in whole_group(seed).items():
                assert torch.equal(found.read(group, name), tensor)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def test_islands_write_whole_files_with_their_checksums(folder):
    warnings, before = [], set(threading.enumerate())
    all_save(folder, 1, warnings)
    assert_saved(folder, 1)
    assert command("sha256sum", "-c", "SHA256SUMS", cwd=folder / "round_00001").returncode == 0
    sums = (folder / "round_00001" / "SHA256SUMS").read_text().split()[1::2]
    assert sorted([*sums, "SHA256SUMS"]) == names(folder / "round_00001")
    assert not warnings
    assert not [thread for thread in set(threading.enumerate()) - before if "checkpoint" in thread.name]


@pytest.mark.parametrize("rank", range(ISLANDS * DEVICES))
@pytest.mark.parametrize("what", ["rows", "checksum"])
def test_what_one_device_cannot_write_or_read_is_one_warning(folder, monkeypatch, rank, what):
    """And the checkpoint before stays; none waits for the others for ever."""
    warnings: list[str] = []
    all_save(folder, 1, warnings)
    # The island of the rank, and in it the device: it alone writes these rows, and sums this file.
    island, index = divmod(rank, DEVICES)

    def full(path, parts, is_first):
        if path.name.startswith(f"trainer_{island}") and is_first == (index == 0):
            raise FULL
        write_parts(path, parts, is_first)

    def unreadable(path):
        if path.name == f"trainer_{island}{'_worker_0' * index}.safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return "0" * 64

    with monkeypatch.context() as patch:
        if what == "rows":
            patch.setattr(writer, "write_parts", full)
        else:
            patch.setattr(writer, "checksum", unreadable)
        all_save(folder, 2, warnings)
    said = FULL.strerror if what == "rows" else "Input/output error"
    assert warnings == [
        f"no checkpoint after round 2: {said}; training goes on, and what was written before is as it was"
    ]
    assert names(folder) == ["round_00001"]
    all_save(folder, 3, warnings)
    assert_saved(folder, 3)
    assert len(warnings) == 1


@pytest.mark.parametrize("from_what", ["rows", "part"])
def test_a_board_that_one_device_cannot_reach_costs_a_warning(folder, from_what):
    """While others of its island wait for it there."""
    warnings: list[str] = []

    def work(process):
        post = process.notices.post_own

        def unreachable(name, text):
            if name.endswith(from_what) or name.endswith("part"):
                raise ConnectionError("the first process is gone: Broken pipe")
            post(name, text)

        process.notices.post_own = unreachable if process.rank == 3 else post
        save(process, folder, 1, warnings)
        process.notices.post_own = post
        save(process, folder, 2, warnings)

    together(ISLANDS * DEVICES, work, devices_per_node=DEVICES)
    assert len(warnings) == 1
    assert "no checkpoint after round 1: the first process is gone" in warnings[0]
    assert names(folder) == ["round_00002"]


@pytest.mark.parametrize("early", [(0,), (1,), (0, 1), (0, 3), (0, 1, 2, 3)])
def test_a_round_that_ends_while_it_is_given_up_is_written_in_place_of_the_one_before(folder, early):
    """Some devices have begun to write what was held, and wait for those of their island that have not."""
    warnings: list[str] = []

    def work(process):
        island, index = divmod(process.rank, DEVICES)
        checkpoints = Checkpoints(folder, 2, None, process, warnings.append)
        checkpoints.hold(1, {f"trainer_{island}": parts_of(whole_group(1), index, DEVICES)}, {"round": 1}, {})
        held = checkpoints.held
        process.gather(None)
        if process.rank in early:
            checkpoints.write_held(held)
        checkpoints.hold(2, {f"trainer_{island}": parts_of(whole_group(2), index, DEVICES)}, {"round": 2}, {})
        checkpoints.finish()

    together(ISLANDS * DEVICES, work, devices_per_node=DEVICES)
    assert names(folder) == ["round_00001"] * (len(early) == 4) + ["round_00002"]
    assert newest(folder).state == {"round": 2}
    assert warnings == []


def test_a_device_that_is_killed_while_it_writes_leaves_the_checkpoint_before(folder, monkeypatch):
    """The others give up what they waited for, and the next checkpoint sweeps away what there was of this one."""
    warnings: list[str] = []
    all_save(folder, 1, warnings)
    monkeypatch.setattr(checkpoint, "_SECONDS_FOR_THE_LOST", 0.2)
    over = threading.Event()

    def killed(path, parts, is_first):
        write_parts(path, parts, is_first)
        if not is_first:
            over.wait()
            raise FULL

    def lost(value):
        raise PeerLostError("rank 1 was killed")

    def work(process):
        process.gather = lost
        checkpoints = Checkpoints(folder, 2, None, process, warnings.append)
        groups = {"trainer_0": parts_of(whole_group(2), process.rank, DEVICES)}
        checkpoints.save(2, groups, {"round": 2}, {})
        if process.rank == 0:
            with pytest.raises(PeerLostError):
                checkpoints.finish()
            checkpoints.settle(somebody_is_lost=True)
            over.set()
        checkpoints.settle()

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_parts", killed)
        together(DEVICES, work, devices_per_node=DEVICES)
    assert_saved(folder, 1)
    all_save(folder, 3, warnings)
    assert_saved(folder, 3)
    assert names(folder) == ["round_00001", "round_00003"]
    assert warnings == []
