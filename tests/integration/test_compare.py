"""Comparisons: their files, recorded outcomes, and small ones through the command."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.compare import runs, spec
from benchmarks.compare.compare import carry_out, check_same_data, identity, main, recorded_outcomes
from benchmarks.compare.results import Results
from benchmarks.compare.runs import ComparisonError, Runner, outcome
from benchmarks.compare.spec import COMPARISONS, ROOT, ComparisonSpec, load_spec, make_run
from tests.support.helpers import Recorder, light_cluster
from training_logs.showing.run_data import read_run
from utils.config.schema import ConfigError

RESULTS = ROOT / "docs" / "results"


def small_comparison(folder: Path, **values) -> Path:
    common = {
        "max_tokens": 6000, "number_of_outer_steps": None, "number_of_inner_steps_between_outers": 5,
        "sequence_length": 16, "vocab_size": 300, "data_sample_size": 60, "model_config": {"preset": "demo",
        "hidden_size": 16, "intermediate_size": 24}, "max_batch_size": 16, "max_requested_batch": None,
        "smallest_worker_batch": None,
    }  # fmt: skip
    adaptive = {"number_of_initial_trainers": 2, "INITIAL_BATCH_SIZE": 8, "merge_frequency": 2, "ETA": 0.8}
    fixed = {"number_of_initial_trainers": 1, "INITIAL_BATCH_SIZE": 8, "sampling_method": "none"}
    written = {
        "title": "Small", "question": "Does it run?", "common": common, "seeds": [1, 2], "reference": "AdLoCo",
        "methods": [
            {"name": "AdLoCo", "overrides": adaptive}, {"name": "DiLoCo", "overrides": fixed, "baseline": True},
        ],
        "hardware": [{"name": "paper", "t_min": 0.01, "t_example": 0.002}],
        "networks": [{"name": "1 Gb/s", "bits_per_second": 1e9, "latency": 0.001}],
    }  # fmt: skip
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(written | values))
    return path


def test_methods_stop_at_the_same_number_of_tokens():
    """Every method stops within one inner step of the budget."""
    for settings in ({"sampling_method": "none"}, {"number_of_initial_trainers": 3, "ETA": 0.3}):
        cluster, recorder = light_cluster(number_of_outer_steps=None, max_tokens=3000, **settings), Recorder()
        cluster.train(recorder)
        step = sum(report.effective_batch for report in recorder.rounds[-1].reports.values()) * 9
        assert 3000 <= cluster.counters.tokens < 3000 + step


# Files


@pytest.mark.parametrize("path", sorted(COMPARISONS.glob("*.yaml")), ids=lambda path: path.stem)
def test_all_runs_of_the_published_comparisons_are_recorded(path):
    recorded = json.loads((RESULTS / f"{path.stem}.json").read_text(encoding="utf-8"))
    assert json.loads(json.dumps(carry_out(path, None, RESULTS))) == recorded


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"reference": "SGD"}, "reference: must be one of the methods, got 'SGD'"),
        ({"sedes": [1]}, "sedes: "),
        ({"seeds": []}, "seeds: "),
        ({"methods": [{"name": "AdLoCo", "overrides": {"ETTA": 1}}]}, "AdLoCo: ETTA: unknown key"),
        ({"methods": [{"name": "AdLoCo"}, {"name": "AdLoCo"}]}, "methods: 'AdLoCo' is there twice"),
        ({"methods": [{"name": "AdLoCo", "overrides": {"ETA": -1}}]}, "AdLoCo: ETA: "),
        ({"summary": "a\nb\nc\nd\ne"}, "summary: "),
        ({"claims": [{"paper": "it helps"}]}, "claims.0.found: "),
    ],
)
def test_a_wrong_comparison_is_refused_before_any_run(tmp_path, capsys, values, problem):
    path = small_comparison(tmp_path, **values)
    with pytest.raises(ConfigError) as error:
        load_spec(path)
    assert any(problem in line for line in error.value.problems), error.value.problems
    assert main([str(path), "--runs", str(tmp_path / "runs"), "--output", str(tmp_path)]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


# Identity of runs and recorded outcomes


def test_a_run_is_identified_by_the_settings_of_its_file(tmp_path):
    comparison = load_spec(small_comparison(tmp_path))
    method = comparison.methods[0]
    run = make_run(comparison, method, 1)
    assert make_run(comparison, method.model_copy(update={"name": "other"}), 1).id == run.id
    assert make_run(comparison, method, 2).id != run.id
    third = make_run(comparison, method, 1, 1 / 3)
    assert third.id != run.id
    assert "max_tokens=2000" in third.overrides()
    own = make_run(comparison, method.with_settings({"sequence_length": 8}), 1)  # over the common settings
    assert own.id != run.id
    assert "sequence_length=8" in own.overrides()


def small_results(comparison: ComparisonSpec) -> dict:
    outcomes = [{"method": name, "seed": 1, "completed": True} for name in ("AdLoCo", "DiLoCo")]
    return {"comparison": comparison.model_dump(mode="json"), "outcomes": outcomes}


def test_recorded_outcomes_survive_removed_and_renamed_keys(tmp_path, monkeypatch):
    comparison = load_spec(small_comparison(tmp_path))
    old = small_results(comparison)
    old["comparison"]["common"] |= {"a_key_that_is_gone": 3}
    for method in old["comparison"]["methods"]:
        method["overrides"]["first_batch"] = method["overrides"].pop("INITIAL_BATCH_SIZE")
    wanted = {
        identity(comparison, make_run(comparison, method, 1)): outcome
        for method, outcome in zip(comparison.methods, old["outcomes"], strict=True)
    }
    assert recorded_outcomes(old, comparison) != wanted
    monkeypatch.setitem(spec._RENAMED, "first_batch", "INITIAL_BATCH_SIZE")
    assert recorded_outcomes(old, comparison) == wanted


def test_recorded_outcomes_hold_for_the_same_settings_hardware_and_networks(tmp_path):
    comparison = load_spec(small_comparison(tmp_path))
    raw = small_results(comparison)

    def left(**values) -> list[str]:
        """Methods with an outcome that the changed comparison still asks for."""
        changed = ComparisonSpec.model_validate(comparison.model_dump() | values)
        known = recorded_outcomes(raw, changed)
        return [method.name for method in changed.methods if identity(changed, make_run(changed, method, 1)) in known]

    device = vars(comparison.hardware[0])
    network = vars(comparison.networks[0])
    adloco, diloco = comparison.model_dump()["methods"]
    assert left() == left(title="New", seeds=[1, 2, 3]) == ["AdLoCo", "DiLoCo"]
    assert left(hardware=[device | {"t_min": 0.02}]) == []
    assert left(networks=[network | {"latency": 0.01}]) == []
    assert left(methods=[adloco, diloco | {"synchronous_workers": 4}]) == ["AdLoCo"]
    assert left(methods=[adloco, diloco | {"overrides": {"sampling_method": "none"}}]) == ["AdLoCo"]
    assert recorded_outcomes({}, comparison) == {}


# Identity of the data


def text_run(runner: Runner, folder: Path, comparison: ComparisonSpec, method: str, text: str) -> dict:
    """Outcome of a run on text files with this content."""
    (folder / "text").mkdir(exist_ok=True)
    (folder / "text" / "one.txt").write_text(text)
    run = make_run(comparison, comparison.method(method), 1)
    runner.make([run], "text")
    return outcome(run, comparison, runner)


@pytest.mark.usefixtures("programs")
def test_runs_of_different_data_are_never_paired(tmp_path):
    paragraphs = [f"A paragraph of the number {number} and of little else." for number in range(60)]
    common = {"dataset": "text", "text_files": [str(tmp_path / "text" / "*.txt")], "text_documents": "blank_lines"}
    common |= {"cache_dir": str(tmp_path / "cache"), "sequence_length": 16, "vocab_size": 300, "val_size": 10}
    common |= {"number_of_outer_steps": 1, "max_tokens": None, "number_of_inner_steps_between_outers": 1}
    comparison = load_spec(small_comparison(tmp_path, common=common, seeds=[1]))
    runner = Runner(tmp_path / "runs", 1)
    first = text_run(runner, tmp_path, comparison, "AdLoCo", "\n\n".join(paragraphs))
    paragraphs[30] = paragraphs[30].replace("little", "nothing")
    second = text_run(runner, tmp_path, comparison, "DiLoCo", "\n\n".join(paragraphs))
    assert first["data"] != second["data"]
    assert first["versions"]["torch"] == torch.__version__
    with pytest.raises(ComparisonError, match=r"seed 1: .*AdLoCo.*DiLoCo"):
        check_same_data([first, second])
    shared = second | {"data": first["data"]}
    check_same_data([first, shared])
    raw = {"comparison": comparison.model_dump(mode="json"), "metric": {"higher_is_better": False}}
    assert Results(raw | {"outcomes": [first, shared]}).difference("DiLoCo", "tokens") is not None
    assert Results(raw | {"outcomes": [first, second]}).difference("DiLoCo", "tokens") is None


def test_outcomes_without_a_digest_of_their_data_are_not_extended(tmp_path):
    path = small_comparison(tmp_path)
    comparison = load_spec(path)
    (tmp_path / "small.json").write_text(json.dumps(small_results(comparison)))
    runner = Runner(tmp_path / "runs", 1)
    with pytest.raises(ComparisonError, match=r"small\.json"):
        carry_out(path, runner, tmp_path)
    assert not runner.folder.exists()


# Runs


def test_a_small_comparison_through_its_command(programs, tmp_path, cache_dir, capsys):
    path = small_comparison(tmp_path)
    written = yaml.safe_load(path.read_text())
    written["common"]["cache_dir"] = str(cache_dir)
    path.write_text(yaml.safe_dump(written))
    arguments = [str(path), "--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "docs"), "--jobs", "2"]
    json_file = tmp_path / "docs" / "results" / "small.json"
    page = json_file.with_suffix(".md")

    assert main([*arguments, "--report-only"]) == 1
    assert "runs are missing: AdLoCo, DiLoCo" in capsys.readouterr().err
    programs.run("benchmarks/compare/compare.py", *arguments)
    found = json.loads(json_file.read_text())
    results = Results(found)
    assert {name: len(runs) for name, runs in results.runs.items()} == {"AdLoCo": 2, "DiLoCo": 2}
    for entry in found["outcomes"]:
        folder = tmp_path / "runs" / entry["id"]
        run = read_run(folder / json.loads((folder / "run.json").read_text())["folder"])
        assert run.config["training_seed"] == entry["seed"]
        assert entry["final_metric"] == run.summary["final_metric"]
        assert 6000 <= entry["curves"]["tokens"][-1] == run.summary["tokens"]
        assert entry["curves"]["communications"][-1] == run.summary["communications"] > 0
        assert entry["curves"]["metric"][-1] == pytest.approx(run.summary["final_metric"], rel=1e-5)
        blocking, overlapped = (entry["curves"][axis][-1] for axis in (*results.simulated, *results.overlapped))
        assert overlapped < blocking
    text = page.read_text()
    assert f"| DiLoCo | {results.mean_final('DiLoCo'):.2f} ±" in text
    assert "(results/small.md)" in (tmp_path / "docs" / "results.md").read_text()
    for name in ("small.png", "small_frontier.png"):
        assert (page.parent / name).stat().st_size > 10_000
    # Finished runs are not made again; a missing one is.
    json_file.unlink()
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").glob("*/run.json")}
    lost = sorted(times)[0]
    lost.unlink()
    assert main(arguments) == 0
    assert [file for file, before in times.items() if file.stat().st_mtime_ns != before] == [lost]
    # Recorded outcomes are not made again.
    assert all(entry["data"] and entry["versions"] for entry in found["outcomes"])
    shutil.rmtree(tmp_path / "runs")
    published = json_file.read_text()
    assert main(arguments) == 0
    assert json_file.read_text() == published
    assert not (tmp_path / "runs").exists()
    # New words need no runs. A page is not written while runs are missing.
    path.write_text(yaml.safe_dump(written | {"answer": "It does."}))
    text = page.read_text()
    assert main([*arguments, "--report-only"]) == 0
    assert page.read_text() == text.replace("![Curves]", "## Conclusions\n\nIt does.\n\n![Curves]")
    text = page.read_text()
    written["methods"][1]["overrides"]["INITIAL_BATCH_SIZE"] = 4
    path.write_text(yaml.safe_dump(written | {"answer": "Perhaps."}))
    assert main([*arguments, "--report-only"]) == 1
    assert "small.yaml: runs are missing: DiLoCo\n" in capsys.readouterr().err
    assert page.read_text() == text


@pytest.mark.parametrize(("status", "text"), [(1, "a round\n"), (1, "Traceback (most recent call last):\n"), (2, "")])
def test_a_failed_run_is_made_again_unless_training_itself_failed(monkeypatch, tmp_path, status, text):
    comparison = load_spec(small_comparison(tmp_path))
    run = make_run(comparison, comparison.methods[0], 1)
    commands = []

    class Program:
        def __init__(self, command, stdout, **how):
            commands.append(command[2:])
            stdout.write(text.encode())
            (tmp_path / run.id / "run" / "checkpoints").mkdir(parents=True)

        def wait(self):
            return status

    monkeypatch.setattr(runs.subprocess, "Popen", Program)
    monkeypatch.setattr(runs, "commit", lambda: "one")
    monkeypatch.setattr(runs, "machine", lambda: "here")
    runner = Runner(tmp_path, 1)
    if (status, text) == (1, "a round\n"):
        runner.make([run, run], "small")
        assert runner.record(run)["completed"] is False
        assert runner.data(run) is None
        assert not list((tmp_path / run.id).glob("*/checkpoints"))
        assert len(commands) == 1
    else:
        for _ in range(2):
            with pytest.raises(ComparisonError, match=f"exit status {status}"):
                runner.make([run], "small")
        assert len(commands) == 2
        assert runner.record(run) is None
    assert commands[0] == ["--config", "config.yaml", *run.overrides(), *runs._ALONE, f"log_dir={tmp_path / run.id}"]


RATE = {"low": 1e-3, "high": 1e-1, "log": True}


def test_a_search_and_a_comparison_that_uses_its_values(programs, tmp_path, cache_dir):
    (tmp_path / "text").mkdir()
    for name in ("README.md", "docs/rounds.md", "docs/theory.md"):
        shutil.copy(ROOT / name, tmp_path / "text")
    fixed = {"number_of_initial_trainers": 1, "sampling_method": "none", "max_tokens": 1800, "INITIAL_BATCH_SIZE": 4}
    methods = [
        {"name": "AdLoCo", "overrides": fixed, "search": {"outer_momentum": [0.0, 0.5]}},
        {"name": "LocalSGD", "overrides": fixed | {"distributed_algo": "LocalSGD"}, "baseline": True},
    ]
    search = {"budget": 4, "rungs": 2, "over": {"learning_rate_for_inner_opt": RATE}}
    path = small_comparison(tmp_path, search=search, methods=methods, seeds=[1, 2])
    written = yaml.safe_load(path.read_text())
    written["common"]["cache_dir"] = str(cache_dir)
    searched = tmp_path / "searched.yaml"
    searched.write_text(yaml.safe_dump(written))
    del written["search"], written["methods"][0]["search"]
    text = {"dataset": "text", "text_files": [str(tmp_path / "text")], "text_documents": "blank_lines"}
    judged = tmp_path / "judged.yaml"
    judged.write_text(yaml.safe_dump(written | {"tuned_on": "searched", "common": written["common"] | text}))
    arguments = ["--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "docs"), "--jobs", "2"]

    assert main([str(judged), *arguments]) == 2  # the search has no results yet
    assert main([str(judged), str(searched), *arguments]) == 0
    folder = tmp_path / "docs" / "results"
    results = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("searched", "judged")}
    found = results["searched"]["search"]
    assert results["judged"]["found"] == {name: entry["best"] for name, entry in found.items()}
    assert list(found["AdLoCo"]["best"]) == ["learning_rate_for_inner_opt", "outer_momentum"]
    for entry in found.values():
        assert [run["rung"] for run in entry["runs"]] == [0, 0, 0, 1]
        assert entry["metric"] == entry["runs"][-1]["metric"]
    # The first seed chose the values, so it is not reported where they were chosen.
    assert {entry["seed"] for entry in results["searched"]["outcomes"]} == {2}
    assert {entry["seed"] for entry in results["judged"]["outcomes"]} == {1, 2}
    for entry in results["judged"]["outcomes"]:
        settings = json.loads((tmp_path / "runs" / entry["id"] / "run.json").read_text())["settings"]
        assert settings["dataset"] == "text"
        best = found[entry["method"]]["best"]
        assert settings["learning_rate_for_inner_opt"] == best["learning_rate_for_inner_opt"]
    assert "## Tuning" in (folder / "judged.md").read_text()
    assert "Tuning runs of LocalSGD" in (folder / "searched.md").read_text()
    # A recorded search is not repeated.
    shutil.rmtree(tmp_path / "runs")
    runner = Runner(tmp_path / "runs", 2)
    for name, file in (("searched", searched), ("judged", judged)):
        assert json.loads(json.dumps(carry_out(file, runner, folder))) == results[name]
    assert not runner.folder.exists()
