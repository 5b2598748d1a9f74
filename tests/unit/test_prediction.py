"""Predictions of communications: laws of the batch and their fits, made-up runs with known numbers, and a short run."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from algorithms.nodes.policies import Merge
from tests.support.runs import table_of
from training_logs.prediction import DRIFT, BatchLaw, NoLawError, RunFit, fit, fit_laws, main
from training_logs.showing.run_data import RunData

CONSTANT = BatchLaw("linear", 12.0)
LINEAR = BatchLaw("linear", 8.0, 3.0)
GEOMETRIC = BatchLaw("geometric", 8.0, math.log(1.25))


@pytest.mark.parametrize("law", [CONSTANT, LINEAR, GEOMETRIC, BatchLaw("linear", 8.0, 3.0, largest=30.0)], ids=str)
def test_rounds_are_the_inverse_of_the_sum_over_rounds(law):
    assert law.rounds(0, 0.0) == 0.0
    for number in range(1, 26):
        assert law.rounds(5, sum(law.batch(5 + each) for each in range(1, number + 1))) == pytest.approx(number)


def test_the_laws_by_hand():
    # 8 + 11 + 14 = 33; 8 + 10 + 12.5 = 30.5; at most 12: 8 + 11 + 12 + 6, half of a round.
    assert LINEAR.rounds(0, 33.0) == pytest.approx(3.0)
    assert GEOMETRIC.rounds(0, 30.5) == pytest.approx(3.0)
    assert BatchLaw("linear", 8.0, 3.0, largest=12.0).rounds(0, 37.0) == pytest.approx(3.5)
    doubling = BatchLaw("geometric", 8.0, math.log(2.0), largest=20.0)
    assert [doubling.batch(number) for number in (2, 3, 4)] == pytest.approx([16.0, 20.0, 20.0])


@pytest.mark.parametrize("true", [LINEAR, GEOMETRIC, BatchLaw("linear", 90.0, 30.0), BatchLaw("geometric", 20.0, 0.08)])
def test_a_law_without_noise_is_found_exactly(true):
    law, other = fit_laws([true.batch(number) for number in range(1, 20)])
    assert (law.regime, {law.regime, other.regime}) == (true.regime, {"linear", "geometric"})
    assert law.first == pytest.approx(true.first, rel=1e-6)
    assert law.growth == pytest.approx(true.growth, rel=1e-5)


def test_a_falling_batch_is_fitted_with_the_constant_law():
    # The least squares of logarithms give the geometric mean.
    assert fit_laws([32.0, 16.0, 8.0, 4.0])[0].growth == 0.0
    assert fit_laws([32.0, 16.0, 8.0, 4.0])[0].first == pytest.approx(math.sqrt(128.0))


def correlated(generator) -> np.ndarray:
    """Deviations of 0.1 whose neighbours have a correlation of 0.8."""
    values = [generator.normal(0.0, 0.1)]
    for _ in range(59):
        values.append(0.8 * values[-1] + generator.normal(0.0, 0.06))
    return np.array(values)


def white(generator) -> np.ndarray:
    return generator.normal(0.0, 0.05, 60)


@pytest.mark.parametrize(("noise_of", "wander"), [(correlated, 0.0), (white, DRIFT)])
def test_nine_in_ten_intervals_hold_the_rest_of_a_run(noise_of, wander):
    """Fit the first 20 of 60 rounds of 100 runs, with correlated noise, or with white noise and a drift."""
    held = 0
    ratios = []
    for seed in range(100):
        generator = np.random.default_rng(seed)
        true = LINEAR if seed % 2 else BatchLaw("geometric", 8.0, 0.06)
        noise = noise_of(generator)
        batches = [true.batch(number + 1) * math.exp(noise[number]) for number in range(60)]
        found = RunFit(fit_laws(batches[:20]), batches[:20], 1, 20, 0.0, 0.0, 1, 1)
        _, low, high = found.predict(20 * math.fsum(batches[20:]))
        held += low <= 40 * math.exp(wander * generator.normal()) <= high
        ratios.append(high / low)
    assert held >= 85
    assert np.median(ratios) < 4.5


def test_rounds_at_the_largest_batch_say_nothing_about_growth():
    true = BatchLaw("linear", 8.0, 4.0, largest=40.0)
    assert fit_laws([true.batch(number) for number in range(1, 30)], largest=40.0)[0].growth == pytest.approx(4.0)


# Runs


def made_run(
    batches, merge_after: int = 0, nodes: int = 4, cap: int | None = None, steps: int = 20, **values
) -> RunData:
    """Rounds of one trainer, and until a merge of a second one with one node."""
    rows, examples, communications = [], 0, 0
    for number, batch in enumerate(batches, start=1):
        living = [(0, batch, nodes)] + ([(1, 8, 1)] if number <= merge_after else [])
        examples += steps * sum(own for _, own, _ in living)
        communications += int(nodes > 1) + (number == merge_after)
        rows += [
            {"outer_step": number, "trainer_id": trainer, "tokens": 10.0 * examples, "effective_batch": own,
             "requested_batch": own, "nodes": workers, "max_batch": 8, "inner_steps": steps, "examples": examples,
             "communications": communications}
            for trainer, own, workers in living
        ]  # fmt: skip
    merges = {merge_after: Merge(0, {0: 0.5, 1: 0.5})} if merge_after else {}
    config = {
        "number_of_inner_steps_between_outers": steps, "max_requested_batch": cap, "sampling_method": "norm_test",
        "ETA": 2.0, "ETA_at_end": None, "max_tokens": None, "number_of_outer_steps": len(batches),
    }  # fmt: skip
    return RunData(Path("made"), config | values, {}, table_of(rows), merges)


def test_only_rounds_after_the_last_merge_are_fitted():
    batches = [8, 8, 8, *(round(16 * 1.2**index) for index in range(12))]
    run = made_run(batches, merge_after=3)
    found = fit(run)
    assert (found.first_round, found.batches) == (4, batches[3:])
    assert (found.examples, found.communications) == (20 * (sum(batches) + 3 * 8), 3 + 1 + 12)
    assert (found.communications_per_round, found.living) == (1, 1)
    assert found.laws[0].regime == "geometric"
    assert found.predict(found.examples)[0] == found.communications
    assert "geometric law" in found.sentences([1e6])[0]


def test_the_end_is_predicted_from_the_beginning():
    run = made_run([round(16 + 2.5 * index) for index in range(60)])
    found = fit(run, share=1 / 3)
    assert len(found.batches) == 20
    value, low, high = found.predict(run.rounds["examples"][-1])
    assert value == pytest.approx(60, rel=0.03)
    assert low <= 60 <= high


def test_a_method_may_communicate_several_times_in_a_round():
    run = made_run([16.0] * 10)
    run.rounds["communications"] *= 20  # synchronous training, with rounds of 20 inner steps
    assert fit(run, share=0.5).predict(run.rounds["examples"][-1])[0] == pytest.approx(200)


def test_rounds_before_the_batch_grows_are_left_out():
    run = made_run([16.0] * 10 + [16 * 1.05**index for index in range(1, 15)])
    found = fit(run)
    assert found.first_round == 10
    assert found.laws[0].growth == pytest.approx(math.log(1.05), rel=1e-3)
    assert fit(made_run([16.0] * 10)).first_round == 1


def test_an_interval_respects_that_batches_neither_shrink_nor_outgrow_the_largest():
    batches = [16, 18, 17, 22, 21, 26, 24, 30]
    run = made_run(batches, cap=40)
    more = 20 * 40 * 30
    value, low, high = fit(run).predict(20 * sum(batches) + more)
    assert 8 + 30 <= low < value < high <= 8 + more / 20 / 30
    assert fit(made_run([16] * 8)).predict(20 * 16 * 100) == pytest.approx((100.0, 100.0, 100.0))


def test_the_past_of_a_run_is_not_predicted():
    with pytest.raises(NoLawError, match=r"after 4,200 examples .* for 900"):
        fit(made_run([10, 20, 30, 40, 50, 60])).predict(900)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"communication_budget": 50}, "communication_budget"),
        ({"smallest_worker_batch": 16}, "smallest_worker_batch"),
        ({"ETA_at_end": 1.0}, "ETA_at_end"),
        ({"node_schedule": [[0, 2], [0.5, 4]]}, "node_schedule"),
        ({"batch_schedule": "seesaw"}, "batch_schedule"),
        ({"learning_rate_schedule": "warmup_stable_decay"}, "warmup_stable_decay"),
    ],
)
def test_runs_that_follow_no_law_are_refused(values, why):
    with pytest.raises(NoLawError, match=why):
        fit(made_run([16 + index for index in range(20)], **values))


def test_a_run_whose_rounds_communicate_unequally_is_refused():
    run = made_run([16 + index for index in range(20)])
    fit(run)
    run.rounds["communications"][-1] += 1
    with pytest.raises(NoLawError, match="rounds have 1 to 2 communications"):
        fit(run)


def test_a_run_whose_requests_run_in_part_is_refused():
    run = made_run([32] * 4 + [33 + index for index in range(16)])
    fit(run)
    run.rounds["requested_batch"][3] = 33.0
    with pytest.raises(NoLawError, match="switch_mode"):
        fit(run)


def test_a_run_whose_workers_make_unequal_steps_is_refused():
    run = made_run([16 + index for index in range(20)])
    run.__dict__["node_rows"] = table_of([{"outer_step": 1, "trainer_id": 0, "inner_steps": made} for made in (20, 10)])
    with pytest.raises(NoLawError, match="fewer inner steps"):
        fit(run)


def test_a_lone_worker_communicates_nothing_and_a_largest_batch_makes_communications_proportional():
    assert fit(made_run([16.0] * 8, nodes=1)).predict(1e6)[0] == 0.0
    found = fit(made_run([16, 20, 24, 28, 32, 36, 40, 40, 40, 40], cap=40))
    per_round = 20 * 40
    first, second = (found.predict(count)[0] for count in (2e4, 4e4))
    assert second - first == pytest.approx(2e4 / per_round)


def test_too_few_rounds_are_refused():
    with pytest.raises(NoLawError, match="at least 4 rounds below the largest batch, got 3"):
        fit(made_run([8, 9, 10]))
    with pytest.raises(NoLawError, match="got 0"):
        fit(made_run([]))
    with pytest.raises(NoLawError, match="got 0"):
        fit(made_run([8] * 6, merge_after=6))


@pytest.mark.parametrize(("examples", "shown"), [(1e30, r"1e\+30"), (float("nan"), "nan")])
def test_examples_far_beyond_the_run_are_refused(examples, shown):
    found = fit(made_run([16 + index for index in range(20)]))
    assert found.predict(1_000 * found.examples)[0] > found.communications
    with pytest.raises(NoLawError, match=f"says nothing about {shown}"):
        found.predict(examples)


def test_a_shortened_last_round_is_left_out():
    run = made_run([16] * 8)
    run.rounds["inner_steps"][7] = 3
    assert len(fit(run).batches) == 7


def test_the_command_states_the_error(monkeypatch, capsys, tmp_path):
    assert main([str(tmp_path)]) == 2
    run = made_run([16 + index for index in range(20)])
    monkeypatch.setattr("training_logs.prediction.read_run", lambda folder: run)
    assert main(["made", "--share", "0.7"]) == 0
    printed = capsys.readouterr().out
    last = run.rounds[-1]
    value, _, _ = fit(run, 0.7).predict(last["examples"])
    assert f"error {value / last['communications'] - 1.0:+.1%}" in printed
    assert main(["made", "--examples", "1e6"]) == 0
    assert "1,000,000 examples" in capsys.readouterr().out


def test_the_command_states_no_error_of_a_run_without_communications(monkeypatch, capsys):
    monkeypatch.setattr("training_logs.prediction.read_run", lambda folder: made_run([16] * 8, nodes=1))
    assert main(["alone", "--share", "0.5"]) == 0
    assert capsys.readouterr().out.endswith("measured at 2,560 examples: 0 communications\n")


def test_a_round_log_without_its_columns_is_one_line(monkeypatch, capsys):
    damaged = dataclasses.replace(made_run([16] * 8), rounds=table_of([{"outer_step": 1, "trainer_id": 0}]))
    monkeypatch.setattr("training_logs.prediction.read_run", lambda folder: damaged)
    assert main(["made"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: made: not a run folder, or damaged: ")


def test_the_command_says_why_a_run_cannot_be_predicted(monkeypatch, capsys):
    demo = made_run([16 + index for index in range(20)], ETA_at_end=0.9, smallest_worker_batch=16)
    monkeypatch.setattr("training_logs.prediction.read_run", lambda folder: demo)
    assert main(["logs/demo"]) == 2
    error = capsys.readouterr().err
    assert "logs/demo: smallest_worker_batch sets the batch" in error
    assert "docs/theory.md" in error
