"""Equal tuning: draws, halving and edges on paper, and a small search through its own command."""

import json
import math
import shutil

import pytest
import yaml

from benchmarks.compare.compare import carry_out, in_order, main, unfinished
from benchmarks.compare.plan import ROOT, draws, load_comparison, make_run, method_space, with_found, with_settings
from benchmarks.compare.runs import Store
from benchmarks.compare.search import BEYOND, NO_BUDGET, NOT_ALLOWED, Measured, found_values, search_methods, tuning
from benchmarks.compare.search_page import what_was_searched
from benchmarks.compare.search_space import Range, Search, distinct_draws, draw, edge
from tests.integration.test_compare import small_comparison
from utils.config.schema import ConfigError

EXPECTED_RATES = [0.0088, 0.06, 0.0012, 0.022]
RATE = {"low": 1e-3, "high": 1e-1, "log": True}


def searched(search, loss, space=None, is_allowed=lambda settings: True):
    """What the search of one method finds where the loss is a function of settings and rung."""
    space = search.over if space is None else space

    def identify(settings):
        return repr(sorted(settings.items())) if is_allowed(settings) else None

    steps = tuning(search, space, distinct_draws(space, search.seed, "a", search.budget, identify), identify)
    asked = next(steps)
    while True:
        rung, settings, _ = asked
        try:
            asked = steps.send([loss(entry, rung) for entry in settings])
        except StopIteration as ended:
            return ended.value


def test_draws_depend_on_seed_method_key_and_number_alone():
    space = {"rate": Range(**RATE), "schedule": ["constant", "cosine", "linear"], "steps": Range(low=10, high=40)}
    drawn = [draw(space, 0, "AdLoCo", number) for number in range(4)]
    # The same on every machine: written down once.
    assert [entry["rate"] for entry in drawn] == EXPECTED_RATES
    assert [draw({"rate": space["rate"]}, 0, "AdLoCo", number)["rate"] for number in range(4)] == EXPECTED_RATES
    assert [draw(space, 0, "DiLoCo", number) for number in range(4)] != drawn
    assert [draw(space, 1, "AdLoCo", number) for number in range(4)] != drawn
    many = [draw(space, 0, "AdLoCo", number) for number in range(400)]
    assert {entry["schedule"] for entry in many} == {"constant", "cosine", "linear"}
    assert all(isinstance(entry["steps"], int) and 10 <= entry["steps"] <= 40 for entry in many)
    assert 0.4 < sum(entry["rate"] < 1e-2 for entry in many) / 400 < 0.6  # as likely in each decade
    assert all(entry["rate"] == float(f"{entry['rate']:.2g}") for entry in many)


@pytest.mark.parametrize(
    ("budget", "rungs", "sizes"),
    [
        (24, 3, [(0, 17), (1, 5), (2, 1)]),  # and one is left
        (4, 2, [(0, 2), (1, 1)]),
        (4, 1, [(0, 3)]),
        (3, 3, [(0, 2), (2, 1)]),  # a rung that would drop nothing is left out
    ],
)
def test_rungs_of_a_budget_on_paper(budget, rungs, sizes):
    search = Search(budget=budget, rungs=rungs, over={"rate": RATE})
    assert search.sizes(1000) == sizes
    assert [search.share(rung) for rung in range(rungs)] == pytest.approx(
        [3.0 ** (rung + 1 - rungs) for rung in range(rungs)]
    )


def test_all_methods_spend_the_whole_budget_and_no_more():
    for budget in range(4, 60):
        for best in (1e-1, 1e-2):  # at the edge, and inside
            search = Search(budget=budget, over={"rate": RATE, "other": [1, 2, 4]})
            found = searched(search, lambda s, rung, best=best: abs(math.log(s["rate"] / best)) + 0.1 * s["other"])
            assert len(found.trials) == budget


def test_halving_keeps_the_best_of_every_rung():
    search = Search(budget=24, over={"rate": {"low": 0.0, "high": 1.0}})
    found = searched(search, lambda settings, rung: abs(settings["rate"] - 0.5) + 10 * (2 - rung))
    by_rung = [[trial for trial in found.trials if trial.rung == rung] for rung in range(3)]
    assert [len(trials) for trials in by_rung] == [17, 5, 2]
    best = sorted(by_rung[0], key=lambda trial: trial.loss)
    assert [trial.settings for trial in by_rung[1]] == [trial.settings for trial in best[:5]]
    # The last run of the budget goes to the best that had been dropped.
    assert [trial.settings for trial in by_rung[2]] == [trial.settings for trial in best[:2]]
    assert found.best.settings == best[0].settings
    assert found.further == {}


def test_a_run_that_stops_is_the_worst():
    search = Search(budget=4, rungs=2, over={"rate": [1, 2, 4]})
    found = searched(search, lambda settings, rung: math.inf if settings["rate"] == 1 else settings["rate"])
    assert found.best.settings["rate"] == 2 or all(trial.settings["rate"] != 2 for trial in found.trials)
    assert found.best.loss < math.inf


def test_an_edge_is_searched_further_once():
    search = Search(budget=24, over={"rate": RATE}, seed=1)
    found = searched(search, lambda settings, rung: -settings["rate"])
    assert edge(search.over["rate"], max(trial.settings["rate"] for trial in found.trials[:17])) == "high"
    assert found.further == {"rate": [0.32]}  # a quarter of two decades beyond 0.1
    assert found.trials[-1].why == BEYOND
    assert found.best.settings == {"rate": 0.32}


@pytest.mark.parametrize(
    ("values", "best", "further"),
    [([0.5, 1.0, 2.0], 2.0, [4.0]), ([8, 16, 32], 8, [4]), ([0.0, 0.6, 0.9], 0.9, [1.4]), ([4, 2, 1], 4, [8])],
)
def test_a_list_goes_on_like_its_last_two(values, best, further):
    search = Search(budget=5, rungs=1, over={"key": values})
    assert searched(search, lambda settings, rung: abs(settings["key"] - best)).further == {"key": further}


def test_an_edge_that_is_not_searched_further_says_why():
    def loss(settings, rung):
        return -settings["rate"]

    every = Search(budget=3, rungs=3, over={"rate": [1, 2]})
    assert searched(every, loss).further == {"rate": NO_BUDGET}
    refused = searched(Search(budget=5, rungs=1, over={"rate": [1, 2]}), loss, is_allowed=lambda s: s["rate"] <= 2)
    assert refused.further == {"rate": NOT_ALLOWED}
    assert searched(Search(budget=5, rungs=1, over={"rate": ["a", "b"]}), lambda s, rung: 0.0).further == {}


def search_comparison(folder, name="searched", **values):
    return small_comparison(folder, tune={}, **values).rename(folder / f"{name}.yaml")


OVER = {"learning_rate_for_inner_opt": RATE, "ETA": [0.5, 1.0], "learning_rate_schedule": ["constant", "cosine"]}


def test_a_method_searches_what_means_something_to_it(tmp_path):
    path = search_comparison(tmp_path, search={"budget": 4, "over": OVER})
    written = yaml.safe_load(path.read_text())
    written["methods"][1]["search"] = {"ETA": None, "decay_share": [0.1, 0.2]}
    path.write_text(yaml.safe_dump(written))
    comparison = load_comparison(path)
    assert list(method_space(comparison, comparison.methods[0])) == sorted(OVER)
    space = method_space(comparison, comparison.methods[1])
    assert set(space) == {"learning_rate_for_inner_opt", "learning_rate_schedule", "decay_share"}


def test_settings_without_an_effect_are_one_run(tmp_path):
    over = {"decay_share": [0.1, 0.2, 0.3], "learning_rate_schedule": ["constant", "warmup_stable_decay"]}
    comparison = load_comparison(search_comparison(tmp_path, search={"budget": 24, "over": over}))
    drawn = draws(comparison, comparison.methods[1])
    assert len(drawn) == 4  # constant, and three shares
    method = with_settings(comparison.methods[1], drawn[0])
    whole, third = (make_run(comparison, method, None, 1, share) for share in (1.0, 1 / 3))
    assert whole.id != third.id
    assert "max_tokens=2000" in third.overrides


def test_all_methods_are_measured_rung_by_rung(tmp_path):
    comparison = load_comparison(search_comparison(tmp_path, search={"budget": 4, "rungs": 2, "over": OVER}))
    made = []

    def measure(runs, words):
        made.append((words, len(runs)))
        return Measured({run.id: int(run.id, 16) % 97 / 97 for run in runs}, higher_is_better=True)

    found = search_methods(comparison, measure)
    assert made == [("search, rung 1", 4), ("search, rung 2", 2), ("search, rung 2", 2)]
    for entry in found.values():
        whole = [run for run in entry["runs"] if run["rung"] == 1]
        assert entry["metric"] == max(run["metric"] for run in whole)
        assert entry["best"] == next(run["values"] for run in whole if run["metric"] == entry["metric"])
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"search": {"over": OVER}}, "search.budget: Field required"),
        ({"search": {"budget": 2, "over": OVER}}, "search: Value error, budget must be at least 3 with 3 rungs, got 2"),
        ({"search": {"budget": 4, "over": {}}}, "search.over: "),
        ({"search": {"budget": 4, "over": {"ETA": {"low": 2, "high": 1}}}}, "search.over.ETA.range: Value error, low"),
        ({"search": {"budget": 4, "over": {"ETA": RATE | {"low": 0}}}}, "low must be above 0 with log"),
        ({"search": {"budget": 4, "over": {"ETTA": [1, 2]}}}, "AdLoCo: ETTA: unknown key; did you mean ETA?"),
        ({"search": {"budget": 4, "over": {"ETA": [1, -2]}}}, "AdLoCo: ETA: should be greater than 0, got -2"),
        ({"search": {"budget": 4, "over": OVER}, "tune": {"ETA": [1]}}, "search: tune is there too; one must go"),
        ({"search": {"budget": 4, "over": OVER}, "tuned_on": "a"}, "search: tuned_on is there too; one must go"),
        ({"methods": [{"name": "AdLoCo", "search": {"ETA": [1, 2]}}]}, "AdLoCo: search: the comparison itself has no"),
        ({"methods": [{"name": "AdLoCo", "tuned_as": "DiLoCo"}]}, "AdLoCo: tuned_as: the comparison has no tuned_on"),
        (
            {"search": {"budget": 4, "over": OVER}, "methods": [{"name": "AdLoCo", "search": {"nu": None}}]},
            "AdLoCo: search.nu: null drops a key, and this one is not searched by all",
        ),
    ],
)  # fmt: skip
def test_a_wrong_search_is_refused(tmp_path, values, problem):
    path = small_comparison(tmp_path, **({"tune": {}} | values))
    with pytest.raises(ConfigError) as error:
        load_comparison(path)
    assert any(line.startswith(f"{path}: ") and problem in line for line in error.value.problems), error.value.problems


def test_values_found_elsewhere_are_used_unchanged(tmp_path):
    path = search_comparison(tmp_path, "judged", tuned_on="searched")
    comparison = load_comparison(path)
    with pytest.raises(ConfigError, match=r"judged.yaml: tuned_on: .*searched.json is not there"):
        in_order([path], tmp_path)
    there = tmp_path / "searched.json"
    there.write_text(json.dumps({"search": {"DiLoCo": {"best": {"outer_momentum": 0.3}}, "other": {"best": {}}}}))
    assert in_order([path], tmp_path) == [path]
    found = found_values(path, comparison, tmp_path)
    assert found == {"DiLoCo": {"outer_momentum": 0.3}}
    adloco, diloco = with_found(comparison, found).methods
    assert adloco == comparison.methods[0]
    assert diloco.overrides == comparison.methods[1].overrides | {"outer_momentum": 0.3}
    there.write_text(
        json.dumps({"grids": {"AdLoCo": ["ETA", [1, 2]], "DiLoCo": [None, [None]]}, "best": {"AdLoCo": 2}})
    )
    assert found_values(path, comparison, tmp_path) == {"AdLoCo": {"ETA": 2}}
    path = search_comparison(
        tmp_path, "judged", tuned_on="searched", methods=[{"name": "AdLoCo"}, {"name": "late", "tuned_as": "AdLoCo"}]
    )
    comparison = load_comparison(path)
    assert found_values(path, comparison, tmp_path) == {"AdLoCo": {"ETA": 2}, "late": {"ETA": 2}}
    there.write_text(json.dumps({"search": {"other": {"best": {}}}}))
    with pytest.raises(ConfigError, match=r"judged.yaml: tuned_as: .*searched.json has found no values for AdLoCo"):
        found_values(path, comparison, tmp_path)
    path = search_comparison(tmp_path, "judged", tuned_on="searched", methods=[{"name": "AdLoCo"}])
    comparison = load_comparison(path)
    with pytest.raises(ConfigError, match="holds no values for any of these methods"):
        found_values(path, comparison, tmp_path)


@pytest.mark.parametrize("name", ["decay_python_code", "decay_packages"])
def test_published_runs_that_train_as_ever_are_found_again(name):
    """One trainer without a batch test: what came since then changes nothing for it."""
    comparison = load_comparison(ROOT / "benchmarks" / "comparisons" / f"{name}.yaml")
    found = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())
    ids = {(run["method"], run["value"], run["seed"]): run["id"] for run in found["outcomes"]}
    for method in comparison.methods:
        if method.name.startswith("DiLoCo, batch"):
            value = found["best"][method.name]
            assert make_run(comparison, method, value, 1).id == ids[method.name, value, 1], method.name


def test_a_small_search_and_a_comparison_that_uses_it(programs, tmp_path, cache_dir):
    (tmp_path / "text").mkdir()
    for name in ("README.md", "docs/rounds.md", "docs/theory.md"):
        shutil.copy(ROOT / name, tmp_path / "text")
    fixed = {"number_of_initial_trainers": 1, "sampling_method": "none", "max_tokens": 1800, "INITIAL_BATCH_SIZE": 4}
    methods = [
        {"name": "AdLoCo", "overrides": fixed, "search": {"outer_momentum": [0.0, 0.5]}},
        {"name": "LocalSGD", "overrides": fixed | {"distributed_algo": "LocalSGD"}, "baseline": True},
    ]
    search = {"budget": 4, "rungs": 2, "over": {"learning_rate_for_inner_opt": RATE}}
    tuned = search_comparison(tmp_path, search=search, methods=methods, seeds=[1])
    written = yaml.safe_load(tuned.read_text())
    written["common"]["cache_dir"] = str(cache_dir)
    tuned.write_text(yaml.safe_dump(written))
    del written["search"], written["methods"][0]["search"]
    text = {"dataset": "text", "text_files": [str(tmp_path / "text")], "text_documents": "blank_lines"}
    judged = tmp_path / "judged.yaml"
    judged.write_text(yaml.safe_dump(written | {"tuned_on": "searched", "common": written["common"] | text}))
    arguments = ["--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "docs"), "--jobs", "2"]

    assert main([str(judged), *arguments]) == 2  # what it is tuned on is not there yet
    assert main([str(judged), str(tuned), *arguments]) == 0
    folder = tmp_path / "docs" / "results"
    results = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("searched", "judged")}
    found = results["searched"]["search"]
    assert {name: len(entry["runs"]) for name, entry in found.items()} == {"AdLoCo": 4, "LocalSGD": 4}
    assert results["judged"]["found"] == {name: entry["best"] for name, entry in found.items()}
    assert list(found["AdLoCo"]["best"]) == ["learning_rate_for_inner_opt", "outer_momentum"]
    for entry in found.values():
        for run in entry["runs"]:
            record = json.loads((tmp_path / "runs" / run["id"] / "run.json").read_text())
            assert f"max_tokens={600 if run['rung'] == 0 else 1800}" in record["overrides"]
    for outcome in results["judged"]["outcomes"]:
        overrides = json.loads((tmp_path / "runs" / outcome["id"] / "run.json").read_text())["overrides"]
        assert "dataset=text" in overrides
        rate = found[outcome["method"]]["best"]["learning_rate_for_inner_opt"]
        assert [float(line.split("=")[1]) for line in overrides if line.startswith("learning_rate_for_inner")] == [rate]
    for name, result in results.items():
        page, parts = (folder / f"{name}.md").read_text(), what_was_searched(result)
        assert parts[0] == "## What was searched"
        assert all(part in page for part in parts)
    # What is finished is not made again, be it known from the runs or from the results.
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/run.json")}
    store, there = Store(tmp_path / "runs"), folder / "searched.json"
    there.unlink()
    again = carry_out(tuned, store, 2, there)
    assert again["search"] == found
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/run.json")} == times
    shutil.rmtree(store.folder)
    assert json.loads(json.dumps(carry_out(tuned, store, 2, there))) == json.loads(json.dumps(again))
    unfinished(there).unlink()
    there.write_text(json.dumps(again))
    for name, path in (("searched", tuned), ("judged", judged)):
        known = json.loads((folder / f"{name}.json").read_text())
        assert json.loads(json.dumps(carry_out(path, store, 2, folder / f"{name}.json"))) == known
    assert not store.folder.exists()
