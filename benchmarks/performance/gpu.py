"""Measure one GPU in at most ten minutes: python benchmarks/performance/gpu.py [--parts ...], or make gpu.

Writes docs/results/gpu.json and a table for each GPU in docs/benchmarks.md; without a GPU it writes nothing. Each part
runs in its own process with a time limit. A part that fails leaves the reason in its place, and the others continue.
Another call measures the parts that are missing, have failed, or were measured with another version of the program.

- tests: tests/integration/test_gpu.py, which also checks that no inner step waits for the GPU.
- eager, compiled: MicroLlama (305M parameters) at sequence length 512 in bfloat16 against a bare loop, with the model
  FLOPs utilisation (MFU), and what the per-example statistics add to a round of 200 inner steps.
- graphs: inner steps of a model of 0.2M parameters, eager, compiled, and replayed as CUDA graphs.
- trainers: four trainers of 0.1M parameters on the GPU, in one, two and four processes.
- exo_gym: DiLoCo with four workers of 0.1M parameters beside EXO Gym, if it can be imported.
- large: 1.1B parameters; large_with_less: with activation checkpointing and the outer state in host memory. Both
  compare the allocator's peak with the plan.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.performance import exo_gym
from benchmarks.performance.throughput import (
    OVERHEAD,
    inner_steps,
    interleaved,
    make_data,
    seconds,
    step_speeds,
    tokens_per_second,
    whole_round,
)
from cluster import Cluster
from fabrics.config_checks import CHECKS
from fabrics.models.initialisation import flops_per_token
from fabrics.planning.estimate import Estimate
from utils.config.reading import parse_config
from utils.config.schema import Config
from utils.distributed.processes import program_digest
from utils.files import write_json_atomically, write_text_atomically

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "gpu.json"
PAGE = ROOT / "docs" / "benchmarks.md"
GPU_TESTS = "tests/integration/test_gpu.py"
# The section of the page between these lines is written by this program.
BEGIN = "<!-- gpu: written by benchmarks/performance/gpu.py -->"
END = "<!-- end of gpu -->"
TOTAL_SECONDS = 540.0  # ten minutes with start and end
# Dense bfloat16 FLOP/s from data sheets.
DATA_SHEETS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}
# Names of the parts in the table of the page.
LABELS = {
    "eager": "MicroLlama, eager",
    "compiled": "MicroLlama, compiled",
    "graphs": "0.2M parameters",
    "trainers": "four trainers of 0.1M parameters",
    "exo_gym": "DiLoCo, four workers of 0.1M parameters",
    "large": "1.1B parameters",
    "large_with_less": "1.1B parameters with less memory",
}

MICROLLAMA = {
    "devices": ["cuda:0"],
    "autocast": "bfloat16",
    "model_config": {"preset": "keeeeenw/MicroLlama", "vocab_size": 32000},
    "sequence_length": 512,
    "INITIAL_BATCH_SIZE": 32,
    "compile_model": False,
}
LARGE = MICROLLAMA | {
    "model_config": MICROLLAMA["model_config"]
    | {"hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32},
    "INITIAL_BATCH_SIZE": 16,
    "eval_batch_size": 16,
    "number_of_inner_steps_between_outers": 30,
}
SMALL = {"devices": ["cuda:0"], "number_of_inner_steps_between_outers": 100}
_MODES = {"eager": False, "compiled": True, "graphs": "reduce-overhead"}
_CONSTANT = ("max_tokens=1000000", "sampling_method=none", "merge_frequency=1000000", "eval_every=1000000")
# Four workers of the demo's model as in exo_gym.FOUR_NODES.
_FOUR_WORKERS = (
    *("number_of_initial_trainers=1", "smallest_worker_batch=null", "number_of_inner_steps_between_outers=20"),
    *(f"INITIAL_BATCH_SIZE={exo_gym.FOUR_NODES['INITIAL_BATCH_SIZE']}", "deterministic=false"),
)


def configured(values: Mapping, **more) -> Config:
    """Return the configuration of a measured training run."""
    return parse_config(OVERHEAD | dict(values) | more, checks=CHECKS)[0]


# The parts; each returns JSON values.


def tests() -> dict:
    """Run the GPU tests: counts of passed, failed and skipped ones."""
    # pyproject.toml has one -q; with a second one pytest prints no counts.
    command = [sys.executable, "-m", "pytest", "-n", "0", GPU_TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    return {"status": done.returncode, **counts, "output": done.stdout[-2000:] if done.returncode else ""}


def peak_flops(device: torch.device) -> float:
    """Return the device's bfloat16 FLOP/s: of its data sheet, or of a large matrix product measured here."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, peak in DATA_SHEETS.items():
            if known in name:
                return peak
    size = 8192 if device.type == "cuda" else 1024
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2.0 * size**3 / min(seconds(lambda: torch.mm(matrix, matrix), device) for _ in range(8))


def speeds(config: Config, repeats: int = 3) -> dict:
    """Measure the bare loop, inner steps and whole rounds: tokens/s and MFU, and the share of the statistics."""
    found = step_speeds(config, repeats)
    measured = {name.replace(" ", "_"): speed for name, speed in found["tokens_per_second"].items()}
    tested = measured.pop("whole_round_with_norm_test")
    added_steps = (measured["whole_round"] / tested - 1.0) * config.number_of_inner_steps_between_outers
    peak = peak_flops(torch.device(config.devices[0]))
    return {
        "tokens_per_second": measured,
        "mfu": {name: speed * found["flops_per_token"] / peak for name, speed in measured.items()},
        "inner_steps_of_bare_loop": found["of_bare_loop"]["inner steps"],
        "statistics_share_of_200_steps": added_steps / 200,
        "peak_flops": peak,
    }


def large(config: Config) -> dict:
    """Measure a round, and its inner steps alone, after a warm-up round: tokens/s, MFU and the allocator's peak."""
    cluster = Cluster(config, make_data(config))
    device = cluster.model.device
    whole_round(cluster)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    round_seconds = seconds(lambda: whole_round(cluster), device)
    step_seconds = seconds(lambda: inner_steps(cluster), device)
    measured = tokens_per_second(config, {"whole_round": [round_seconds], "inner_steps": [step_seconds]})
    flops = flops_per_token(cluster.model.module, config.sequence_length)
    peak = peak_flops(device)
    return {
        "parameters": cluster.parameter_count,
        "tokens_per_second": measured,
        "mfu": {name: speed * flops / peak for name, speed in measured.items()},
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "planned_bytes": Estimate(config).device_bytes,
    }


def graphs(configs: Mapping[str, Config], repeats: int = 5) -> dict:
    """Measure the inner steps of a small model under several configurations in turn: tokens/s by name."""
    functions = {}
    for name, config in configs.items():
        cluster = Cluster(config, make_data(config))
        functions[name] = partial(inner_steps, cluster)
    times = interleaved(functions, cluster.model.device, repeats)
    return {"tokens_per_second": tokens_per_second(config, times)}


def beside_exo_gym(device: str) -> dict:
    """Measure EXO Gym, which has a process per worker, and this project with one process and with four."""
    found = exo_gym.speeds(configured(exo_gym.FOUR_NODES, devices=[device]), 1)
    one, four = (f"this project in {count}" for count in ("one process", "four processes"))
    found["tokens_per_second"][one] = found["tokens_per_second"].pop("this project")
    together = trainers(device, (4,), (*_CONSTANT, *_FOUR_WORKERS))
    found["tokens_per_second"][four] = together["tokens_per_second"]["processes=4"]
    return found


def trainers(device: str, counts: Sequence[int], overrides: Sequence[str] = ()) -> dict:
    """Return the training speed of the demo's four nodes on one device, in tokens/s, by number of processes."""
    found = {}
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            values = [f"devices=[{device}]", f"processes={count}", f"log_dir={folder}", "trackers=[]", *overrides]
            subprocess.run([sys.executable, "run.py", *values], cwd=ROOT, capture_output=True, check=True)
            (summary,) = Path(folder).glob("*/model_training_report/summary.json")
            found[f"processes={count}"] = json.loads(summary.read_text())["tokens_per_second"]
    return {"tokens_per_second": found}


# The parts, in order of importance, each with its time limit in seconds.
PARTS: dict[str, tuple[Callable[[], dict], float]] = {
    "tests": (tests, 300.0),
    "eager": (lambda: speeds(configured(MICROLLAMA)), 120.0),
    "large": (lambda: large(configured(LARGE)), 120.0),
    "graphs": (lambda: graphs({name: configured(SMALL, compile_model=mode) for name, mode in _MODES.items()}), 120.0),
    "trainers": (lambda: trainers("cuda:0", (1, 2, 4), _CONSTANT), 120.0),
    "large_with_less": (
        lambda: large(configured(LARGE, activation_checkpointing=True, offload_outer_state=True)),
        150.0,
    ),
    "exo_gym": (lambda: beside_exo_gym("cuda:0"), 120.0),
    "compiled": (lambda: speeds(configured(MICROLLAMA, compile_model=True)), 240.0),
}


def measured(name: str, limit: float) -> dict:
    """Run a part in its own process; return its result, or the problem."""
    if limit < 10.0:
        return {"problem": "no time was left"}
    command = [sys.executable, __file__, "--part", name]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=limit)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # with all its children, which would keep the GPU
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return {"problem": f"not done after {limit:.0f} s"}
    if process.returncode:
        return {"problem": " ".join(errors.strip().splitlines()[-1:]) or f"exit status {process.returncode}"}
    return json.loads(output.splitlines()[-1])


# Results and their presentation


def recorded() -> list[dict]:
    """Return the recorded results: a dictionary with gpu, torch and parts for each GPU and PyTorch."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []


def section(results: Mapping) -> str:
    """Return what the page says of one GPU, as Markdown."""
    parts = results["parts"]
    rows = []
    findings = []
    tested = parts.get("tests", {})
    if "status" in tested:
        counts = ", ".join(
            f"{tested[word]} {word}" for word in ("passed", "failed", "error", "skipped") if word in tested
        )
        findings.append(f"tests, including that no inner step waits for the GPU: {counts}, status {tested['status']}")
    for name, label in LABELS.items():
        part = parts.get(name, {})
        shares = part.get("mfu", {})
        for key, speed in part.get("tokens_per_second", {}).items():
            share = f"{shares[key]:.1%}" if key in shares else ""
            rows.append(f"| {label}, {key.replace('_', ' ')} | {speed:,.0f} | {share} |")
        if "inner_steps_of_bare_loop" in part:
            findings.append(
                f"{label}: inner steps have {part['inner_steps_of_bare_loop']:.2f} of the bare loop's speed"
            )
            statistics = part["statistics_share_of_200_steps"]
            findings.append(f"{label}: the statistics take {statistics:.1%} of a round of 200 steps")
        if part.get("peak_bytes"):
            peak = part["peak_bytes"] / 1e9
            findings.append(f"{label}: {peak:.1f} GB allocated, {part['planned_bytes'] / 1e9:.1f} GB estimated")
    findings += [f"{name}: {part['problem']}" for name, part in parts.items() if "problem" in part]
    table = ["| what | tokens/s | MFU |", "| --- | --- | --- |", *rows]
    origin = f"On {results['gpu']}, with PyTorch {results['torch']} (`python benchmarks/performance/gpu.py`):"
    return "\n".join([origin, "", *table, "", *(f"- {finding}" for finding in findings)])


def with_section(page: str, text: str) -> str:
    """Return the page with this text between its two marker lines."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"


def _succeeded(part: Mapping | None) -> bool:
    return part is not None and "problem" not in part and not part.get("status")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure one GPU.")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, help="default: those not recorded, or failed, with this GPU and program"
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU here: nothing is measured, and nothing written")
        return 0
    if options.part:
        print(json.dumps(PARTS[options.part][0]()))
        return 0
    started = time.monotonic()
    everything = recorded()
    origin = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    results = next((entry for entry in everything if origin.items() <= entry.items()), origin | {"parts": {}})
    if results not in everything:
        everything.append(results)
    parts = results["parts"]
    program = program_digest()
    failed = [name for name in PARTS if not _succeeded(parts.get(name))]
    outdated = [name for name in PARTS if name not in failed and parts[name].get("program") != program]
    for name in options.parts or failed + outdated:
        found = measured(name, min(PARTS[name][1], TOTAL_SECONDS - (time.monotonic() - started)))
        found["program"] = program
        if _succeeded(parts.get(name)) and not _succeeded(found):
            print(f"{name}: {found.get('problem', 'failed')}; the earlier result stays", flush=True)
            continue
        print(f"{name}: {json.dumps(found)}", flush=True)
        parts[name] = found
        write_json_atomically(RESULTS, everything)  # an interruption loses one part
        text = "\n\n".join(section(entry) for entry in everything)
        write_text_atomically(PAGE, with_section(PAGE.read_text(encoding="utf-8"), text))
    print(section(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
