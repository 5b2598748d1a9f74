"""A checkpoint is whole or not there, and what is damaged is seen; tensors come back bit for bit."""

import errno
import hashlib
import json
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.helpers import without_privileges
from tests.support.programs import command
from tests.support.threads import together
from training_logs.recording.append_log import AppendLog
from utils.checkpoint import checkpoint, writer
from utils.checkpoint.checkpoint import Checkpoint, CheckpointError, Checkpoints, newest_checkpoint
from utils.checkpoint.files import damage, read_sums, write_tensors
from utils.distributed.heartbeat import PeerLostError
from utils.distributed.processes import LocalProcesses

ALONE = LocalProcesses([torch.device("cpu")], 1)


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
    return Checkpoints(folder, 2, None, ALONE, warnings.append)


def save(checkpoints: Checkpoints, folder: Path, number: int) -> Path:
    """A checkpoint, when it is there."""
    state = {"round": number, "loss": 0.1 + 0.2}
    checkpoints.save(number, tensors(number / 3), state, {"config.yaml": "ETA: 1\n"})
    checkpoints.finish()
    return folder / f"round_{number:05d}"


def newest(folder: Path) -> Checkpoint:
    return newest_checkpoint(folder, ALONE)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_is_read_bit_for_bit(checkpoints, folder, warnings):
    path = save(checkpoints, folder, 7)
    found = newest(folder)
    assert (found.folder, found.problems, warnings) == (path, (), [])
    assert found.state == {"round": 7, "loss": 0.30000000000000004}
    assert torch.equal(found.read("trainer_0", "parameters"), torch.full((5,), 7 / 3))
    assert found.read("trainer_0", "step").item() == 3.0
    assert (path / "config.yaml").read_text() == "ETA: 1\n"
    with pytest.raises(CheckpointError, match="cannot read velocity of trainer_0"):
        found.read("trainer_0", "velocity")


def test_a_file_is_what_safetensors_itself_would_write_and_its_checksum_that_of_the_file(tmp_path):
    generator = torch.Generator().manual_seed(0)
    mixed = {
        "large": torch.randn(3 << 20, generator=generator),  # three blocks
        "double": torch.randn(3, 2, generator=generator, dtype=torch.float64),
        "turned": torch.randn(4, 3, generator=generator).T,
        "half": torch.randn(5, generator=generator).bfloat16(),
        "scalar": torch.tensor(3.0),
        "indices": torch.arange(7),
        "flags": torch.tensor([True, False]),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "nothing": torch.zeros(0),
    }
    digest = write_tensors(tmp_path / "ours", mixed)
    save_file({name: tensor.contiguous() for name, tensor in mixed.items()}, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert digest == hashlib.sha256((tmp_path / "ours").read_bytes()).hexdigest()
    read = load_file(tmp_path / "ours")
    assert all(torch.equal(read[name], tensor) for name, tensor in mixed.items())


def test_the_checksums_are_those_of_sha256sum(checkpoints, folder):
    path = save(checkpoints, folder, 1)
    assert command("sha256sum", "-c", "SHA256SUMS", cwd=path).returncode == 0
    assert set(read_sums(path)) == set(names(path)) - {"SHA256SUMS"}
    assert read_sums(path)["state.json"] == hashlib.sha256((path / "state.json").read_bytes()).hexdigest()


def test_the_newest_stay(checkpoints, folder):
    for number in (1, 2, 3, 10):
        save(checkpoints, folder, number)
    assert names(folder) == ["round_00003", "round_00010"]
    assert newest(folder).state["round"] == 10


def spoil(path: Path) -> None:
    (path / "state.json").write_text("damaged")


def save_all(folder: Path, *numbers: int) -> None:
    for number in numbers:
        save(Checkpoints(folder, len(numbers), None, ALONE, [].append), folder, number)


@pytest.mark.parametrize("renamed", [True, False])
def test_damaged_checkpoints_do_not_displace_good_ones(checkpoints, folder, monkeypatch, renamed):
    """Two are kept, and the newest two are damaged; what is written then has a lower number than those."""

    def refused(path):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    if not renamed:
        monkeypatch.setattr(checkpoint, "set_aside", refused)
    save_all(folder, 100, 110, 120)
    damaged = ["round_00110", "round_00120"]
    for name in damaged:
        spoil(folder / name)
    found = newest(folder)
    what = "kept as damaged_round_00120" if renamed else "it cannot be renamed: Permission denied"
    assert (found.folder.name, len(found.problems)) == ("round_00100", 2)
    assert what in found.problems[0]
    if renamed:
        damaged = [f"damaged_{name}" for name in damaged]
    save(checkpoints, folder, 105)
    assert names(folder) == sorted([*damaged, "round_00100", "round_00105"])
    save(checkpoints, folder, 107)
    assert names(folder) == sorted([*damaged, "round_00105", "round_00107"])
    assert newest(folder).folder.name == "round_00107"


def test_a_checkpoint_that_is_damaged_again_is_set_aside_beside_the_first(checkpoints, folder):
    save(checkpoints, folder, 1)
    for _ in range(3):
        spoil(save(checkpoints, folder, 2))
        assert newest(folder).folder.name == "round_00001"
    assert names(folder) == ["damaged_round_00002", "damaged_round_00002_2", "damaged_round_00002_3", "round_00001"]


def test_where_no_checkpoint_is_good_all_stay_as_they_are(checkpoints, folder):
    spoil(save(checkpoints, folder, 1))
    with pytest.raises(CheckpointError, match="round_00001: "):
        newest(folder)
    assert names(folder) == ["round_00001"]


def test_a_round_that_is_made_again_replaces_its_checkpoint(checkpoints, folder):
    save(checkpoints, folder, 4)
    checkpoints.save(4, tensors(9.0), {"round": "again"}, {})
    checkpoints.finish()
    assert names(folder) == ["round_00004"]
    assert newest(folder).state == {"round": "again"}


@pytest.mark.parametrize("name", ["state.json", "trainer_0.safetensors", "config.yaml", "SHA256SUMS"])
@pytest.mark.parametrize("fault", ["flipped", "cut", "removed"])
def test_a_damaged_checkpoint_is_passed_over_and_reported(checkpoints, folder, name, fault):
    save(checkpoints, folder, 1)
    path = save(checkpoints, folder, 2) / name
    data = bytearray(path.read_bytes())
    if fault == "flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif fault == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.unlink()
    found = newest(folder)
    assert found.state["round"] == 1
    assert len(found.problems) == 1
    assert "round_00002" in found.problems[0]


def test_half_a_checkpoint_is_not_one(checkpoints, folder):
    save(checkpoints, folder, 1)
    half = folder / ".round_00002.new"
    half.mkdir()
    (half / "state.json").write_text("{}")
    assert newest(folder).state["round"] == 1
    save(checkpoints, folder, 2)
    assert names(folder) == ["round_00001", "round_00002"]


def test_no_checkpoint_is_an_error(checkpoints, folder):
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*checkpoints: none was written"):
        newest(folder)
    (save(checkpoints, folder, 1) / "state.json").unlink()
    with pytest.raises(CheckpointError, match="round_00001"):
        newest(folder)


# Disks


@pytest.mark.parametrize("where", ["write_tensors", "write_text", "write_sums", "sync_folder"])
def test_a_full_disk_leaves_the_last_good_one(checkpoints, folder, warnings, monkeypatch, where):
    save(checkpoints, folder, 1)

    def full(path, *arguments):
        if path.is_file() or not path.exists():
            path.write_bytes(b"half of i")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer, where, full)
    save(checkpoints, folder, 2)
    monkeypatch.undo()
    assert warnings == [
        "no checkpoint after round 2: No space left on device; training goes on, and what was written before is as it "
        "was"
    ]
    assert names(folder) == ["round_00001"]
    assert newest(folder).state["round"] == 1
    save(checkpoints, folder, 2)
    assert newest(folder).state["round"] == 2
    assert len(warnings) == 1


def test_a_read_only_folder_leaves_the_last_good_one(checkpoints, folder, warnings):
    save(checkpoints, folder, 1)
    folder.chmod(0o555)
    try:
        with without_privileges(folder):
            save(checkpoints, folder, 2)
    finally:
        folder.chmod(0o755)
    assert "Permission denied" in warnings[0]
    assert newest(folder).state["round"] == 1


# Several processes


def part(rank: int, value: float) -> dict:
    return {f"trainer_{rank}": {"parameters": torch.full((3,), value)}}


def save_part(process, folder: Path, number: int, warnings: list[str]) -> None:
    checkpoints = Checkpoints(folder, 2, None, process, warnings.append)
    checkpoints.save(number, part(process.rank, process.rank / 7), {"of": process.rank}, {"config.yaml": "ETA: 1\n"})
    checkpoints.finish()


def test_every_process_writes_its_part_and_verifies_a_share_of_the_files(folder, warnings, monkeypatch):
    together(3, lambda process: save_part(process, folder, 5, warnings))
    written = [*(f"trainer_{rank}.safetensors" for rank in range(3)), "config.yaml", "state.json"]
    assert names(folder / "round_00005") == sorted([*written, "SHA256SUMS"])
    shares = []
    monkeypatch.setattr(checkpoint, "damage", lambda path, sums: shares.append(list(sums)) or damage(path, sums))
    for found in together(3, lambda process: newest_checkpoint(folder, process)):
        assert found.state == {"of": 0}
        for rank in range(3):
            assert torch.equal(found.read(f"trainer_{rank}", "parameters"), torch.full((3,), rank / 7))
    assert sorted(name for share in shares for name in share) == sorted(written)
    assert sorted(map(len, shares)) == [1, 2, 2]
    assert warnings == []


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_damage_that_one_process_finds_is_known_to_all(folder, warnings, rank):
    for number in (1, 2):
        together(3, lambda process, number=number: save_part(process, folder, number, warnings))
    path = folder / "round_00002" / f"trainer_{rank}.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    for found in together(3, lambda process: newest_checkpoint(folder, process)):
        assert found.folder.name == "round_00001"
        assert f"trainer_{rank}.safetensors is damaged" in found.problems[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_process_cannot_write_there_is_no_checkpoint_of(folder, warnings, monkeypatch, rank):
    together(2, lambda process: save_part(process, folder, 1, warnings))

    def full(path, tensors):
        if path.name == f"trainer_{rank}.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_tensors(path, tensors)

    monkeypatch.setattr(writer, "write_tensors", full)
    together(2, lambda process: save_part(process, folder, 2, warnings))
    assert len(warnings) == 1
    assert "no checkpoint after round 2: No space left on device" in warnings[0]
    assert names(folder) == ["round_00001"]


def test_a_board_that_one_process_cannot_reach_costs_a_warning(folder, warnings):
    def work(process):
        reached = process.notices.post_own

        def unreachable(*arguments):
            raise ConnectionError("the first process is gone: Broken pipe")

        process.notices.post_own = reached if process.is_main else unreachable
        save_part(process, folder, 1, warnings)
        process.notices.post_own = reached
        save_part(process, folder, 2, warnings)

    together(2, work)
    assert len(warnings) == 1
    assert "no checkpoint after round 1: the first process is gone" in warnings[0]
    assert names(folder) == ["round_00002"]


# While training goes on


@pytest.fixture
def blocked(monkeypatch):
    """Files wait until the event is set; the names of those that have been begun are in the list."""
    event, begun = threading.Event(), []

    def waiting(path, tensors):
        begun.append(path.name)
        event.wait()
        return write_tensors(path, tensors)

    monkeypatch.setattr(writer, "write_tensors", waiting)
    yield event, begun
    event.set()


def test_training_goes_on_while_a_checkpoint_is_written(checkpoints, folder, warnings, blocked):
    event, _ = blocked
    state, parameters = {"warnings": []}, torch.ones(4)
    checkpoints.save(1, {"trainer_0": {"parameters": parameters}}, state, {})
    # What happens to the state from here on is not in the checkpoint.
    parameters.zero_()
    state["warnings"].append("later")
    with pytest.raises(CheckpointError, match="none was written"):
        newest(folder)
    event.set()
    checkpoints.finish()
    found = newest(folder)
    assert found.state == {"warnings": []}
    assert torch.equal(found.read("trainer_0", "parameters"), torch.ones(4))
    assert warnings == []


def test_the_next_checkpoint_waits_for_the_one_before_and_no_two_copies_exist(checkpoints, folder, blocked):
    event, begun = blocked
    checkpoints.save(1, tensors(1.0), {}, {})
    done = []
    second = threading.Thread(target=lambda: done.append(checkpoints.save(2, tensors(2.0), {}, {})))
    second.start()
    while not begun:
        pass
    assert (begun, done) == (["trainer_0.safetensors"], [])
    event.set()
    second.join()
    checkpoints.finish()
    assert names(folder) == ["round_00001", "round_00002"]


def test_who_dies_while_it_writes_leaves_the_checkpoint_before(checkpoints, folder, blocked, warnings):
    event, begun = blocked
    event.set()
    save(checkpoints, folder, 1)
    event.clear()
    checkpoints.save(2, tensors(2.0), {}, {})
    while len(begun) < 2:
        pass
    # This is what a resumed run finds: and it removes what was left.
    assert names(folder) == [".round_00002.new", "round_00001"]
    assert newest(folder).folder.name == "round_00001"
    after = Checkpoints(folder, 2, None, LocalProcesses(), warnings.append)
    event.set()
    checkpoints.finish()
    (folder / ".round_00003.new").mkdir()
    save(after, folder, 2)
    assert names(folder) == ["round_00001", "round_00002"]


def test_a_state_that_is_held_is_written_when_it_is_asked_for(checkpoints, folder):
    parameters = torch.ones(3)
    checkpoints.hold(4, {"trainer_0": {"parameters": parameters}}, {"round": 4}, {})
    assert not folder.exists()
    parameters.zero_()
    checkpoints.write_held("another")
    assert not folder.exists()
    checkpoints.write_held(checkpoints.held)
    checkpoints.settle()
    assert newest(folder).state["round"] == 4
    assert torch.equal(newest(folder).read("trainer_0", "parameters"), torch.ones(3))
    assert checkpoints.held == ""
    checkpoints.write_held("")  # it is written once
    checkpoints.finish()
    assert names(folder) == ["round_00004"]


def test_a_state_is_written_without_the_others_waiting_for_each_other(folder, warnings):
    """As when a round is given up: one process is in a collective, another at a step; both write, in any order."""

    def work(process):
        checkpoints = Checkpoints(folder, 2, None, process, warnings.append)
        checkpoints.hold(3, part(process.rank, 1.0), {"round": 3}, {})
        checkpoints.write_held(checkpoints.held)
        checkpoints.settle()
        return names(folder)

    assert together(3, work) == [["round_00003"]] * 3
    assert newest(folder).state == {"round": 3}


@pytest.mark.parametrize("early", [(0,), (1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("then", ["save", "hold"])
def test_a_round_that_ends_while_it_is_given_up_is_written_in_place_of_the_one_before(folder, warnings, early, then):
    """Some have begun to write what was held when they meet, others have not, and cannot any more."""

    def work(process):
        checkpoints = Checkpoints(folder, 2, None, process, warnings.append)
        checkpoints.hold(1, part(process.rank, 1.0), {"round": 1}, {})
        held = checkpoints.held
        process.gather(None)
        if process.rank in early:
            checkpoints.write_held(held)
        getattr(checkpoints, then)(2, part(process.rank, 2.0), {"round": 2}, {})
        checkpoints.write_held(held)  # the others
        checkpoints.finish()

    together(3, work)
    assert names(folder) == ["round_00001"] * (len(early) == 3) + ["round_00002"]
    assert newest(folder).state == {"round": 2}
    assert warnings == []


def test_who_keeps_a_copy_and_never_writes_it_meets_the_others_once_for_each(folder, warnings):
    """And before there is one, not at all."""

    def work(process):
        gather, met = process.gather, []
        process.gather = lambda value: met.append(1) or gather(value)
        checkpoints = Checkpoints(folder, 2, None, process, warnings.append)
        checkpoints.finish()
        counts = []
        for number in (1, 2, 3):
            checkpoints.hold(number, part(process.rank, 1.0), {}, {})
            counts.append(len(met))
        checkpoints.finish()
        checkpoints.finish()
        return [*counts, len(met)]

    assert together(2, work) == [[0, 1, 2, 3]] * 2
    assert not folder.exists()


def test_who_waits_for_the_part_of_somebody_lost_gives_up_and_leaves_nothing_running(folder, warnings, monkeypatch):
    """A thread that waits for the board while the interpreter ends would abort the process."""
    monkeypatch.setattr(checkpoint, "_SECONDS_FOR_THE_LOST", 0.0)
    before = set(threading.enumerate())
    ended = threading.Barrier(3)

    def work(process):
        if process.rank != 1:  # which has died
            checkpoints = Checkpoints(folder, 2, None, process, warnings.append)
            checkpoints.hold(3, part(process.rank, 1.0), {}, {})
            checkpoints.write_held(checkpoints.held)
            checkpoints.settle(somebody_is_lost=True)
        ended.wait()

    together(3, work)
    # What was begun may lie there still, under a name that is swept away by the next.
    assert set(names(folder)) <= {".round_00003.new"}
    assert not [thread for thread in set(threading.enumerate()) - before if "checkpoint" in thread.name]


def test_a_process_that_is_lost_while_the_others_meet_is_waited_for_no_longer(folder, warnings, monkeypatch):
    """The gather raises; what is being written is still known, and settled."""
    monkeypatch.setattr(checkpoint, "_SECONDS_FOR_THE_LOST", 0.0)

    def lost(value):
        raise PeerLostError("rank 1 was killed")

    def work(process):
        if not process.is_main:
            return
        process.gather = lost
        checkpoints = Checkpoints(folder, 2, None, process, warnings.append)
        checkpoints.save(1, part(0, 1.0), {}, {})
        with pytest.raises(PeerLostError):
            checkpoints.finish()
        checkpoints.settle(somebody_is_lost=True)
        assert names(folder) == []

    before = set(threading.enumerate())
    together(2, work)
    assert not [thread for thread in set(threading.enumerate()) - before if "checkpoint" in thread.name]


def test_a_copy_that_finds_no_memory_costs_a_warning(checkpoints, folder, warnings, monkeypatch):
    def none_left(tensor):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(writer, "_copy", none_left)
    save(checkpoints, folder, 1)
    assert len(warnings) == 1
    assert "no memory for a copy of the state" in warnings[0]
    assert names(folder) == []


# CSVs that go on


def test_a_log_goes_on_where_its_state_says(tmp_path):
    path = tmp_path / "log.csv"
    log = AppendLog(path, ("a", "b"))
    assert log.append([(1, 2), (3, 4)]) is None
    state = json.loads(json.dumps(log.state_dict()))
    before = path.read_bytes()
    log.append([(5, 6)])
    with path.open("a") as file:
        file.write("7,")  # killed in the middle of a row
    again = AppendLog(path, ("a", "b"), state)
    assert path.read_bytes() == before
    again.append([(5, 6)])
    assert path.read_text().split() == ["a,b", "1,2", "3,4", "5,6"]


def test_rows_that_cannot_be_written_wait(tmp_path):
    path = tmp_path / "log.csv"
    log = AppendLog(path, ("a",))
    log.append([(1,)])
    hidden = path.rename(tmp_path / "elsewhere")
    assert isinstance(log.append([(2,)]), FileNotFoundError)
    path.symlink_to("/dev/full")
    assert log.append([(3,)]).errno == errno.ENOSPC
    state = log.state_dict()
    assert state["pending"].split() == ["2", "3"]
    path.unlink()
    hidden.rename(path)
    resumed = AppendLog(path, ("a",), state)
    for each in (log, resumed):
        assert each.append([(4,)]) is None
        assert path.read_text().split() == ["a", "1", "2", "3", "4"]


def test_a_log_shorter_than_its_state_is_an_error(tmp_path):
    log = AppendLog(tmp_path / "log.csv", ("a",))
    log.append([(1,)])
    state = log.state_dict()
    (tmp_path / "log.csv").write_text("a\n")
    with pytest.raises(OSError, match="is shorter than it was"):
        AppendLog(tmp_path / "log.csv", ("a",), state)
