"""Measure the cost of the framework: python benchmarks/performance/throughput.py [--parts ...] [key=value ...].

Prints ratios of medians of interleaved measurements, because single timings on a shared machine mean little:

- steps: tokens/s of a trainer's inner steps and of whole rounds (outer step, batch test and statistics, no evaluation)
  against a loop without the framework: same model and batch, autocast and compilation as configured, fused AdamW,
  gradient clipping, the loss read once at the end. With the model FLOPs utilisation (MFU).
- statistics: what the per-example statistics add to a round.
- memory: peak bytes per parameter of all tensors of model size, and the formula.
- trainers: tokens/s of several trainers that share a device, against one that has the device for itself.

The model is the demo's unless model_config names another. Tokens are random. On a GPU:

    python benchmarks/performance/throughput.py devices=[cuda:0] autocast=bfloat16 \\
        model_config.preset=keeeeenw/MicroLlama model_config.vocab_size=32000 sequence_length=512 \\
        INITIAL_BATCH_SIZE=32 number_of_inner_steps_between_outers=200
"""

import argparse
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from algorithms.batch.per_example import PerExampleProbe
from algorithms.schedule.limits import RoundSchedule
from cluster import Cluster
from fabrics.config_checks import CHECKS
from fabrics.data.examples import PackedSequences, TaskData
from fabrics.data.tokenization import train_tokenizer
from fabrics.models.attention import unmasked
from fabrics.models.meta_model import flops_per_token
from fabrics.models.registry import build_model
from fabrics.training.forward_backward import backward
from fabrics.training.inner_loop import InnerLoop
from trainers import Trainer
from utils.config.reading import parse_config
from utils.config.schema import Config, ConfigError

DEFAULTS = {
    "number_of_outer_steps": 1,
    "number_of_initial_trainers": 1,
    "nodes_per_gpu": 1,
    "number_of_inner_steps_between_outers": 20,
    "INITIAL_BATCH_SIZE": 8,
    "max_batch_size": 64,
    "sampling_method": "none",
}


def make_data(config: Config, vocabulary: int, examples: int = 512) -> TaskData:
    """Make random tokens in sequences of the configured length."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, (examples, config.sequence_length), dtype=np.int32)
    return TaskData(
        task="causal_lm",
        dataset="random",
        source="random tokens",
        train=PackedSequences(tokens),
        validation=PackedSequences(tokens[:8]),
        tokenizer=train_tokenizer(["random tokens need no text"], 258),
    )


class BareLoop:
    """Training without the framework: same model, data, optimizer, clipping and attention."""

    def __init__(self, config: Config, data: TaskData, device: torch.device):
        self.model = build_model(config.model_type, config.model_config, data.tokenizer, config.sequence_length, 0)
        self.model.to(device)
        self.forward = torch.compile(self.model) if config.compile_model is True else self.model
        self.autocast = torch.autocast(
            device.type, getattr(torch, config.autocast or "bfloat16"), enabled=config.autocast is not None
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.learning_rate_for_inner_opt,
            betas=tuple(config.adam_betas),
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


# Dense bfloat16 FLOP/s from data sheets.
DATA_SHEETS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}


@functools.cache
def peak_flops(device: torch.device, autocast: str | None) -> tuple[float, str]:
    """Return the device's FLOP/s and its source: a data sheet, or a large matrix product measured here."""
    dtype = torch.bfloat16 if autocast else torch.float32
    if device.type == "cuda" and autocast:
        name = torch.cuda.get_device_name(device)
        for known, peak in DATA_SHEETS.items():
            if known in name:
                return peak, f"{known}, data sheet, dense bfloat16"
    size = 8192 if device.type == "cuda" else 1024
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    found = [seconds(lambda: torch.mm(matrix, matrix), device) for _ in range(8)]
    return 2.0 * size**3 / min(found), f"the fastest {size} x {size} matrix product here, {dtype}"


def seconds(function, device: torch.device) -> float:
    """Return the wall-clock seconds of one call, including the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def interleaved(functions: dict, device: torch.device, repeats: int) -> dict[str, list[float]]:
    """Measure the seconds of every function in turn, after a warm-up call."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            elapsed = seconds(function, device)
            if repeat:
                times[name].append(elapsed)
    return times


# One trainer against the bare loop


def schedule_of(config: Config) -> RoundSchedule:
    """Return a round of the configured length."""
    return RoundSchedule(config.number_of_inner_steps_between_outers, 0.0, 0.0)


def inner_steps(trainer: Trainer, schedule: RoundSchedule) -> None:
    """Run the inner steps of a round, without outer step and batch test."""
    assignment = trainer.assignments(trainer.split_work(), schedule)[0]
    loop = InnerLoop(trainer.workers[0], assignment, trainer.parameters, False, lambda: None)
    loop.run(until=schedule.inner_steps)


def whole_round(trainer: Trainer, schedule: RoundSchedule, on_step: Callable[[], None] = lambda: None) -> None:
    """Run a whole round of a trainer."""
    split = trainer.split_work()
    trained = trainer.train_round(split, schedule, on_step)
    trainer.conclude_round(split, schedule, trained)


@dataclass(frozen=True)
class StepTimes:
    """Measured times of the bare loop and of the framework.

    Attributes:
        seconds: seconds of every repetition, by name.
        tokens: tokens of one repetition.
        flops: model FLOPs per token.
    """

    seconds: dict[str, list[float]]
    tokens: int
    flops: float
    device: torch.device

    def speed(self, name: str) -> float:
        """Return the tokens per second."""
        return self.tokens / statistics.median(self.seconds[name])


def step_times(config: Config, repeats: int) -> StepTimes:
    """Measure the bare loop, inner steps, and whole rounds without and with a batch test, interleaved."""
    data = make_data(config, build_vocabulary(config))
    cluster = Cluster(config, data)
    tested = Cluster(with_values(config, sampling_method="norm_test", max_batch_growth=1.0), data)
    device = cluster.devices[0]
    bare = BareLoop(config, data, device)
    schedule = schedule_of(config)
    times = interleaved(
        {
            "bare loop": lambda: bare.run(schedule.inner_steps),
            "inner steps": lambda: inner_steps(cluster.trainers[0], schedule),
            "whole round": lambda: whole_round(cluster.trainers[0], schedule),
            "whole round with norm test": lambda: whole_round(tested.trainers[0], schedule),
        },
        device,
        repeats,
    )
    tokens = schedule.inner_steps * config.INITIAL_BATCH_SIZE * config.sequence_length
    return StepTimes(times, tokens, flops_per_token(bare.model, config.sequence_length), device)


def print_step_times(config: Config, repeats: int) -> None:
    """Print tokens/s, MFU and the ratio to the bare loop."""
    found = step_times(config, repeats)
    bare = found.seconds["bare loop"]
    peak, source = peak_flops(found.device, config.autocast)
    print(
        f"\nmodel FLOPs: {found.flops:,.0f} per token (6 per linear weight, 6 * layers * width * length for attention)"
    )
    print(f"peak: {peak / 1e12:,.3f} TFLOP/s ({source}; {torch.get_num_threads()} threads)")
    print(f"\n{'':28} {'tokens/s':>10}    MFU   ratio to the bare loop (median of pairs; quartiles)")
    for name, values in found.seconds.items():
        pairs = [b / v for b, v in zip(bare, values, strict=True)]
        low, middle, high = statistics.quantiles(pairs, n=4)
        speed = found.speed(name)
        ratio = statistics.median(bare) / statistics.median(values)
        print(
            f"{name:28} {speed:>10,.0f}  {speed * found.flops / peak:5.1%}   {ratio:.3f}"
            f"   ({middle:.3f}; {low:.3f} to {high:.3f})"
        )


# Statistics and memory


def statistics_ratio(config: Config, repeats: int) -> tuple[float, float]:
    """Return the cost of a pass with statistics, and the cost it adds to a round, in plain steps."""
    data = make_data(config, build_vocabulary(config))
    device, working = next(iter(Cluster(config, data).models.items()))
    batch = config.INITIAL_BATCH_SIZE
    in_step = batch >= config.statistics_batch_size
    sample = np.arange(batch if in_step else config.statistics_batch_size)

    def plain() -> None:
        backward(working, data.train, sample[:batch])
        working.gradient.zero_()

    def probed() -> None:
        with PerExampleProbe(working.module, batch_size=len(sample)) as probe:
            backward(working, data.train, sample, hooked=True)
        probe.statistics()
        working.gradient.zero_()

    times = interleaved({"plain": plain, "probed": probed}, device, repeats * 5)
    ratio = statistics.median(times["probed"]) / statistics.median(times["plain"])
    return ratio, ratio - 1.0 if in_step else ratio


def print_statistics_cost(config: Config, repeats: int) -> None:
    """Print what the statistics add to a round: hooks on its first step, or a probe batch if the step is too small."""
    batch = config.INITIAL_BATCH_SIZE
    steps = config.number_of_inner_steps_between_outers
    ratio, added = statistics_ratio(config, repeats)
    in_step = batch >= config.statistics_batch_size
    what = "a step with hooks" if in_step else f"a probe batch of {config.statistics_batch_size} examples"
    print(f"\nstatistics: {what} costs {ratio:.2f} plain steps of {batch} examples,")
    print(f"  which adds {100 * added / steps:.1f}% to a round of {steps} steps")


def print_memory(config: Config) -> None:
    """Print the peak bytes per parameter of all tensors of model size within a round, and the formula."""
    config = with_values(config, number_of_initial_trainers=2, nodes_per_gpu=4, merge_frequency=10**6)
    cluster = Cluster(config, make_data(config, build_vocabulary(config)))
    parameters = cluster.parameter_count
    peak = 0

    def look() -> None:
        nonlocal peak
        found = [entry for entry in gc.get_objects() if type(entry) in (torch.Tensor, torch.nn.Parameter)]
        sizes = {t.data_ptr(): t.numel() * t.element_size() for t in found if t.numel() >= parameters and not t.is_meta}
        peak = max(peak, sum(sizes.values()))

    gc.collect()
    for _ in range(2):
        for trainer in cluster.trainers.values():
            whole_round(trainer, RoundSchedule(2, 0.0, 0.0), look)
    workers = sum(len(trainer.workers) for trainer in cluster.trainers.values())
    trainers = len(cluster.trainers)
    formula = 4 * (2 + 1 + 2 * trainers + 2 * workers)
    print(f"\npeak memory of model size, {trainers} trainers, {workers} workers, {parameters:,} parameters:")
    print(f"  measured {peak / parameters:.2f} bytes per parameter; per replica {peak / parameters / workers:.2f}")
    print(f"  formula  {formula} = 4 (2 working + 1 pseudo-gradient + 2 per trainer + 2 per worker)")


# Several trainers on one device


def trainers_together(config: Config, repeats: int, counts: tuple[int, ...]) -> dict[int, tuple[float, float]]:
    """Return the tokens/s of all trainers of a device, and its ratio to one alone, by number of trainers."""
    data = make_data(config, build_vocabulary(config))
    schedule = schedule_of(config)
    clusters = {
        count: Cluster(with_values(config, number_of_initial_trainers=count, nodes_per_gpu=count), data)
        for count in counts
    }

    def all_trainers(cluster: Cluster) -> None:
        for trainer in cluster.trainers.values():
            whole_round(trainer, schedule)

    rounds = {count: functools.partial(all_trainers, cluster) for count, cluster in clusters.items()}
    times = interleaved(rounds, clusters[counts[0]].devices[0], repeats)
    tokens = schedule.inner_steps * config.INITIAL_BATCH_SIZE * config.sequence_length
    found = {}
    for count, values in times.items():
        pairs = [count * alone / own for alone, own in zip(times[counts[0]], values, strict=True)]
        found[count] = count * tokens / statistics.median(values), statistics.median(pairs)
    return found


def print_trainers(config: Config, repeats: int) -> None:
    """Print the tokens/s of several trainers that share a device."""
    print("\ntrainers on one device, in turn in one process: tokens/s of all together")
    for count, (speed, ratio) in trainers_together(config, repeats, (1, 2, 4)).items():
        print(f"  {count} trainer(s): {speed:>10,.0f}, {ratio:.3f} of one alone")


def with_values(config: Config, **values) -> Config:
    """Return the configuration with other values."""
    return parse_config(vars(config) | values, checks=CHECKS)[0]


def build_vocabulary(config: Config) -> int:
    """Return the vocabulary of the measured model."""
    return config.model_config.get("vocab_size", 2048)


PARTS = {
    "memory": lambda config, repeats: print_memory(config),
    "statistics": print_statistics_cost,
    "steps": print_step_times,
    "trainers": print_trainers,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the framework against a bare training loop.")
    parser.add_argument("--repeats", type=int, default=15, help="repetitions of every measurement, at least 2")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config values")
    options = parser.parse_args(arguments)
    try:
        raw = DEFAULTS | {"model_config": {"preset": "demo", "vocab_size": 2048}}
        config, _ = parse_config(raw, options.overrides, CHECKS)
    except ConfigError as error:
        print("\n".join(f"error: {problem}" for problem in error.problems), file=sys.stderr)
        return 2
    if options.repeats < 2:
        parser.error("--repeats must be at least 2")
    if config.cpu_threads:
        torch.set_num_threads(config.cpu_threads)
    for part in options.parts:
        PARTS[part](config, options.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
