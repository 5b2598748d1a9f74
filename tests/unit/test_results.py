"""Results of comparisons: curves, paired differences and frontiers on paper, and the published pages."""

import json
import math

import pytest

from benchmarks.compare.compare import carry_out
from benchmarks.compare.report import EQUAL_AXES, equal_table, final_table, frontier_table, headline, page, pages
from benchmarks.compare.results import Results, mean_curve, metric_where, paired_difference, used_until
from benchmarks.compare.spec import COMPARISONS, ROOT


def made_outcome(metric, tokens, method="a", final=None, seed=1):
    curves = {"metric": metric, "tokens": tokens, "communications": [t / 10 for t in tokens]}
    curves["bytes_communicated"] = [50 * t for t in tokens]
    curves["inner_steps"] = tokens
    return {
        "method": method, "seed": seed, "id": f"{method}{seed}", "completed": True,
        "final_metric": final or metric[-1], "first_batch": 1, "last_batch": 1, "curves": curves,
    }  # fmt: skip


def test_interpolation_of_a_curve_on_paper():
    run = made_outcome([100.0, 25.0, 25.0, 20.0], [0, 10, 20, 30])
    assert metric_where(run, "tokens", 5) == pytest.approx(50.0)  # halfway between logarithms
    assert metric_where(run, "tokens", 99) == pytest.approx(20.0)
    assert used_until(run, "tokens", 50.0) == pytest.approx(5.0)
    assert used_until(run, "tokens", 25.0) == pytest.approx(10.0)
    assert used_until(run, "tokens", 19.0) is None
    accuracy = made_outcome([0.25, 0.5, 0.8], [0, 10, 20])
    assert used_until(accuracy, "tokens", 0.5, sign=-1) == pytest.approx(10.0)
    assert used_until(accuracy, "tokens", 0.9, sign=-1) is None


def test_the_mean_curve_ends_at_the_mean_usage():
    runs = [made_outcome([100.0, 50.0, 20.0], [0, 100, 200]), made_outcome([100.0, 30.0], [0, 300])]
    xs, values = mean_curve(runs, "communications", points=3)
    assert xs.tolist() == [0.0, 12.5, 25.0]
    assert values[:, -1].tolist() == pytest.approx([20.0, 30.0])
    assert values[:, 1].tolist() == pytest.approx([50.0, math.sqrt(3000.0)])


# Differences


def test_a_paired_difference_on_paper():
    """Differences of logarithms 0.1, 0.2, 0.3: mean 0.2, standard error 0.1 / sqrt(3), t 4.3027 with two degrees."""
    theirs = {1: 20.0, 2: 30.0, 3: 25.0}
    ours = {seed: value * math.exp(0.1 * seed) for seed, value in theirs.items()}
    found = paired_difference(ours | {4: 1.0}, theirs, lower_is_better=True)
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert found.mean == pytest.approx(100 * (math.exp(0.2) - 1))
    assert found.interval == pytest.approx([100 * (math.exp(0.2 + x) - 1) for x in (-half, half)], rel=1e-5)
    assert (found.verdict, str(found)) == ("not significant", "+22.1% (-4.7 to +56.6)")


@pytest.mark.parametrize(
    ("differences", "lower_is_better", "verdict"),
    [
        ((0.10, 0.11, 0.12), True, "worse"),
        ((-0.10, -0.11, -0.12), True, "better"),
        ((0.10, 0.11, 0.12), False, "better"),
        ((-0.10, -0.11, -0.12), False, "worse"),
        ((0.0, 0.0, 0.0), True, "not significant"),
        ((0.3,), True, "one seed"),
    ],
)
def test_a_verdict_needs_an_interval_that_excludes_zero(differences, lower_is_better, verdict):
    theirs = dict.fromkeys(range(len(differences)), 0.5)
    add = (lambda x, d: x * math.exp(d)) if lower_is_better else (lambda x, d: x + d)
    ours = {seed: add(theirs[seed], difference) for seed, difference in enumerate(differences)}
    assert paired_difference(ours, theirs, lower_is_better).verdict == verdict


def test_an_accuracy_is_compared_in_points():
    found = paired_difference({1: 0.81, 2: 0.83}, {1: 0.80, 2: 0.80}, lower_is_better=False)
    assert found.mean == pytest.approx(2.0)
    assert found.interval == pytest.approx((2.0 - 12.7062, 2.0 + 12.7062), rel=1e-4)  # t with one degree of freedom
    assert str(found) == "+2.0 points (-10.7 to +14.7)"


def made_results(families=("", "", ""), seeds=3):
    """c ends 10% above a with half of the tokens; b is a with noise."""
    methods = [
        {"name": name, "baseline": name == "c", "family": family} for name, family in zip("abc", families, strict=True)
    ]
    outcomes = []
    for seed in range(1, seeds + 1):
        end = 20.0 + seed
        outcomes += [
            made_outcome([100.0, 40.0, end], [0, 100, 200], "a", seed=seed),
            made_outcome([100.0, 40.0, end * (1.1, 0.9, 1.0)[seed - 1]], [0, 100, 200], "b", seed=seed),
            made_outcome([100.0, end * 1.1], [0, 100], "c", seed=seed),
        ]
    return Results({
        "name": "made",
        "comparison": {"methods": methods, "reference": "a", "seeds": list(range(1, seeds + 1))},
        "metric": {"name": "perplexity", "higher_is_better": False, "decimals": 2},
        "outcomes": outcomes,
    })  # fmt: skip


def test_methods_are_compared_with_the_reference_at_equal_usage():
    results = made_results()
    table = equal_table(results, list(EQUAL_AXES))
    assert "| method | 200 training tokens | 20 communications | 10.0 kB sent |" in table
    assert "| c |" + 3 * " 24.20 ± 1.10 (at its end); +10.0% (+10.0 to +10.0), worse |" in table
    worse = "c: +10.0% (+10.0 to +10.0), worse"
    assert headline(results) == (
        "a: perplexity 22.00 ± 1.00, 20 communications, 10.0 kB. "
        f"Best baseline at equal tokens {worse}; at equal communications {worse}; at equal bytes {worse}."
    )


def stop(results: Results, method: str, *seeds: int) -> None:
    """Record the runs of a method with these seeds as stopped."""
    for run in results.raw["outcomes"]:
        if run["method"] == method and run["seed"] in seeds:
            run["completed"] = False
            del run["final_metric"], run["curves"]


def test_a_stopped_seed_counts_as_the_worst_outcome():
    results = made_results(("F", "F", ""))
    for run in results.raw["outcomes"]:
        if run["method"] == "b":  # by far the best, while it lasts
            run["curves"]["metric"] = [2.0, 2.0, 2.0]
            run["final_metric"] = 2.0
    for method in results.raw["comparison"]["methods"]:
        method["baseline"] = method["name"] != "a"
    assert (results.best_baseline(), results.closest("tokens"), results.frontier(200)["F"][0]) == ("b", "b", "b")
    stop(results, "b", 3)
    results = Results(results.raw)
    assert (results.best_baseline(), results.closest("tokens"), results.frontier(200)["F"][0]) == ("c", "c", "a")
    assert results.difference("b", "tokens") is None
    assert "| b | 2.00 ± 0.00; 1 of 3 seeds stopped |" in equal_table(results, ["tokens"])
    assert "| b (1 of 3 seeds stopped) |" in final_table(results)


def test_without_all_seeds_of_the_reference_nothing_is_compared():
    results = made_results()
    stop(results, "a", 2)
    results = Results(results.raw)
    assert results.difference("c", "tokens") is None
    assert "| c | 24.20 ± 1.10 (at its end); a: 1 of 3 seeds stopped |" in equal_table(results, ["tokens"])
    assert "better" not in headline(results)
    assert "worse" not in headline(results)


def test_a_stopped_run_of_a_published_comparison_takes_away_its_verdict():
    raw = json.loads((ROOT / "docs" / "results" / "decay_packages.json").read_text(encoding="utf-8"))
    results = Results(raw)
    best = "DiLoCo, batch 16, 200 communications"
    assert results.best_baseline() == best
    assert results.difference("DiLoCo, batch 32, 50 communications", "tokens").verdict == "worse"
    stop(results, best, 3)
    results = Results(raw)
    assert results.best_baseline() == "DiLoCo, batch 16, 100 communications"
    assert results.difference(best, "tokens") is None


def test_a_run_that_goes_on_beyond_the_limit_is_marked_as_cut_off():
    results = made_results()
    results.raw["comparison"]["reference"] = "c"
    assert "| a | 40.00 ± 0.00 (cut off); " in equal_table(results, ["tokens"])


def test_one_seed_has_no_interval():
    results = made_results(seeds=1)
    assert "| c | 23.10 (at its end); +10.0%, one seed |" in equal_table(results, ["tokens"])


def test_the_seed_of_the_search_is_not_reported():
    results = made_results()
    results.raw["search"] = {name: {"best": {}} for name in "abc"}
    assert results.mean_final("a") == 22.5  # of seeds 2 and 3; seed 1 has 21
    alone = made_results(seeds=1)
    alone.raw["search"] = results.raw["search"]
    assert alone.mean_final("a") == 21.0
    raw = json.loads((ROOT / "docs" / "results" / "equal_tuning.json").read_text(encoding="utf-8"))
    assert "the seed of the tuning runs" in page(Results(raw))


def test_overlapped_time_is_shown_only_if_all_runs_have_it():
    results = made_results(seeds=1)
    names = ["simulated: x, 1 Gb/s", "simulated: x, 1 Gb/s, overlapped"]
    for run in results.raw["outcomes"]:
        run["curves"] |= dict.fromkeys(names, run["curves"]["tokens"])
    assert (results.simulated, results.overlapped) == (names[:1], names[1:])
    del results.raw["outcomes"][-1]["curves"][names[1]]
    older = Results(results.raw)
    assert (older.simulated, older.overlapped) == (names[:1], [])


def test_the_frontier_of_a_family_is_its_best_method_within_the_limit():
    results = made_results(("F", "", "F"))
    assert results.families == {"F": ["a", "c"], "b": ["b"]}
    # c ends after 10 communications, where a has 40; a ends 10% lower after 20.
    at_15, at_25 = results.frontier(15), results.frontier(25)
    assert at_15["F"][0] == "c"
    assert at_15["F"][1] == pytest.approx({1: 23.1, 2: 24.2, 3: 25.3})
    assert at_25["F"][0] == "a"
    assert at_25["F"][1] == pytest.approx({1: 21.0, 2: 22.0, 3: 23.0})
    assert "| F | 24.20 ± 1.10 (c, 10) | 22.00 ± 1.00 (a, 20) |" in frontier_table(results)


# Pages


def published():
    """Pages of the recorded results with the words of today's comparison files."""
    found = []
    for path in sorted((ROOT / "docs" / "results").glob("*.json")):
        found.append(Results(carry_out(COMPARISONS / f"{path.stem}.yaml", None, path.parent)))
    return pages(found)


def test_the_published_pages_are_those_of_the_recorded_results():
    written = published()
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs" / "results").glob("*.md")}
    assert there | {"results.md"} == set(written)
    for name, text in written.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, (
            "run: benchmarks/compare/compare.py --report-only"
        )
