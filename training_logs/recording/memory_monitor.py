"""Memory use of processes, host and GPUs: rows of memory_log.csv."""

from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from utils.host_memory import host_memory

# Name of a process or device; bytes allocated, reserved, allocated at most, and in all.
Use = tuple[str, int, int, int, int]


def memory_use(device: torch.device) -> list[Use]:
    """Measure the memory that this process uses on the host and on its device, if that is a GPU."""
    resident = psutil.Process().memory_info().rss
    uses = [("process", resident, resident, _peak_resident(resident), host_memory()[0])]
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        reserved = torch.cuda.memory_reserved(device)
        peak = torch.cuda.max_memory_allocated(device)
        total = torch.cuda.get_device_properties(device).total_memory
        uses.append((str(device), allocated, reserved, peak, total))
    return uses


def _peak_resident(resident: int) -> int:
    """The largest resident size of this process so far; outside Linux the present one."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    kilobytes = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return max([resident, *(1024 * size for size in kilobytes)])


def memory_rows(stage: str, outer_step: int, seconds: float, processes: Sequence[Sequence[Use]]) -> list[dict]:
    """Return one row of memory_log.csv per process or device.

    For a process "allocated" is resident memory; for the host, memory in use; for a GPU, PyTorch's allocations.

    processes: results of memory_use in the processes of the run; this one comes first.
    """
    memory, in_use = host_memory()
    uses = [("host", in_use, in_use, in_use, memory)]
    for number, own in enumerate(processes):
        for name, *use in own:
            device = f"{name} of process {number}" if number else name
            uses.append((f"process {number}" if name == "process" else device, *use))
    return [
        {
            "seconds": round(seconds, 3),
            "stage": stage,
            "outer_step": outer_step,
            "device": device,
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
            "peak_bytes": peak,
            "total_bytes": total,
        }
        for device, allocated, reserved, peak, total in uses
    ]
