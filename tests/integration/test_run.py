"""The program as a user runs it: run folder, logs, summary, plots, model, and errors before any work."""

import html
import logging
import os
import platform
import re
import shlex
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import run as program
from algorithms.batch.calc_batch import BATCH_TESTS
from algorithms.batch.gradient_statistics import MINIMUM_WORKERS
from algorithms.flat import SKETCH_SIZE
from algorithms.nodes.policies import MERGE_POLICIES
from algorithms.synchronisation import METHODS
from fabrics.config_checks import CHECKS
from fabrics.data import dataset_loader
from fabrics.data.dataset_loader import DATASETS
from fabrics.models.model_family import MODELS
from fabrics.training.optimizers import INNER_OPTIMIZERS
from fabrics.training.worker import TrainingError
from run import train
from tests.support.programs import command
from tests.support.runs import assert_same_run, before_round, error_lines, rows_of, write_config
from tests.support.runs import summary as summary_of
from training_logs.showing.run_data import read_run
from utils.config.reading import load_config
from utils.config.schema import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def finished(programs, tmp_path_factory, cache_dir):
    """One short run through the real entry point, in its own process."""
    folder = tmp_path_factory.mktemp("run")
    config = write_config(folder, cache_dir)
    result = programs.run("run.py", "--config", config, "ETA=0.3", "model_config.num_hidden_layers=1")
    (run_folder,) = (folder / "logs").iterdir()
    return run_folder, result


@pytest.fixture(scope="module")
def rows(finished):
    return rows_of(finished[0] / "model_training_report" / "training_log.csv")


@pytest.fixture(scope="module")
def summary(finished):
    return summary_of(finished[0])


def test_the_run_folder_is_named_after_model_dataset_and_date(finished):
    assert finished[0].name.startswith("microllama_python_docs_20")
    # Where files differ from the commit, changes.patch is there as well.
    assert {path.name for path in finished[0].iterdir()} - {"changes.patch"} == {
        ".lock",
        "config.yaml",
        "training_log.log",
        "model_training_report",
        "memory_report",
        "model_weights",
        "checkpoints",
    }


def test_train_gives_the_bits_of_the_program_and_leaves_nothing_behind(finished, tmp_path, cache_dir):
    def state():
        log = logging.getLogger("adloco")
        signals = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        return log.handlers[:], log.level, log.propagate, signals, torch.get_num_threads(), dict(os.environ)

    own = logging.FileHandler(tmp_path / "own.log")
    logging.getLogger("adloco").addHandler(own)
    before = state()
    values = {"ETA": 0.3, "model_config.num_hidden_layers": 1}
    run = train(write_config(tmp_path, cache_dir), **values)
    assert state() == before
    assert own.stream is not None  # it is still open
    own.close()
    assert not torch.distributed.is_initialized()
    assert_same_run(run.folder, finished[0])
    assert run.perplexity == run.summary["final_metric"] == run.training_log["validation_metric"][-1]
    assert run.accuracy is None
    assert (run.model_folder / "model.safetensors").exists()


def test_a_run_leaves_the_deterministic_mode_of_the_program():
    """On GPUs a run may turn it on, without filling memory."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with program._unchanged_program():
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


def test_train_takes_a_mapping_a_config_and_a_run_to_resume(finished, tmp_path, cache_dir):
    short = yaml.safe_load(write_config(tmp_path, cache_dir).read_text()) | {"number_of_outer_steps": 1}
    torch.set_num_threads(2)
    architecture = {"preset": "demo", "hidden_size": np.int64(64)}
    assert program.given_config({}) == {}  # not config.yaml
    first = train(short, cpu_threads=1, model_config=architecture)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert first.summary["outer_steps"] == 1
    config, warnings = load_config(first.folder / "config.yaml", checks=CHECKS)
    assert warnings == []
    assert train(config, save_weights_every=None).perplexity == first.perplexity
    again = train(resume=first.folder, number_of_outer_steps=2)
    assert (again.folder, again.summary["outer_steps"]) == (first.folder, 2)


def test_train_works_in_a_thread(tmp_path, cache_dir):
    with ThreadPoolExecutor() as threads:
        run = threads.submit(train, write_config(tmp_path, cache_dir, number_of_outer_steps=1)).result()
    assert run.summary["status"] == "completed"


def test_train_raises_what_the_command_line_prints(tmp_path, cache_dir, monkeypatch):
    config = write_config(tmp_path, cache_dir)
    with pytest.raises(ConfigError, match="ETAA: unknown key; did you mean ETA"):
        train(config, ETAA=1)
    with pytest.raises(TrainingError, match="lower learning_rate_for_inner_opt"):
        train(config, learning_rate_for_inner_opt=1e30, gradient_clipping=None)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="processes: "):
        train(config)


def test_the_round_log_has_a_row_per_trainer_and_round(rows):
    assert [(row["outer_step"], row["trainer_id"]) for row in rows[:3]] == [("1", "0"), ("1", "1"), ("1", "2")]
    assert [sum(row["outer_step"] == str(step) for row in rows) for step in range(1, 6)] == [3, 3, 2, 2, 1]
    for row in rows:
        # P and O are measured for the tests that ask for them.
        unmeasured = ("inner_product", "orthogonal")
        assert all(value for name, value in row.items() if not name.startswith(unmeasured)), row
        assert float(row["validation_metric"]) == pytest.approx(2.718281828 ** float(row["validation_loss"]), rel=1e-4)
        assert int(row["nodes"]) * int(row["micro_batch"]) * int(row["accumulation_steps"]) >= int(
            row["effective_batch"]
        )
        assert int(row["round_examples"]) == int(row["effective_batch"]) * int(row["inner_steps"])
        assert int(row["round_tokens"]) == 32 * int(row["round_examples"])


def test_totals_are_the_sums_of_the_rounds(finished, rows, summary):
    assert summary["examples"] == sum(int(row["round_examples"]) for row in rows) == int(rows[-1]["examples"])
    assert summary["tokens"] == sum(int(row["round_tokens"]) for row in rows) == int(rows[-1]["tokens"])
    synchronisations = sum(int(row["nodes"]) > 1 for row in rows)
    assert summary["communications"] == synchronisations + summary["merges"] == int(rows[-1]["communications"])
    model_bytes = 4 * summary["parameters"]
    nodes = {(int(row["outer_step"]), int(row["trainer_id"])): int(row["nodes"]) for row in rows}
    # Parameters and velocity of one trainer to the other's first node, the average from there to its others.
    merging = [nodes[step, merge.representative] for step, merge in read_run(finished[0]).merges.items()]
    # Parameters, velocity, two moments and a step count to every new node.
    new = sum(max(0, count - nodes.get((step - 1, trainer), count)) for (step, trainer), count in nodes.items())
    assert new > 0
    grown = {step for (step, trainer), count in nodes.items() if count > nodes.get((step - 1, trainer), count)}
    redistributions = len(grown)
    expected = {
        "bytes_synchronised": sum(
            2 * (count - 1) * (model_bytes + 4 * SKETCH_SIZE * (count >= MINIMUM_WORKERS)) for count in nodes.values()
        ),
        "bytes_merged": 2 * model_bytes * sum(merging),
        "bytes_redistributed": new * (4 * model_bytes + 4),
    }
    expected["bytes_communicated"] = sum(expected.values())
    # The first node of a merge's representative receives as much as it sends on, if there is another; new nodes receive
    # their state side by side.
    expected["link_bytes_merged"] = 2 * model_bytes * sum(1 + (count > 1) for count in merging)
    expected["link_bytes_redistributed"] = (4 * model_bytes + 4) * redistributions
    for name, value in expected.items():
        assert summary[name] == value == float(rows[-1][name])


def test_the_summary_tells_the_run(rows, summary):
    assert summary["status"] == "completed"
    assert (summary["outer_steps"], summary["merges"], summary["final_trainers"]) == (5, 2, 1)
    assert summary["dataset"] == "python_docs"
    assert summary["seed"] == 42
    assert summary["versions"]["torch"].startswith("2.")
    # Before training the model knows nothing: about the vocabulary's size.
    assert summary["initial_metric"] == pytest.approx(400, rel=0.2)
    assert summary["final_metric"] == pytest.approx(float(rows[-1]["validation_metric"]), rel=1e-9)
    assert summary["final_metric"] < 0.75 * summary["initial_metric"]
    assert summary["largest_requested_batch"] == max(int(row["requested_batch"]) for row in rows) > 4
    assert summary["wall_seconds"] > summary["training_seconds"] > 0
    assert summary["tokens_per_second"] == pytest.approx(summary["tokens"] / summary["training_seconds"])


def test_the_run_can_be_traced(finished, summary):
    (invocation,) = summary["invocations"]
    program, *arguments = shlex.split(invocation["command"])
    assert program.startswith("python")
    assert arguments == finished[1].args[1:]
    assert (invocation["first_round"], invocation["processes"]) == (1, 1)
    commit = command("git", "rev-parse", "HEAD", cwd=ROOT).stdout.strip()
    assert invocation["commit"] == (commit or "unknown")
    assert (finished[0] / "changes.patch").exists() == bool(invocation["changed"])
    (hardware,) = invocation["hardware"]
    assert (hardware["host"], hardware["processes"]) == (platform.node(), 1)


def test_every_inner_step_is_in_the_step_log(finished, rows):
    steps = rows_of(finished[0] / "model_training_report" / "step_loss_log.csv")
    assert len(steps) == sum(int(row["nodes"]) * int(row["inner_steps"]) for row in rows)
    for row in rows:
        own = [s for s in steps if (s["outer_step"], s["trainer_id"]) == (row["outer_step"], row["trainer_id"])]
        weights = [int(step["effective_batch"]) for step in own]
        mean = sum(float(s["loss"]) * w for s, w in zip(own, weights, strict=True)) / sum(weights)
        assert float(row["train_loss"]) == pytest.approx(mean)


def test_one_readable_line_per_trainer_and_round(finished, rows):
    log = (finished[0] / "training_log.log").read_text()
    lines = [line for line in log.splitlines() if "| trainer" in line]
    assert len(lines) == len(rows)
    for word in ("loss", "perplexity", "batch", " x ", " node", "tokens/s", "communications"):
        assert all(word in line for line in lines), word
    assert log.count("merge after round") == 2
    assert "trainer 0" in finished[1].stderr + finished[1].stdout


def test_the_log_says_what_lone_workers_cost(tmp_path, cache_dir):
    config = write_config(
        tmp_path, cache_dir, number_of_initial_trainers=2, merge_frequency=2, eval_every=2, sampling_method="none",
        INITIAL_BATCH_SIZE=8, smallest_worker_batch=8, number_of_outer_steps=None, max_tokens=3072,
        communication_budget=30, save_weights_every=None,
    )  # fmt: skip
    run = train(config)
    # Two rounds with two trainers of one worker each, then two rounds with one: 2 x 1,024 and 2 x 512 tokens.
    assert (run.summary["communications"], run.summary["alone_share"]) == (1, 0.5)
    assert run.summary["idle_share"] > 0.5
    log = (run.folder / "training_log.log").read_text()
    rounds = [line for line in log.splitlines() if "| trainer" in line]
    assert ["perplexity" in line for line in rounds] == [False, False, True, True, False, True]
    assert [int(line.split("communications")[1].split()[0]) for line in rounds] == [0, 0, 0, 0, 1, 1]
    assert "round 3: trainer 0 on node 0 (3 nodes idle: each worker needs 8 examples)\n" in log
    (merge,) = (line for line in log.splitlines() if "merge after round 2" in line)
    assert "| perplexity " in merge
    assert "| communications 1 (" in merge
    assert "in 4 rounds with 1 communication (" in log
    assert "; one worker alone in 50% of the rounds\n" in log
    assert not re.search(r"\b(None|False|1 (trainer|node|round|communication)s)\b", log)


def test_overrides_may_stand_before_and_after_options():
    options = program.parse_arguments(["ETA=1", "--resume", "logs/a", "max_tokens=5", "--force", "nu=2"])
    assert options.overrides == ["ETA=1", "max_tokens=5", "nu=2"]
    assert (options.resume, options.force) == ("logs/a", True)
    assert program.parse_arguments([]).overrides == []


@pytest.mark.parametrize("option", ["--config", "--resume"])
def test_an_option_without_a_value_starts_no_other_run(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        program.parse_arguments([option, ""])
    assert f"{option} must not be empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["INITIAL_BATCH_SIZE=100000", "max_requested_batch=null"], "INITIAL_BATCH_SIZE: must be at most the"),
        (["model_type=bert"], "model_type: bert is for classification, dataset python_docs for causal_lm"),
        (
            ["model_config.name=/no/such/model", "model_config.pretrained=true"],
            "model_config.name: cannot load '/no/such/model'",
        ),
        (["data_sample_size=1000000"], "data_sample_size:"),
        (["data_sample_size=1000000", "sequence_length=1024"], "sequence_length: the model takes"),  # comes first
        (["log_dir=FILE/logs"], "log_dir: cannot write to"),
        (["cache_dir=FILE/cache", "vocab_size=333"], "cache_dir: cannot write"),
    ],
)
def test_bad_input_is_one_clear_line_exit_2_and_no_run_folder(tmp_path, cache_dir, capsys, overrides, expected):
    (tmp_path / "FILE").write_text("a file, not a folder")
    overrides = [override.replace("FILE", str(tmp_path / "FILE")) for override in overrides]
    assert program.main(["--config", str(write_config(tmp_path, cache_dir)), *overrides]) == 2
    (error,) = error_lines(capsys)
    assert expected in error
    assert not list(tmp_path.glob("logs/*"))


def test_nodes_that_do_not_suit_are_refused_before_data_are_read(tmp_path, cache_dir, capsys, monkeypatch):
    def read(*arguments):
        raise AssertionError("the data were read")

    monkeypatch.setattr(dataset_loader, "load_data", read)
    config = write_config(
        tmp_path, cache_dir, communication_budget=3, nodes_per_gpu=1, number_of_initial_trainers=1,
        sampling_method="none", number_of_outer_steps=None, max_tokens=9000,
    )  # fmt: skip
    assert program.main(["--config", str(config)]) == 2
    (error,) = error_lines(capsys)
    assert "communication_budget: a run on one node never communicates" in error


def test_all_problems_are_reported_together(tmp_path, cache_dir, capsys):
    overrides = ["ETAA=1", "nu=-1", "merging_policy=x"]
    assert program.main(["--config", str(write_config(tmp_path, cache_dir)), *overrides]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[:2] for line in lines] == [["error", key] for key in ("ETAA", "nu", "merging_policy")]


def test_the_first_line_is_there_before_anything_that_takes_long_is_loaded(programs, tmp_path):
    """PyTorch, or what imports it, takes seconds; here it ends the program."""
    for name in ("torch", "transformers", "numpy", "pydantic"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} is loaded')")
    begun = programs.run("run.py", env=os.environ | {"PYTHONPATH": str(tmp_path)}, fresh=True, status=1)
    assert begun.stdout == "AdLoCo: loading PyTorch ...\n"
    assert "is loaded" in begun.stderr


@pytest.mark.parametrize("buffering", [1, -1])
def test_a_list_whose_reader_has_ended_gives_status_1(monkeypatch, buffering):
    """The error comes from printing where lines are written at once, otherwise from flushing."""
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "argv", ["run.py", "--list", "methods"])
    with open(write, "w", buffering) as output, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        assert program.start() == 1


@pytest.mark.parametrize(
    ("kind", "registry"),
    [
        ("methods", METHODS),
        ("models", MODELS),
        ("datasets", DATASETS),
        ("policies", MERGE_POLICIES),
        ("optimizers", INNER_OPTIMIZERS),
        ("tests", BATCH_TESTS),
    ],
)
def test_lists_have_one_line_for_each_name(capsys, kind, registry):
    assert program.main(["--list", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(registry)
    assert all(len(line.split()) > 1 for line in lines)


def test_a_run_that_cannot_go_on_says_why_and_keeps_what_it_has(tmp_path, cache_dir, capsys):
    values = {"learning_rate_for_inner_opt": 1e30, "gradient_clipping": None, "plot_at_end": True}
    config = write_config(tmp_path, cache_dir, **values)
    assert program.main(["--config", str(config)]) == 1
    captured = capsys.readouterr()
    assert "lower learning_rate_for_inner_opt" in captured.out + captured.err
    (folder,) = tmp_path.glob("logs/*")
    summary = summary_of(folder)
    assert summary["status"] == "failed"
    assert "lower learning_rate_for_inner_opt" in summary["error"]
    assert html.escape(summary["error"]) in (folder / "model_training_report" / "report.html").read_text()


def test_an_unforeseen_error_is_logged_whole_and_the_run_keeps_what_it_has(tmp_path, cache_dir, monkeypatch):
    def fail():
        raise RuntimeError("the disk is on fire")

    before_round(monkeypatch, 1, fail)
    assert program.main(["--config", str(write_config(tmp_path, cache_dir))]) == 1
    (folder,) = tmp_path.glob("logs/*")
    summary = summary_of(folder)
    assert (summary["status"], summary["outer_steps"]) == ("failed", 1)
    assert summary["error"] == "RuntimeError: the disk is on fire"
    log = (folder / "training_log.log").read_text()
    assert "Traceback" in log
    assert "RuntimeError: the disk is on fire" in log
    assert len(rows_of(folder / "model_training_report" / "training_log.csv")) == 3


def test_every_field_of_the_records_is_explained(finished, summary):
    page = (ROOT / "docs" / "run_folder.md").read_text(encoding="utf-8")
    explained = re.findall(r"`([a-z_]+\*?)`", page)
    prefixes = tuple(name.removesuffix("*") for name in explained if name.endswith("*"))
    names = set(summary)
    for file in (finished[0] / "model_training_report").glob("*.csv"):
        names.update(file.read_text(encoding="utf-8").splitlines()[0].split(","))
    assert [name for name in sorted(names) if name not in explained and not name.startswith(prefixes)] == []
