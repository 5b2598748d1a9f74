"""The map of methods, links and times, against recorded times and numbers on paper."""

import json

import pytest

from algorithms.nodes.traffic import Link
from benchmarks.compare.results import Results
from benchmarks.compare.which_method import RESULTS, Plan, all_plans, best_plans, recorded_plans, retimed

LINKS = [Link(1e6, 0.5), Link(1e7, 0.5), Link(1e7, 0.1)]


def test_a_blocking_run_is_retimed_by_hand():
    # 10 s of computing, 4 exchanges, and 1 MB: 8 s with 1 Mb/s.
    seconds = [10 + 4 * 0.5 + 8, 10 + 4 * 0.5 + 0.8, 10 + 4 * 0.1 + 0.8]
    times = list(zip(LINKS, seconds, strict=True))
    assert retimed(times) == pytest.approx((10, 4, 1e6))
    assert retimed(times[:2], exchanges=4) == pytest.approx((10, 4, 1e6))
    with pytest.raises(ValueError, match="do not all block"):
        retimed(times[:2])
    overlapped = [*times, (Link(1e9, 0.5), 10.0)]  # faster than 4 latencies
    with pytest.raises(ValueError, match="do not all block"):
        retimed(overlapped)


@pytest.mark.parametrize(
    ("nodes", "seconds"),
    [
        (8, 10 + 4 * 0.5 + 6),  # four idle nodes
        (4, 10 + 4 * 0.5 + 6),
        (2, 20 + 4 * 0.5 + 4),  # 2 (N - 1) / N of the model per exchange instead of 2 (4 - 1) / 4: two thirds
        (1, 40),
    ],
)
def test_workers_share_nodes_by_hand(nodes, seconds):
    plan = Plan("DiLoCo", "", 15.0, 32, 100, workers=4, computing=10.0, exchanges=4, link_bytes=6e6 / 8)
    assert plan.seconds(Link(1e6, 0.5), nodes) == pytest.approx(seconds)


def test_recorded_runs_keep_their_recorded_times():
    results = Results(json.loads((RESULTS / "equal_time.json").read_text(encoding="utf-8")))
    plans = {(plan.name, plan.workers): plan for plan in recorded_plans(results)}
    methods = {"synchronous AdamW, batch 16": 4, "DiLoCo, batch 32, 100 communications": 4, "one worker, batch 16": 1}
    for method, workers in methods.items():
        name = f"10 Gb/s: {method}"
        for network in results.raw["comparison"]["networks"]:
            link = Link(network["bits_per_second"], network["latency"])
            recorded = results.runs[name][0]["curves"][f"simulated: idle cores, {network['name']}"][-1]
            assert plans[name, workers].seconds(link, 4) == pytest.approx(recorded, rel=1e-3)


@pytest.mark.parametrize(
    ("link", "nodes", "seconds", "expected"),
    [
        ("10Gb/s,1ms", 4, 40, ("synchronous", 14.02)),
        ("10Gb/s,1ms", 8, 40, ("synchronous", 12.54)),
        ("1Gb/s,1ms", 2, 40, ("DiLoCo", 15.59)),
        ("100Mb/s,10ms", 4, 40, ("DiLoCo", 15.0)),
        ("10Mb/s,10ms", 4, 60, ("DiLoCo", 14.99)),
        ("1Mb/s,10ms", 4, 200, ("one worker", 12.93)),
    ],
)
def test_the_page_names_the_best_recorded_plans(link, nodes, seconds, expected):
    best = best_plans(all_plans(), Link.parse(link), nodes, seconds)[0]
    assert (best.family, round(best.perplexity, 2)) == expected
    page = (RESULTS / "which_method.md").read_text(encoding="utf-8")
    assert f"{best.perplexity:.2f}" in page
