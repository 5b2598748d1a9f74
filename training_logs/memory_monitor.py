"""Memory use in `memory_log.csv`: the process, the host, and each device; at named stages and by a sampler."""

import csv
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from utils.utils import write_json_atomically

COLUMNS = ("seconds", "stage", "outer_step", "device", "allocated_bytes", "reserved_bytes", "peak_bytes", "total_bytes")


class MemoryMonitor:
    """Collects measurements, one row per device, and appends them when it is flushed.

    Of the process, allocated is its resident memory and peak the largest so far; of the host, what is in use. Of a GPU
    they are what PyTorch has allocated, reserved, and allocated at most. A device's label is its real id where the
    config gives one.

    Args:
        folder: receives memory_log.csv and, at the end, memory_summary.json.
        devices: those trained on.
        labels: one per device, or None for their names.
        every: seconds between samples in a thread of its own; None: stages only.
    """

    def __init__(
        self, folder: Path, devices: Sequence[torch.device], labels: Sequence[str] | None, every: float | None = None
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "memory_log.csv"
        self._summary_path = folder / "memory_summary.json"
        names = [str(device) for device in devices]
        self._devices = list(zip(devices, labels if labels and len(labels) == len(names) else names, strict=True))
        self._process, self._started = psutil.Process(), time.perf_counter()
        self._peaks: dict[str, dict] = {}
        self._rows: list[tuple] = []
        self._outer_step = 0
        self._lock, self._stop = threading.Lock(), threading.Event()
        with self.path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(COLUMNS)
        self._thread = None
        if every is not None:
            self._thread = threading.Thread(target=self._sample, args=(every,), name="memory sampler", daemon=True)
            self._thread.start()

    def _sample(self, every: float) -> None:
        while not self._stop.wait(every):
            self._measure("sample")

    def _use(self) -> list[tuple[str, int, int, int, int]]:
        resident, host = self._process.memory_info().rss, psutil.virtual_memory()
        uses = [
            ("process", resident, resident, resident, host.total),
            ("host", host.total - host.available, host.total - host.available, 0, host.total),
        ]
        for device, label in self._devices:
            if device.type == "cuda":
                uses.append(
                    (
                        label,
                        torch.cuda.memory_allocated(device),
                        torch.cuda.memory_reserved(device),
                        torch.cuda.max_memory_allocated(device),
                        torch.cuda.get_device_properties(device).total_memory,
                    )
                )
        return uses

    def _measure(self, stage: str) -> None:
        with self._lock:
            seconds = time.perf_counter() - self._started
            for device, allocated, reserved, peak, total in self._use():
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
                self._rows.append((round(seconds, 3), *row))

    def measure(self, stage: str, outer_step: int) -> None:
        """Take the memory use as it is now, under the name of a stage, and write what was collected."""
        self._outer_step = outer_step
        self._measure(stage)
        with self._lock:
            rows, self._rows = self._rows, []
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)

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
