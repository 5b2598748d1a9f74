"""Predictions of communications: of made-up runs with known numbers, and of a short run."""

import dataclasses
import math
from pathlib import Path

import pytest

from algorithms.theory import Prediction
from tests.support.runs import table_of
from training_logs.prediction import NoLawError, fit, main, measured
from training_logs.showing.run_data import MergeRecord, RunData


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
             "nodes": workers, "inner_steps": steps, "examples": examples, "communications": communications}
            for trainer, own, workers in living
        ]  # fmt: skip
    merges = [MergeRecord(merge_after, 0, {0: 0.5, 1: 0.5})] if merge_after else []
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
    assert (found.examples[3], found.communications[3]) == (20 * (8 + 8) * 3, 4)
    assert (found.communications_per_round, found.living) == (1, 1)
    assert found.laws[0].regime == "geometric"
    examples, communications = measured(run)
    assert found.predict(examples[-1]).value == pytest.approx(communications[-1], abs=0.1)
    assert "geometric law" in found.sentences([1e6])[0]


def test_the_end_is_predicted_from_the_beginning():
    run = made_run([round(16 + 2.5 * index) for index in range(60)])
    found = fit(run, share=1 / 3)
    assert len(found.batches) == 20
    examples, communications = measured(run)
    prediction = found.predict(examples[-1])
    assert prediction.value == pytest.approx(communications[-1], rel=0.03)
    assert prediction.low <= communications[-1] <= prediction.high


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
    prediction = fit(run).predict(20 * sum(batches) + more)
    assert 8 + 30 <= prediction.low < prediction.value < prediction.high <= 8 + more / 20 / 30
    still = fit(made_run([16] * 8, sampling_method="none")).predict(20 * 16 * 100)
    assert (still.value, still.low, still.high) == pytest.approx((100.0, 100.0, 100.0))


def test_the_past_of_a_run_is_interpolated():
    run = made_run([10, 20, 30, 40, 50, 60])
    assert fit(run).predict(20 * 45.0) == Prediction(2.5, 2.5, 2.5)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"communication_budget": 50}, "budget .* 50 communications"),
        ({"smallest_worker_batch": 16}, "smallest_worker_batch"),
        ({"ETA_at_end": 1.0}, "ETA_at_end"),
        ({"node_schedule": [[0, 2], [0.5, 4]]}, "node_schedule"),
        ({"learning_rate_schedule": "warmup_stable_decay"}, "warmup_stable_decay"),
    ],
)
def test_runs_that_follow_no_law_are_refused(values, why):
    with pytest.raises(NoLawError, match=why):
        fit(made_run([16 + index for index in range(20)], **values))


def test_a_run_whose_workers_make_unequal_steps_is_refused():
    run = made_run([16 + index for index in range(20)])
    expected = fit(run).predict(1e5)

    def with_steps(*steps) -> RunData:
        found = dataclasses.replace(run)
        rows = [{"outer_step": 1, "trainer_id": 0, "inner_steps": made} for made in steps]
        found.__dict__["node_rows"] = table_of(rows)
        return found

    assert fit(with_steps(20, 20, 20)).predict(1e5) == expected
    for steps in ((20, 20, 10), (10, 10, 10)):
        with pytest.raises(NoLawError, match="fewer inner steps"):
            fit(with_steps(*steps))


def test_a_lone_worker_communicates_nothing_and_a_largest_batch_makes_communications_proportional():
    assert fit(made_run([16.0] * 8, nodes=1)).predict(1e6).value == 0.0
    found = fit(made_run([16, 20, 24, 28, 32, 36, 40, 40, 40, 40], cap=40))
    per_round = 20 * 40
    first, second = (found.predict(count).value for count in (2e4, 4e4))
    assert second - first == pytest.approx(2e4 / per_round)


def test_too_few_rounds_are_refused():
    with pytest.raises(NoLawError, match="at least 4 rounds below the largest batch, got 3"):
        fit(made_run([8, 9, 10]))
    with pytest.raises(NoLawError, match="got 0"):
        fit(made_run([]))
    with pytest.raises(NoLawError, match="got 0"):
        fit(made_run([8] * 6, merge_after=6))


def test_a_shortened_last_round_is_left_out():
    run = made_run([16] * 8)
    run.rounds["inner_steps"][7] = 3
    assert len(fit(run).batches) == 7


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    from tests.support.runs import record_run
    from training_logs.showing.run_data import read_run

    folder = tmp_path_factory.mktemp("logs")
    settings = {"number_of_outer_steps": 12, "number_of_initial_trainers": 2, "max_batch_growth": 1.2}
    settings |= {"number_of_inner_steps_between_outers": 1, "nodes_per_gpu": 2}
    return read_run(record_run(folder, max_batch_size=64, max_requested_batch=None, **settings))


def test_the_command_states_the_error(run, capsys, tmp_path):
    assert main([str(run.folder), "--share", "0.7"]) == 0
    printed = capsys.readouterr().out
    examples, communications = measured(run)
    value = fit(run, 0.7).predict(examples[-1]).value
    assert f"error {value / communications[-1] - 1.0:+.1%}" in printed
    assert main([str(run.folder), "--examples", "1e6"]) == 0
    assert "1,000,000 examples" in capsys.readouterr().out
    assert main([str(tmp_path)]) == 2


def test_the_command_says_why_a_run_cannot_be_predicted(monkeypatch, capsys):
    demo = made_run([16 + index for index in range(20)], ETA_at_end=0.9, smallest_worker_batch=16)
    monkeypatch.setattr("training_logs.prediction.read_run", lambda folder: demo)
    assert main(["logs/demo"]) == 2
    error = capsys.readouterr().err
    assert "logs/demo: workers join as the batch grows (smallest_worker_batch)" in error
    assert "docs/theory.md" in error
