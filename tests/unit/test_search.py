"""Equal tuning: draws, successive halving and wrong files."""

import json
import math

import pytest
import yaml

from benchmarks.compare.compare import found_values
from benchmarks.compare.search import Range, Search, draw, halve
from benchmarks.compare.spec import load_spec
from tests.support.comparisons import RATE, small_comparison
from utils.config.schema import ConfigError

EXPECTED_RATES = [0.0088, 0.06, 0.0012, 0.022]
OVER = {"learning_rate_for_inner_opt": RATE, "ETA": [0.5, 1.0], "learning_rate_schedule": ["constant", "cosine"]}


def test_draws_depend_only_on_seed_method_key_and_number():
    space = {"rate": Range(**RATE), "schedule": ["constant", "cosine", "linear"]}
    drawn = [draw(space, 0, "AdLoCo", number) for number in range(4)]
    assert [entry["rate"] for entry in drawn] == EXPECTED_RATES  # the same on every machine
    assert [draw(space, 0, "DiLoCo", number) for number in range(4)] != drawn
    assert [draw(space, 1, "AdLoCo", number) for number in range(4)] != drawn
    many = [draw(space, 0, "AdLoCo", number) for number in range(400)]
    assert {entry["schedule"] for entry in many} == {"constant", "cosine", "linear"}
    assert 0.4 < sum(entry["rate"] < 1e-2 for entry in many) / 400 < 0.6  # as likely in each decade
    assert all(entry["rate"] == float(f"{entry['rate']:.2g}") for entry in many)


@pytest.mark.parametrize(
    ("budget", "rungs", "sizes"), [(24, 3, [17, 5, 1]), (24, 2, [18, 6]), (4, 2, [3, 1]), (4, 1, [4]), (3, 3, [1] * 3)]
)
def test_sizes_of_rungs_on_paper(budget, rungs, sizes):
    search = Search(budget=budget, rungs=rungs, over={"rate": RATE})
    assert search.sizes() == sizes
    assert [search.token_fraction(rung) for rung in range(rungs)] == pytest.approx(
        [3.0 ** (rung + 1 - rungs) for rung in range(rungs)]
    )


def test_halving_keeps_the_best_of_every_rung():
    search = Search(budget=24, over={"rate": {"low": 0.1, "high": 1.0}})

    rungs = []

    def losses_of(rung, candidates):
        rungs.append(candidates)
        return [math.inf if entry["rate"] < 0.3 else entry["rate"] + 10 * (2 - rung) for entry in candidates]

    best = halve(search, search.over, "a", losses_of)
    assert [len(settings) for settings in rungs] == [17, 5, 1]
    passing = sorted((entry for entry in rungs[0] if entry["rate"] >= 0.3), key=lambda entry: entry["rate"])
    assert rungs[1] == passing[:5]
    assert best == rungs[2][0] == passing[0]


def test_a_method_can_add_and_remove_keys_of_the_search_space(tmp_path):
    path = small_comparison(tmp_path, search={"budget": 4, "over": OVER})
    written = yaml.safe_load(path.read_text())
    written["methods"][1]["search"] = {"ETA": None, "outer_momentum": [0.1, 0.2]}
    path.write_text(yaml.safe_dump(written))
    comparison = load_spec(path)
    assert set(comparison.space(comparison.methods[0])) == set(OVER)
    space = comparison.space(comparison.methods[1])
    assert set(space) == {"learning_rate_for_inner_opt", "learning_rate_schedule", "outer_momentum"}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"search": {"over": OVER}}, "search.budget: is missing"),
        ({"search": {"budget": 2, "over": OVER}}, "search: budget must be at least 3"),
        ({"search": {"budget": 4, "over": {}}}, "search.over: "),
        ({"search": {"budget": 4, "over": {"ETA": {"low": 2, "high": 1}}}}, "search.over.ETA: must be a list"),
        ({"search": {"budget": 4, "over": {"ETA": RATE | {"low": 0}}}}, "search.over.ETA: must be a list"),
        ({"search": {"budget": 4, "over": {"ETTA": [1, 2]}}}, "AdLoCo: ETTA: unknown key"),
        ({"search": {"budget": 4, "over": {"ETA": [1, -2]}}}, "AdLoCo: ETA: "),
        ({"search": {"budget": 4, "over": OVER}, "tuned_on": "a"}, "search: cannot be combined"),
        ({"methods": [{"name": "AdLoCo", "search": {"ETA": [1, 2]}}]}, "AdLoCo: search: "),
        ({"methods": [{"name": "AdLoCo", "tuned_as": "DiLoCo"}]}, "AdLoCo: tuned_as: "),
    ],
)
def test_a_wrong_search_is_refused(tmp_path, values, problem):
    path = small_comparison(tmp_path, **values)
    with pytest.raises(ConfigError) as error:
        load_spec(path)
    assert any(line.startswith(f"{path}: ") and problem in line for line in error.value.problems), error.value.problems


def test_values_found_by_another_comparison_are_used_unchanged(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.compare.compare.Results", dict)  # only the found values matter here
    monkeypatch.setattr("benchmarks.compare.compare.page", str)
    methods = [{"name": "AdLoCo"}, {"name": "DiLoCo"}, {"name": "late", "tuned_as": "DiLoCo"}]
    path = small_comparison(tmp_path, tuned_on="searched", methods=methods)
    comparison = load_spec(path)
    source = tmp_path / "searched.json"
    with pytest.raises(ConfigError, match=r"tuned_on: .*searched.json"):
        found_values(path, comparison, tmp_path)
    source.write_text(json.dumps({"search": {"DiLoCo": {"best": {"outer_momentum": 0.3}}, "other": {"best": {}}}}))
    found = found_values(path, comparison, tmp_path)
    assert found == {name: {"outer_momentum": 0.3} for name in ("DiLoCo", "late")}
    source.write_text(json.dumps({"search": {"other": {"best": {}}}}))
    with pytest.raises(ConfigError, match=r"tuned_as: .* DiLoCo"):
        found_values(path, comparison, tmp_path)
