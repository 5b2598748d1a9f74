"""Measure one GPU in at most ten minutes: python benchmarks/performance/gpu.py [--parts ...], or make gpu.

Writes docs/results/gpu.json and a table in docs/speed.md; without a GPU it writes nothing. Each part is a process of
its own with a time limit. A part that fails leaves the reason in its place, and the others continue.

- tests: tests/integration/test_gpu.py, among it that no inner step waits for the GPU;
- eager, compiled, graphs: MicroLlama (305M parameters) at sequence 512 in bfloat16 beside a bare loop, with the model
  FLOPs utilisation (MFU); the last with what takes the launching of kernels away (CUDA graphs), which no run does yet;
- statistics: what they add to a round of 200 inner steps of it;
- trainers: several of it in turn in one process; processes: four small ones, in processes that share the GPU;
- large: 1.1B parameters, plainly, and with activations computed anew and the outer state in host memory, with the
  allocator's peak beside what is planned;
- exchange: the mean of 100M parameters over two GPUs (nccl), in every encoding; with one GPU it says so;
- demo: config.yaml, on the GPU.
"""

import argparse
import functools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from algorithms.schedule.limits import RoundSchedule
from benchmarks.performance import scaling
from benchmarks.performance.throughput import (
    DEFAULTS,
    build_vocabulary,
    flops_per_token,
    inner_steps,
    make_data,
    peak_flops,
    seconds,
    statistics_ratio,
    step_times,
    trainers_together,
    whole_round,
)
from cluster import Cluster
from fabrics.config_checks import CHECKS
from fabrics.planning.estimate import estimate
from utils.config.reading import parse_config
from utils.config.schema import Config
from utils.distributed.launch import Launch
from utils.files import write_json_atomically, write_text_atomically

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "gpu.json"
PAGE = ROOT / "docs" / "speed.md"
# This program writes the section of the page between these lines.
BEGIN = "<!-- gpu: written by benchmarks/performance/gpu.py -->"
END = "<!-- end of gpu -->"
TOTAL_SECONDS = 540.0  # ten minutes with start and end
_LARGE = {"large": "1.1B parameters", "large_with_less": "1.1B, with less memory"}
_TIMES = {"bare loop": "bare_loop", "inner steps": "inner_steps", "whole round": "whole_round"}

MICROLLAMA = {
    "devices": ["cuda:0"],
    "autocast": "bfloat16",
    "model_config": {"preset": "keeeeenw/MicroLlama", "vocab_size": 32000},
    "sequence_length": 512,
    "INITIAL_BATCH_SIZE": 32,
    "compile_model": False,
}
LARGE = MICROLLAMA | {
    "model_config": {
        "preset": "keeeeenw/MicroLlama",
        "vocab_size": 32000,
        "hidden_size": 2048,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
    },
    "INITIAL_BATCH_SIZE": 16,
    "eval_batch_size": 16,
    "number_of_inner_steps_between_outers": 30,
}


def configured(values: Mapping, **more) -> Config:
    return parse_config(DEFAULTS | dict(values) | more, checks=CHECKS)[0]


# The parts: each returns JSON values.


def tests() -> dict:
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "tests/integration/test_gpu.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    return {"status": done.returncode, **counts, "output": done.stdout[-2000:] if done.returncode else ""}


def speeds(config: Config, repeats: int = 3) -> dict:
    found = step_times(config, repeats)
    peak, source = peak_flops(found.device, config.autocast)
    times = {key: found.speed(name) for name, key in _TIMES.items()}
    return {
        "tokens_per_second": times,
        "mfu": {key: speed * found.flops / peak for key, speed in times.items()},
        "inner_steps_of_bare_loop": times["inner_steps"] / times["bare_loop"],
        "peak_flops": peak,
        "peak_from": source,
    }


def graphs(config: Config) -> dict:
    """Speeds with CUDA graphs (torch.compile, mode reduce-overhead)."""
    compile_model = torch.compile
    torch.compile = functools.partial(compile_model, mode="reduce-overhead")
    try:
        return speeds(config)
    finally:
        torch.compile = compile_model


def statistics_share(config: Config, repeats: int = 2, steps: int = 200) -> dict:
    ratio, added = statistics_ratio(config, repeats)
    return {"plain_steps": ratio, "share_of_round": added / steps, "steps": steps}


def trainers_in_turn(config: Config, repeats: int = 2) -> dict:
    found = trainers_together(config, repeats, (1, 2, 4))
    return {str(count): {"tokens_per_second": speed, "of_one": ratio} for count, (speed, ratio) in found.items()}


def run_of(**values) -> dict:
    """Return the summary of a run of run.py with the demo's model."""
    with tempfile.TemporaryDirectory() as folder:
        keys = {"devices": "[cuda:0]", "clearml": "off", "plot_at_end": "false", "log_dir": folder} | values
        command = [sys.executable, "run.py", *(f"{key}={value}" for key, value in keys.items())]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(f"run.py ended with status {ended.returncode}: {ended.stderr[-500:]}")
        (summary,) = Path(folder).glob("*/model_training_report/summary.json")
        return json.loads(summary.read_text(encoding="utf-8"))


def processes_that_share() -> dict:
    fixed = {"sampling_method": "none", "smallest_worker_batch": "null", "merge_frequency": 10**6, "eval_every": 1000}
    length = {"number_of_outer_steps": 15, "number_of_inner_steps_between_outers": 40, "max_tokens": "null"}
    found = {n: run_of(processes=n, **fixed, **length)["tokens_per_second"] for n in (1, 2, 4)}
    return {str(n): {"tokens_per_second": speed, "of_one": speed / found[1]} for n, speed in found.items()}


def large(config: Config) -> dict:
    """Measure a round and its inner steps alone, after a warm-up round: tokens/s, MFU and the allocator's peak."""
    cluster = Cluster(config, make_data(config, build_vocabulary(config)))
    device = cluster.devices[0]
    (trainer,) = cluster.trainers.values()
    schedule = RoundSchedule(config.number_of_inner_steps_between_outers, 0.0, 0.0)
    whole_round(trainer, schedule)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    tokens = schedule.inner_steps * config.INITIAL_BATCH_SIZE * config.sequence_length
    speeds = {
        "whole_round": tokens / seconds(lambda: whole_round(trainer, schedule), device),
        "inner_steps": tokens / seconds(lambda: inner_steps(trainer, schedule), device),
    }
    flops = flops_per_token(cluster.models[device].module, config.sequence_length)
    peak, _ = peak_flops(device, config.autocast)
    return {
        "parameters": cluster.parameter_count,
        "tokens_per_second": speeds,
        "mfu": {name: speed * flops / peak for name, speed in speeds.items()},
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "planned_bytes": estimate(config).device_bytes,
    }


def exchange(parameters: int = 100_000_000, repeats: int = 3, gpus: int = 2) -> dict:
    """Measure the mean of a model over two processes: median seconds and bytes sent by both, for each encoding.

    Args:
        gpus: GPUs that take part; 0: two processes on the CPU.
    """
    if gpus > torch.cuda.device_count():
        return {"problem": f"needs {gpus} GPUs"}
    arguments = parameters, repeats, 1, gpus
    with Launch(2, [scaling.__file__, "--synchronisation", *map(str, arguments)]) as launch:
        found = scaling.synchronise(*arguments, launch)
    return {
        f"{one.encoding}, {one.how}": {"seconds": statistics.median(one.seconds), "bytes": one.sent} for one in found
    }


def begun(where: dict) -> dict:
    """Return the stored results if they are of the same GPU and PyTorch, else empty ones."""
    there = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    same = all(there.get(key) == value for key, value in where.items())
    return where | {"parts": there["parts"] if same else {}}


def demo() -> dict:
    summary = run_of()
    return {key: summary[key] for key in ("wall_seconds", "tokens_per_second", "final_metric", "communications")}


# The parts, in order of importance, each with its time limit in seconds.
PARTS: dict[str, tuple[Callable[[], dict], float]] = {
    "tests": (tests, 240.0),
    "eager": (lambda: speeds(configured(MICROLLAMA)), 120.0),
    "statistics": (lambda: statistics_share(configured(MICROLLAMA)), 60.0),
    "large": (lambda: large(configured(LARGE)), 120.0),
    "large_with_less": (
        lambda: large(configured(LARGE, activation_checkpointing=True, offload=["outer_state"])),
        150.0,
    ),
    "compiled": (lambda: speeds(configured(MICROLLAMA, compile_model=True)), 240.0),
    "trainers": (lambda: trainers_in_turn(configured(MICROLLAMA, number_of_inner_steps_between_outers=10)), 90.0),
    "processes": (processes_that_share, 150.0),
    "demo": (demo, 120.0),
    "exchange": (exchange, 60.0),
    "graphs": (lambda: graphs(configured(MICROLLAMA, compile_model=True)), 240.0),
}


def measured(name: str, limit: float) -> dict:
    """Run a part in a process of its own; return its result, or the problem."""
    if limit < 10.0:
        return {"problem": "no time was left"}
    command = [sys.executable, __file__, "--part", name]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with all its children
            return {"problem": f"not done after {limit:.0f} s"}
    if process.returncode:
        return {"problem": " ".join(errors.strip().splitlines()[-1:]) or f"exit status {process.returncode}"}
    return json.loads(output.splitlines()[-1])


# Name, measured value, target, whether the target is met.
Bar = tuple[str, float, float, bool]


def bars(parts: Mapping[str, Mapping]) -> list[Bar]:
    """Compare the results with their targets; parts without numbers are left out."""
    found = []
    part = parts.get("tests", {})
    if "status" in part:
        failed = max(part.get("failed", 0) + part.get("error", 0), int(part["status"] != 0))
        found.append(("tests that fail, of inner steps that wait for the GPU among them", failed, 0, failed == 0))
    models = [parts[name] for name in ("eager", "compiled") if "mfu" in parts.get(name, {})]
    if models:
        best = max(part["mfu"]["inner_steps"] for part in models)
        beside = min(part["inner_steps_of_bare_loop"] for part in models)
        found.append(("MFU of MicroLlama", best, 0.45, best >= 0.45))
        found.append(("of the bare loop", beside, 0.97, beside >= 0.97))
    share = parts.get("statistics", {}).get("share_of_round")
    if share is not None:
        found.append(("statistics in a round of 200 steps", share, 0.03, share < 0.03))
    for name in ("large", "large_with_less"):
        part = parts.get(name, {})
        if part.get("peak_bytes"):
            beside = abs(part["peak_bytes"] / part["planned_bytes"] - 1.0)
            found.append((f"memory of {_LARGE[name]} beside its estimate", beside, 0.25, beside <= 0.25))
    return found


def rows(parts: Mapping[str, Mapping]) -> Iterator[tuple[str, float, float | None]]:
    """Yield the rows of the table: description, tokens per second, and MFU (None: unknown)."""
    for name in ("eager", "compiled", "graphs"):
        part = parts.get(name, {})
        for key, speed in part.get("tokens_per_second", {}).items():
            yield f"MicroLlama, {name}, {key.replace('_', ' ')}", speed, part["mfu"][key]
    for name, label in _LARGE.items():
        part = parts.get(name, {})
        for key, speed in part.get("tokens_per_second", {}).items():
            yield f"{label}, {part['peak_bytes'] / 1e9:.1f} GB, {key.replace('_', ' ')}", speed, part["mfu"][key]
    for name, label in (("trainers", "trainers of MicroLlama in turn"), ("processes", "processes, the demo's model")):
        for count, part in parts.get(name, {}).items():
            if count.isdecimal():
                yield f"{count} {label}: {part['of_one']:.2f} of one", part["tokens_per_second"], None


def section(results: Mapping) -> str:
    """Return the section of the page as Markdown."""
    parts = results["parts"]
    lines = [f"On {results['gpu']}, with PyTorch {results['torch']} (`make gpu`):", ""]
    lines += ["| what | tokens/s | MFU |", "| --- | --- | --- |"]
    lines += [f"| {what} | {speed:,.0f} | {'' if mfu is None else f'{mfu:.1%}'} |" for what, speed, mfu in rows(parts)]
    lines += ["", *(f"- {said(bar)}" for bar in bars(parts))]
    for name, found in parts.get("exchange", {}).items():
        if name != "problem":
            lines.append(f"- 100M parameters, {name}: {found['seconds']:.3f} s for {found['bytes'] / 1e6:.0f} MB")
    return "\n".join(lines + [f"- {name}: {part['problem']}" for name, part in parts.items() if "problem" in part])


def said(bar: Bar) -> str:
    name, value, aim, kept = bar
    return f"{name}: {value:.3f}, aimed at {aim:g}, {'kept' if kept else 'missed'}"


def with_section(page: str, text: str) -> str:
    """Return the page with this text between its two marker lines."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure one GPU.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU here: nothing is measured, and nothing written")
        return 0
    if options.part:
        print(json.dumps(PARTS[options.part][0]()))
        return 0
    started = time.monotonic()
    results = begun({"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__})
    for name in options.parts:
        found = measured(name, min(PARTS[name][1], TOTAL_SECONDS - (time.monotonic() - started)))
        print(f"{name}: {json.dumps(found)}", flush=True)
        results["parts"][name] = found
        write_json_atomically(RESULTS, results)  # an interruption loses one part
        write_text_atomically(PAGE, with_section(PAGE.read_text(encoding="utf-8"), section(results)))
    print("\n".join(said(bar) for bar in bars(results["parts"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
