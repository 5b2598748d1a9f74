"""Measure the speed of inner steps and whole rounds on random tokens against a loop without the framework:

    python benchmarks/performance/throughput.py [--repeats N] [--cpu-time] [key=value ...]

Measurements are interleaved, and their ratios are printed: single timings on a shared machine mean little.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from torch import nn

import adloco
from algorithms.schedule.limits import RoundSchedule
from cluster import Cluster
from fabrics.config_checks import CHECKS
from fabrics.data.examples import PackedSequences, TaskData
from fabrics.data.tokenization import train_tokenizer
from fabrics.models.attention import unmasked
from fabrics.models.initialisation import compile_mode, flops_per_token
from fabrics.models.model_family import build_model
from fabrics.training.inner_loop import InnerLoop
from fabrics.training.optimizers import inner_optimizer_of
from utils.config.reading import parse_config
from utils.config.schema import Config, ConfigError
from utils.distributed.devices import wait_for
from utils.distributed.launch import cores

# The measured configuration.
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


def seconds(
    function: Callable[[], None], device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds of one call, including the device's work; by default of the wall clock."""
    wait_for(device)
    started = clock()
    function()
    wait_for(device)
    return clock() - started


def interleaved(
    functions: Mapping[str, Callable[[], None]],
    device: torch.device,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Measure the seconds of every function in turn, after a warm-up call; the order changes, as it has an effect."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions)
    for repeat in range(repeats + 1):
        random.Random(repeat).shuffle(order)
        for name in order:
            elapsed = seconds(functions[name], device, clock)
            if repeat:
                times[name].append(elapsed)
    return times


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
    """Training without the framework: same model, data, autocast, compilation, fused AdamW, clipping and attention.

    Args:
        distribute: takes the model before its optimizer is made, and returns the module to call.
        rank: this process, of `world` that each train on their part of the batch.
    """

    def __init__(
        self,
        config: Config,
        data: TaskData,
        device: torch.device,
        distribute: Callable[[nn.Module], nn.Module] = lambda model: model,
        rank: int = 0,
        world: int = 1,
    ):
        self.model = build_model(config.model_type, config.model_config, data.tokenizer, config.sequence_length, 0)
        self.model.to(device)
        self.forward = distribute(self.model)
        if compile_mode(config, device, self.model):
            self.forward = torch.compile(self.forward)
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
        self.batch = config.INITIAL_BATCH_SIZE // world
        self.rank = rank
        self.world = world
        self.device = device
        self.tokens = torch.from_numpy(data.train._tokens).to(torch.long)

    def run(self, steps: int) -> None:
        """Make training steps; the host reads the loss once, at the end."""
        loss_sum = torch.zeros((), device=self.device)
        for step in range(steps):
            first = (step * self.world + self.rank) * self.batch
            rows = torch.arange(first, first + self.batch) % len(self.tokens)
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.loss(self.examples(rows))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            loss_sum += loss.detach()
        loss_sum.item()

    def examples(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of the tokens on the device; the host does not wait for the copy."""
        ids = self.tokens[rows]
        if self.device.type == "cuda":
            ids = ids.pin_memory()
        return ids.to(self.device, non_blocking=True)

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        with unmasked(self.model, {"input_ids": ids}), self.autocast:
            logits = self.forward(input_ids=ids).logits
            return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class LibraryLoop(BareLoop):
    """The bare loop over adloco.Worker, with an outer step after every `inner_steps` steps."""

    def __init__(self, config: Config, data: TaskData, device: torch.device, inner_steps: int):
        super().__init__(config, data, device)
        self.worker = adloco.Worker(
            self.model, self.optimizer, inner_steps=inner_steps, batch=self.batch, gradient_clipping=self.clip
        )

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for indices in self.worker.micro_batches(len(self.tokens)):
                self.worker.backward(self.loss(self.examples(torch.from_numpy(indices))))
            self.worker.step()


def round_schedule(config: Config) -> RoundSchedule:
    return RoundSchedule(config.number_of_inner_steps_between_outers, 0.0, 0.0)


def inner_steps(cluster: Cluster) -> None:
    """Run the inner steps of a round of the only trainer, without outer step and batch test."""
    trainer = cluster.trainers[0]
    schedule = round_schedule(cluster.config)
    assignment = trainer.assignments(trainer.split_work(), schedule)[0]
    loop = InnerLoop(trainer.local_workers[0], assignment, trainer.parameters, False, lambda: None)
    loop.run(until=schedule.inner_steps)


def whole_round(cluster: Cluster) -> None:
    """Run a whole round of the only trainer, without evaluation."""
    trainer = cluster.trainers[0]
    schedule = round_schedule(cluster.config)
    split = trainer.split_work()
    trained = trainer.train_round(split, schedule, lambda: None)
    trainer.conclude_round(split, schedule, [trained])


def tokens_per_second(config: Config, seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median speed of rounds by name."""
    tokens = config.number_of_inner_steps_between_outers * config.INITIAL_BATCH_SIZE * config.sequence_length
    return {name: tokens / statistics.median(values) for name, values in seconds.items()}


def step_speeds(config: Config, repeats: int, clock: Callable[[], float] = time.perf_counter) -> dict:
    """Return by name the tokens_per_second and its ratio of_bare_loop, and the model's flops_per_token."""
    data = make_data(config)
    cluster = Cluster(config, data)
    tested = Cluster(parse_config(vars(config) | {"sampling_method": "norm_test", "max_batch_growth": 1.0})[0], data)
    device = cluster.model.device
    steps = config.number_of_inner_steps_between_outers
    bare = BareLoop(config, data, device)
    library = LibraryLoop(config, data, device, steps)
    functions = {
        "bare loop": lambda: bare.run(steps),
        "loop over adloco.Worker": lambda: library.run(steps),
        "inner steps": lambda: inner_steps(cluster),
        "whole round": lambda: whole_round(cluster),
        "whole round with norm test": lambda: whole_round(tested),
    }
    times = interleaved(functions, device, repeats, clock)
    return {
        "tokens_per_second": tokens_per_second(config, times),
        "of_bare_loop": {name: float(np.median(np.divide(times["bare loop"], own))) for name, own in times.items()},
        "flops_per_token": flops_per_token(bare.model, config.sequence_length),
    }


def main(arguments: list[str] | None = None) -> int:
    """Print the tokens per second of inner steps and whole rounds, and their ratios to the bare loop."""
    parser = argparse.ArgumentParser(description="Measure the speed of the framework.")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of everything; default: %(default)s")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time, which other programs disturb less")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration values")
    options = parser.parse_intermixed_args(arguments)
    try:
        config, _ = parse_config(OVERHEAD, options.overrides, CHECKS)
    except ConfigError as error:
        print("\n".join(f"error: {problem}" for problem in error.problems), file=sys.stderr)
        return 2
    torch.set_num_threads(config.cpu_threads or cores())
    found = step_speeds(config, options.repeats, time.process_time if options.cpu_time else time.perf_counter)
    print(f"{'':28} {'tokens/s':>10}   of the bare loop (median over pairs of repeats)")
    for name, speed in found["tokens_per_second"].items():
        print(f"{name:28} {speed:>10,.0f}   {found['of_bare_loop'][name]:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
