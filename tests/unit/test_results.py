"""Results of comparisons: paired differences, verdicts and tables on paper, and the published pages."""

import json
import math

import pytest

from benchmarks.compare import results
from benchmarks.compare.compare import carry_out, same_data
from benchmarks.compare.report import final_table, overview, page, target_table, verdict_table
from benchmarks.compare.results import Results, mean_curve, paired_difference, used_until
from benchmarks.compare.spec import COMPARISONS, ROOT

RESULTS = ROOT / "docs" / "results"


EARLIER = "not comparable: ended earlier"
MORE = "not comparable: used more"


def made_outcome(metric, tokens, method="a", seed=1):
    curves = {"metric": metric, "tokens": tokens, "communications": [t / 10 for t in tokens]}
    curves["bytes_communicated"] = [50 * t for t in tokens]
    curves["inner_steps"] = tokens
    return {
        "method": method, "seed": seed, "id": f"{method}{seed}", "completed": True,
        "final_metric": metric[-1], "first_batch": 1, "last_batch": 1, "curves": curves,
    }  # fmt: skip


def test_interpolation_of_a_curve_on_paper(monkeypatch):
    run = made_outcome([100.0, 25.0, 25.0, 20.0], [0, 10, 20, 30])
    accuracy = made_outcome([0.25, 0.5, 0.8], [0, 10, 20])
    assert used_until(run, "tokens", 50.0) == (0, 10)  # a third of the run
    assert used_until(run, "tokens", 100.0) == (0, 0)
    monkeypatch.setattr(results, "COARSE", 0.5)
    assert used_until(run, "tokens", 50.0) == pytest.approx((5.0, 5.0))  # halfway between logarithms
    assert used_until(run, "tokens", 25.0) == pytest.approx((10.0, 10.0))
    assert used_until(run, "tokens", 19.0) is None
    assert used_until(accuracy, "tokens", 0.5, sign=-1) == pytest.approx((10.0, 10.0))
    assert used_until(accuracy, "tokens", 0.9, sign=-1) is None


def test_the_mean_curve_ends_at_the_mean_usage():
    runs = [made_outcome([100.0, 50.0, 20.0], [0, 100, 200]), made_outcome([100.0, 30.0], [0, 300])]
    xs, mean, values = mean_curve(runs, "communications", points=3)
    assert xs.tolist() == [0.0, 12.5, 25.0]
    assert values[:, -1].tolist() == pytest.approx([20.0, 30.0])
    assert values[:, 1].tolist() == pytest.approx([50.0, math.sqrt(3000.0)])
    assert mean[1] == pytest.approx((50.0 * math.sqrt(3000.0)) ** 0.5)


def test_an_accuracy_is_interpolated_as_it_is():
    runs = [made_outcome([0.0, 0.5], [0, 10]), made_outcome([0.0, 0.0], [0, 10])]
    assert used_until(runs[1], "tokens", 0.0, sign=-1) == (0, 0)
    _, mean, values = mean_curve(runs, "tokens", sign=-1, points=3)
    assert values.tolist() == [[0.0, 0.25, 0.5], [0.0, 0.0, 0.0]]
    assert mean.tolist() == [0.0, 0.125, 0.25]


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
        ((0.3,), True, "worse"),
    ],
)
def test_verdict_needs_interval_that_excludes_zero(differences, lower_is_better, verdict):
    theirs = dict.fromkeys(range(len(differences)), 0.5)
    add = (lambda x, d: x * math.exp(d)) if lower_is_better else (lambda x, d: x + d)
    ours = {seed: add(theirs[seed], difference) for seed, difference in enumerate(differences)}
    assert paired_difference(ours, theirs, lower_is_better).verdict == verdict


def test_an_accuracy_is_compared_in_points():
    found = paired_difference({1: 0.81, 2: 0.83}, {1: 0.80, 2: 0.80}, lower_is_better=False)
    assert found.mean == pytest.approx(2.0)
    assert found.interval == pytest.approx((2.0 - 12.7062, 2.0 + 12.7062), rel=1e-4)  # t with one degree of freedom
    assert str(found) == "+2.0 points (-10.7 to +14.7)"


def made_results(seeds=3):
    """Results with reference a; b is a with noise, c ends 10% above a with half of its usage, d below with twice."""
    outcomes = []
    for seed in range(1, seeds + 1):
        end = 20.0 + seed
        outcomes += [
            made_outcome([100.0, 40.0, end], [0, 100, 200], "a", seed=seed),
            made_outcome([100.0, 40.0, end * (1.1, 0.9, 1.0)[seed - 1]], [0, 100, 190], "b", seed=seed),
            made_outcome([100.0, end * 1.1], [0, 100], "c", seed=seed),
            made_outcome([100.0, end * 0.9], [0, 400], "d", seed=seed),
        ]
    methods = [{"name": name, "overrides": {"balance": None}} for name in "abcd"]
    comparison = {"title": "Made", "corpus": "letters", "question": "Why?", "answer": "", "details": "", "base": "x"}
    comparison |= {"common": {}, "hardware": [], "networks": [], "methods": methods, "reference": "a"}
    return Results({
        "name": "made", "file": "/elsewhere/made.yaml", "parameters": 1_250_000,
        "comparison": comparison | {"seeds": list(range(1, seeds + 1))},
        "metric": {"name": "perplexity", "higher_is_better": False, "decimals": 2},
        "outcomes": [outcome | {"commit": "c0ffee+", "machine": "a CPU"} for outcome in outcomes],
    })  # fmt: skip


def test_usage_until_a_target_is_a_range_or_a_bound():
    """All runs of the reference reach 23, between the evaluations at 100 and 200 tokens."""
    rows = target_table(made_results()).splitlines()
    assert "| a | 3 of 3 | 100 to 200 | 100 to 200 | 10 to 20 |" in rows
    assert "| d | 3 of 3 | at most 400 | at most 400 | at most 40 |" in rows  # evaluated at the end only


def test_runs_are_compared_only_where_usage_allows_a_verdict():
    results = made_results()
    verdicts = {name: results.verdict(name, "tokens") for name in "bcd"}
    assert verdicts == {"b": "not significant", "c": EARLIER, "d": MORE}
    results.raw["comparison"]["reference"] = "d"  # c and a are worse with less
    assert {name: results.verdict(name, "tokens") for name in "ac"} == {"a": EARLIER, "c": EARLIER}
    results.raw["comparison"]["reference"] = "c"  # better with more, and better with equal usage
    assert results.verdict("a", "tokens") == MORE
    for run in results.runs["a"]:
        run["curves"]["tokens"] = [0, 50, 109]
    assert results.verdict("a", "tokens") == "better"
    for run in results.runs["a"]:  # better with nothing sent
        run["curves"]["communications"] = [0, 0, 0]
    assert results.verdict("a", "communications") == "better"


def test_page_names_its_file_commit_and_range_of_tokens():
    text = page(made_results())
    assert text.startswith("# Made (letters, 1.2M parameters, 0.0001M to 0.0004M tokens, 3 seeds)\n\n**Question:** ")
    assert "compare.py /elsewhere/made.yaml` with commit c0ffee+ (+ marks" in text


def stop(results: Results, method: str, *seeds: int) -> None:
    """Record the runs of a method with these seeds as stopped."""
    for run in results.raw["outcomes"]:
        if run["method"] == method and run["seed"] in seeds:
            run["completed"] = False
            del run["final_metric"], run["curves"]


def test_stopped_seed_takes_away_the_verdict():
    results = made_results()
    stop(results, "b", 3)
    results = Results(results.raw)
    assert results.verdict("b", "tokens") == "not comparable: stopped or no common seed"
    assert "| b | not comparable: stopped or no common seed |" in verdict_table(results)
    assert "| b (1 of 3 seeds stopped) | 21.45 ± 2.33 | not comparable |" in final_table(results)
    stop(results, "a", 2)
    results = Results(results.raw)
    assert results.difference("c") is None


def test_a_method_may_have_seeds_of_its_own():
    results = made_results()
    results.raw["comparison"]["seeds"] = [2, 3]
    results.raw["comparison"]["methods"][1]["seeds"] = [1, 2]
    results.raw["comparison"]["methods"][2]["seeds"] = [1, 2, 3]
    results.raw["comparison"]["methods"][3]["seeds"] = [1]
    assert results.finals("b") == pytest.approx({1: 23.1, 2: 19.8})
    assert results.difference("b").mean == pytest.approx(-10.0)  # over seed 2 alone
    assert results.difference("d") is None  # no seed in common
    text = page(results)
    assert text.startswith("# Made (letters, 1.2M parameters, 0.0001M to 0.0004M tokens, 1 to 3 seeds)\n")
    assert "| c | 3 of 3 |" not in text
    assert "| a | 2 of 2 |" in text
    assert "Seeds 1, 2, 3." in text


def test_usage_counts_over_the_seeds_of_both():
    results = made_results()
    for outcome in results.raw["outcomes"]:
        if outcome["method"] == "a" and outcome["seed"] == 3:  # it alone uses this much
            outcome["curves"]["tokens"] = [tokens * 100 for tokens in outcome["curves"]["tokens"]]
    assert results.verdict("d", "tokens") != MORE
    results.raw["comparison"]["methods"][3]["seeds"] = [1, 2]
    results.raw["outcomes"] = [
        outcome for outcome in results.raw["outcomes"] if (outcome["method"], outcome["seed"]) != ("d", 3)
    ]
    assert Results(results.raw).verdict("d", "tokens") == MORE


def test_a_method_may_have_a_reference_of_its_own():
    results = made_results()
    results.raw["comparison"]["methods"][3]["reference"] = "c"
    assert results.references == {"a": "a", "b": "a", "c": "c", "d": "c"}
    assert str(results.difference("d")) == "-18.2% (-18.2 to -18.2)"
    assert results.verdict("d", "tokens") == MORE
    text = page(results)
    assert "| d | c | not comparable: used more |" in text
    assert "| c | 24.20 ± 1.10 |  | 1 | 100 | 10 | 5.0 kB |" in text
    assert "| d | 3 of 3: 25.30 |" in text


@pytest.mark.parametrize("stopped", ["a", "c"])
def test_one_of_several_references_may_have_stopped(stopped):
    results = made_results()
    results.raw["comparison"]["methods"][3]["reference"] = "c"
    for outcome in results.raw["outcomes"]:
        outcome["completed"] = outcome["method"] != stopped
    text = page(results)
    assert f"| {'b' if stopped == 'a' else 'd'} | {stopped} | not comparable: stopped or no common seed |" in text
    assert f"| {'b' if stopped == 'a' else 'd'} | the reference stopped | - |" in text
    assert f"| {'d | 3 of 3: 25.30' if stopped == 'a' else 'b | 2 of 3: 23.00'} |" in text


def test_old_outcomes_are_told_apart_by_the_metric_of_the_untrained_model():
    ours, theirs = made_outcome([100.0, 20.0], [0, 1]), made_outcome([100.0, 30.0], [0, 1])
    assert same_data(ours | {"data": "x"}, theirs)
    assert not same_data(ours | {"data": "x"}, theirs | {"data": "y"})
    theirs["curves"]["metric"][0] = 101.0
    assert not same_data(ours, theirs)


# Pages


def test_published_pages_are_those_of_the_recorded_results():
    found = {}
    for path in sorted(COMPARISONS.glob("*.yaml")):
        recorded = json.loads((RESULTS / f"{path.stem}.json").read_text(encoding="utf-8"))
        assert json.loads(json.dumps(carry_out(path, None, RESULTS))) == recorded
        found[path.stem] = Results(recorded)
    template = (COMPARISONS / "overview.md").read_text(encoding="utf-8")
    pages = {f"results/{name}.md": page(results) for name, results in found.items()}
    pages["results.md"] = overview(template, found)
    for name, text in pages.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, "run compare.py --report-only"
        assert not {"None", "False"} & set(text.split())
    assert pages["results.md"].count("\n") <= 120
    rows = [line for text in pages.values() for line in text.splitlines() if line.startswith("| ")]
    assert max(row.count(" | ") for row in rows) <= 6  # seven columns
