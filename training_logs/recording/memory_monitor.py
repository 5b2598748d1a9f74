"""Memory use in `memory_log.csv`: the process, the host, and each device; at named stages and by a sampler."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from training_logs.recording.append_log import AppendLog
from utils.utils import write_json_atomically

COLUMNS = ("seconds", "stage", "outer_step", "device", "allocated_bytes", "reserved_bytes", "peak_bytes", "total_bytes")

# So many rows before only half as many measurements are written.
ROWS = 20_000

# Of a process or device: its name, and bytes allocated, reserved, at most, and in all.
Use = tuple[str, int, int, int, int]


def memory_use(devices: Sequence[torch.device]) -> list[Use]:
    """What this process uses of the host's memory and of its GPUs'."""
    resident, total = psutil.Process().memory_info().rss, psutil.virtual_memory().total
    uses = [("process", resident, resident, resident, total)]
    for device in devices:
        if device.type == "cuda":
            uses.append(
                (
                    str(device),
                    torch.cuda.memory_allocated(device),
                    torch.cuda.memory_reserved(device),
                    torch.cuda.max_memory_allocated(device),
                    torch.cuda.get_device_properties(device).total_memory,
                )
            )
    return uses


class MemoryMonitor:
    """Collects measurements, one row per device, and appends them when it is flushed.

    Of the process, allocated is its resident memory and peak the largest so far; of the host, what is in use. Of a GPU
    they are what PyTorch has allocated, reserved, and allocated at most. A device's label is its real id where the
    config gives one. Other processes of the run are measured after rounds, and their rows end with their number.

    The log grows with the logarithm of the run: after ROWS rows only every second sample and every second round are
    written, after as many more every fourth, and so on. Peaks are of all measurements.

    Args:
        folder: receives memory_log.csv and, at the end, memory_summary.json.
        devices: those trained on.
        labels: one per device, or None for their names.
        every: seconds between samples in a thread of its own; None: stages only.
        state: from state_dict, to go on there.

    Raises:
        OSError: the log cannot be made, or not be continued.
    """

    def __init__(
        self,
        folder: Path,
        devices: Sequence[torch.device],
        labels: Sequence[str] | None,
        every: float | None = None,
        state: dict | None = None,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self._log = AppendLog(folder / "memory_log.csv", COLUMNS, state and state["log"])
        self._summary_path = folder / "memory_summary.json"
        names = [str(device) for device in devices]
        self._devices = devices
        self._labels = dict(zip(names, labels if labels and len(labels) == len(names) else names, strict=True))
        self._started = time.perf_counter() - (state["seconds"] if state else 0.0)
        self._peaks: dict[str, dict] = state["peaks"] if state else {}
        self._rows: list[tuple] = []
        # Of so many measurements of a stage one is written; rows since that was so; measurements by stage.
        self._every, self._written = (state["every"], state["written"]) if state else (1, 0)
        self._measured: Counter[str] = Counter(state["measured"] if state else {})
        self._outer_step = 0
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = None
        if every is not None:
            self._thread = threading.Thread(target=self._sample, args=(every,), name="memory sampler", daemon=True)
            self._thread.start()

    def _sample(self, every: float) -> None:
        while not self._stop.wait(every):
            self._measure("sample")

    def _measure(self, stage: str, others: Sequence[Sequence[Use]] = ()) -> None:
        host = psutil.virtual_memory()
        in_use = host.total - host.available
        uses = [(self._labels.get(name, name), *use) for name, *use in memory_use(self._devices)]
        uses.append(("host", in_use, in_use, 0, host.total))
        for number, theirs in enumerate(others, 1):
            uses += [
                (f"{name} {number}" if name == "process" else f"{name} of process {number}", *use)
                for name, *use in theirs
            ]
        with self._lock:
            seconds = time.perf_counter() - self._started
            shown = self._measured[stage] % self._every == 0
            self._measured[stage] += 1
            for device, allocated, reserved, peak, total in uses:
                known = self._peaks.get(device)
                reached = max(peak, allocated)
                if known is None or reached > known["peak_bytes"]:
                    self._peaks[device] = {
                        "peak_bytes": reached,
                        "stage": stage,
                        "outer_step": self._outer_step,
                        "seconds": seconds,
                        "total_bytes": total,
                    }
                row = (stage, self._outer_step, device, allocated, reserved, self._peaks[device]["peak_bytes"], total)
                if shown:
                    self._rows.append((round(seconds, 3), *row))

    def measure(self, stage: str, outer_step: int, others: Sequence[Sequence[Use]] = ()) -> OSError | None:
        """Take the memory use as it is now, under the name of a stage, and write what was collected.

        others: what the other processes of the run use, from memory_use. The error, if rows could not be written.
        """
        self._outer_step = outer_step
        self._measure(stage, others)
        with self._lock:
            rows, self._rows = self._rows, []
            self._written += len(rows)
            if self._written >= ROWS:
                self._every, self._written = 2 * self._every, 0
        return self._log.append(rows)

    def state_dict(self) -> dict:
        """Where the log stands, as JSON values."""
        return {
            "log": self._log.state_dict(),
            "seconds": time.perf_counter() - self._started,
            "peaks": self.peaks,
            "every": self._every,
            "written": self._written,
            "measured": dict(self._measured),
        }

    @property
    def peaks(self) -> dict[str, dict]:
        """Per device: peak_bytes so far, with stage, outer_step and seconds of when it was first seen, total_bytes."""
        return dict(self._peaks)

    def close(self) -> None:
        """Stop the sampler and write the summary."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        write_json_atomically(self._summary_path, self._peaks)
