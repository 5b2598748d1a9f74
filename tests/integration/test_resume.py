"""A run that was stopped, killed or moved to another number of processes ends as if it had not been."""

import dataclasses
import errno
import os
import random
import re
import shlex
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import run as program
from fabrics.config_checks import CHECKS
from tests.support import killed_in_round
from tests.support.helpers import make_config, warnings_of
from tests.support.programs import LIMIT_SECONDS
from tests.support.runs import assert_same_run, error_lines, rows_of, summary, write_config
from training_logs.recording.run_folder import check_logs, lock_run, make_run_folder
from utils.config.reading import parse_config
from utils.config.resume import resumed_config, training_changes
from utils.config.schema import ConfigError

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache_dir):
    """A run that was not stopped, with all its checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    config = write_config(folder, cache_dir, number_of_outer_steps=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("utils.checkpoint.checkpoint.KEPT", 9)
        assert program.main(["--config", str(config)]) == 0
    return next((folder / "logs").iterdir())


@pytest.fixture
def stopped(whole, tmp_path):
    """The same run, killed in round 6; its last checkpoint is after round 4."""
    folder = tmp_path / whole.name
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / "round_00006")
    for model in [*(folder / "model_weights").glob("trainer_?")]:  # of a trainer that has merged since
        model.rename(f"{model}9")
    with (folder / "model_training_report" / "training_log.csv").open("a") as file:
        file.write("6,0,4,")
    return folder


def test_a_resumed_run_equals_the_uninterrupted_run(stopped, whole):
    assert program.main(["--resume", str(stopped)]) == 0
    assert_same_run(stopped, whole)
    log = (stopped / "training_log.log").read_text()
    for step in range(1, 7):
        line = rf"round +{step} \( *\d+%\) \| trainer 0"
        expected = re.findall(line, (whole / "training_log.log").read_text())
        assert expected
        assert re.findall(line, log)[-len(expected) :] == expected
    assert "resumed after round 4" in log
    rows = rows_of(stopped / "memory_report" / "memory_log.csv")
    seconds = [float(row["seconds"]) for row in rows if row["device"] == "host"]
    assert seconds == sorted(seconds)


def test_a_resumed_run_on_two_processes_equals_the_uninterrupted_run_on_one(programs, stopped, whole):
    done = programs.run("run.py", "--resume", stopped, "processes=2")
    assert "2 processes" in (stopped / "training_log.log").read_text()
    assert_same_run(stopped, whole, besides=("processes",))
    assert ",process 1," in (stopped / "memory_report" / "memory_log.csv").read_text()
    begun, resumed = summary(stopped)["invocations"]
    assert begun == summary(whole)["invocations"][0]
    assert (resumed["first_round"], resumed["processes"]) == (5, 2)
    assert shlex.split(resumed["command"])[1:] == done.args[1:]


LACKS_TENSORS = "distributed_algo, inner_optimizer, communication_dtype, message_loss: the run has no "


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["ETA=0.9"], "ETA: was 0.4, now 0.9; that changes how the run trains: --force allows it"),
        (["training_seed=1", "--force"], "training_seed: cannot change in a run that has begun, was 42, got 1"),
        (["ETAA=0.9"], "ETAA: unknown key; did you mean ETA?"),
        (["dataset=text", "text_files=[README.md]", "--force"], "dataset: cannot change in a run that has begun, was"),
        (["sequence_length=16", "--force"], "the checkpoint is of a run on other data"),
        (["model_config.num_hidden_layers=2", "--force"], "the checkpoint is of a model with"),
        (["communication_dtype=int4", "number_of_outer_steps=9", "--force"], LACKS_TENSORS),
        (["distributed_algo=Synchronous", "number_of_outer_steps=9", "--force"], LACKS_TENSORS),
        (["inner_optimizer=muon", "number_of_outer_steps=9", "--force"], LACKS_TENSORS),
    ],
)
def test_a_run_that_cannot_be_resumed_is_left_as_it_was(whole, capsys, overrides, expected):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.name != ".lock"}
    assert program.main(["--resume", str(whole), *overrides]) == 2
    (error,) = error_lines(capsys)
    assert expected in error
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.name != ".lock"} == before


def test_force_allows_changes_and_the_summary_records_them(stopped):
    assert program.main(["--resume", str(stopped), "ETA=0.9", "--force"]) == 0
    assert warnings_of(stopped) == ["resumed with another ETA: was 0.4, now 0.9"]
    assert "ETA: 0.9" in (stopped / "config.yaml").read_text()


def test_a_folder_without_a_run_or_a_checkpoint_is_refused(whole, tmp_path, capsys):
    (tmp_path / "link").symlink_to(whole)  # which only a run's folder must not have
    assert program.main(["--resume", str(tmp_path)]) == 2
    assert f"error: --resume: {tmp_path} is not a run folder: it has no config.yaml" in capsys.readouterr().err
    (tmp_path / "link").unlink()
    shutil.copy(whole / "config.yaml", tmp_path)
    assert program.main(["--resume", str(tmp_path)]) == 2
    assert "no checkpoint in" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        program.main(["--resume", str(tmp_path), "--config", "config.yaml"])


def test_one_process_at_a_time_trains_a_run(stopped, capsys):
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file() and path.name != ".lock"}

    before = files()
    with lock_run(stopped):
        assert program.main(["--resume", str(stopped)]) == 2
    assert "another process is training this run" in capsys.readouterr().err
    assert files() == before


def test_a_process_that_is_about_to_end_is_waited_for(tmp_path, monkeypatch):
    holding, waiting = threading.Event(), threading.Event()

    def hold():
        with lock_run(tmp_path):
            holding.set()
            waiting.wait(LIMIT_SECONDS)

    holder = threading.Thread(target=hold)
    holder.start()
    holding.wait(LIMIT_SECONDS)
    monkeypatch.setattr("training_logs.recording.run_folder.logger", SimpleNamespace(info=lambda *words: waiting.set()))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a restart by torchrun")
    with lock_run(tmp_path):
        monkeypatch.delenv("TORCHELASTIC_RUN_ID")
        with pytest.raises(ConfigError, match="another process"):
            lock_run(tmp_path)
    assert waiting.is_set()
    holder.join()


def test_runs_are_resumed_on_file_systems_without_locks(tmp_path, monkeypatch):
    def unknown(*arguments):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", unknown)
    with lock_run(tmp_path), lock_run(tmp_path):
        pass


def test_resume_auto_begins_a_run_and_then_continues_it(tmp_path, cache_dir, capsys):
    unnamed = str(write_config(tmp_path, cache_dir))
    assert program.main(["--config", unnamed, "--resume", "auto"]) == 2
    assert "error: run_name: " in capsys.readouterr().err
    config = str(write_config(tmp_path, cache_dir, run_name="a mine", number_of_outer_steps=1, save_weights_every=None))
    arguments = ["--config", config, "--resume", "auto"]
    assert program.main(arguments) == 0
    folder = tmp_path / "logs" / "a mine"
    assert program.main([*arguments, "number_of_outer_steps=2"]) == 0
    assert summary(folder)["outer_steps"] == 2
    assert [each["first_round"] for each in summary(folder)["invocations"]] == [1, 2]
    # Another value in the file is what --resume makes of it on the command line.
    write_config(tmp_path, cache_dir, run_name="a mine", number_of_outer_steps=3, ETA=0.5)
    assert program.main(arguments) == 2
    assert "error: ETA: was 0.4, now 0.5; that changes how the run trains" in capsys.readouterr().err
    write_config(tmp_path, cache_dir, run_name="a mine", number_of_outer_steps=3, save_weights_every=None)
    assert program.main(arguments) == 0
    assert summary(folder)["outer_steps"] == 3
    assert "number_of_outer_steps: 3" in (folder / "config.yaml").read_text()
    assert program.main(arguments) == 0
    assert "resumed after round 3, the last: nothing is left to train" in (folder / "training_log.log").read_text()
    assert (summary(folder)["outer_steps"], summary(folder)["status"]) == (3, "completed")
    write_config(tmp_path, cache_dir, run_name="a mine", number_of_outer_steps=1, save_weights_every=None)
    assert program.main(["--config", config]) == 2
    error = f"run_name: {folder} exists; choose another name, remove it, or "
    assert f"{error}continue it with --resume '{folder}'" in capsys.readouterr().err
    # A run without a checkpoint starts again; its old logs are kept.
    shutil.rmtree(folder / "checkpoints")
    assert program.main(["--config", config]) == 2
    assert f"{error}start with --resume auto" in capsys.readouterr().err
    assert program.main(arguments) == 0
    assert summary(folder)["outer_steps"] == 1
    assert summary(tmp_path / "logs" / "a mine_2")["outer_steps"] == 3


def test_resume_auto_sets_no_run_aside_that_has_made_a_checkpoint_since_it_was_started(tmp_path):
    config = make_config(log_dir=str(tmp_path), run_name="mine")
    (make_run_folder(config, "text") / "checkpoints" / "round_00001").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"^run_name: .*mine has a checkpoint since this run was started"):
        make_run_folder(config, "text")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_two_runs_that_begin_under_one_name_at_once_do_not_share_it(tmp_path, monkeypatch):
    config = make_config(log_dir=str(tmp_path), run_name="mine")
    make_run_folder(config, "text")
    rename = Path.rename

    def rename_and_make(path, target):
        rename(path, target)
        path.mkdir()  # by the other one

    monkeypatch.setattr(Path, "rename", rename_and_make)
    with pytest.raises(ConfigError, match="mine: another run has just made it"):
        make_run_folder(config, "text")


def test_resume_auto_starts_as_many_processes_as_the_run_has_nodes_for(stopped, monkeypatch, tmp_path):
    """Without --config, the run's own configuration counts, not config.yaml."""
    started = []
    monkeypatch.setattr(program, "start_processes", lambda config, *more: started.append(config) or pytest.fail("on"))
    with pytest.raises(pytest.fail.Exception):
        program.main(["--resume", "auto", f"log_dir={stopped.parent}", f"run_name={stopped.name}"])
    with pytest.raises(pytest.fail.Exception):
        program.main(["--resume", "auto", f"log_dir={stopped.parent}", "run_name=new"])
    assert started == [stopped / "config.yaml", Path("config.yaml")]


def test_a_folder_that_a_dying_process_removes_does_not_stop_a_resume(stopped, monkeypatch):
    leaving = stopped / "checkpoints" / ".round_00009.new"
    leaving.mkdir()
    scandir = os.scandir

    def scan(path):
        if Path(path) == leaving:
            leaving.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    resumed_config(stopped, (), force=False, checks=CHECKS)
    assert not leaving.exists()


@pytest.mark.parametrize("name", ["mine/notes.txt", "mine"])
def test_resume_auto_renames_nothing_that_is_no_run(tmp_path, cache_dir, capsys, name):
    file = tmp_path / "logs" / name
    file.parent.mkdir(parents=True)
    file.write_text("of the user")
    config = str(write_config(tmp_path, cache_dir, run_name="mine"))
    assert program.main(["--config", config, "--resume", "auto"]) == 2
    assert f"error: run_name: {tmp_path / 'logs' / 'mine'} is not the folder of a run" in capsys.readouterr().err
    assert file.read_text() == "of the user"
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["mine"]


def test_a_start_takes_the_name_of_one_that_was_interrupted_before_its_first_file(tmp_path):
    config = make_config(log_dir=str(tmp_path), run_name="mine")
    (tmp_path / "mine").mkdir()
    check_logs(config, anew=True)
    assert make_run_folder(config, "text") == tmp_path / "mine"


def test_another_log_dir_moves_no_run(whole):
    _, (warning,) = resumed_config(whole, ["log_dir=elsewhere"], False, CHECKS)
    assert warning.startswith("log_dir: has no effect with --resume")


def test_a_run_folder_cannot_make_the_run_write_elsewhere(stopped, tmp_path, capsys):
    """A foreign folder may try it by its configuration or by a link."""
    with (stopped / "config.yaml").open("a") as file:
        file.write("log_file: ../../precious\nmodel_weights_dir: /precious\n")
    _, warnings = resumed_config(stopped, [], False, CHECKS)
    assert [warning.split(":")[0] for warning in warnings] == ["log_file", "model_weights_dir"]
    precious = tmp_path / "precious"
    precious.write_text("mine")
    log = stopped / "training_log.log"
    log.unlink()
    log.symlink_to(precious)
    assert program.main(["--resume", str(stopped)]) == 2
    assert f"error: {log}: is a link" in capsys.readouterr().err
    assert precious.read_text() == "mine"
    log.unlink()
    reports = stopped / "model_training_report"
    reports.rename(tmp_path / "reports")
    reports.symlink_to(tmp_path / "reports")
    assert program.main(["--resume", str(stopped)]) == 2
    assert f"error: {reports}: is a link" in capsys.readouterr().err


def test_links_within_a_run_folder_are_no_obstacle(stopped):
    """W&B makes them, in its own folder."""
    store = stopped / "wandb" / "wandb"
    (store / "offline-run-1").mkdir(parents=True)
    (store / "latest-run").symlink_to("offline-run-1")
    resumed_config(stopped, [], False, CHECKS)


def test_which_changes_need_force():
    def config(**values):
        return parse_config({"number_of_outer_steps": 3} | values)[0]

    def changes(before, after):
        return [line.split(":")[0] for line in training_changes(before, after)]

    assert training_changes(config(), config(gradient_clipping=None)) == ["gradient_clipping: was 1.0, now null"]
    assert changes(config(loss_chunk_tokens=256), config()) == ["loss_chunk_tokens"]
    assert changes(config(loss_chunk_tokens=256), config(memory="auto")) == []  # it chooses as at the start
    harmless = config(processes=3, clearml="off", number_of_outer_steps=9, eval_every=2)
    assert changes(config(), harmless) == []
    assert changes(config(), config(nu=1, max_batch_growth=4, communication_dtype="int8")) == [
        *("communication_dtype", "nu", "max_batch_growth")
    ]


def test_moments_of_another_optimizer_are_refused(tmp_path, cache_dir, capsys):
    values = {"inner_optimizer": "muon", "number_of_outer_steps": 1}
    assert program.main(["--config", str(write_config(tmp_path, cache_dir, **values))]) == 0
    (folder,) = (tmp_path / "logs").iterdir()
    assert program.main(["--resume", str(folder), "inner_optimizer=adamw", "number_of_outer_steps=2", "--force"]) == 2
    (error,) = error_lines(capsys)
    assert "inner_optimizer, distributed_algo: " in error


def test_a_run_that_is_given_more_time_keeps_the_method_that_was_chosen(tmp_path, cache_dir):
    """One worker makes outer steps only if it has time for a hundred rounds; others keep other tensors."""
    values = {"objective": "time", "time_budget": 1.0, "node_speeds": [100] * 4, "nodes_per_gpu": 4, "link": "1b/s"}
    values |= {"number_of_initial_trainers": 1, "number_of_outer_steps": None, "sampling_method": "none"}
    assert program.main(["--config", str(write_config(tmp_path, cache_dir, **values))]) == 0
    (folder,) = (tmp_path / "logs").iterdir()
    assert program.main(["--resume", str(folder), "time_budget=60", "number_of_outer_steps=30", "--force"]) == 0
    log = (folder / "training_log.log").read_text()
    assert len(re.findall("on Synchronous, 1 worker", log)) == 2
    assert "DiLoCo, 1 worker" not in log


@pytest.mark.parametrize(
    ("values", "matters"),
    [
        ({}, False),
        ({"ETA_at_end": 0.5}, True),  # eta changes over the run
        ({"sampling_method": "none"}, False),  # no test reads eta
        ({"sampling_method": "none", "batch_schedule": [[0.5, 32]]}, True),
        ({"learning_rate_schedule": "cosine"}, True),
    ],
)
@pytest.mark.parametrize("length", ["number_of_outer_steps", "number_of_training_epochs", "max_tokens"])
def test_another_length_is_refused_if_training_depends_on_progress(values, matters, length):
    before = parse_config({"number_of_outer_steps": 3} | values)[0]
    after = dataclasses.replace(before, **{length: 9})
    assert [line.split(":")[0] for line in training_changes(before, after)] == [length] * matters


# Signals


@pytest.fixture(scope="module")
def unsaved(tmp_path_factory, cache_dir):
    """A run that was not stopped, and saved nothing before its end."""
    folder = tmp_path_factory.mktemp("unsaved")
    assert program.main(["--config", str(write_config(folder, cache_dir, save_weights_every=None))]) == 0
    return next((folder / "logs").iterdir())


@pytest.mark.parametrize(("name", "processes"), [("SIGINT", 1), ("SIGTERM", 2)])
def test_a_signal_ends_the_round_writes_a_checkpoint_and_says_how_to_resume(
    programs, unsaved, tmp_path, cache_dir, name, processes
):
    config = write_config(tmp_path, cache_dir, save_weights_every=None, number_of_outer_steps=9)
    own = ["--config", config, f"processes={processes}"]
    done = programs.run("tests/support/killed_in_round.py", name, 0, *own, status=130)
    (folder,) = (tmp_path / "logs").iterdir()
    assert f"{name}: stopping after this round" in done.stderr
    assert f"python run.py --resume {folder}" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert summary(folder)["outer_steps"] == killed_in_round.ROUND
    assert summary(folder)["status"] == "interrupted"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"round_{killed_in_round.ROUND:05d}"]
    assert program.main(["--resume", str(folder), "number_of_outer_steps=5", "processes=1"]) == 0
    assert_same_run(folder, unsaved)


@pytest.mark.parametrize(
    ("signalled", "values"),
    [
        (0, {"processes": 1}),
        (1, {"processes": 2}),
        (1, {"processes": 2, "devices_per_node": 2}),  # the other device waits in the middle of a pass
    ],
)
def test_a_signal_in_a_long_round_ends_the_run_in_it_with_the_last_checkpoint(
    programs, whole, tmp_path, cache_dir, signalled, values
):
    """One process gets the signal, and leaves after its inner step; the others end as well."""
    (tmp_path / "long.py").write_text("from utils.distributed import signals\n\nsignals.ROUND_SECONDS = 0.0\n")
    values = values | {"number_of_outer_steps": 6, "plugins": [str(tmp_path / "long.py")], "run_name": "mine"}
    config = write_config(tmp_path, cache_dir, **values)
    done = programs.run("tests/support/killed_in_round.py", "SIGTERM", signalled, "--config", config, status=130)
    folder = tmp_path / "logs" / "mine"
    said = done.stdout + done.stderr
    assert "stopped in a round" in said
    assert f"python run.py --resume {folder}" in done.stdout
    assert not re.search("Traceback|error:", said)
    assert summary(folder)["status"] == "interrupted"
    assert summary(folder)["outer_steps"] == killed_in_round.ROUND - 1
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["round_00002"]
    if values["processes"] == 1:
        programs.run("run.py", "--config", config, "--resume", "auto")
        assert_same_run(folder, whole)


# Killed


def test_a_run_killed_six_times_gives_the_same_weights(programs, tmp_path, cache_dir):
    """Killed while it loads, while it writes models, logs or a checkpoint, and while it trains.

    Each of two workers of a trainer has a replica, and after every round a fragment is on its way.
    """
    values = {
        "distributed_algo": "StreamingDiLoCo",
        "synchronisation": {"fragments": 2, "delay": 1},
        "number_of_outer_steps": 16,
        "number_of_initial_trainers": 2,
        "nodes_per_gpu": 4,
        "val_size": 10,
        "save_weights_every": 1,
        "max_requested_batch": 16,
        "merge_frequency": 10,
    }
    config, logs = write_config(tmp_path, cache_dir, **values), tmp_path / "logs"
    generator, rounds = random.Random(1), []
    for _ in range(6):
        begun = list(logs.glob("*"))
        rounds.append(max((int(path.name[6:]) for path in logs.glob("*/checkpoints/round_*")), default=0))
        if begun and not rounds[-1]:
            shutil.rmtree(begun.pop())
        arguments = ["--resume", *begun] if begun else ["--config", config]
        # A round opens about a hundred files and takes longer than these microseconds.
        moment = [generator.randrange(1, 240), generator.randrange(1, 20_000)]
        programs.run("tests/support/killed.py", logs, *moment, "run.py", *arguments, status=-signal.SIGALRM)
    assert rounds[0] == 0
    assert len(set(rounds)) >= 3
    (folder,) = logs.iterdir()
    assert program.main(["--resume", str(folder)]) == 0
    assert program.main(["--config", str(config), f"log_dir={tmp_path / 'whole'}"]) == 0
    assert_same_run(folder, next((tmp_path / "whole").iterdir()))
