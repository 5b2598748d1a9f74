"""What processes, synchronisations and checkpoints cost: python benchmarks/scaling.py [--parts ...].

- processes: tokens/s of the demo's training on this machine with one process and a thread per core, with one process
  and one thread, and with two processes of one thread each; runs of the program itself, interleaved.
- synchronisation: seconds, and bytes sent, of the mean of 100M parameters over two processes, for every encoding,
  summed in worker order and with one all-reduce; encoding and decoding included.
- checkpoint: GB/s of writing and reading one, checksums and fsync included, beside copying the same bytes to a file
  with fsync; and of the copy in memory, for which training stands still.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from utils.checkpoint import Checkpoints, newest_checkpoint
from utils.compression import COMMUNICATION_DTYPES
from utils.distributed import LocalProcesses, meet
from utils.launch import Launch, cores

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


def tokens_per_second(processes: int, threads: int, rounds: int, folder: Path) -> float:
    """Of a short run of the demo's model with four trainers whose batches stay as they are."""
    values = {
        "processes": processes,
        "cpu_threads": threads,
        "number_of_outer_steps": rounds,
        "sequence_length": 128,
        "vocab_size": 2048,
        "INITIAL_BATCH_SIZE": 8,
        "sampling_method": "none",
        "merge_frequency": 10**6,
        "clearml": "off",
        "memory_sample_seconds": "null",
        "log_dir": str(folder / f"{processes}_{threads}_{time.time_ns()}"),
    }
    command = [sys.executable, "run.py", *(f"{key}={value}" for key, value in values.items())]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (summary,) = Path(values["log_dir"]).glob("*/model_training_report/summary.json")
    return json.loads(summary.read_text())["tokens_per_second"]


def compare_processes(repeats: int, rounds: int) -> None:
    settings = [(1, cores()), (1, 1), (2, 1)]
    speeds: dict[tuple[int, int], list[float]] = {setting: [] for setting in settings}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeats):
            for setting in settings:
                speeds[setting].append(tokens_per_second(*setting, rounds, Path(folder)))
    print(f"\n{'4 trainers of batch 8':36} {'tokens/s':>10}   against the first (median of pairs; all)")
    for setting, values in speeds.items():
        pairs = sorted(value / first for value, first in zip(values, speeds[settings[0]], strict=True))
        name = f"{setting[0]} process(es) of {setting[1]} thread(s)"
        shown = " ".join(f"{pair:.2f}" for pair in pairs)
        print(f"{name:36} {statistics.median(values):>10,.0f}   {statistics.median(pairs):.2f} ({shown})")


def measure_synchronisation(parameters: int, repeats: int, launch: Launch | None) -> None:
    """One of two processes: time the mean over two workers, one in each."""
    torch.set_num_threads(1)
    results = []
    processes = meet(launch)
    processes.place([CPU], 2, True)
    like = torch.zeros(parameters)
    tensor = torch.randn(parameters, generator=torch.Generator().manual_seed(0)) * 1e-3
    for name, encoding in COMMUNICATION_DTYPES.items():
        for in_order in (True, False) if encoding.lossless else (True,):
            processes._in_order = in_order
            workers, times = processes.workers([0, 1]), []
            for repeat in range(repeats + 1):
                processes.gather(None)
                started = time.perf_counter()
                rows = encoding.encode(tensor)
                workers.mean(((index, rows) for index in workers.local_workers), like, encoding)
                if repeat:
                    times.append(time.perf_counter() - started)
            results.append((name, in_order, times, encoding.reduction_bytes(2, parameters, torch.float32)))
    if processes.is_main:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(f"\nmean of {parameters:,} parameters over two processes on this machine (median; all):")
        for name, in_order, times, sent in results:
            how = "in worker order" if in_order else "one all-reduce"
            shown = " ".join(f"{value:.2f}" for value in sorted(times))
            print(f"  {name:9} {how:16} {statistics.median(times):6.2f} s ({shown}), {sent / 1e6:7.1f} MB sent by both")
        print(f"  peak memory of a process {peak / 4 / parameters:.1f} times the parameters")
    processes.close()


def measure_checkpoint(parameters: int, repeats: int) -> None:
    """A checkpoint of one trainer with one worker: parameters, momentum, and two moments."""
    groups = {
        "trainer_0": {name: torch.randn(parameters) for name in ("parameters", "velocity")},
        "trainer_0_worker_0": {name: torch.randn(parameters) for name in ("exp_avg", "exp_avg_sq")},
    }
    size = 4 * 4 * parameters
    times: dict[str, list[float]] = {"copy to a file": [], "stand still": [], "write": [], "verify": [], "read": []}
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        alone = LocalProcesses([CPU], 1)
        checkpoints = Checkpoints(Path(folder), 1, None, alone, print)
        for number in range(repeats):
            started = time.perf_counter()
            with (Path(folder) / "plain").open("wb") as file:
                for group in groups.values():
                    for tensor in group.values():
                        file.write(memoryview(tensor.numpy()).cast("B"))
                os.fsync(file.fileno())
            times["copy to a file"].append(time.perf_counter() - started)
            started = time.perf_counter()
            checkpoints.save(number, groups, {}, {})
            times["stand still"].append(time.perf_counter() - started)
            checkpoints.finish()
            times["write"].append(time.perf_counter() - started)
            started = time.perf_counter()
            checkpoint = newest_checkpoint(Path(folder), alone)
            times["verify"].append(time.perf_counter() - started)
            started = time.perf_counter()
            for group, tensors in groups.items():
                for name, tensor in tensors.items():
                    tensor.copy_(checkpoint.read(group, name))
            times["read"].append(time.perf_counter() - started)
    print(f"\ncheckpoint of {size / 1e9:.1f} GB (GB/s, median; all):")
    for name, values in times.items():
        speeds = sorted(size / 1e9 / value for value in values)
        print(f"  {name:15} {statistics.median(speeds):5.2f} ({' '.join(f'{speed:.2f}' for speed in speeds)})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = ("processes", "synchronisation", "checkpoint")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="default: all")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of everything (default: 5)")
    parser.add_argument("--rounds", type=int, default=4, help="of the runs whose tokens/s are taken (default: 4)")
    parser.add_argument("--parameters", type=int, default=100_000_000, help="of what is sent and written")
    parser.add_argument("--synchronisation", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.synchronisation:
        measure_synchronisation(*options.synchronisation, None)
        return
    if "processes" in options.parts:
        compare_processes(options.repeats, options.rounds)
    if "synchronisation" in options.parts:
        arguments = ["--synchronisation", str(options.parameters), str(options.repeats)]
        with Launch(2, [__file__, *arguments]) as launch:
            measure_synchronisation(options.parameters, options.repeats, launch)
    if "checkpoint" in options.parts:
        measure_checkpoint(options.parameters, options.repeats)


if __name__ == "__main__":
    main()
