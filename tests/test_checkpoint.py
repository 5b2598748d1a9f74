"""A checkpoint is whole or not there, and what is damaged is seen; tensors come back bit for bit."""

import errno
import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.helpers import without_privileges
from training_logs.recording.append_log import AppendLog
from utils import checkpoint
from utils.checkpoint import CheckpointError, Checkpoints, damage
from utils.distributed import LocalProcesses

ALONE = LocalProcesses([torch.device("cpu")], 1)


def tensors(value: float) -> dict:
    return {"trainer_0": {"parameters": torch.full((5,), value), "step": torch.tensor(3.0)}}


def save(checkpoints: Checkpoints, number: int) -> Path:
    state = {"round": number, "loss": 0.1 + 0.2}
    return checkpoints.save(ALONE, number, tensors(number / 3), state, {"config.yaml": "ETA: 1\n"})


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", keep=2)


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


def test_what_was_saved_is_read_bit_for_bit(checkpoints):
    folder = save(checkpoints, 7)
    assert folder == checkpoints.folder / "round_00007"
    found = checkpoints.newest()
    assert (found.folder, found.problems) == (folder, ())
    assert found.state == {"round": 7, "loss": 0.30000000000000004}
    assert torch.equal(found.read("trainer_0", "parameters"), torch.full((5,), 7 / 3))
    assert found.read("trainer_0", "step").item() == 3.0
    assert (folder / "config.yaml").read_text() == "ETA: 1\n"
    with pytest.raises(CheckpointError, match="cannot read velocity of trainer_0"):
        found.read("trainer_0", "velocity")


def test_the_checksums_are_those_of_sha256sum(checkpoints):
    folder = save(checkpoints, 1)
    assert subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True).returncode == 0
    lines = dict(reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert set(lines) == {path.name for path in folder.iterdir()} - {"SHA256SUMS"}
    assert lines["state.json"] == hashlib.sha256((folder / "state.json").read_bytes()).hexdigest()


def test_the_newest_stay(checkpoints):
    for number in (1, 2, 3, 10):
        save(checkpoints, number)
    assert names(checkpoints) == ["round_00003", "round_00010"]
    assert checkpoints.newest().state["round"] == 10


def test_a_round_that_is_made_again_replaces_its_checkpoint(checkpoints):
    save(checkpoints, 4)
    checkpoints.save(ALONE, 4, tensors(9.0), {"round": "again"}, {})
    assert names(checkpoints) == ["round_00004"]
    assert checkpoints.newest().state == {"round": "again"}


@pytest.mark.parametrize("name", ["state.json", "trainer_0.safetensors", "config.yaml", "SHA256SUMS"])
@pytest.mark.parametrize("fault", ["flipped", "cut", "removed"])
def test_a_damaged_checkpoint_is_passed_over_and_reported(checkpoints, name, fault):
    save(checkpoints, 1)
    path = save(checkpoints, 2) / name
    data = bytearray(path.read_bytes())
    if fault == "flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif fault == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.unlink()
    found = checkpoints.newest()
    assert found.state["round"] == 1
    assert len(found.problems) == 1
    assert "round_00002" in found.problems[0]


def test_half_a_checkpoint_is_not_one(checkpoints):
    save(checkpoints, 1)
    half = checkpoints.folder / ".round_00002.new"
    half.mkdir()
    (half / "state.json").write_text("{}")
    assert checkpoints.newest().state["round"] == 1
    save(checkpoints, 2)
    assert names(checkpoints) == ["round_00001", "round_00002"]


def test_no_checkpoint_is_an_error(checkpoints):
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*checkpoints: none was written"):
        checkpoints.newest()
    (save(checkpoints, 1) / "state.json").unlink()
    with pytest.raises(CheckpointError, match="round_00001"):
        checkpoints.newest()


@pytest.mark.parametrize("where", ["_write_tensors", "_write_text", "_sync"])
def test_a_full_disk_leaves_the_last_good_one(checkpoints, monkeypatch, where):
    save(checkpoints, 1)
    original, calls = getattr(checkpoint, where), []

    def full(path, *arguments):
        calls.append(path)
        if len(calls) < 2 and where != "_write_tensors":
            return original(path, *arguments)
        path.write_bytes(b"half of i")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, where, full)
    with pytest.raises(OSError, match="No space left on device"):
        save(checkpoints, 2)
    monkeypatch.undo()
    assert names(checkpoints) == ["round_00001"]
    assert damage(checkpoints.folder / "round_00001") is None
    save(checkpoints, 2)
    assert checkpoints.newest().state["round"] == 2


def test_a_read_only_folder_leaves_the_last_good_one(checkpoints):
    save(checkpoints, 1)
    checkpoints.folder.chmod(0o555)
    try:
        with without_privileges(checkpoints.folder), pytest.raises(OSError, match="Permission denied"):
            save(checkpoints, 2)
    finally:
        checkpoints.folder.chmod(0o755)
    assert checkpoints.newest().state["round"] == 1


class _OfTwo:
    """Two processes in one: what the other one answers is given."""

    is_main = True

    def __init__(self, *answers):
        self.answers = list(answers)

    def gather(self, value):
        return [value, self.answers.pop(0)]


def test_what_another_process_cannot_write_fails_everywhere(checkpoints):
    save(checkpoints, 1)
    with pytest.raises(OSError, match="disk of the other"):
        checkpoints.save(_OfTwo((None, None), (None, "disk of the other is full")), 2, tensors(1.0), {}, {})
    assert names(checkpoints) == ["round_00001"]
    other = {"trainer_1.safetensors": "0" * 64}
    folder = checkpoints.save(_OfTwo((None, None), (other, None), (None, None)), 3, tensors(1.0), {}, {})
    assert "0" * 64 + "  trainer_1.safetensors" in (folder / "SHA256SUMS").read_text()
    assert "trainer_1.safetensors" in damage(folder)


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
