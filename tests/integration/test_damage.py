"""Damage to the files of a run: no completed work is lost, no wrong data is used, and one line names the damage."""

import contextlib
import io
import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import run as program
from benchmarks.compare import compare
from benchmarks.compare.spec import load_spec, make_run
from cluster import Cluster
from tests.support.comparisons import small_comparison
from tests.support.helpers import warnings_of
from tests.support.runs import assert_same_run, summary, write_config
from utils.checkpoint.checkpoint import Checkpoints, newest_checkpoint
from utils.checkpoint.run_lock import lock_run
from utils.distributed.processes import LocalProcesses

ROUNDS = 3
NEWEST = f"checkpoints/round_{ROUNDS:05d}"


VALUES = {
    "number_of_outer_steps": ROUNDS,
    "number_of_inner_steps_between_outers": 2,
    "number_of_initial_trainers": 2,
    "nodes_per_gpu": 2,
    "data_sample_size": 200,
    "val_size": 10,
    "sampling_method": "none",
    "merge_frequency": 2,
    "save_weights_every": 1,
    "run_name": "whole",
}


def start(folder: Path, cache_dir: Path, **values) -> int:
    """Train a run in `folder/logs/whole`; return the exit status."""
    return program.main(["--config", str(write_config(folder, cache_dir, **(VALUES | values)))])


@contextlib.contextmanager
def files_limited_to(size: int) -> Iterator[io.StringIO]:
    """Let no file grow beyond a size, as on a full disk; gives what is written to standard error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    errors = io.StringIO()
    try:  # pytest keeps output in files, too
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            yield errors
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def resume(folder: Path) -> int:
    return program.main(["--resume", str(folder)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache_dir):
    """A completed run with a checkpoint of every round."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("utils.checkpoint.checkpoint.KEPT", 9)
        assert start(folder, cache_dir) == 0
    return folder / "logs" / "whole"


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / whole.name))


@pytest.fixture
def stopped(copy):
    """The same run, killed before its last checkpoint."""
    shutil.rmtree(copy / NEWEST)
    return copy


def flip(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 0x01
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped at the start": lambda path: flip(path, 0.0),
    "flipped near the start": lambda path: flip(path, 0.05),
    "flipped in the middle": lambda path: flip(path, 0.5),
    "flipped at the end": lambda path: flip(path, 0.99),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "junk": lambda path: path.write_bytes(bytes(range(256)) * (path.stat().st_size // 256 + 1)),
    "cut": cut,
    "empty": lambda path: path.write_bytes(b""),
    "deleted": Path.unlink,
    "a folder": folder_instead,
}


def errors(capsys) -> list[str]:
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return [line for line in captured.err.splitlines() if line.startswith("error: ")]


def log_of(folder: Path) -> str:
    log = (folder / "training_log.log").read_text(encoding="utf-8", errors="replace")
    assert "Traceback" not in log
    return log


# Checkpoints


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def of_the_checkpoint_before(path: Path) -> None:
    shutil.copy(path.parent.with_name("round_00002") / path.name, path)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(
            (name, damage)
            for name in ("state.json", "trainer_0.safetensors", "config.yaml")
            for damage in DAMAGE.values()
        ),
        *((name, longer) for name in ("state.json", "trainer_0.safetensors", "config.yaml")),
        *((name, of_the_checkpoint_before) for name in ("state.json", "trainer_0.safetensors")),
        ("trainer_0_worker_0.safetensors", DAMAGE["flipped in the middle"]),
        ("trainer_0_worker_0.safetensors", DAMAGE["deleted"]),
        ("trainer_0_worker_0.safetensors", of_the_checkpoint_before),
    ],
)
def test_the_checkpoint_before_a_damaged_one_is_used(whole, copy, name, damage):
    damage(copy / NEWEST / name)
    assert resume(copy) == 0
    (warning,) = warnings_of(copy)
    assert warning.startswith(f"a checkpoint was passed over: {copy / NEWEST}: ")
    assert name in warning or damage is of_the_checkpoint_before
    assert f"resumed after round {ROUNDS - 1}" in log_of(copy)
    assert (copy / "checkpoints" / f"damaged_round_{ROUNDS:05d}").is_dir()
    assert_same_run(copy, whole, besides=("warnings",))


def test_without_an_undamaged_checkpoint_nothing_is_changed(copy, capsys):
    for path in (copy / "checkpoints").glob("*/trainer_0.safetensors"):
        flip(path, 0.5)
    before = sorted(copy.rglob("*"))
    assert resume(copy) == 2
    (error,) = errors(capsys)
    assert error.count("trainer_0.safetensors has changed since it was written") == ROUNDS
    assert sorted(copy.rglob("*")) == before


class KilledError(BaseException):
    """Ends a program as a kill would: nothing catches it."""


def killed_in_save(folder: Path, number: int, moment: int) -> bool:
    """Save a checkpoint and kill it before one of its steps on the disk; return False if it has fewer steps."""
    left = [moment]

    def counted(call: Callable) -> Callable:
        def step(*arguments, **keywords):
            left[0] -= 1
            if left[0] <= 0:
                raise KilledError
            return call(*arguments, **keywords)

        return step

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KilledError):
        for name in ("mkdir", "open", "ftruncate", "pwrite", "fsync", "replace", "unlink", "rmdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        patch.setattr(io, "open", counted(io.open))
        save(folder, number)
        return False
    return True


def save(folder: Path, number: int) -> None:
    groups = {"trainer_0": {"parameters": torch.full((1000,), number / 3)}}
    Checkpoints(folder, None, LocalProcesses(), pytest.fail).save(number, groups, {"round": number}, {"a": "b"})


@pytest.mark.parametrize("repeated", [False, True])
def test_a_kill_at_any_step_of_a_checkpoint_leaves_a_complete_one(tmp_path, repeated):
    """The repeated one replaces a checkpoint of the same round."""
    number = 2 if repeated else 3
    moment = 1
    killed = True
    while killed:
        folder = tmp_path / str(moment)
        save(folder, 1)
        save(folder, 2)
        killed = killed_in_save(folder, number, moment)
        found = newest_checkpoint(folder, LocalProcesses())
        assert found.problems == ()
        assert found.state["round"] in {number, 1 if repeated else 2}
        expected = torch.full((1000,), found.state["round"] / 3)
        assert torch.equal(found.read("trainer_0", "parameters"), expected)
        save(folder, number)
        assert newest_checkpoint(folder, LocalProcesses()).state["round"] == number
        moment += 1
    assert moment > 15


# Configuration and logs


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_configuration_is_refused(stopped, capsys, damage):
    DAMAGE[damage](stopped / "config.yaml")
    assert resume(stopped) == 2
    assert len(errors(capsys)) == 1


@pytest.mark.parametrize(
    ("line", "now", "status", "expected"),
    [
        ("ETA: 0.4", "ETA: 0.5", 0, "resumed with another ETA: was 0.4, now 0.5"),
        ("training_seed: 42", "training_seed: 43", 2, "training_seed: cannot change in a run that has begun, was 42"),
        ("val_size: 10", "val_size: 11", 2, "the checkpoint is of a run on other data"),
    ],
)
def test_a_value_of_the_configuration_that_is_not_that_of_the_checkpoint_is_reported(
    stopped, capsys, line, now, status, expected
):
    path = stopped / "config.yaml"
    path.write_text(path.read_text().replace(line, now))
    assert resume(stopped) == status
    (message,) = errors(capsys) if status else warnings_of(stopped)
    assert expected in message


@pytest.mark.parametrize("name", ["training_log.csv", "step_loss_log.csv", "node_log.csv", "merge_log.csv"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_log_is_reported(stopped, capsys, name, damage):
    """One that lacks rows is refused. One with other rows is continued, and the training is the same."""
    path = stopped / "model_training_report" / name
    rows = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(row for row in rows if not row.startswith(b"3,")))  # the rows of the checkpoint
    DAMAGE[damage](path)
    missing = damage in ("cut", "empty", "deleted", "a folder")
    assert resume(stopped) == (2 if missing else 0)
    if missing:
        (error,) = errors(capsys)
        assert name in error
    else:
        (warning,) = warnings_of(stopped)
        assert warning == f"{name} has changed since the checkpoint was written: earlier rows may be wrong"


@pytest.mark.parametrize("name", ["training_log.log", "model_training_report/summary.json"])
@pytest.mark.parametrize("damage", [name for name in DAMAGE if name != "a folder"])
def test_a_run_goes_on_without_what_it_does_not_need(whole, stopped, name, damage):
    DAMAGE[damage](stopped / name)
    assert resume(stopped) == 0
    assert warnings_of(stopped) == []
    assert_same_run(stopped, whole)


@pytest.mark.parametrize("damage", ["cut", "empty", "deleted"])
def test_a_run_is_resumed_without_its_memory_log(whole, stopped, damage):
    DAMAGE[damage](stopped / "memory_report" / "memory_log.csv")
    assert resume(stopped) == 0
    (warning,) = warnings_of(stopped)
    assert warning.startswith("memory_log.csv begins anew: ")
    assert_same_run(stopped, whole, besides=("warnings",))


@pytest.mark.parametrize("override", ["run_name=x\udcff", "log_dir=x\udcff", 'text_files=["\udcff"]'])
def test_text_that_is_not_utf8_is_refused(tmp_path, cache_dir, capsys, override):
    config = write_config(tmp_path, cache_dir, **VALUES)
    assert program.main(["--config", str(config), override]) == 2
    (error,) = errors(capsys)
    assert error.startswith(f"error: {override.partition('=')[0]}: must be UTF-8 text, got ")
    assert not (tmp_path / "logs").exists()


# Two programs


def test_a_run_that_trains_keeps_its_folder_when_the_same_run_is_started_again(tmp_path, cache_dir, capsys):
    """Both were started before the first had made its folder."""
    config = write_config(tmp_path, cache_dir, **VALUES)
    folder = tmp_path / "logs" / "whole"
    folder.mkdir(parents=True)
    with lock_run(folder):
        assert program.main(["--config", str(config), "--resume", "auto"]) == 2
    (error,) = errors(capsys)
    assert error.startswith(f"error: {folder}: another process is training this run")
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["whole"]


# Disks


def broken_after(monkeypatch, rounds: int, fault: Callable[[], object]) -> None:
    """Let something happen to the disk when so many rounds of a run are done."""
    run_round = Cluster.run_round

    def run_then_break(self, *arguments):
        if self.counters.outer_steps == rounds:
            fault()
        return run_round(self, *arguments)

    monkeypatch.setattr(Cluster, "run_round", run_then_break)


def replaced_by_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("")


def replaced_by_a_broken_link(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to("/nonexistent/folder")


@pytest.mark.parametrize("fault", [shutil.rmtree, replaced_by_a_file, replaced_by_a_broken_link])
@pytest.mark.parametrize("name", [".", "model_training_report", "memory_report", "checkpoints", "model_weights"])
def test_a_folder_that_is_lost_while_a_run_trains_costs_warnings(tmp_path, cache_dir, monkeypatch, name, fault):
    """Without a place for models the exit status is 1."""
    folder = tmp_path / "logs" / "whole"
    broken_after(monkeypatch, 1, lambda: fault(folder / name))
    assert start(tmp_path, cache_dir) == int(fault is not shutil.rmtree and name in (".", "model_weights"))
    if name not in (".", "model_training_report"):
        assert summary(folder)["outer_steps"] == ROUNDS
        assert summary(folder)["status"] == "completed"
        named = "models" if name == "model_weights" else name.split("_")[0].rstrip("s")
        assert all(named in warning for warning in warnings_of(folder))
        log_of(folder)


@pytest.mark.parametrize("limit", [0, 1000, 7000, 40_000, 100_000])
def test_a_resume_brings_back_what_a_full_disk_has_cost(whole, tmp_path, cache_dir, monkeypatch, limit):
    """No room for the last rows, for models, for checkpoints, or for plots."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    with contextlib.ExitStack() as disk:
        broken_after(monkeypatch, 1, lambda: disk.enter_context(files_limited_to(limit)))
        assert start(tmp_path, cache_dir, plot_at_end=limit == 100_000) == int(limit < 40_000)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == unlimited
    monkeypatch.undo()
    folder = tmp_path / "logs" / "whole"
    log_of(folder)
    assert resume(folder) == 0
    assert_same_run(folder, whole, besides=("warnings",))


@pytest.mark.parametrize("limit", [0, 1000, 20_000])
def test_a_disk_without_room_for_the_data_is_one_error(tmp_path, limit):
    """No room for the tokenizer's configuration, its vocabulary, or the tokens."""
    config = write_config(tmp_path, tmp_path / "cache", **VALUES)
    (tmp_path / "cache").mkdir()
    with files_limited_to(limit) as errors:
        assert program.main(["--config", str(config)]) == 2
    assert errors.getvalue().splitlines()[-1].startswith("error: cache_dir: cannot write ")
    assert not (tmp_path / "logs").exists()
    assert program.main(["--config", str(config)]) == 0


# The clock


@pytest.mark.parametrize("days", [-400, 400])
def test_a_clock_that_is_set_changes_nothing(whole, stopped, monkeypatch, days):
    """Between a run and its resume, with the times of all files."""
    for path in stopped.rglob("*"):
        os.utime(path, (86_400 * 400 + 86_400 * days, 86_400 * 400 + 86_400 * days))
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 86_400 * days)
    broken_after(monkeypatch, ROUNDS - 1, lambda: monkeypatch.setattr(time, "time", lambda: now() - 86_400 * days))
    assert resume(stopped) == 0
    assert warnings_of(stopped) == []
    assert_same_run(stopped, whole)


# Comparisons


@pytest.mark.parametrize("damage", ["flipped at the start", "junk", "zeros", "cut", "empty"])
@pytest.mark.parametrize("name", ["results/small.json", "run.json"])
def test_damage_to_a_comparison_is_one_line(tmp_path, capsys, name, damage):
    path = small_comparison(tmp_path)
    comparison = load_spec(path)
    damaged = tmp_path / name
    if name == "run.json":
        run = make_run(comparison, comparison.methods[0], comparison.seeds[0])
        damaged = tmp_path / "runs" / run.id / name
    damaged.parent.mkdir(parents=True)
    damaged.write_text(json.dumps({"folder": "nowhere", "settings": {}}))
    DAMAGE[damage](damaged)
    status = compare.main([str(path), "--output", str(tmp_path), "--runs", str(tmp_path / "runs")])
    assert status == (1 if name == "run.json" else 2)
    (error,) = errors(capsys)
    assert str(damaged.parent if name == "run.json" else damaged) in error
