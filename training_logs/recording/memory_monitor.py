"""Memory use of the process, the host and each device: rows of memory_log.csv at named stages, and peaks."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from training_logs.recording.csv_log import CsvLog
from utils.files import write_json_atomically

COLUMNS = ("seconds", "stage", "outer_step", "device", "allocated_bytes", "reserved_bytes", "peak_bytes", "total_bytes")
# Seconds between two samples, which see peaks between stages.
SAMPLE_SECONDS = 1.0

# Name of a process or device; bytes allocated, reserved, allocated at most, and in all.
Use = tuple[str, int, int, int, int]


def memory_use(devices: Sequence[torch.device]) -> list[Use]:
    """Measure the memory that this process uses on the host and on its GPUs."""
    resident = psutil.Process().memory_info().rss
    uses = [("process", resident, resident, resident, psutil.virtual_memory().total)]
    for device in devices:
        if device.type == "cuda":
            allocated = torch.cuda.memory_allocated(device)
            reserved = torch.cuda.memory_reserved(device)
            peak = torch.cuda.max_memory_allocated(device)
            total = torch.cuda.get_device_properties(device).total_memory
            uses.append((str(device), allocated, reserved, peak, total))
    return uses


class MemoryMonitor:
    """Writes memory_log.csv, one row per device and stage, and at the end memory_summary.json.

    For a process "allocated" is resident memory; for the host, memory in use; for a GPU, PyTorch's allocations. A
    thread samples between stages: samples count for peaks and have no rows. Other processes of the run are measured
    after rounds; their names end with their number.

    Args:
        folder: receives the files.
        devices: devices of this process.
        state: from state_dict, to continue.

    Raises:
        OSError: the log cannot be created or continued.
    """

    def __init__(
        self,
        folder: Path,
        devices: Sequence[torch.device],
        state: dict | None = None,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self._log = CsvLog(folder / "memory_log.csv", COLUMNS, state and state["log"])
        self._summary_path = folder / "memory_summary.json"
        self._devices = devices
        self._started = time.perf_counter() - (state["seconds"] if state else 0.0)
        # By device: peak_bytes, total_bytes, and stage, outer_step and seconds of the peak.
        self.peaks: dict[str, dict] = state["peaks"] if state else {}
        self._outer_step = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory sampler", daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._measure("sample", ())

    def _measure(self, stage: str, others: Sequence[Sequence[Use]]) -> list[tuple]:
        host = psutil.virtual_memory()
        in_use = host.total - host.available
        uses = list(memory_use(self._devices))
        uses.append(("host", in_use, in_use, 0, host.total))
        for number, theirs in enumerate(others, 1):
            for name, *use in theirs:
                label = f"{name} {number}" if name == "process" else f"{name} of process {number}"
                uses.append((label, *use))
        rows = []
        with self._lock:
            seconds = time.perf_counter() - self._started
            for device, allocated, reserved, peak, total in uses:
                largest = max(peak, allocated)
                if device not in self.peaks or largest > self.peaks[device]["peak_bytes"]:
                    self.peaks[device] = {
                        "peak_bytes": largest,
                        "stage": stage,
                        "outer_step": self._outer_step,
                        "seconds": seconds,
                        "total_bytes": total,
                    }
                peak_so_far = self.peaks[device]["peak_bytes"]
                rows.append(
                    (round(seconds, 3), stage, self._outer_step, device, allocated, reserved, peak_so_far, total)
                )
        return rows

    def measure(self, stage: str, outer_step: int, others: Sequence[Sequence[Use]] = ()) -> None:
        """Measure and write rows.

        Args:
            stage: name of the moment.
            outer_step: the last finished round.
            others: results of memory_use in the other processes.

        Raises:
            OSError: the rows could not be written, and wait for the next call.
        """
        self._outer_step = outer_step
        self._log.append(self._measure(stage, others))

    def state_dict(self) -> dict:
        with self._lock:
            peaks = {device: dict(peak) for device, peak in self.peaks.items()}
        return {"log": self._log.state_dict(), "seconds": time.perf_counter() - self._started, "peaks": peaks}

    def close(self) -> None:
        """Stop the sampler and write the summary."""
        self._stop.set()
        self._thread.join()
        write_json_atomically(self._summary_path, self.peaks)
