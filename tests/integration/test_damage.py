"""Damage to the files of a run: no completed work is lost, no wrong data is used, and one line names the damage."""

import contextlib
import errno
import io
import json
import os
import resource
import shutil
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import run as program
from benchmarks.compare import compare
from benchmarks.compare.runs import ComparisonError, Runner
from benchmarks.compare.spec import load_spec, make_run
from tests.support.comparisons import small_comparison
from tests.support.helpers import LocalProcesses, warnings_of
from tests.support.programs import LIMIT_SECONDS
from tests.support.runs import assert_same_run, before_round, error_lines, summary, write_config
from training_logs.recording.run_folder import lock_run
from training_logs.showing.run_data import RunFolderError
from utils.checkpoint.checkpoint import Checkpoints, newest_checkpoint
from utils.files import write_folder_atomically

pytestmark = pytest.mark.long

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
    """Flip a bit at the place, or after it if a digit is there: numbers of 17 digits can differ and be equal."""
    data = bytearray(path.read_bytes())
    start = int(place * (len(data) - 1))
    data[next(i for i in range(start, len(data)) if not chr(data[i]).isdigit())] ^= 0x01
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def nested(path: Path) -> None:
    path.write_text("[" * 100_000)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped at the start": lambda path: flip(path, 0.0),
    "flipped in the middle": lambda path: flip(path, 0.5),
    "junk": lambda path: path.write_bytes(bytes(range(256)) * (path.stat().st_size // 256 + 1)),
    "cut": cut,
    "empty": lambda path: path.write_bytes(b""),
    "deleted": Path.unlink,
    "a folder": folder_instead,
}


def log_of(folder: Path) -> str:
    log = (folder / "training_log.log").read_text(encoding="utf-8", errors="replace")
    assert "Traceback" not in log
    return log


# Checkpoints


def of_the_checkpoint_before(path: Path) -> None:
    shutil.copy(path.parent.with_name("round_00002") / path.name, path)


def test_the_checkpoint_before_a_damaged_one_is_used(whole, copy):
    (copy / NEWEST / "config.yaml").unlink()
    assert resume(copy) == 0
    (warning,) = warnings_of(copy)
    assert warning.startswith(f"a checkpoint was passed over: {copy / NEWEST}: ")
    assert "config.yaml" in warning
    assert f"resumed after round {ROUNDS - 1}" in log_of(copy)
    assert (copy / "checkpoints" / f"damaged_round_{ROUNDS:05d}").is_dir()
    assert_same_run(copy, whole, besides=("warnings",))


@pytest.mark.parametrize("name", ["state.json", "trainer_0.safetensors", "a"])
@pytest.mark.parametrize("damage", [*DAMAGE.values(), nested, of_the_checkpoint_before])
def test_every_damage_to_a_checkpoint_is_noticed(tmp_path, name, damage):
    for number in (2, 3):
        save(tmp_path, number)
    damage(tmp_path / "round_00003" / name)
    found = newest_checkpoint(tmp_path, LocalProcesses())
    assert found.state["round"] == 2
    assert len(found.problems) == 1


def test_a_checkpoint_of_another_version_is_one_error(stopped, capsys):
    """The state of the checkpoint lacks keys that this version reads."""
    for left_out in ("observer", "cluster"):
        path = stopped / "checkpoints" / f"round_{ROUNDS - 1:05d}" / "state.json"
        content = json.loads(path.read_text())
        del content["state"][left_out], content["crc32"]
        path.write_text(json.dumps(content | {"crc32": zlib.crc32(json.dumps(content).encode())}))
        assert resume(stopped) == 2
        (error,) = error_lines(capsys)
        assert error == f"error: {path.parent}: not a checkpoint of this version: KeyError: '{left_out}'"


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
    Checkpoints(folder, None, LocalProcesses(), pytest.fail).save(
        number, groups, {"round": number}, {"a": f"text {number}"}
    )


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


@pytest.mark.parametrize("damage", ["junk", "cut"])
def test_a_damaged_configuration_is_refused(stopped, capsys, damage):
    DAMAGE[damage](stopped / "config.yaml")
    assert resume(stopped) == 2
    assert len(error_lines(capsys)) == 1


def test_a_value_of_the_configuration_that_is_not_that_of_the_checkpoint_is_reported(stopped):
    path = stopped / "config.yaml"
    path.write_text(path.read_text().replace("ETA: 0.4", "ETA: 0.5"))
    assert resume(stopped) == 0
    (warning,) = warnings_of(stopped)
    assert "resumed with another ETA: was 0.4, now 0.5" in warning


def damage_record(path: Path, damage: str) -> None:
    """Damage a record as it was at the last checkpoint."""
    if path.match("model_training_report/*.csv"):
        rows = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(row for row in rows if not row.startswith(f"{ROUNDS},".encode())))
    (DAMAGE | {"nested": nested})[damage](path)


@pytest.mark.parametrize(("name", "damage"), [
    ("training_log.log", "a folder"), ("model_training_report/training_log.csv", "cut"),
    ("model_training_report/node_log.csv", "a folder"), ("memory_report/memory_log.csv", "a folder"),
])  # fmt: skip
def test_a_record_that_lacks_rows_or_is_a_folder_is_refused(stopped, capsys, name, damage):
    damage_record(stopped / name, damage)
    assert resume(stopped) == 2
    (error,) = error_lines(capsys)
    assert name in error


@pytest.mark.parametrize(("name", "damage", "expected", "same"), [
    ("training_log.log", "deleted", [], True),
    ("model_training_report/summary.json", "junk", [], True),
    ("model_training_report/summary.json", "nested", [], True),
    ("model_training_report/summary.json", "a folder", ["summary.json could not be written (Is a directory)"], False),
    ("memory_report/memory_log.csv", "deleted", ["memory_log.csv begins anew: "], True),
])  # fmt: skip
def test_another_damage_to_a_record_costs_at_most_a_warning(whole, stopped, name, damage, expected, same):
    damage_record(stopped / name, damage)
    assert resume(stopped) == 0
    warnings = [line.partition("warning: ")[2] for line in log_of(stopped).splitlines() if "warning: " in line]
    assert len(warnings) == len(expected)
    assert all(warning.startswith(start) for warning, start in zip(warnings, expected, strict=True))
    assert (stopped / "model_weights" / "trainer_0" / "model.safetensors").exists()
    if same:
        assert_same_run(stopped, whole, besides=("warnings",))


@pytest.mark.parametrize("override", ["run_name=x\udcff", "log_dir=x\udcff", 'text_files=["\udcff"]'])
def test_text_that_is_not_utf8_is_refused(tmp_path, cache_dir, capsys, override):
    config = write_config(tmp_path, cache_dir, **VALUES)
    assert program.main(["--config", str(config), override]) == 2
    (error,) = error_lines(capsys)
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
    (error,) = error_lines(capsys)
    assert error.startswith(f"error: {folder}: another process is training this run")
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["whole"]


# Disks


def replaced_by_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("")


@pytest.mark.parametrize(("name", "fault"), [
    (".", shutil.rmtree), (".", replaced_by_a_file), ("memory_report", replaced_by_a_file),
    ("checkpoints", shutil.rmtree), ("model_weights", replaced_by_a_file),
])  # fmt: skip
def test_a_folder_that_is_lost_while_a_run_trains_costs_warnings(tmp_path, cache_dir, monkeypatch, name, fault):
    """The exit status is 1 if models cannot be written."""
    folder = tmp_path / "logs" / "whole"
    before_round(monkeypatch, 1, lambda: fault(folder / name))
    assert start(tmp_path, cache_dir) == int(fault is not shutil.rmtree and name in (".", "model_weights"))
    if name != ".":
        assert summary(folder)["outer_steps"] == ROUNDS
        assert summary(folder)["status"] == "completed"
        named = "models" if name == "model_weights" else name.split("_")[0].rstrip("s")
        assert all(named in warning for warning in warnings_of(folder))
        final = [warning for warning in warnings_of(folder) if "model_weights: " in warning]
        assert len(final) == (named == "models")  # they are not written twice
        log_of(folder)


@pytest.mark.parametrize("limit", [0, 7000, 40_000])
def test_a_resume_brings_back_what_a_full_disk_has_cost(whole, tmp_path, cache_dir, monkeypatch, limit):
    """No room for the last rows, for models, or for checkpoints."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    with contextlib.ExitStack() as disk:
        before_round(monkeypatch, 1, lambda: disk.enter_context(files_limited_to(limit)))
        assert start(tmp_path, cache_dir) == int(limit < 40_000)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == unlimited
    monkeypatch.undo()
    folder = tmp_path / "logs" / "whole"
    log_of(folder)
    assert resume(folder) == 0
    assert_same_run(folder, whole, besides=("warnings",))


def test_a_disk_without_room_for_the_data_is_one_error(tmp_path):
    config = write_config(tmp_path, tmp_path / "cache", **VALUES)
    (tmp_path / "cache").mkdir()
    with files_limited_to(1000) as errors:
        assert program.main(["--config", str(config)]) == 2
    assert errors.getvalue().splitlines()[-1].startswith("error: cache_dir: cannot write ")
    assert not (tmp_path / "logs").exists()
    assert program.main(["--config", str(config)]) == 0


def test_models_that_cannot_be_replaced_are_kept(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    write_folder_atomically(folder, lambda new: (new / "weights").write_text("old"))
    replace = os.replace

    def without_room(source: Path, target: Path) -> None:
        if source.name == "new":
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", without_room)
    with pytest.raises(OSError, match="No space left"):
        write_folder_atomically(folder, lambda new: (new / "weights").write_text("new"))
    assert (folder / "weights").read_text() == "old"
    assert list(tmp_path.iterdir()) == [folder]


# Comparisons


@pytest.mark.parametrize("damage", ["junk", "empty", "nested", "another key"])
@pytest.mark.parametrize("name", ["results/small.json", "run.json"])
def test_damage_to_a_comparison_is_one_line(tmp_path, capsys, name, damage):
    path = small_comparison(tmp_path)
    comparison = load_spec(path)
    damaged = tmp_path / name
    if name == "run.json":
        run = make_run(comparison, comparison.methods[0], comparison.seeds[0])
        damaged = tmp_path / "runs" / run.id / name
    damaged.parent.mkdir(parents=True)
    damaged.write_text(json.dumps({"fomder": "nowhere", "settings": {}}))
    if damage != "another key":
        (DAMAGE | {"nested": nested})[damage](damaged)
    status = compare.main([str(path), "--output", str(tmp_path), "--runs", str(tmp_path / "runs")])
    assert status == (1 if name == "run.json" else 2)
    (error,) = error_lines(capsys)
    assert str(damaged.parent if name == "run.json" else damaged) in error


@pytest.fixture
def made(whole, monkeypatch) -> list[Path]:
    """Let the runs of comparisons be copies of one run; gives the folders into which they are copied."""
    found: list[Path] = []

    class Program:
        def __init__(self, command: list[str], **how):
            found.append(Path(command[-1].removeprefix("log_dir=")))
            shutil.copytree(whole, found[-1] / "run")

        def wait(self) -> int:
            return 0

    monkeypatch.setattr("benchmarks.compare.runs.subprocess.Popen", Program)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **how: path.write_bytes(bytes(10**5)))
    return found


@pytest.mark.parametrize("limit", [0, 50_000])
def test_results_that_cannot_be_written_are_one_line_and_the_runs_are_kept(tmp_path, capsys, monkeypatch, made, limit):
    """The disk is full when all runs have been made: no room for the results, or for the figures."""
    path = small_comparison(tmp_path)
    arguments = [str(path), "--output", str(tmp_path), "--runs", str(tmp_path / "runs")]
    carry_out = compare.carry_out
    with contextlib.ExitStack() as disk, monkeypatch.context() as patch:

        def then_full(*values):
            raw = carry_out(*values)
            printed.append(disk.enter_context(files_limited_to(limit)))
            return raw

        printed: list[io.StringIO] = []
        patch.setattr(compare, "carry_out", then_full)
        assert compare.main(arguments) == 1
    (error,) = printed[0].getvalue().splitlines()
    assert error.startswith("error: results cannot be written: [Errno 27] File too large")
    assert len(list((tmp_path / "runs").glob("*/run.json"))) == len(made) == 4
    assert compare.main(arguments) == 0
    assert len(made) == 4
    assert len(compare.read_results(tmp_path / "results" / "small.json")["outcomes"]) == 4


def test_a_folder_of_runs_that_cannot_be_made_is_one_line(tmp_path, capsys, made):
    path = small_comparison(tmp_path, seeds=[1])
    (tmp_path / "file").write_text("")
    assert compare.main([str(path), "--output", str(tmp_path), "--runs", str(tmp_path / "file" / "place")]) == 1
    (error,) = error_lines(capsys)
    assert error.startswith("error: results cannot be written: [Errno 20] Not a directory")


@pytest.mark.parametrize(("name", "lost"), [
    ("exchange_log.csv", ""), ("node_log.csv", ""), ("merge_log.csv", ""), ("training_log.csv", f"{ROUNDS},"),
])  # fmt: skip
def test_a_finished_run_whose_records_are_cut_is_no_outcome(tmp_path, made, name, lost):
    """A run without its exchanges would have too short a simulated time."""
    comparison = load_spec(small_comparison(tmp_path))
    run = make_run(comparison, comparison.methods[0], 1)
    runner = Runner(tmp_path / "runs", 1)
    runner.make([run], "small")
    path = made[0] / "run" / "model_training_report" / name
    header, *rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([header, *(row for row in rows if not row.startswith(lost))]))
    with pytest.raises(RunFolderError, match="its records are incomplete"):
        runner.data(run)


def test_damaged_records_of_a_finished_run_are_one_line(tmp_path, capsys, made):
    arguments = [str(small_comparison(tmp_path, seeds=[1])), "--runs", str(tmp_path / "runs")]
    assert compare.main([*arguments, "--output", str(tmp_path / "first")]) == 0
    path = made[0] / "run" / "model_training_report" / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"invocations": []}))
    capsys.readouterr()
    assert compare.main([*arguments, "--output", str(tmp_path / "second")]) == 1
    (error,) = error_lines(capsys)
    assert f"{made[0] / 'run'}: not a run folder, or damaged: IndexError" in error


def test_a_run_whose_summary_a_full_disk_has_kept_old_is_no_outcome(tmp_path, monkeypatch, made):
    def leave_it_running(program) -> int:
        path = made[-1] / "run" / "model_training_report" / "summary.json"
        path.write_text(path.read_text().replace('"completed"', '"running"'))
        return 0

    monkeypatch.setattr(subprocess.Popen, "wait", leave_it_running)
    comparison = load_spec(small_comparison(tmp_path))
    run = make_run(comparison, comparison.methods[0], 1)
    with pytest.raises(ComparisonError, match="AdLoCo, seed 1: its records are incomplete"):
        Runner(tmp_path / "runs", 1).make([run], "small")
    assert Runner(tmp_path / "runs", 1).data(run) is None


def test_two_programs_make_each_run_of_a_comparison_once(tmp_path, monkeypatch, made):
    """Both find that all runs are missing before either has begun."""
    comparison = load_spec(small_comparison(tmp_path))
    runs = [make_run(comparison, method, 1) for method in comparison.methods]
    both_looked = threading.Barrier(2, timeout=LIMIT_SECONDS)
    data = Runner.data
    looked = threading.local()

    def first_together(self, run):
        found = data(self, run)
        if run is runs[-1] and not hasattr(looked, "once"):
            looked.once = True
            if threading.current_thread() in programs:
                both_looked.wait()
        return found

    monkeypatch.setattr(Runner, "data", first_together)
    programs = [
        threading.Thread(target=lambda: Runner(tmp_path / "runs", 2).make(runs, "small"), daemon=True) for _ in range(2)
    ]
    for thread in programs:
        thread.start()
    for thread in programs:
        thread.join(LIMIT_SECONDS)
    assert sorted(made) == sorted(tmp_path / "runs" / run.id for run in runs)
    assert all(Runner(tmp_path / "runs", 1).data(run).summary["status"] == "completed" for run in runs)
