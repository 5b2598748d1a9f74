"""Where a run comes from: for its start and every resume the command line, the code and the machines.

Nothing of the environment is written down: it may hold secrets. Git is asked four short questions, 30 ms together.
Without git, or where the program lies in no checkout, the commit is "unknown" and the run goes on.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from utils.config.plugins import Plugin
from utils.distributed.devices import identity
from utils.distributed.launch import cores
from utils.utils import write_atomically

ROOT = Path(__file__).resolve().parents[2]
UNKNOWN = "unknown"
# Of changes.patch, with the line that says that there is more.
LIMIT_BYTES = 1_000_000
_CUT = b"\n# cut here: this file holds at most 1 MB, and the difference is larger\n"
# An answer takes milliseconds; a disk that hangs must not keep the run.
_GIT_SECONDS = 20.0
# They would lead to another checkout than the one that the program lies in (inside a git hook they are set).
_MISLEADING = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")


# The code


@dataclass(frozen=True)
class Code:
    """The code that a run is made with.

    commit: of the checkout, or "unknown". changed: whether tracked files differ from it or there are Python files that
    it does not have; None where that is not known. difference: in git's format, with those files whole, LIMIT_BYTES at
    most.
    """

    commit: str
    changed: bool | None
    difference: bytes = b""


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _git(folder: Path, *arguments: str, limit: int = LIMIT_BYTES) -> bytes | None:
    """What git prints about a folder, so many bytes at most; None where it fails, hangs or is missing."""
    environment = {name: value for name, value in os.environ.items() if name not in _MISLEADING}
    try:
        process = subprocess.Popen(
            ["git", "-C", str(folder), "-c", "core.fsmonitor=false", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    except OSError:
        return None
    hung = threading.Timer(_GIT_SECONDS, _kill, (process.pid,))
    hung.daemon = True
    hung.start()
    try:
        with process:
            output = process.stdout.read(limit)
            if len(output) == limit:
                _kill(process.pid)
    finally:
        hung.cancel()
    return output if process.returncode == 0 or len(output) == limit else None


def _as_new(folder: Path, name: str) -> bytes:
    """An untracked file as git would show it, had it been added; empty where it cannot be read."""
    try:
        with (folder / name).open("rb") as file:
            text = file.read(LIMIT_BYTES)
    except OSError:
        return b""
    path = name.encode(errors="surrogateescape")
    head = b"diff --git a/%s b/%s\nnew file mode 100644\n" % (path, path)
    *lines, last = text.split(b"\n")
    if not text:
        return head
    tab = b"\t" if b" " in path else b""
    head += b"--- /dev/null\n+++ b/%s%s\n@@ -0,0 +1,%d @@\n" % (path, tab, len(lines) + bool(last))
    end = b"+" + last + b"\n\\ No newline at end of file\n" if last else b""
    return head + b"".join(b"+" + line + b"\n" for line in lines) + end


def code_of(folder: Path = ROOT) -> Code:
    """The code in a folder; unknown where git is missing, or where the folder is not itself under git's control.

    A checkout of another project that merely contains the folder says nothing about it.
    """
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None or not _git(folder, "ls-files", "--error-unmatch", "--", "run.py"):
        return Code(UNKNOWN, None)
    diff = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/", "--relative")
    difference = _git(folder, *diff, "HEAD", "--", ".", limit=LIMIT_BYTES + 1)
    untracked = _git(folder, "ls-files", "--others", "--exclude-standard", "-z", "--", "*.py")
    commit = commit.decode().strip()
    if difference is None or untracked is None:
        return Code(commit, None)
    names = (os.fsdecode(name) for name in untracked.split(b"\0") if name)
    # An environment inside the checkout is not of the project.
    for name in (name for name in names if "site-packages" not in Path(name).parts):
        if len(difference) <= LIMIT_BYTES:
            difference += _as_new(folder, name)
    changed = bool(difference)
    if len(difference) > LIMIT_BYTES:
        difference = difference[: LIMIT_BYTES - len(_CUT)] + _CUT
    return Code(commit, changed, difference)


# The machines


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine(devices: Iterable[torch.device]) -> dict:
    """The machine of this process with those of its devices that the process trains on, as JSON values."""
    gpus = {}
    for device in devices:
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            gpus[identity(device)] = {"name": properties.name, "memory_bytes": properties.total_memory}
    return {
        "host": platform.node(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def machines(processes: Iterable[Mapping]) -> list[dict]:
    """What `machine` says in each process, by machine: with how many processes, and all their GPUs as a list."""
    found: dict[str, dict] = {}
    for own in processes:
        key = json.dumps({name: value for name, value in own.items() if name != "gpus"})
        entry = found.setdefault(key, dict(own) | {"gpus": {}, "processes": 0})
        entry["gpus"] = entry["gpus"] | own["gpus"]
        entry["processes"] += 1
    return [entry | {"gpus": list(entry["gpus"].values())} for entry in found.values()]


# The run


@dataclass(frozen=True)
class Origin:
    """What a start or a resume of a run comes from. started: with the time zone, to the second."""

    command: str
    started: str
    code: Code
    machines: Sequence[Mapping]
    plugins: Sequence[Plugin] = ()

    @classmethod
    def of_this_program(
        cls, started: float, code: Code, processes: Iterable[Mapping], plugins: Sequence[Plugin] = ()
    ) -> "Origin":
        """started: time.perf_counter() at the start of the program. processes: of each what `machine` says."""
        ago = datetime.timedelta(seconds=time.perf_counter() - started)
        when = (datetime.datetime.now().astimezone() - ago).isoformat(timespec="seconds")
        command = shlex.join([Path(sys.executable).name, *sys.argv])
        return cls(command, when, code, machines(processes), plugins)


class Invocations:
    """The start and the resumes of a run, the last of which is this one's.

    Args:
        folder: the run folder, which receives changes.patch, of the second invocation changes_2.patch, and so on.
        summary: where the run's summary is, with the earlier invocations.
        origin: of this one; None: it is not recorded.
        state: the entries at the time of the checkpoint that is resumed; the summary may know of later ones.
    """

    def __init__(self, folder: Path, summary: Path, origin: Origin | None, state: Sequence[dict] | None = None):
        self._folder, self._origin = folder, origin
        self.entries: list[dict] = max(list(state or ()), _read(summary), key=len)

    def changed_plugins(self) -> list[str]:
        """In what the plugins differ from those of the invocation before, one line for each; before `begin`."""
        if self._origin is None or not self.entries:
            return []
        entries = self.entries[-1].get("plugins", ())  # a run from before there were plugins had none
        before = {Path(entry["path"]).name: entry["sha256"] for entry in entries}
        now = {plugin.name: plugin.sha256 for plugin in self._origin.plugins}
        return [
            f"plugins: {name} has changed since the run was last started: SHA-256 {_short(before.get(name))} then, "
            f"{_short(now.get(name))} now"
            for name in before | now
            if before.get(name) != now.get(name)
        ]

    def begin(self, first_round: int) -> None:
        """Enter this invocation, and write the difference.

        Raises:
            OSError: the difference cannot be written; the entry is there.
        """
        if self._origin is None:
            return
        code, number = self._origin.code, len(self.entries) + 1
        patch = "changes.patch" if number == 1 else f"changes_{number}.patch"
        entry = {
            "command": self._origin.command,
            "started": self._origin.started,
            "first_round": first_round,
            "commit": code.commit,
            "changed": code.changed,
            "patch": None,
            "plugins": [dataclasses.asdict(plugin) for plugin in self._origin.plugins],
            "processes": sum(machine["processes"] for machine in self._origin.machines),
            "hardware": [dict(machine) for machine in self._origin.machines],
        }
        self.entries.append(entry)
        if code.difference:
            write_atomically(self._folder / patch, lambda path: path.write_bytes(code.difference))
            entry["patch"] = patch


def _short(sha256: str | None) -> str:
    return "none" if sha256 is None else sha256[:16]


def _read(summary: Path) -> list[dict]:
    try:
        return list(json.loads(summary.read_text(encoding="utf-8"))["invocations"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
