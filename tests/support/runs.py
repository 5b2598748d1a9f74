"""Short runs: their configurations, processes and logs, and the comparison of two of them."""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import yaml
from safetensors.torch import load_file

from cluster import Cluster
from tests.support.helpers import tiny_cluster
from training_logs.recording import recorder as recording
from training_logs.recording.provenance import Code, Origin, machine, machines
from training_logs.recording.recorder import RunRecorder
from training_logs.recording.run_folder import make_run_folder, start_logging

TIMES = (
    *("wall_seconds", "startup_seconds", "training_seconds", "evaluation_seconds", "tokens_per_second"),
    *("waiting_share", "idle_share", "invocations"),
)
SHORT = {
    "model_config": {"preset": "demo", "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24},
    "data_sample_size": 400,
    "val_size": 30,
    "eval_batch_size": 128,
    "sequence_length": 32,
    "vocab_size": 400,
    "number_of_outer_steps": 5,
    "number_of_inner_steps_between_outers": 4,
    "number_of_initial_trainers": 3,
    "nodes_per_gpu": 4,
    "INITIAL_BATCH_SIZE": 4,
    "max_batch_size": 4,
    "max_requested_batch": 24,
    "merge_frequency": 2,
    "identical_initialisation": False,
    "max_batch_growth": 2.0,
    "ETA": 0.4,
    "learning_rate_for_inner_opt": 5e-3,
    "save_weights_every": 2,
    "clearml": "off",
    "plot_at_end": False,
    "processes": 1,
}

# Data that a new interpreter reads faster than the docstrings of the standard library.
PAGE = {
    "dataset": "text",
    "text_files": [str(Path(__file__).resolve().parents[2] / "docs" / "methods.md")],
    "text_documents": "blank_lines",
    "data_sample_size": None,
    "val_size": 10,
}


def write_config(folder: Path, cache_dir: Path, **values) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(SHORT | {"log_dir": str(folder / "logs"), "cache_dir": str(cache_dir)} | values))
    return path


def before_round(monkeypatch, rounds: int, action: Callable[[], object]) -> None:
    """Do something after this number of rounds of a run, before the next one."""
    run_round = Cluster.run_round

    def act_and_run(self, *arguments):
        if self.counters.outer_steps == rounds:
            action()
        return run_round(self, *arguments)

    monkeypatch.setattr(Cluster, "run_round", act_and_run)


def error_lines(capsys) -> list[str]:
    """Return the lines of errors that a command has printed, without a traceback."""
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return [line for line in captured.err.splitlines() if line.startswith("error: ")]


def table_of(rows: Sequence[Mapping[str, float]]) -> np.ndarray:
    """Return rows with equal keys as `read_table` would read them."""
    names = list(rows[0]) if rows else []
    return np.array([tuple(row.values()) for row in rows], dtype=[(name, float) for name in names])


def rows_of(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def report(folder: Path, name: str) -> list[dict]:
    rows = rows_of(folder / "model_training_report" / name)
    return [row | {"seconds": "", "wall_seconds": ""} for row in rows]


def summary(folder: Path) -> dict:
    return json.loads((folder / "model_training_report" / "summary.json").read_text())


def assert_same_run(folder: Path, expected: Path, besides: tuple[str, ...] = ()) -> None:
    """Assert equal weights, CSVs and summaries, except times and the named entries of the summary."""
    for name in ("training_log.csv", "step_loss_log.csv", "merge_log.csv", "exchange_log.csv"):
        assert report(folder, name) == report(expected, name), name
    models, others = (
        sorted(path.relative_to(run) for path in run.glob("model_weights/**/model.safetensors"))
        for run in (expected, folder)
    )
    assert models == others
    assert models
    for model in models:
        ours, theirs = load_file(folder / model), load_file(expected / model)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), model
    ours, theirs = summary(folder), summary(expected)
    assert {k: v for k, v in ours.items() if k not in (*TIMES, *besides)} == {
        k: v for k, v in theirs.items() if k not in (*TIMES, *besides)
    }


def record_run(folder: Path, **values) -> Path:
    """Train a small run and record it as run.py does; return its folder."""
    cluster = tiny_cluster(
        **{
            "log_dir": str(folder),
            "clearml": "off",
            "number_of_outer_steps": 5,
            "number_of_initial_trainers": 3,
            "max_batch_size": 2,
            "max_requested_batch": 16,
            "ETA": 0.3,
        }
        | values
    )
    kept = start_logging()
    started = recording.time.perf_counter()
    folder = make_run_folder(cluster.config, cluster.data.dataset)
    here = machines([machine(cluster.model.device)])
    origin = Origin("python run.py 'run_name=<i>'", "2026-01-02T03:04:05+01:00", Code("c0ffee", True, b"+1\n"), here)
    recorder = RunRecorder(cluster.config, folder, kept, started, None, origin)
    final = cluster.train(recorder)
    models = cluster.save_models(folder / "model_weights", recorder)
    recorder.finish(cluster, final, "completed", models)
    recorder.close()
    return recorder.folder
