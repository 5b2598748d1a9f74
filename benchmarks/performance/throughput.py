"""What the framework costs: python benchmarks/performance/throughput.py [--repeats N] [--parts ...] [key=value ...].

Prints ratios of medians of interleaved measurements, because single timings on a shared machine say little:

- steps: tokens/s of a trainer's inner steps against the loop that a good engineer would write (same model and
  batch, autocast and compilation as configured, fused AdamW, gradient clipping, the loss read once at the end, no
  framework), and of whole rounds, with outer step, batch test and statistics, evaluation off; with the model
  FLOPs utilisation;
- statistics: what the per-example statistics add to a round, from a pass with hooks against a plain one;
- memory: bytes per parameter of everything of model size, beside the formula;
- outer: GB/s of the outer step against a memory copy;
- trainers: tokens/s of several trainers that share a device, together, against one that has it for itself.

The model is the demo's unless model_config says otherwise; random tokens cost what real ones cost. On a GPU:

    python benchmarks/performance/throughput.py devices=[cuda:0] autocast=bfloat16
    model_config.preset=keeeeenw/MicroLlama \
        model_config.vocab_size=32000 sequence_length=512 INITIAL_BATCH_SIZE=32 number_of_inner_steps_between_outers=200
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
from algorithms.synchronisation.outer_step import nesterov_step
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
    tokenizer = train_tokenizer(["random tokens need no text"], 258)
    train, validation = PackedSequences(tokens), PackedSequences(tokens[:8])
    return TaskData("causal_lm", "random", "random tokens", train, validation, tokenizer, documents={})


class BareLoop:
    """The same model, data, optimiser, clipping and unmasked attention without the framework."""

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


# Dense bfloat16 FLOP/s of the data sheets.
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


def inner_steps(trainer: Trainer, schedule: RoundSchedule) -> None:
    """Run the inner steps of a round, without outer step and batch test."""
    assignment = trainer.assignments(trainer.split_work(), schedule)[0]
    loop = InnerLoop(trainer.workers[0], assignment, trainer.parameters, False, lambda: None)
    loop.run(until=schedule.inner_steps)


def whole_round(trainer: Trainer, schedule: RoundSchedule, on_step: Callable[[], None] = lambda: None) -> None:
    """Run a round of a trainer."""
    split = trainer.split_work()
    trained = trainer.train_round(split, schedule, on_step)
    trainer.conclude_round(split, schedule, trained)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the bare loop and of the framework, by name, for `tokens` tokens of `flops` FLOPs each."""

    seconds: dict[str, list[float]]
    tokens: int
    flops: float
    device: torch.device

    def speed(self, name: str) -> float:
        """Return the tokens per second."""
        return self.tokens / statistics.median(self.seconds[name])


def step_times(config: Config, repeats: int) -> StepTimes:
    data = make_data(config, build_vocabulary(config))
    cluster = Cluster(config, data)
    tested = Cluster(with_values(config, sampling_method="norm_test", max_batch_growth=1.0), data)
    device = cluster.devices[0]
    bare = BareLoop(config, data, device)
    schedule = RoundSchedule(config.number_of_inner_steps_between_outers, 0.0, 0.0)
    steps = schedule.inner_steps
    times = interleaved(
        {
            "bare loop": lambda: bare.run(steps),
            "inner steps": lambda: inner_steps(cluster.trainers[0], schedule),
            "whole round": lambda: whole_round(cluster.trainers[0], schedule),
            "whole round with norm test": lambda: whole_round(tested.trainers[0], schedule),
        },
        device,
        repeats,
    )
    tokens = steps * config.INITIAL_BATCH_SIZE * config.sequence_length
    return StepTimes(times, tokens, flops_per_token(bare.model, config.sequence_length), device)


def throughput(config: Config, repeats: int) -> None:
    found = step_times(config, repeats)
    times, flops = found.seconds, found.flops
    base = statistics.median(times["bare loop"])
    peak, source = peak_flops(found.device, config.autocast)
    print(f"\nmodel FLOPs: {flops:,.0f} per token (6 per linear weight, 6 * layers * width * length for attention)")
    print(f"peak: {peak / 1e12:,.3f} TFLOP/s ({source}; {torch.get_num_threads()} threads)")
    print(f"\n{'':28} {'tokens/s':>10}    MFU   ratio to the bare loop (median of pairs; quartiles)")
    for name, values in times.items():
        pairs = [b / v for b, v in zip(times["bare loop"], values, strict=True)]
        low, middle, high = statistics.quantiles(pairs, n=4)
        speed = found.speed(name)
        print(
            f"{name:28} {speed:>10,.0f}  {speed * flops / peak:5.1%}   {base / statistics.median(values):.3f}"
            f"   ({middle:.3f}; {low:.3f} to {high:.3f})"
        )


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


def statistics_cost(config: Config, repeats: int) -> None:
    """Print what the statistics add to a round: hooks on its first step, or a probe batch if the step is too small."""
    batch = config.INITIAL_BATCH_SIZE
    steps = config.number_of_inner_steps_between_outers
    ratio, added = statistics_ratio(config, repeats)
    own = f"a probe batch of {config.statistics_batch_size} examples"
    what = "a step with hooks" if batch >= config.statistics_batch_size else own
    print(f"\nstatistics: {what} costs {ratio:.2f} plain steps of {batch} examples,")
    print(f"  which adds {100 * added / steps:.1f}% to a round of {steps} steps")


def memory(config: Config) -> None:
    """Print the peak bytes per parameter of all tensors of model size within a round, beside the formula."""
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


def outer_step(config: Config, repeats: int, elements: int = 25_000_000) -> None:
    """Print the GB/s of the outer step and of a copy, on tensors larger than any cache."""
    device = Cluster(config, make_data(config, build_vocabulary(config))).devices[0]
    x, delta, velocity, other = (torch.randn(elements, device=device) * 1e-3 for _ in range(4))
    times = interleaved(
        {"copy": lambda: other.copy_(x), "outer": lambda: nesterov_step(x, delta, velocity, 1e-3, 0.9)}, device, repeats
    )
    # A copy reads and writes once; the least that a Nesterov step can do is to read three tensors and write two.
    speeds = {
        name: moved * 4 * elements / statistics.median(times[name]) / 1e9 for name, moved in (("copy", 2), ("outer", 5))
    }
    print(
        f"\nouter step of {elements:,} parameters: {speeds['outer']:.1f} GB/s of the 5 passes that it needs at least;"
    )
    print(f"  a copy {speeds['copy']:.1f} GB/s; ratio {speeds['outer'] / speeds['copy']:.2f}")


def trainers_together(config: Config, repeats: int, counts: tuple[int, ...]) -> dict[int, tuple[float, float]]:
    """Return the tokens/s of all trainers of a device, and relative to one alone, by number of trainers."""
    data = make_data(config, build_vocabulary(config))
    rounds = {}
    for count in counts:
        cluster = Cluster(with_values(config, number_of_initial_trainers=count, nodes_per_gpu=count), data)
        schedule = RoundSchedule(config.number_of_inner_steps_between_outers, 0.0, 0.0)

        def all_trainers(cluster: Cluster = cluster, schedule: RoundSchedule = schedule) -> None:
            for trainer in cluster.trainers.values():
                whole_round(trainer, schedule)

        rounds[count] = all_trainers
        device = cluster.devices[0]
    times = interleaved(rounds, device, repeats)
    tokens = config.number_of_inner_steps_between_outers * config.INITIAL_BATCH_SIZE * config.sequence_length
    found = {}
    for count, values in times.items():
        pairs = [count * alone / own for alone, own in zip(times[counts[0]], values, strict=True)]
        found[count] = count * tokens / statistics.median(values), statistics.median(pairs)
    return found


def several_trainers(config: Config, repeats: int) -> None:
    print("\ntrainers on one device, one after the other in one process: tokens/s of all together")
    for count, (speed, ratio) in trainers_together(config, repeats, (1, 2, 4)).items():
        print(f"  {count} trainer(s): {speed:>10,.0f}, {ratio:.3f} of one with the device for itself")


def with_values(config: Config, **values) -> Config:
    return parse_config(vars(config) | values, checks=CHECKS)[0]


def build_vocabulary(config: Config) -> int:
    return config.model_config.get("vocab_size", 2048)


PARTS = {
    "memory": lambda config, repeats: memory(config),
    "statistics": statistics_cost,
    "steps": throughput,
    "outer": outer_step,
    "trainers": several_trainers,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the framework against a bare training loop.")
    parser.add_argument("--repeats", type=int, default=15, help="interleaved measurements of everything, at least 2")
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
