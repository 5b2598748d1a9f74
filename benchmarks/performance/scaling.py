"""Measure processes, shard groups and synchronisation: python benchmarks/performance/scaling.py [--parts ...].

- processes: tokens/s of the demo's training with one process and a thread per core, one process and one thread, two
  processes of one thread each, and a loop without the framework. All but the last are runs of run.py, interleaved.
- shard_groups: tokens/s of one trainer, for two model sizes: on one device, on two devices with a whole model each, on
  one shard group of two devices, and on two such shard groups. The third against the second is the cost of sharding.
- synchronisation: seconds and bytes of the mean of 100M parameters over two processes, for every encoding, summed in
  worker order or by one all-reduce, encoding and decoding included.
- exchange: the same between two shard groups of two devices, each with its shard of the model. On Linux, the bytes that
  a process has written, message headers included, are read from the operating system.
"""

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

from algorithms.synchronisation.encodings.encoding import COMMUNICATION_DTYPES
from benchmarks.performance.throughput import BareLoop, build_vocabulary, make_data, seconds
from fabrics.config_checks import CHECKS
from utils.config.reading import load_config
from utils.distributed.launch import Launch, cores
from utils.distributed.processes import Processes, meet

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

# Tokens per second of short runs

BARE = "bare loop"
# How runs use the machine: configuration values by name.
PROCESSES = {
    "1 process, a thread per core": {"processes": 1, "cpu_threads": cores()},
    "1 process of 1 thread": {"processes": 1, "cpu_threads": 1},
    "2 processes of 1 thread": {"processes": 2, "cpu_threads": 1},
    BARE: {"cpu_threads": cores()},
}
SHARD_GROUPS = {
    "1 device": {"processes": 1, "nodes_per_gpu": 1},
    "2 devices, a whole model each": {"processes": 2, "nodes_per_gpu": 2},
    "1 shard group of 2 devices": {"processes": 2, "nodes_per_gpu": 1, "devices_per_node": 2},
    "2 shard groups of 2 devices": {"processes": 4, "nodes_per_gpu": 2, "devices_per_node": 2},
}


def _overrides(values: dict) -> list[str]:
    return [f"{key}={value}" for key, value in (RUN | values).items()]


def run_speed(values: dict) -> float:
    """Return the tokens per second of a short run of run.py."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "run.py", *_overrides(values | {"log_dir": folder})]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        (summary,) = Path(folder).glob("*/model_training_report/summary.json")
        return json.loads(summary.read_text())["tokens_per_second"]


def bare_speed(values: dict) -> float:
    """Return the tokens per second of a loop without the framework, for the steps of all workers of the run."""
    # The vocabulary of a tokenizer that was trained on text.
    same = values | {"model_config.vocab_size": RUN["vocab_size"]}
    config, _ = load_config(ROOT / "config.yaml", _overrides(same), CHECKS)
    round_steps = config.number_of_inner_steps_between_outers
    steps = round_steps * config.number_of_outer_steps * config.number_of_initial_trainers
    threads = torch.get_num_threads()
    torch.set_num_threads(config.cpu_threads)
    bare = BareLoop(config, make_data(config, build_vocabulary(config)), CPU)
    bare.run(round_steps)  # warm-up
    elapsed = seconds(lambda: bare.run(steps), CPU)
    torch.set_num_threads(threads)
    return steps * config.INITIAL_BATCH_SIZE * config.sequence_length / elapsed


def compare(title: str, settings: Mapping[str, dict], values: dict, repeats: int) -> None:
    """Print the speeds of short runs, interleaved."""
    speeds: dict[str, list[float]] = {name: [] for name in settings}
    for _ in range(repeats):
        for name, setting in settings.items():
            measure = bare_speed if name == BARE else run_speed
            speeds[name].append(measure({"cpu_threads": 1} | values | setting))
    first = next(iter(speeds.values()))
    print(f"\n{title:36} {'tokens/s':>10}   ratio to the first (median of pairs; all)")
    for name, found in speeds.items():
        pairs = sorted(value / other for value, other in zip(found, first, strict=True))
        shown = " ".join(f"{pair:.2f}" for pair in pairs)
        print(f"{name:36} {statistics.median(found):>10,.0f}   {statistics.median(pairs):.2f} ({shown})")


# The mean of a model over two nodes


@dataclass(frozen=True)
class Exchange:
    """The mean of a model's parameters over two nodes, with one encoding.

    Attributes:
        order: how the workers' tensors are summed.
        seconds: seconds of every repetition, encoding and decoding included.
        sent: bytes sent by all processes, as the encoding counts them.
        written: bytes that each process wrote meanwhile; None: not counted by the system.
    """

    encoding: str
    order: str
    seconds: list[float]
    sent: int
    written: list[int | None]


def _written_bytes() -> int | None:
    """Bytes that this process has written so far, mostly to sockets; None: not counted by the system."""
    counts = Path("/proc/self/io")
    return int(re.search(r"wchar: (\d+)", counts.read_text())[1]) if counts.exists() else None


def _local_parameters(parameters: int, processes: Processes) -> torch.Tensor:
    """The flat parameters on this process's device, for a model of ten layers with this many parameters in total."""
    if processes.shard_group.size == 1:
        return torch.randn(parameters) * 1e-3
    from fabrics.sharding.sharded_model import ShardedModel  # slow to import, and tied to one release of PyTorch

    # The first device of a node has the weights and sends the others their shards.
    first = processes.shard_group.index == 0
    with torch.device("cpu" if first else "meta"):
        layers = [nn.Sequential(nn.Linear(1000, parameters // 10_000, bias=False)) for _ in range(10)]
        model = nn.Sequential(nn.ModuleList(layers))
    if first:
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=1e-3)
    return ShardedModel(model, CPU, processes.shard_group).parameters.detach()


def synchronise(
    parameters: int, repeats: int, devices_per_node: int, gpus: int, launch: Launch | None
) -> list[Exchange]:
    """Average a model over two workers, one on each of two nodes; called by every process of the nodes.

    Args:
        gpus: GPUs that the nodes use; 0: CPUs.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    processes = meet(launch)
    devices = [torch.device("cuda", index) for index in range(gpus)] or [CPU]
    processes.place(devices, 1 if gpus else 2, True, devices_per_node)
    (device,) = (device for node, device in enumerate(processes.devices) if processes.owns(node))
    tensor = _local_parameters(parameters, processes).to(device)
    results = []
    for name, encoding in COMMUNICATION_DTYPES.items():
        for in_order in (True, False) if encoding.lossless else (True,):
            processes._in_order = in_order
            workers = processes.workers([0, 1])
            like = torch.zeros_like(tensor)

            def average(workers=workers, encoding=encoding, like=like) -> None:
                encoded = encoding.encode(tensor)
                mean = workers.mean(like, encoding)
                for index in workers.local_workers:
                    mean.add(index, encoded)
                mean.result()

            times = []
            for repeat in range(repeats + 1):
                processes.gather(None)
                before = _written_bytes()
                elapsed = seconds(average, device)
                if repeat:  # the first is a warm-up
                    times.append(elapsed)
            written = None if before is None else _written_bytes() - before
            sent = encoding.reduction_bytes(2, parameters, torch.float32)
            order = "in worker order" if in_order else "one all-reduce"
            results.append(Exchange(name, order, times, sent, processes.gather(written)))
    processes.close()
    return results


def measure_synchronisation(parameters: int, repeats: int, devices_per_node: int) -> None:
    """Launch two nodes on this machine's cores, and print seconds and bytes of their synchronisation."""
    arguments = (parameters, repeats, devices_per_node, 0)
    count = 2 * devices_per_node
    with Launch(count, [__file__, "--synchronisation", *map(str, arguments)]) as launch:
        results = synchronise(*arguments, launch)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    nodes = "processes" if devices_per_node == 1 else f"shard groups of {devices_per_node} devices"
    print(f"\nmean of {parameters:,} parameters over two {nodes} on this machine (median; all):")
    for found in results:
        shown = " ".join(f"{value:.2f}" for value in sorted(found.seconds))
        written = "" if None in found.written else f", at most {max(found.written) / 1e6:.1f} written"
        print(
            f"  {found.encoding:9} {found.order:16} {statistics.median(found.seconds):6.2f} s ({shown}), "
            f"{found.sent / 1e6:7.1f} MB sent in total, {found.sent / count / 1e6:.1f} per process{written}"
        )
    print(f"  peak memory of a process: {peak / 4 / parameters:.1f} times the parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = ("processes", "shard_groups", "synchronisation", "exchange")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="default: all")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of everything (default: 5)")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of the measured runs (default: 4)")
    parser.add_argument("--parameters", type=int, default=100_000_000, help="parameters of the averaged model")
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


if __name__ == "__main__":
    main()
