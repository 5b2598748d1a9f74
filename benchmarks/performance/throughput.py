"""Measure the speed of the framework: python benchmarks/performance/throughput.py [--parts ...] [key=value ...].

Measurements are interleaved, and their ratios are printed: single timings on a shared machine mean little.

- overhead (the default): inner steps and whole rounds on random tokens, against a loop without the framework.
- exchange: the mean of 100M parameters over two nodes of one and of two devices, in every encoding.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from algorithms.schedule.limits import RoundSchedule
from algorithms.synchronisation.encodings.encoding import COMMUNICATION_DTYPES
from cluster import Cluster
from fabrics.config_checks import CHECKS
from fabrics.data.examples import PackedSequences, TaskData
from fabrics.data.tokenization import train_tokenizer
from fabrics.models.attention import unmasked
from fabrics.models.initialisation import flops_per_token
from fabrics.models.model_family import build_model
from fabrics.training.inner_loop import InnerLoop
from fabrics.training.optimizers import inner_optimizer_of
from trainers import Trainer
from utils.config.reading import parse_config
from utils.config.schema import Config, ConfigError
from utils.distributed.launch import Launch, cores
from utils.distributed.processes import meet

# Configuration of the overhead.
OVERHEAD = {
    "number_of_outer_steps": 1,
    "number_of_initial_trainers": 1,
    "nodes_per_gpu": 1,
    "number_of_inner_steps_between_outers": 20,
    "INITIAL_BATCH_SIZE": 8,
    "max_batch_size": 64,
    "sampling_method": "none",
    "model_config": {"preset": "demo", "vocab_size": 2048},
}


def seconds(function: Callable[[], None], device: torch.device) -> float:
    """Return the wall-clock seconds of one call, including the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def interleaved(
    functions: Mapping[str, Callable[[], None]], device: torch.device, repeats: int
) -> dict[str, list[float]]:
    """Measure the seconds of every function in turn, after a warm-up call."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            elapsed = seconds(function, device)
            if repeat:
                times[name].append(elapsed)
    return times


# Overhead over a loop without the framework


def make_data(config: Config) -> TaskData:
    """Make 512 sequences of random tokens."""
    vocabulary = config.model_config["vocab_size"]
    tokens = np.random.default_rng(0).integers(0, vocabulary, (512, config.sequence_length), dtype=np.int32)
    return TaskData(
        task="causal_lm",
        dataset="random",
        source="random tokens",
        train=PackedSequences(tokens),
        validation=PackedSequences(tokens[:8]),
        tokenizer=train_tokenizer(["random tokens need no text"], 258),
    )


class BareLoop:
    """Training without the framework: same model, data, autocast, compilation, fused AdamW, clipping and attention."""

    def __init__(self, config: Config, data: TaskData, device: torch.device):
        self.model = build_model(config.model_type, config.model_config, data.tokenizer, config.sequence_length, 0)
        self.model.to(device)
        self.forward = torch.compile(self.model) if config.compile_model else self.model
        self.autocast = torch.autocast(
            device.type, getattr(torch, config.autocast or "bfloat16"), enabled=config.autocast is not None
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.learning_rate_for_inner_opt,
            betas=inner_optimizer_of(config).betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.clip = config.gradient_clipping
        self.batch = config.INITIAL_BATCH_SIZE
        self.device = device
        self.tokens = torch.from_numpy(data.train._tokens).to(torch.long)

    def run(self, steps: int) -> None:
        """Make training steps; the host reads the loss once, at the end."""
        loss_sum = torch.zeros((), device=self.device)
        for step in range(steps):
            rows = torch.arange(step * self.batch, (step + 1) * self.batch) % len(self.tokens)
            ids = self.tokens[rows]
            if self.device.type == "cuda":
                ids = ids.pin_memory().to(self.device, non_blocking=True)
            self.optimizer.zero_grad(set_to_none=True)
            with unmasked(self.model, {"input_ids": ids}):
                with self.autocast:
                    logits = self.forward(input_ids=ids).logits
                    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
                loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            loss_sum += loss.detach()
        loss_sum.item()


def inner_steps(trainer: Trainer, schedule: RoundSchedule) -> None:
    """Run the inner steps of a round, without outer step and batch test."""
    assignment = trainer.assignments(trainer.split_work(), schedule)[0]
    loop = InnerLoop(trainer.workers[0], assignment, trainer.parameters, False, lambda: None)
    loop.run(until=schedule.inner_steps)


def whole_round(trainer: Trainer, schedule: RoundSchedule) -> None:
    """Run a whole round of a trainer, without evaluation."""
    split = trainer.split_work()
    trained = trainer.train_round(split, schedule, lambda: None)
    trainer.conclude_round(split, schedule, trained)


def step_speeds(config: Config, repeats: int) -> dict:
    """Return by name the tokens_per_second and its ratio of_bare_loop, and the model's flops_per_token."""
    data = make_data(config)
    cluster = Cluster(config, data)
    tested = Cluster(parse_config(vars(config) | {"sampling_method": "norm_test", "max_batch_growth": 1.0})[0], data)
    device = cluster.devices[0]
    bare = BareLoop(config, data, device)
    schedule = RoundSchedule(config.number_of_inner_steps_between_outers, 0.0, 0.0)
    functions = {
        "bare loop": lambda: bare.run(schedule.inner_steps),
        "inner steps": lambda: inner_steps(cluster.trainers[0], schedule),
        "whole round": lambda: whole_round(cluster.trainers[0], schedule),
        "whole round with norm test": lambda: whole_round(tested.trainers[0], schedule),
    }
    times = interleaved(functions, device, repeats)
    tokens = schedule.inner_steps * config.INITIAL_BATCH_SIZE * config.sequence_length
    return {
        "tokens_per_second": {name: tokens / statistics.median(values) for name, values in times.items()},
        "of_bare_loop": {name: float(np.median(np.divide(times["bare loop"], own))) for name, own in times.items()},
        "flops_per_token": flops_per_token(bare.model, config.sequence_length),
    }


def print_overhead(config: Config, repeats: int) -> None:
    found = step_speeds(config, repeats)
    print(f"{'':28} {'tokens/s':>10}   of the bare loop")
    for name, speed in found["tokens_per_second"].items():
        print(f"{name:28} {speed:>10,.0f}   {found['of_bare_loop'][name]:.3f}")


# The mean of a model over two nodes


def exchange(parameters: int, repeats: int, devices_per_node: int, gpus: int, launch: Launch | None) -> dict:
    """Average a flat model over two nodes, called by every process of them.

    Args:
        gpus: GPUs to use; 0: every process is a device on the CPU.

    Returns:
        By encoding and order of summation: seconds (median, with encoding and decoding), and bytes sent by all.
    """
    torch.set_num_threads(1)
    processes = meet(launch)
    devices = [torch.device("cuda", index) for index in range(gpus)] or [torch.device("cpu")]
    processes.place(devices, 1 if gpus else 2, True, devices_per_node)
    (device,) = (device for node, device in enumerate(processes.devices) if processes.owns(node))
    shard = torch.randn(parameters // devices_per_node, device=device) * 1e-3
    found = {}
    for name, encoding in COMMUNICATION_DTYPES.items():
        for in_order in (True, False) if encoding.lossless else (True,):
            processes._in_order = in_order
            workers = processes.workers([0, 1])
            like = torch.zeros_like(shard)

            def average(workers=workers, encoding=encoding, like=like) -> None:
                encoded = encoding.encode(shard)
                mean = workers.mean(like, encoding)
                for index in workers.local_workers:
                    mean.add(index, encoded)
                mean.result()

            times = []
            for _ in range(repeats + 1):
                processes.gather(None)  # all begin together
                times.append(seconds(average, device))
            order = "in worker order" if in_order else "one all-reduce"
            sent = encoding.reduction_bytes(2, parameters, torch.float32)
            found[f"{name}, {order}"] = {"seconds": statistics.median(times[1:]), "bytes": sent}
    processes.close()
    return found


def launch_exchange(parameters: int, repeats: int, devices_per_node: int, gpus: int = 0) -> dict:
    """Start the processes of two nodes, and return the result of `exchange`."""
    arguments = (parameters, repeats, devices_per_node, gpus)
    with Launch(2 * devices_per_node, [__file__, "--exchange", *map(str, arguments)]) as launch:
        return exchange(*arguments, launch)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the speed of the framework.")
    parser.add_argument("--parts", nargs="+", choices=("overhead", "exchange"), default=["overhead"])
    parser.add_argument("--repeats", type=int, default=5, help="measurements of everything; default: %(default)s")
    parser.add_argument("--exchange", nargs=4, type=int, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration values")
    options = parser.parse_intermixed_args(arguments)
    if options.exchange:
        exchange(*options.exchange, None)
        return 0
    try:
        config, _ = parse_config(OVERHEAD, options.overrides, CHECKS)
    except ConfigError as error:
        print("\n".join(f"error: {problem}" for problem in error.problems), file=sys.stderr)
        return 2
    if "overhead" in options.parts:
        torch.set_num_threads(config.cpu_threads or cores())
        print_overhead(config, options.repeats)
    for devices in (1, 2) if "exchange" in options.parts else ():
        print(f"\nmean of 100M parameters over two nodes of {devices} device(s)")
        for name, found in launch_exchange(100_000_000, options.repeats, devices).items():
            print(f"  {name:26} {found['seconds']:6.2f} s, {found['bytes'] / 1e6:7.1f} MB sent by both nodes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
