"""Measure rounds of Synchronous and DiLoCo against synchronous training without the framework, in several processes:

    torchrun --nproc_per_node=N benchmarks/performance/data_parallel.py [--repeats N] [key=value ...]

On CPUs nodes_per_gpu must be the number of processes.

The loop without the framework is DistributedDataParallel, which sums gradients during the backward pass. With
devices_per_node above 1 it is FSDP2 over all devices. The framework's Synchronous sums them afterwards, so that
wall-clock comparisons belong to the loop. The batch of a step is divided among the nodes.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.performance.throughput import (
    OVERHEAD,
    BareLoop,
    interleaved,
    make_data,
    round_schedule,
    tokens_per_second,
)
from cluster import Cluster
from fabrics.config_checks import CHECKS
from fabrics.data.examples import TaskData
from fabrics.sharding.sharded_model import sharded_layers
from utils.config.reading import parse_config
from utils.config.schema import Config
from utils.distributed.processes import Processes, join_processes

METHODS = ("Synchronous", "DiLoCo")


def data_parallel_loop(config: Config, data: TaskData, device: torch.device) -> BareLoop:
    """Return the loop without the framework, in all processes; DDP, or FSDP2 with devices_per_node above 1."""
    communicator = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")

    def distribute(model: nn.Module) -> nn.Module:
        if config.devices_per_node == 1:
            return DistributedDataParallel(model, process_group=communicator)
        mesh = DeviceMesh.from_group(communicator, device.type)
        computed_in = None if config.autocast is None else getattr(torch, config.autocast)
        policy = MixedPrecisionPolicy(computed_in, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for part in (*sharded_layers(model), model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        return model

    return BareLoop(config, data, device, distribute, dist.get_rank(), dist.get_world_size())


def speeds(config: Config, processes: Processes, repeats: int) -> dict[str, float]:
    """Return tokens per second of all processes together, by name."""
    data = make_data(config)
    schedule = round_schedule(config)
    functions: dict[str, Callable[[], None]] = {}
    for name in METHODS:
        cluster = Cluster(parse_config(vars(config) | {"distributed_algo": name}, checks=CHECKS)[0], data, processes)
        trainer = cluster.trainers[0]
        functions[name] = lambda trainer=trainer: trainer.train_round(trainer.split_work(), schedule, lambda: None)
    device = cluster.model.device
    loop = data_parallel_loop(config, data, device)
    functions["DDP" if config.devices_per_node == 1 else "FSDP2"] = lambda: loop.run(schedule.inner_steps)

    def together(function: Callable[[], None]) -> Callable[[], None]:
        def measured() -> None:
            function()
            dist.barrier()  # the slowest process counts

        return measured

    times = interleaved({name: together(function) for name, function in functions.items()}, device, repeats)
    return tokens_per_second(config, times)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure data-parallel training with and without the framework.")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of everything; default: %(default)s")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration values")
    options = parser.parse_intermixed_args()
    config, _ = parse_config(OVERHEAD | {"deterministic": False}, options.overrides, CHECKS)
    torch.set_num_threads(config.cpu_threads or 1)
    processes = join_processes(config)
    if processes.count == 1 or config.INITIAL_BATCH_SIZE % processes.count:
        print("error: needs torchrun with several processes, among which INITIAL_BATCH_SIZE divides", file=sys.stderr)
        return 2
    found = speeds(config, processes, options.repeats)
    if processes.is_main:
        loop = list(found)[-1]
        for name, speed in found.items():
            print(f"{name:12} {speed:>12,.0f} tokens/s, {speed / found[loop]:.2f} of {loop}")
    processes.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
