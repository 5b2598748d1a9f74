"""Comparisons: their files, recorded outcomes, and small ones through the command."""

import contextlib
import json
import math
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg

from benchmarks.compare import runs
from benchmarks.compare.compare import carry_out, main, recorded_outcomes
from benchmarks.compare.report import draw_curves, draw_ends, page, write_page
from benchmarks.compare.results import Results
from benchmarks.compare.runs import ComparisonError, Runner
from benchmarks.compare.spec import ROOT, ComparisonSpec, Run, load_spec, make_run
from tests.support.blocks import ALL
from tests.support.comparisons import small_comparison
from tests.support.programs import LIMIT_SECONDS
from tests.support.runs import PAGE, table_of
from training_logs.showing.run_data import RunData, read_run
from utils.config.reading import load_config
from utils.config.schema import ConfigError
from utils.distributed.launch import STARTED_BY

# Files


def test_documented_example_is_a_valid_comparison(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(next(block.text for block in ALL if block.text.startswith("title: Two batches")))
    assert len(load_spec(path).methods) == 2


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"reference": "SGD"}, "reference: must be one of the methods, got 'SGD'"),
        ({"methods": [{"name": "AdLoCo"}, {"name": "a", "reference": "SGD"}]}, "must be one of the methods, got 'SGD'"),
        ({"methods": [{"name": "AdLoCo", "reference": "a"}, {"name": "a"}]}, "AdLoCo: other methods are compared with"),
        ({"sedes": [1]}, "sedes: unknown key; did you mean seeds?"),
        ({"networks": []}, "hardware, networks: give both or neither"),
        ({"methods": [{"name": "AdLoCo", "overrides": {"ETTA": 1}}]}, "AdLoCo: ETTA: unknown key"),
        ({"methods": [{"name": "AdLoCo"}, {"name": "AdLoCo"}]}, "methods: 'AdLoCo' is there twice"),
        ({"seeds": [1, 2, 1]}, "seeds: 1 is there twice"),
        ({"methods": [{"name": "AdLoCo", "seeds": [3, 3]}]}, "AdLoCo: seeds: 3 is there twice"),
        (
            {"methods": [{"name": "AdLoCo"}, {"name": "short", "overrides": {"sequence_length": 8}}]},
            "sequence_length: must be equal in all methods",
        ),
        (
            {"methods": [{"name": "AdLoCo"}, {"name": "other", "seeds": [3]}]},
            "other: seeds: none is one of its reference, AdLoCo",
        ),
        (
            {"common": {"time_budget": 80, "node_speeds": [100, 50], "nodes_per_gpu": 2, "max_tokens": None}},
            "hardware paper: must have t_min 0 and t_example 0.01, the clock of time_budget with node_speeds",
        ),
        (
            {"methods": [{"name": "AdLoCo", "overides": {}}]},
            "methods[0].overides: unknown key; did you mean overrides?",
        ),
        ({"common": "x" * 1000}, "common: should be a valid dictionary, got 'xxx"),
    ],
)
def test_wrong_comparison_is_refused_with_one_line_before_any_run(tmp_path, capsys, values, problem):
    path = small_comparison(tmp_path, **values)
    with pytest.raises(ConfigError) as error:
        load_spec(path)
    assert any(problem in line for line in error.value.problems), error.value.problems
    assert all(len(line) < len(str(path)) + 200 for line in error.value.problems)
    assert main([str(path), "--runs", str(tmp_path / "runs"), "--output", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert problem in lines[0]
    assert len(lines[0]) < 200
    assert not (tmp_path / "runs").exists()


def test_a_run_configuration_and_a_comparison_are_distinguished_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match="not a comparison") as error:
        load_spec(ROOT / "config.yaml")
    assert len(error.value.problems) == 1
    with pytest.raises(ConfigError, match="a comparison, which python") as error:
        load_config(small_comparison(tmp_path))
    assert len(error.value.problems) == 1


# Identity of runs and recorded outcomes


def test_run_is_identified_by_the_settings_of_its_file(tmp_path):
    comparison = load_spec(small_comparison(tmp_path))
    method = comparison.methods[0]
    run = make_run(comparison, method, 1)
    longer = method.model_copy(update={"overrides": method.overrides | {"sequence_length": 8}})
    own = make_run(comparison, longer, 1)  # over the common settings
    assert make_run(comparison, method.model_copy(update={"name": "other"}), 1).id == run.id
    assert len({run.id, make_run(comparison, method, 2).id, own.id}) == 3
    assert "sequence_length=8" in own.overrides()


def small_results(comparison: ComparisonSpec) -> dict:
    outcomes = [{"method": name, "seed": 1, "completed": True} for name in ("AdLoCo", "DiLoCo")]
    return {"comparison": comparison.model_dump(mode="json"), "outcomes": outcomes}


def test_an_edited_base_of_ones_own_makes_all_runs_again(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text((ROOT / "config.yaml").read_text())
    comparison = load_spec(small_comparison(tmp_path, base=str(base)))
    runs = comparison.runs()
    outcomes = [{"method": run.method, "seed": run.seed, "completed": True, "id": run.id} for run in runs]
    recorded = {"comparison": comparison.model_dump(mode="json"), "outcomes": outcomes}
    assert recorded_outcomes(recorded, comparison).keys() == {run.id for run in runs}
    base.write_text(base.read_text() + "\ngradient_clipping: 0.5\n")
    assert not recorded_outcomes(recorded, comparison).keys() & {run.id for run in comparison.runs()}


def test_an_edited_plugin_makes_its_runs_again(tmp_path):
    plugin = tmp_path / "plugin.py"
    plugin.write_text("")
    own = {"name": "own", "overrides": {"plugins": [str(plugin)]}}
    comparison = load_spec(small_comparison(tmp_path, seeds=[1], methods=[{"name": "AdLoCo", "overrides": {}}, own]))
    ids = {run.method: run.id for run in comparison.runs()}
    outcomes = [{"method": name, "seed": 1, "completed": True, "id": id} for name, id in ids.items()]
    recorded = {"comparison": comparison.model_dump(mode="json"), "outcomes": outcomes}
    plugin.write_text("# edited")
    runs = {run.method: run.id for run in comparison.runs()}
    assert runs["AdLoCo"] == ids["AdLoCo"]
    assert runs["own"] != ids["own"]
    assert recorded_outcomes(recorded, comparison).keys() == set(ids.values())


def test_recorded_outcomes_survive_removed_and_renamed_keys(tmp_path):
    comparison = load_spec(small_comparison(tmp_path))
    old = small_results(comparison)
    old["comparison"]["common"] |= {"a_key_that_is_gone": 3}
    old["comparison"]["order"] = 1  # a key of comparison files that is gone
    for method in old["comparison"]["methods"]:
        method["overrides"]["initial_batch_size"] = method["overrides"].pop("INITIAL_BATCH_SIZE")
    wanted = {
        make_run(comparison, method, 1).id: outcome
        for method, outcome in zip(comparison.methods, old["outcomes"], strict=True)
    }
    assert recorded_outcomes(old, comparison) == wanted


def test_recorded_outcomes_hold_for_the_same_settings_hardware_and_networks(tmp_path):
    comparison = load_spec(small_comparison(tmp_path))
    raw = small_results(comparison)

    def left(**values) -> list[str]:
        """Methods with an outcome that the changed comparison still asks for."""
        changed = ComparisonSpec.model_validate(comparison.model_dump() | values)
        known = recorded_outcomes(raw, changed)
        return [method.name for method in changed.methods if make_run(changed, method, 1).id in known]

    device = vars(comparison.hardware[0])
    network = vars(comparison.networks[0])
    adloco, diloco = comparison.model_dump()["methods"]
    assert left() == left(title="New", seeds=[1, 2, 3]) == ["AdLoCo", "DiLoCo"]
    assert left(hardware=[device | {"t_min": 0.02}]) == []
    assert left(networks=[network | {"latency": 0.01}]) == []
    assert left(methods=[adloco, diloco | {"overrides": {"sampling_method": "none"}}]) == ["AdLoCo"]
    assert recorded_outcomes({}, comparison) == {}


# Runs without training


class SyntheticRunner:
    """Stands for a Runner whose runs end at a perplexity of 20 + 1000 * learning rate + seed.

    Args:
        data: digest of the data of its runs.
    """

    def __init__(self, data: str):
        self.made: list[Run] = []
        self._data = data

    def make(self, runs, title):
        self.made += runs

    def data(self, run) -> RunData:
        metric = 20.0 + 1000.0 * run.settings.get("learning_rate_for_inner_opt", 0.0) + run.seed
        columns = "outer_step trainer_id nodes effective_batch micro_batch tokens inner_steps communications"
        row = dict(zip(columns.split(), (1, 0, 1, 8, 8, 80, 10, 0), strict=True))
        row |= {"bytes_communicated": 0, "gradient_sample_size": math.nan, "validation_metric": metric}
        row |= {"bytes_merged": 0, "link_bytes_merged": 0, "link_bytes_redistributed": 0}
        summary = {"metric": "perplexity", "metric_higher_is_better": False, "metric_decimals": 2, "outer_steps": 1}
        summary |= {"initial_metric": 300.0, "final_metric": metric, "parameters": 100, "devices": ["cpu"]}
        machine = {"cpu": "a CPU", "usable_cores": 2, "system": "Linux"}
        summary |= {"data_digest": self._data, "versions": {"python": "3.11"}, "status": "completed"}
        summary |= {"invocations": [{"commit": "c0ffee", "changed": True, "hardware": [machine]}]}
        config = {"nodes_per_gpu": 1, "statistics_estimator": "per_example", "statistics_batch_size": 8}
        made = RunData(Path("synthetic"), config, summary, table_of([row]), [])
        worker = {"outer_step": 1, "trainer_id": 0, "worker": 0, "node": 0, "examples": 8, "inner_steps": 10}
        made.__dict__["node_rows"] = table_of([worker])
        return made


def test_only_missing_outcomes_are_made_and_only_of_the_same_data(tmp_path):
    path = small_comparison(tmp_path, seeds=[1, 2, 3])
    raw = carry_out(path, SyntheticRunner("a"), tmp_path)
    assert Results(raw).difference("DiLoCo").verdict == "not significant"
    for entry in raw["outcomes"][::2]:  # recorded before there were digests
        del entry["data"]
    (tmp_path / "small.json").write_text(json.dumps(raw))
    written = yaml.safe_load(path.read_text())
    written["methods"].append({"name": "added", "overrides": {"ETA": 0.5}})
    path.write_text(yaml.safe_dump(written))
    with pytest.raises(ComparisonError, match="runs are missing: added; without --report-only"):
        carry_out(path, None, tmp_path)
    runner = SyntheticRunner("a")
    carry_out(path, runner, tmp_path)
    assert [(run.method, run.seed) for run in runner.made] == [("added", seed) for seed in (1, 2, 3)]
    with pytest.raises(ComparisonError, match="seed 2: AdLoCo and added used different data"):
        carry_out(path, SyntheticRunner("b"), tmp_path)


def test_a_comparison_of_which_no_outcome_is_left_has_the_metric_of_its_new_runs(tmp_path):
    path = small_comparison(tmp_path)
    recorded = carry_out(path, SyntheticRunner("a"), tmp_path)
    recorded["metric"] = {"name": "accuracy", "higher_is_better": True, "decimals": 4}
    (tmp_path / "small.json").write_text(json.dumps(recorded))
    assert carry_out(path, None, tmp_path)["metric"]["name"] == "accuracy"
    other = small_comparison(tmp_path, seeds=[7])
    assert carry_out(other, SyntheticRunner("b"), tmp_path)["metric"]["name"] == "perplexity"


# Runs


@pytest.mark.usefixtures("programs")
def test_small_comparison_through_its_command(tmp_path, cache_dir, capsys, monkeypatch, no_pixels):
    path = small_comparison(tmp_path, seeds=[1], methods=[{"name": "AdLoCo"}])
    written = yaml.safe_load(path.read_text())
    written["common"] |= PAGE | {"cache_dir": str(cache_dir), "max_tokens": 1000}
    del written["hardware"], written["networks"]
    path.write_text(yaml.safe_dump(written))
    monkeypatch.chdir(tmp_path)
    arguments = [str(path), "--runs", str(tmp_path / "runs"), "--jobs", "1"]
    page_file = tmp_path / "comparison" / "small" / "small.md"
    json_file = page_file.with_suffix(".json")

    assert main([*arguments, "--report-only"]) == 1
    assert (
        "small.yaml: runs are missing: AdLoCo; without --report-only no finished run is repeated\n"
        in capsys.readouterr().err
    )
    assert not page_file.exists()
    assert main(arguments) == 0
    found = json.loads(json_file.read_text())
    [entry] = found["outcomes"]
    folder = tmp_path / "runs" / entry["id"]
    run = read_run(folder / json.loads((folder / "run.json").read_text())["folder"])
    assert run.config["training_seed"] == 1
    assert entry["final_metric"] == run.summary["final_metric"]
    assert 1000 <= entry["curves"]["tokens"][-1] == run.summary["tokens"]
    assert entry["curves"]["metric"][-1] == pytest.approx(run.summary["final_metric"], rel=1e-5)
    assert entry["data"]
    assert entry["versions"]
    assert f"compare.py {path}`" in page_file.read_text()
    assert sorted(file.name for file in page_file.parent.iterdir()) == [
        "small.json", "small.md", "small.png", "small_ends.png",
    ]  # fmt: skip
    # Recorded outcomes are not made again, and new words need no runs.
    shutil.rmtree(tmp_path / "runs")
    path.write_text(yaml.safe_dump(written | {"answer": "It does."}))
    assert main(arguments) == 0
    assert not (tmp_path / "runs").exists()
    assert "**Answer:** It does." in page_file.read_text()
    assert json.loads(json_file.read_text())["outcomes"] == [entry]


def test_an_interrupted_comparison_ends_its_runs(tmp_path, monkeypatch, capsys):
    started = threading.Event()
    killed = threading.Event()

    class Process:
        def __init__(self, command, **how):
            started.set()

        def wait(self):
            assert killed.wait(LIMIT_SECONDS)
            return -9

        def kill(self):
            killed.set()

    def interrupted(futures):
        assert started.wait(LIMIT_SECONDS)
        raise KeyboardInterrupt

    monkeypatch.setattr(runs.subprocess, "Popen", Process)
    monkeypatch.setattr(runs, "as_completed", interrupted)
    path = small_comparison(tmp_path, seeds=[1], methods=[{"name": "AdLoCo"}])
    assert main([str(path), "--runs", str(tmp_path / "runs"), "--output", str(tmp_path)]) == 130
    assert killed.is_set()
    assert "interrupted; finished runs are kept" in capsys.readouterr().err


def test_figures_show_every_method():
    results = Results(json.loads((ROOT / "docs" / "results" / "pool.json").read_text(encoding="utf-8")))
    completed = [name for name in results.methods if results.runs[name]]
    curves = draw_curves(results)
    assert [text.get_text() for text in curves.legends[0].get_texts()] == completed
    ends = draw_ends(results)
    assert [text.get_text() for text in ends.axes[0].get_yticklabels()] == completed
    for figure in (curves, ends):
        assert len(figure.axes) == 4


def test_the_figure_of_ends_names_far_ends_at_its_edge():
    """Recorded: all others end between 16 and 24."""
    results = Results(json.loads((ROOT / "docs" / "results" / "stages.json").read_text(encoding="utf-8")))
    axes = draw_ends(results).axes[0]
    assert [text.get_text() for text in axes.texts] == ["395 \N{RIGHTWARDS ARROW}", "263 \N{RIGHTWARDS ARROW}"]
    assert 24.0 < axes.get_xlim()[1] < 263.0


def test_names_with_characters_of_matplotlib_and_markdown_are_shown_as_they_are(tmp_path):
    raw = json.loads((ROOT / "docs" / "results" / "pool.json").read_text(encoding="utf-8"))
    names = {}
    for method, name in zip(raw["comparison"]["methods"][1:], ("_draft", r"for $5 to \foo{$", "a|b"), strict=False):
        names[method["name"]] = method["name"] = name
    for run in raw["outcomes"]:
        run["method"] = names.get(run["method"], run["method"])
    results = Results(raw)
    text = write_page(results, tmp_path).read_text()
    assert r"| a\|b |" in text
    (legend,) = draw_curves(results).legends
    shown = [text.get_text().strip().replace(r"\$", "$") for text in legend.get_texts()]
    assert shown[1:4] == list(names.values())


def test_long_names_fit_in_the_figure_and_the_caption_names_what_it_leaves_out():
    read = {}
    for name in ("equal_time", "methods"):
        read[name] = Results(json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8")))
    figure = draw_curves(read["equal_time"])
    FigureCanvasAgg(figure).draw()
    legend = figure.legends[0].get_window_extent()
    assert 0.0 <= legend.x0 < legend.x1 <= figure.bbox.x1
    assert "Above it end: LoCoDL (49.10)." in page(read["methods"])


def test_curve_of_each_method_ends_in_every_panel():
    """Identical curves stay visible: the reference is wide and lies below the others."""
    results = Results(json.loads((ROOT / "docs" / "results" / "parts.json").read_text(encoding="utf-8")))
    for axes in draw_curves(results).axes:
        for line in axes.get_lines():
            x, y = line.get_xdata()[-1], line.get_ydata()[-1]
            assert axes.get_xlim()[0] <= x <= axes.get_xlim()[1]
            assert axes.get_ylim()[0] <= y <= axes.get_ylim()[1]
        reference, *others = axes.get_lines()
        assert all(reference.get_linewidth() > line.get_linewidth() for line in others)
        assert all(reference.get_zorder() < line.get_zorder() for line in others)


@pytest.mark.parametrize(("status", "text"), [(1, "a round\n"), (1, "Traceback (most recent call last):\n"), (2, "")])
def test_failed_run_is_made_again_unless_training_itself_failed(monkeypatch, tmp_path, status, text):
    comparison = load_spec(small_comparison(tmp_path))
    run = make_run(comparison, comparison.methods[0], 1)
    ended = {"status": "failed", "outer_steps": 0}
    commands = []

    class Program:
        def __init__(self, command, stdout, env, **how):
            assert env[STARTED_BY] == str(os.getpid())  # a killed comparison ends its runs, on Linux
            commands.append(command[2:])
            stdout.write(text.encode())
            (tmp_path / run.id / "run" / "checkpoints").mkdir(parents=True)

        def wait(self):
            return status

    monkeypatch.setattr(runs.subprocess, "Popen", Program)
    monkeypatch.setattr(runs, "read_run", lambda folder: SimpleNamespace(summary=ended, by_round={}))
    runner = Runner(tmp_path, 1)
    training_failed = text == "a round\n"
    for _ in range(2):
        with contextlib.nullcontext() if training_failed else pytest.raises(ComparisonError, match=f"status {status}"):
            runner.make([run, run], "small")
    assert len(commands) == (1 if training_failed else 2)
    assert (runner.data(run) is not None) == training_failed
    assert commands[0] == ["--config", "config.yaml", *run.overrides(), *runs._ALONE, f"log_dir={tmp_path / run.id}"]
