"""Where a run goes on that torchrun has started again: what one process finds, all do."""

import os
from pathlib import Path

import pytest

from tests.threads import together
from utils.attempts import folder_to_resume, forget_attempt, remember_attempt
from utils.config import ConfigError
from utils.distributed import LocalProcesses


@pytest.fixture
def job(monkeypatch):
    """A function that makes this process one that torchrun started."""

    def start(run: str = "4711", restarts: int = 0) -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))

    start()
    return start


def run_folder(log_dir: Path, name: str, checkpoint: bool = True) -> Path:
    folder = log_dir / name
    (folder / "checkpoints" / "round_00001" if checkpoint else folder).mkdir(parents=True)
    return folder


def resumed(log_dir: Path, given: str | None = None) -> str | None:
    return folder_to_resume(LocalProcesses(), given, lambda: log_dir)


def test_a_restarted_run_goes_on_where_it_was(tmp_path, job):
    assert resumed(tmp_path / "logs") is None
    folder = run_folder(tmp_path / "logs", "mine")
    remember_attempt(folder)
    other = run_folder(tmp_path / "logs", "other")
    job("4712")
    remember_attempt(other)
    job(restarts=1)
    assert resumed(tmp_path / "logs") == str(folder)
    # From another machine, whose agent has another process id, and for a run that was itself resumed.
    assert resumed(tmp_path / "logs", "elsewhere") == str(folder)


def test_without_a_checkpoint_a_restarted_run_begins_anew(tmp_path, job):
    remember_attempt(run_folder(tmp_path, "mine", checkpoint=False))
    job(restarts=1)
    assert resumed(tmp_path) is None
    assert resumed(tmp_path, "given") == "given"


def test_a_new_job_of_the_same_name_does_not_go_on_with_the_one_before(tmp_path, job):
    remember_attempt(run_folder(tmp_path, "yesterday"))
    assert resumed(tmp_path) is None
    # It dies before it has a folder of its own.
    job(restarts=1)
    assert resumed(tmp_path) is None


def test_a_run_that_is_over_is_not_gone_on_with(tmp_path, job):
    folder = run_folder(tmp_path, "mine")
    remember_attempt(folder)
    forget_attempt(folder)
    job(restarts=1)
    assert resumed(tmp_path) is None


def test_jobs_without_a_name_are_told_apart_by_their_agents(tmp_path, job, monkeypatch):
    job("none")
    folder = run_folder(tmp_path, "mine")
    remember_attempt(folder)
    job("none", restarts=1)
    assert resumed(tmp_path) == str(folder)
    parent = os.getppid()
    monkeypatch.setattr(os, "getppid", os.getpid)
    assert parent != os.getppid()
    assert resumed(tmp_path) is None


def test_outside_of_torchrun_nothing_is_left_or_found(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    folder = run_folder(tmp_path, "mine")
    remember_attempt(folder)
    assert [path.name for path in folder.iterdir()] == ["checkpoints"]
    forget_attempt(folder)
    assert resumed(tmp_path, "given") == "given"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a folder away")
@pytest.mark.parametrize("whose", ["folder", "record"])
def test_what_somebody_else_has_left_is_not_followed(tmp_path, job, whose):
    folder = run_folder(tmp_path, "theirs")
    remember_attempt(folder)
    os.chown(folder if whose == "folder" else folder / ".torchrun", 65534, 65534)
    job(restarts=1)
    assert resumed(tmp_path) is None


def test_one_restarted_process_is_enough_and_all_take_the_main_process_s_folder(tmp_path, job, monkeypatch):
    folder = run_folder(tmp_path / "shared", "mine")
    remember_attempt(folder)
    # The machine of rank 1 was replaced: its agent begins to count, and it has another log folder and command line.
    monkeypatch.setattr("utils.attempts.restarted", lambda: next(restarts))
    restarts = iter([True, False, False])

    def work(process):
        log_dir = tmp_path / ("shared" if process.is_main else "empty")
        return folder_to_resume(process, None if process.is_main else "given", lambda: log_dir)

    assert together(3, work) == [str(folder)] * 3


def test_a_log_folder_that_cannot_be_told_is_everybodys_error(job):
    def unknown():
        raise ConfigError("log_dir: should be a valid string")

    def work(process):
        with pytest.raises(ConfigError, match="log_dir: should be"):
            folder_to_resume(process, None, unknown)

    together(2, work)
