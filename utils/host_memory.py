"""The memory of the host that a process may use: containers and Slurm limit it by control groups."""

from collections.abc import Iterator
from pathlib import Path

import psutil

# By the controllers of a line of /proc/self/cgroup, so in versions 2 and 1: the folder; the files with the limit and
# the use; the part of the use that is page cache, which the kernel drops when memory is needed.
_CONTROL_GROUPS = {
    "": (".", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Return the bytes of memory that this process may use, and those in use: the host's or a control group's."""
    host = psutil.virtual_memory()
    uses = [(host.total, host.total - host.available), *_limits(root)]
    return min(uses, key=lambda use: use[0] - use[1])


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the use of every control group above this process that limits its memory."""
    groups = root / "proc/self/cgroup"
    for line in groups.read_text(encoding="utf-8").splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in _CONTROL_GROUPS:
            continue
        folder, *files = _CONTROL_GROUPS[controllers]
        group = Path(path)  # in a container it may be a path of the host; the top is the container's own group then
        for place in (group, *group.parents):
            try:
                yield _limit_and_use(root / "sys/fs/cgroup" / folder / place.relative_to("/"), *files)
            except (OSError, ValueError, KeyError):  # no such group, no limit or no statistics
                continue


def _limit_and_use(group: Path, limit: str, use: str, cache: str) -> tuple[int, int]:
    """Return the bytes of a group's limit and use; ValueError: it has no limit."""
    statistics = dict(entry.split() for entry in (group / "memory.stat").read_text().splitlines())
    return int((group / limit).read_text()), int((group / use).read_text()) - int(statistics[cache])
