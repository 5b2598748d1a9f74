"""Origin of a run: for its start and every resume the command line, the code, the plugins and the machines.

The environment is not recorded: it may hold secrets. Without git, or outside a checkout, the commit is "unknown".
"""

import dataclasses
import datetime
import itertools
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from utils.config.plugins import Plugin
from utils.distributed.devices import identity
from utils.distributed.launch import cores
from utils.files import write_atomically

ROOT = Path(__file__).resolve().parents[2]
# An answer takes milliseconds; a disk that hangs must not stop the run.
_GIT_SECONDS = 20.0


@dataclass(frozen=True)
class Code:
    """The code of a run.

    Attributes:
        changed: whether files differ from the commit or Python files are untracked; None: unknown.
        difference: of the tracked files, in git's format.
    """

    commit: str
    changed: bool | None
    difference: bytes = b""


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Run git; None if it fails, hangs or is missing."""
    command = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def code_of(folder: Path = ROOT) -> Code:
    """Return the code in a folder; unknown if run.py in it is not tracked, as in a checkout of another project."""
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None or not _git(folder, "ls-files", "--error-unmatch", "--", "run.py"):
        return Code("unknown", None)
    # Whatever the user's settings of git are, `git apply` must understand it.
    form = ("--binary", "--unified=3", "--src-prefix=a/", "--dst-prefix=b/", "--no-ext-diff", "--no-textconv")
    difference = _git(folder, "diff", *form, "--no-color", "--relative", "HEAD", "--", ".")
    untracked = _git(folder, "ls-files", "--others", "--exclude-standard", "--", "*.py")
    if difference is None or untracked is None:
        return Code(commit.decode().strip(), None)
    return Code(commit.decode().strip(), bool(difference or untracked), difference)


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine(device: torch.device) -> dict:
    """Describe this machine and, if it is a GPU, the device that this process trains on, as JSON values."""
    gpus = {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpus[identity(device)] = {"name": properties.name, "memory_bytes": properties.total_memory}
    return {
        "host": platform.node(),
        "cpu": _cpu_model(),
        "usable_cores": cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "system": platform.platform(),
    }


def machines(processes: Iterable[Mapping]) -> list[dict]:
    """Group the results of `machine` of all processes by host, with all GPUs and the number of processes."""
    found: dict[str, dict] = {}
    for own in processes:
        entry = found.setdefault(own["host"], {**own, "gpus": {}, "processes": 0})
        entry["gpus"] |= own["gpus"]
        entry["processes"] += 1
    return [entry | {"gpus": list(entry["gpus"].values())} for entry in found.values()]


@dataclass(frozen=True)
class Origin:
    """The origin of a start or a resume. started: ISO 8601 with time zone."""

    command: str
    started: str
    code: Code
    machines: Sequence[Mapping]
    plugins: Sequence[Plugin] = ()

    @classmethod
    def of_this_program(
        cls, started: float, code: Code, processes: Iterable[Mapping], plugins: Sequence[Plugin] = ()
    ) -> "Origin":
        """Describe this program.

        Args:
            started: time.perf_counter() at the start of the program.
            processes: the result of `machine` in each process.
        """
        ago = datetime.timedelta(seconds=time.perf_counter() - started)
        when = (datetime.datetime.now().astimezone() - ago).isoformat(timespec="seconds")
        command = shlex.join([Path(sys.executable).name, *sys.argv])
        command = command.encode("utf-8", "backslashreplace").decode()  # file names may be bytes that are not UTF-8
        return cls(command, when, code, machines(processes), plugins)


class Invocations:
    """The start and the resumes of a run; the last entry is this one's.

    Args:
        folder: the run folder. It receives changes.patch; the second invocation writes changes_2.patch, and so on.
        state: the entries in the checkpoint that is resumed.
    """

    def __init__(self, folder: Path, origin: Origin, state: Sequence[dict] | None = None):
        self._folder = folder
        self._origin = origin
        self.entries: list[dict] = list(state or ())

    def changed_plugins(self) -> list[str]:
        """Return one line for each plugin that differs from the last invocation's; call it before `begin`."""
        if not self.entries:
            return []
        before = {Path(plugin["path"]).name: plugin["sha256"] for plugin in self.entries[-1]["plugins"]}
        now = {plugin.name: plugin.sha256 for plugin in self._origin.plugins}
        return [
            f"plugins: {name} has changed since the run was last started: SHA-256 {_short(before.get(name))} then, "
            f"{_short(now.get(name))} now"
            for name in before | now
            if before.get(name) != now.get(name)
        ]

    def begin(self, first_round: int) -> None:
        """Add this invocation, and write the difference of the code.

        Raises:
            OSError: the difference cannot be written; the entry is there.
        """
        code = self._origin.code
        numbers = itertools.count(len(self.entries) + 1)
        names = ("changes.patch" if number == 1 else f"changes_{number}.patch" for number in numbers)
        patch = next(name for name in names if not (self._folder / name).exists())
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
