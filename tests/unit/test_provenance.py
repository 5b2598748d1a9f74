"""A run can be traced: to its command line, its code and its machines, at its start and at every resume."""

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.support.helpers import CPU
from tests.support.programs import command
from training_logs.recording import provenance
from training_logs.recording.provenance import Code, Invocations, Origin, code_of, machine, machines

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder: Path, *arguments: str) -> str:
    identity = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    return command("git", "-C", folder, *arguments, env=os.environ | identity, check=True).stdout


@pytest.fixture
def checkout(tmp_path):
    """A project under git's control, as it was committed."""
    folder = tmp_path / "project"
    (folder / "package").mkdir(parents=True)
    (folder / "run.py").write_text("print(1)\n")
    (folder / "package" / "module.py").write_text("a = 1\nb = 2\n")
    (folder / ".gitignore").write_text("logs/\n")
    git(folder, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    return folder


def test_a_clean_checkout_is_its_commit(checkout):
    (checkout / "logs").mkdir()
    (checkout / "logs" / "made.py").write_text("ignored")
    (checkout / "notes.txt").write_text("no program")
    assert code_of(checkout) == Code(git(checkout, "rev-parse", "HEAD").strip(), False, b"")


def test_the_difference_gives_the_code_back(checkout, tmp_path):
    (checkout / "plot.png").write_bytes(bytes(range(256)))
    git(checkout, "add", "plot.png")
    git(checkout, "commit", "-m", "a binary file")
    git(checkout, "clone", ".", str(tmp_path / "again"))
    git(checkout, "config", "diff.noprefix", "true")
    git(checkout, "config", "diff.context", "0")
    (checkout / "plot.png").write_bytes(bytes(reversed(range(256))))
    (checkout / "run.py").write_text("print(2)\n")
    git(checkout, "add", "run.py")  # staged or not, it is not in the commit
    (checkout / "package" / "module.py").write_text("a = 1\n")
    found = code_of(checkout)
    assert (found.commit, found.changed) == (git(checkout, "rev-parse", "HEAD").strip(), True)
    (tmp_path / "changes.patch").write_bytes(found.difference)
    git(tmp_path / "again", "apply", str(tmp_path / "changes.patch"))
    for name in ("run.py", "package/module.py", "plot.png"):
        assert (tmp_path / "again" / name).read_bytes() == (checkout / name).read_bytes(), name


def test_a_new_file_alone_is_a_change(checkout):
    (checkout / "new.py").write_text("")
    assert code_of(checkout).changed is True


def test_a_checkout_that_merely_contains_the_program_says_nothing_about_it(checkout):
    inside = checkout / "vendor" / "program"
    inside.mkdir(parents=True)
    (inside / "run.py").write_text("print(1)\n")
    assert code_of(inside) == Code("unknown", None)
    git(checkout, "add", ".")
    git(checkout, "commit", "-m", "it is of the project now")
    (checkout / "run.py").write_text("somebody else's change\n")
    assert code_of(inside) == Code(git(checkout, "rev-parse", "HEAD").strip(), False)
    (inside / "run.py").write_text("print(2)\n")
    assert b"--- a/run.py\n+++ b/run.py\n" in code_of(inside).difference


def test_without_a_commit_or_a_checkout_it_is_unknown(tmp_path):
    (tmp_path / "run.py").write_text("")
    assert code_of(tmp_path) == Code("unknown", None)
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    assert code_of(tmp_path) == Code("unknown", None)


@pytest.mark.parametrize("program", [None, "exit 3", "sleep 1000 & sleep 1000"])
def test_git_that_is_missing_fails_or_hangs_costs_nothing_but_the_answer(checkout, tmp_path, monkeypatch, program):
    (tmp_path / "bin").mkdir()
    if program is not None:
        (tmp_path / "bin" / "git").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "bin" / "git").chmod(0o755)
    monkeypatch.setattr(provenance, "_GIT_SECONDS", 0.2)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}" + (f":{os.environ['PATH']}" if program else ""))
    assert code_of(checkout) == Code("unknown", None)


def test_processes_are_put_together_by_machine():
    gpus = {name: {"name": "H200", "memory_bytes": 5} for name in ("GPU-1", "GPU-2", "GPU-3")}

    def seen(host, *names):
        return {"host": host, "cpu": "x", "gpus": {name: gpus[name] for name in names}}

    everybody = [seen("a", "GPU-1", "GPU-2"), seen("a", "GPU-2"), seen("b", "GPU-3"), seen("a", "GPU-1")]
    assert machines(everybody) == [
        {"host": "a", "cpu": "x", "gpus": [gpus["GPU-1"], gpus["GPU-2"]], "processes": 3},
        {"host": "b", "cpu": "x", "gpus": [gpus["GPU-3"]], "processes": 1},
    ]


def entered(folder: Path, code: Code, first_round: int, state=None) -> Invocations:
    origin = Origin("python run.py", "2026-01-02T03:04:05+00:00", code, machines([machine(CPU)] * 2))
    invocations = Invocations(folder, origin, state)
    invocations.begin(first_round)
    return invocations


def test_every_resume_adds_its_own(tmp_path):
    first = entered(tmp_path, Code("c1", True, b"first"), 1)
    second = entered(tmp_path, Code("c1", False), 4, state=first.entries)
    assert (tmp_path / "changes.patch").read_bytes() == b"first"
    entries = entered(tmp_path, Code("c2", True, b"third"), 6, state=second.entries).entries
    assert [(e["first_round"], e["commit"], e["changed"], e["patch"], e["processes"]) for e in entries] == [
        (1, "c1", True, "changes.patch", 2),
        (4, "c1", False, None, 2),
        (6, "c2", True, "changes_3.patch", 2),
    ]
    assert (tmp_path / "changes.patch").read_bytes() == b"first"
    assert (tmp_path / "changes_3.patch").read_bytes() == b"third"
    # Another resume from the same checkpoint, because the last one was killed before its first.
    again = entered(tmp_path, Code("c2", True, b"fourth"), 6, state=second.entries)
    assert (again.entries[-1]["patch"], len(again.entries)) == ("changes_4.patch", 3)
    assert (tmp_path / "changes_3.patch").read_bytes() == b"third"


def test_a_command_with_a_name_that_is_not_utf8_can_be_written(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run.py", "--config", "b\udce9.yaml"])
    origin = Origin.of_this_program(time.perf_counter(), Code(None, False), [machine(CPU)])
    assert origin.command.encode().endswith(b"run.py --config 'b\\udce9.yaml'")
