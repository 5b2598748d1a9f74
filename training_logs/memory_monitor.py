"""Memory use after every round, in `memory_log.csv`: the process, the host, and each device."""

import csv
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

COLUMNS = ("outer_step", "device", "used_bytes", "peak_bytes", "total_bytes")


class MemoryMonitor:
    """Appends one row per device and measurement.

    For the CPU, used is the resident memory of this process and peak the largest so far; for a GPU they are
    what PyTorch has allocated, now and at most. A device's label is its real id where the config gives one.
    """

    def __init__(self, folder: Path, devices: Sequence[torch.device], labels: Sequence[str] | None):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "memory_log.csv"
        names = [str(device) for device in devices]
        self._devices = list(zip(devices, labels if labels and len(labels) == len(names) else names, strict=True))
        self._process = psutil.Process()
        self._peak_rss = 0
        with self.path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(COLUMNS)

    def measure(self, outer_step: int) -> None:
        """Write the memory use as it is now."""
        resident = self._process.memory_info().rss
        self._peak_rss = max(self._peak_rss, resident)
        rows = [(outer_step, "process", resident, self._peak_rss, psutil.virtual_memory().total)]
        for device, label in self._devices:
            if device.type == "cuda":
                rows.append(
                    (
                        outer_step,
                        label,
                        torch.cuda.memory_allocated(device),
                        torch.cuda.max_memory_allocated(device),
                        torch.cuda.get_device_properties(device).total_memory,
                    )
                )
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)

    @property
    def peak_process_bytes(self) -> int:
        """Largest resident memory of this process at any measurement."""
        return self._peak_rss
