"""Memory under the limits of control groups, in files as the kernel writes them."""

from pathlib import Path

import psutil
import pytest

from utils.host_memory import host_memory

V1 = ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
V2 = ("max", "current", "inactive_file")


def write_group(folder: Path, files: tuple[str, str, str], limit: str, use: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"memory.{files[0]}").write_text(f"{limit}\n")
    (folder / f"memory.{files[1]}").write_text(f"{use}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{files[2]} {cache}\n")


@pytest.mark.parametrize(
    ("line", "top", "files"),
    [("0::/job_7/step", "sys/fs/cgroup", V2), ("4:memory:/job_7/step", "sys/fs/cgroup/memory", V1)],
)
def test_the_tightest_group_counts_without_its_cache(tmp_path, line, top, files):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"1:cpu:/x\n{line}\n")
    write_group(tmp_path / top / "job_7", files, limit="5000", use=1000, cache=200)
    write_group(tmp_path / top / "job_7/step", files, limit="6000", use=400, cache=0)
    assert host_memory(tmp_path) == (5000, 800)
    write_group(tmp_path / top, files, limit="4000", use=3000, cache=100)  # all that a container sees of its own group
    assert host_memory(tmp_path) == (4000, 2900)


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096)])
def test_without_a_limit_the_host_counts(tmp_path, limit):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    write_group(tmp_path / "sys/fs/cgroup/job", V2, limit=limit, use=1, cache=0)
    assert host_memory(tmp_path)[0] == psutil.virtual_memory().total


def test_without_control_groups_the_host_counts(tmp_path):
    assert host_memory(tmp_path)[0] == psutil.virtual_memory().total
