"""Measure processes, shard groups, synchronisation and checkpoints: python benchmarks/performance/scaling.py [--parts
...].

- processes: tokens/s of the demo's training on this machine with one process and a thread per core, with one process
  and one thread, and with two processes of one thread each; runs of the program itself, interleaved, and with them
  the loop that a good engineer would write without a framework, with a thread per core.
- shard groups: likewise of one trainer, for each of two models, on one device, on two devices with a whole model
  each, on
  one shard group of two devices, and on two such shard groups. The third against the second is what it costs to share
  a model.
- synchronisation: seconds, and bytes sent, of the mean of 100M parameters over two processes, for every encoding,
  summed in worker order and with one all-reduce; encoding and decoding included.
- exchange: the same between two shard groups of two devices, each of which has its share of a model of so many
  parameters.
  What a process has written meanwhile, headers of messages included, is the system's count (Linux).
- checkpoint: GB/s of writing and reading one, checksums and fsync included, beside copying the same bytes to a file
  with fsync; and of the copy in memory, for which training stands still.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

from algorithms.synchronisation.encodings.encoding import COMMUNICATION_DTYPES
from benchmarks.performance.throughput import BareLoop, build_vocabulary, make_data, seconds
from fabrics.config_checks import CHECKS
from utils.checkpoint.checkpoint import Checkpoints, newest_checkpoint
from utils.config.reading import load_config
from utils.distributed.launch import Launch, cores
from utils.distributed.processes import LocalProcesses, Processes, meet

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


# Settings of every measured run: CPU, constant batches.
RUN = {
    "devices": "[cpu]",
    "sequence_length": 128,
    "vocab_size": 2048,
    "INITIAL_BATCH_SIZE": 8,
    "sampling_method": "none",
    "merge_frequency": 10**6,
    "clearml": "off",
}
ONE_TRAINER = {"number_of_initial_trainers": 1, "smallest_worker_batch": "null"}
# With a vocabulary of 2048.
_MODELS = {
    "0.22M parameters": {},
    "3.5M parameters": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4},
}


@dataclass(frozen=True)
class Setting:
    """How a run uses the machine.

    Attributes:
        nodes: nodes of the machine; None: those of config.yaml.
    """

    name: str
    processes: int = 1
    threads: int = 1
    devices_per_node: int = 1
    nodes: int | None = None

    def values(self) -> dict[str, int]:
        """Return the setting as configuration values."""
        found = {"processes": self.processes, "cpu_threads": self.threads, "devices_per_node": self.devices_per_node}
        return found if self.nodes is None else found | {"nodes_per_gpu": self.nodes}

    def tokens_per_second(self, values: dict, folder: Path) -> float:
        """Measure a short run of run.py."""
        log_dir = folder / str(time.time_ns())
        overrides = as_overrides(values | self.values() | {"log_dir": log_dir})
        subprocess.run([sys.executable, "run.py", *overrides], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        (summary,) = log_dir.glob("*/model_training_report/summary.json")
        return json.loads(summary.read_text())["tokens_per_second"]


class Bare(Setting):
    """The same model, batch and optimiser without the framework."""

    def tokens_per_second(self, values: dict, folder: Path) -> float:
        """Measure as many steps as all workers of the run make, after one round of warm-up."""
        # What a tokenizer would say that has learned from text.
        same = values | {"model_config.vocab_size": RUN["vocab_size"]}
        config, _ = load_config(ROOT / "config.yaml", as_overrides(same), CHECKS)
        of_round, threads = config.number_of_inner_steps_between_outers, torch.get_num_threads()
        steps = of_round * config.number_of_outer_steps * config.number_of_initial_trainers
        torch.set_num_threads(self.threads)
        bare = BareLoop(config, make_data(config, build_vocabulary(config)), CPU)
        bare.run(of_round)
        started = time.perf_counter()
        bare.run(steps)
        took = time.perf_counter() - started
        torch.set_num_threads(threads)
        return steps * config.INITIAL_BATCH_SIZE * config.sequence_length / took


PROCESSES = (
    Setting(f"1 process of {cores()} thread(s)", threads=cores()),
    Setting("1 process of 1 thread"),
    Setting("2 processes of 1 thread", 2),
    Bare(f"bare loop of {cores()} thread(s)", threads=cores()),
)
SHARD_GROUPS = (
    Setting("1 device", nodes=1),
    Setting("2 devices, a whole model each", 2, nodes=2),
    Setting("1 shard group of 2 devices", 2, devices_per_node=2, nodes=1),
    Setting("2 shard groups of 2 devices", 4, devices_per_node=2, nodes=2),
)


def as_overrides(values: dict) -> list[str]:
    """Return the command-line overrides of a measured run."""
    return [f"{key}={value}" for key, value in (RUN | values).items()]


def compare(title: str, settings: Sequence[Setting], values: dict, repeats: int) -> None:
    """Print the speeds of short runs, interleaved."""
    speeds: dict[Setting, list[float]] = {setting: [] for setting in settings}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeats):
            for setting in settings:
                speeds[setting].append(setting.tokens_per_second(values, Path(folder)))
    print(f"\n{title:36} {'tokens/s':>10}   against the first (median of pairs; all)")
    for setting, found in speeds.items():
        pairs = sorted(value / first for value, first in zip(found, speeds[settings[0]], strict=True))
        shown = " ".join(f"{pair:.2f}" for pair in pairs)
        print(f"{setting.name:36} {statistics.median(found):>10,.0f}   {statistics.median(pairs):.2f} ({shown})")


def written_bytes() -> int | None:
    """Return the bytes that this process has written so far (mostly to sockets); None: not counted by the system."""
    counts = Path("/proc/self/io")
    return int(re.search(r"wchar: (\d+)", counts.read_text())[1]) if counts.exists() else None


def share_of_model(parameters: int, processes: Processes) -> torch.Tensor:
    """The flat parameters of this process's device, of a model of ten layers with so many in all."""
    if processes.shard_group.size == 1:
        return torch.randn(parameters) * 1e-3
    from fabrics.sharding.sharded_model import ShardedModel

    # The first device of a node has the weights, and sends the others their parts.
    first = processes.shard_group.index == 0
    with torch.device("cpu" if first else "meta"):
        layers = [nn.Sequential(nn.Linear(1000, parameters // 10_000, bias=False)) for _ in range(10)]
        model = nn.Sequential(nn.ModuleList(layers))
    if first:
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=1e-3)
    drawn = ShardedModel(model, CPU, processes.shard_group)
    return drawn.parameters.detach()


@dataclass(frozen=True)
class Exchange:
    """The mean of a model's parameters over two nodes, encoded in one way.

    Attributes:
        how: it is added up. seconds: of every time, encoding and decoding included. sent: bytes by all processes as the
            encoding says. written: bytes that each process wrote meanwhile; None where the system does not count them.
    """

    encoding: str
    how: str
    seconds: list[float]
    sent: int
    written: list[int | None]


def synchronise(
    parameters: int, repeats: int, devices_per_node: int, gpus: int, launch: Launch | None
) -> list[Exchange]:
    """One of the processes of two nodes: the mean over two workers, one on each. gpus: that they are on; 0: on CPUs."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = []
    processes = meet(launch)
    devices = [torch.device("cuda", index) for index in range(gpus)] or [CPU]
    processes.place(devices, 1 if gpus else 2, True, devices_per_node)
    (device,) = (device for node, device in enumerate(processes.devices) if processes.owns(node))
    tensor = share_of_model(parameters, processes).to(device)
    like = torch.zeros_like(tensor)
    for name, encoding in COMMUNICATION_DTYPES.items():
        for in_order in (True, False) if encoding.lossless else (True,):
            processes._in_order = in_order
            workers, times = processes.workers([0, 1]), []

            def once(workers=workers, encoding=encoding) -> None:
                rows = encoding.encode(tensor)
                mean = workers.mean(like, encoding)
                for index in workers.local_workers:
                    mean.add(index, rows)
                mean.result()

            for repeat in range(repeats + 1):
                processes.gather(None)
                before = written_bytes()
                took = seconds(once, device)
                if repeat:
                    times.append(took)
            written = None if before is None else written_bytes() - before
            sent = encoding.reduction_bytes(2, parameters, torch.float32)
            how = "in worker order" if in_order else "one all-reduce"
            results.append(Exchange(name, how, times, sent, processes.gather(written)))
    processes.close()
    return results


def measure_synchronisation(parameters: int, repeats: int, devices_per_node: int) -> None:
    """Launch two nodes on this machine's cores, and print what they need."""
    arguments, count = (parameters, repeats, devices_per_node, 0), 2 * devices_per_node
    with Launch(count, [__file__, "--synchronisation", *map(str, arguments)]) as launch:
        results = synchronise(*arguments, launch)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    of = "processes" if devices_per_node == 1 else f"shard groups of {devices_per_node} devices"
    print(f"\nmean of {parameters:,} parameters over two {of} on this machine (median; all):")
    for found in results:
        shown = " ".join(f"{value:.2f}" for value in sorted(found.seconds))
        counted = "" if None in found.written else f", {max(found.written) / 1e6:.1f} written at most"
        print(
            f"  {found.encoding:9} {found.how:16} {statistics.median(found.seconds):6.2f} s ({shown}), "
            f"{found.sent / 1e6:7.1f} MB sent by both, {found.sent / count / 1e6:.1f} by a process{counted}"
        )
    print(f"  peak memory of a process {peak / 4 / parameters:.1f} times the parameters")


def measure_checkpoint(parameters: int, repeats: int) -> None:
    """A checkpoint of one trainer with one worker: parameters, momentum, and two moments."""
    groups = {
        "trainer_0": {name: torch.randn(parameters) for name in ("parameters", "velocity")},
        "trainer_0_worker_0": {name: torch.randn(parameters) for name in ("exp_avg", "exp_avg_sq")},
    }
    size = 4 * 4 * parameters
    times: dict[str, list[float]] = {"copy to a file": [], "write": [], "find": [], "read": []}
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
            times["write"].append(time.perf_counter() - started)
            started = time.perf_counter()
            checkpoint = newest_checkpoint(Path(folder), alone)
            times["find"].append(time.perf_counter() - started)
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
    parts = ("processes", "shard_groups", "synchronisation", "exchange", "checkpoint")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="default: all")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of everything (default: 5)")
    parser.add_argument("--rounds", type=int, default=4, help="of the runs whose tokens/s are taken (default: 4)")
    parser.add_argument("--parameters", type=int, default=100_000_000, help="of what is sent and written")
    parser.add_argument("--synchronisation", nargs=4, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.synchronisation:
        synchronise(*options.synchronisation, None)
        return
    length = {"number_of_outer_steps": options.rounds}
    if "processes" in options.parts:
        compare("4 trainers of batch 8", PROCESSES, length, options.repeats)
    if "shard_groups" in options.parts:
        for name, architecture in _MODELS.items():
            values = {f"model_config.{key}": value for key, value in architecture.items()}
            compare(f"1 trainer of batch 8, {name}", SHARD_GROUPS, length | ONE_TRAINER | values, options.repeats)
    for part, devices_per_node in (("synchronisation", 1), ("exchange", 2)):
        if part in options.parts:
            measure_synchronisation(options.parameters, options.repeats, devices_per_node)
    if "checkpoint" in options.parts:
        measure_checkpoint(options.parameters, options.repeats)


if __name__ == "__main__":
    main()
