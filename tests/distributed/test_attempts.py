"""Where a run goes on that torchrun has started again: what one process finds, all do."""

import os
import textwrap
import threading
from pathlib import Path

import pytest

from tests.support.threads import together
from utils.config.schema import ConfigError
from utils.distributed.attempts import agents_of, folder_to_resume, forget_attempt, remember_attempt
from utils.distributed.processes import LocalProcesses


@pytest.fixture
def job(monkeypatch):
    """A function that makes this process one that an agent of torchrun started; torchrun counts no restart."""

    def start(agent: str = "machine 17 3.50") -> None:
        monkeypatch.setattr("utils.distributed.attempts._agent", lambda: agent)

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "4711")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    start()
    return start


def run_folder(log_dir: Path, name: str, checkpoint: bool = True) -> Path:
    folder = log_dir / name
    (folder / "checkpoints" / "round_00001" if checkpoint else folder).mkdir(parents=True)
    return folder


def remembered(folder: Path) -> Path:
    remember_attempt(folder, agents_of(LocalProcesses()))
    return folder


def resumed(log_dir: Path, given: str | None = None) -> str | None:
    return folder_to_resume(LocalProcesses(), given, lambda: log_dir)


def test_a_run_that_is_started_again_goes_on_where_it_was(tmp_path, job):
    assert resumed(tmp_path / "logs") is None
    folder = remembered(run_folder(tmp_path / "logs", "mine"))
    job("machine 18 4.00")
    remembered(run_folder(tmp_path / "logs", "other"))
    job()
    for _ in range(2):  # machines have come or gone twice
        assert resumed(tmp_path / "logs") == str(folder)
    # For a run that was itself resumed.
    assert resumed(tmp_path / "logs", "elsewhere") == str(folder)


def test_the_agent_is_the_first_program_above_that_torchrun_did_not_start(programs, tmp_path, monkeypatch):
    """Once as the parent, once with a script in between; a second attempt finds what the first has left."""
    agent = """
        import os, subprocess, sys
        environment = os.environ | {"TORCHELASTIC_RUN_ID": "none"}
        attempt = [sys.executable, "-c", sys.argv[1]]
        for command in (attempt, ["sh", "-c", '"$@"; exit $?', "sh", *attempt]):
            subprocess.run(command, env=environment, check=True)
    """
    attempt = f"""
        from pathlib import Path
        from utils.distributed.attempts import agents_of, folder_to_resume, remember_attempt
        from utils.distributed.processes import LocalProcesses
        logs = Path({str(tmp_path)!r})
        print(folder_to_resume(LocalProcesses(), None, lambda: logs))
        remember_attempt(logs / "mine", agents_of(LocalProcesses()))
    """
    folder = run_folder(tmp_path, "mine")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for _ in range(2):  # two agents, as of two jobs of the same name
        result = programs.run("-c", textwrap.dedent(agent), textwrap.dedent(attempt))
        assert result.stdout.split() == ["None", str(folder)]


def test_without_a_checkpoint_a_restarted_run_begins_anew(tmp_path, job):
    remembered(run_folder(tmp_path, "mine", checkpoint=False))
    assert resumed(tmp_path) is None
    assert resumed(tmp_path, "given") == "given"


def test_jobs_of_the_same_name_leave_each_other_s_runs_alone(tmp_path, job):
    first = remembered(run_folder(tmp_path, "first"))
    job("machine 17 99.00")  # the process id was used again
    assert resumed(tmp_path) is None
    # It dies before it has a folder of its own.
    assert resumed(tmp_path) is None
    second = remembered(run_folder(tmp_path, "second"))
    assert resumed(tmp_path) == str(second)
    job()
    assert resumed(tmp_path) == str(first)


def test_a_run_that_is_over_is_not_gone_on_with(tmp_path, job):
    folder = remembered(run_folder(tmp_path, "mine"))
    forget_attempt(folder)
    assert resumed(tmp_path) is None


def test_outside_of_torchrun_nothing_is_left_or_found(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    folder = remembered(run_folder(tmp_path, "mine"))
    assert [path.name for path in folder.iterdir()] == ["checkpoints"]
    forget_attempt(folder)
    assert resumed(tmp_path, "given") == "given"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a folder away")
@pytest.mark.parametrize("whose", ["folder", "record"])
def test_what_somebody_else_has_left_is_not_followed(tmp_path, job, whose):
    folder = remembered(run_folder(tmp_path, "theirs"))
    assert resumed(tmp_path) == str(folder)
    os.chown(folder if whose == "folder" else folder / ".torchrun", 65534, 65534)
    assert resumed(tmp_path) is None


def test_one_agent_that_was_there_is_enough_and_all_take_the_main_process_s_folder(tmp_path, monkeypatch):
    folder = run_folder(tmp_path / "shared", "mine")
    remember_attempt(folder, ["a", "b"])
    names: dict[int, str] = {}
    monkeypatch.setattr("utils.distributed.attempts._agent", lambda: names[threading.get_ident()])

    def attempt(*agents):
        """With an agent for each process; only the main process's log folder and command line are right."""

        def work(process):
            names[threading.get_ident()] = agents[process.rank]
            log_dir = tmp_path / ("shared" if process.is_main else "empty")
            return folder_to_resume(process, None if process.is_main else "given", lambda: log_dir)

        return together(len(agents), work)

    # Machines are replaced one after the other, the main process's first; nobody of the last was there at first.
    for agents in (("c", "b", "b"), ("d", "c"), ("d",)):
        assert attempt(*agents) == [str(folder)] * len(agents)
    assert attempt("a", "b") == [None, None]


def test_a_log_folder_that_cannot_be_told_is_everybodys_error(job):
    def unknown():
        raise ConfigError("log_dir: should be a valid string")

    def work(process):
        with pytest.raises(ConfigError, match="log_dir: should be"):
            folder_to_resume(process, None, unknown)

    together(2, work)
