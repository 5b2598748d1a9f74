"""Comparisons: counting against the logs, simulated time on paper, and a small one through its own command."""

import functools
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from pydantic import ValidationError

from algorithms.nodes.virtual_clock import Clocks, Sending, pairs
from benchmarks.compare import compare, runs
from benchmarks.compare.accounting import PROBED_PASS, Hardware, fit_step_cost, simulated_seconds, usage
from benchmarks.compare.compare import Kept, main, published, unfinished
from benchmarks.compare.network import Network, same_networks
from benchmarks.compare.plan import (
    ROOT,
    Comparison,
    grid,
    load_comparison,
    make_run,
    seed_runs,
    tuning_runs,
    with_found,
)
from benchmarks.compare.results import Results
from benchmarks.compare.run_id import effective_values
from benchmarks.compare.runs import Store
from tests.integration.test_reporting import record_run
from tests.support.helpers import Recorder, light_cluster
from training_logs.recording.exchange_log import COLUMNS
from training_logs.showing.number_log import Rows
from training_logs.showing.run_data import MergeRecord, RunData, read_run
from utils.checkpoint.run_lock import held
from utils.config.reading import parse_config
from utils.config.schema import ConfigError

# Paper-sized: a pass takes 10 ms, or 2 ms per example from 5 on; 1,000 parameters are 4,000 bytes.
DEVICE = Hardware("paper", t_min=0.01, t_example=0.002)
NETWORK = Network("slow", bits_per_second=8_000.0, latency=0.5)
NOTHING = float("nan")


def row(step, trainer, nodes, batch, parts=1, sample=NOTHING, **totals):
    return {
        "outer_step": step, "trainer_id": trainer, "nodes": nodes, "effective_batch": batch, "inner_steps": 20,
        "accumulation_steps": parts, "micro_batch": math.ceil(batch / nodes / parts), "gradient_sample_size": sample,
        "seconds": 1.5, "tokens": 0, "communications": 0, "bytes_communicated": 0,
    } | totals  # fmt: skip


def made_run(rows, merges=(), nodes_per_gpu=4, folder=Path("made"), **config):
    values = {"nodes_per_gpu": nodes_per_gpu, "communication_dtype": "float32", "statistics_estimator": "per_example"}
    values |= {"statistics_batch_size": 8, "model_training_report_dir": "."}
    return RunData(folder, values | config, {"parameters": 1000, "devices": ["cpu"]}, Rows.of(rows), list(merges))


def test_simulated_time_of_one_trainer_on_paper():
    # 16 examples on 4 workers: 4 each, the smallest pass, 20 of them; 2 * 3 / 4 * 4,000 bytes through each link.
    sent = 0.5 + 8 * 6_000 / 8_000
    small = 20 * 0.01 + sent
    # 64: 16 each in two micro-batches of 8: 2 * 16 ms.
    large = 20 * 2 * 0.016 + sent
    run = made_run([row(1, 0, 4, 16), row(2, 0, 4, 64, parts=2)])
    assert simulated_seconds(run, DEVICE, NETWORK) == pytest.approx([small, small + large])


def test_simulated_time_of_statistics():
    # The first step, in all its micro-batches, and where it has fewer than 8 examples a pass of its own over 8.
    in_step = made_run([row(1, 0, 1, 10, sample=8)])
    assert simulated_seconds(in_step, DEVICE, NETWORK) == pytest.approx([20 * 0.02 + (PROBED_PASS - 1) * 0.02])
    alone = made_run([row(1, 0, 1, 4, sample=8)])
    assert simulated_seconds(alone, DEVICE, NETWORK) == pytest.approx([20.4 * 0.01 + PROBED_PASS * 0.016])
    parts = made_run([row(1, 0, 1, 30, parts=3, sample=30)])
    assert simulated_seconds(parts, DEVICE, NETWORK) == pytest.approx([60 * 0.02 + 3 * (PROBED_PASS - 1) * 0.02])


def test_simulated_time_of_trainers_side_by_side_in_turn_and_merging():
    first = [row(1, 0, 1, 10), row(1, 1, 1, 5)]
    merge = 0.5 + 8 * 4_000 / 8_000  # logs without the columns of bytes knew of the parameters alone
    side_by_side = made_run(first, [MergeRecord(1, 0, {0: 0.5, 1: 0.5})], nodes_per_gpu=2)
    assert simulated_seconds(side_by_side, DEVICE, NETWORK) == pytest.approx([20 * 0.02 + merge])
    in_turn = made_run(first, nodes_per_gpu=1)
    assert simulated_seconds(in_turn, DEVICE, NETWORK) == pytest.approx([20 * 0.02 + 20 * 0.01])


def test_simulated_time_of_merging_and_of_nodes_that_come_to_a_trainer():
    def rounds(step, *trainers, merged, redistributed):
        kinds = {"bytes_merged": merged, "bytes_redistributed": redistributed}
        return [row(step, trainer, nodes, 10 * nodes) | kinds for trainer, nodes in trainers]

    # 8,000 bytes of parameters and velocity of two others come to one of two nodes, which sends them on to the other.
    merge = [MergeRecord(1, 0, {0: 0.5, 1: 0.25, 2: 0.25})]
    # After that, the trainer's two new nodes get 16,004 bytes each, side by side.
    run = made_run(
        rounds(1, (0, 2), (1, 1), (2, 1), merged=3 * 8_000, redistributed=0)
        + rounds(2, (0, 4), merged=3 * 8_000, redistributed=2 * 16_004),
        merge,
    )
    first = 20 * 0.02 + (0.5 + 8 * 4_000 / 8_000) + (0.5 + 8 * 3 * 8_000 / 8_000)
    second = (0.5 + 8 * 16_004 / 8_000) + 20 * 0.02 + (0.5 + 8 * 6_000 / 8_000)
    assert simulated_seconds(run, DEVICE, NETWORK) == pytest.approx([first, first + second])
    twice = Hardware("twice the parameters", 0.01, 0.002, parameters=2000)
    sent = 8 * (4_000 + 3 * 8_000 + 16_004 + 6_000) / 8_000
    assert simulated_seconds(run, twice, NETWORK)[-1] == pytest.approx(first + second + sent)


def test_simulated_time_of_synchronous_training_and_of_another_model():
    run = made_run([row(1, 0, 1, 40)])
    # 4 workers with 10 examples, and a synchronisation in every step.
    each = 0.02 + 0.5 + 8 * 6_000 / 8_000
    assert simulated_seconds(run, DEVICE, NETWORK, 4) == pytest.approx([20 * each])
    larger = Hardware("larger", 0.01, 0.002, parameters=2000)
    each = 0.02 + 0.5 + 8 * 12_000 / 8_000
    assert simulated_seconds(run, larger, NETWORK, 4) == pytest.approx([20 * each])


def test_simulated_time_with_overlap_is_that_of_a_loop_by_hand():
    """One trainer, rounds of 0.2, 0.64 and 0.2 s of computation, and synchronisations longer and shorter."""
    slow = [row(1, 0, 4, 16), row(2, 0, 4, 64, parts=2), row(3, 0, 4, 16)]
    quick = Network("quick", bits_per_second=8_000_000.0, latency=0.5)
    for network, sent in ((NETWORK, 6.5), (quick, 0.506)):
        clock, arrives, expected = 0.0, 0.0, []
        for compute in (0.2, 0.64, 0.2):
            clock = max(clock + compute, arrives)  # a round ends once the update before it is there
            arrives = clock + sent
            expected.append(arrives)
        assert simulated_seconds(made_run(slow), DEVICE, network, overlap=True) == pytest.approx(expected)
    assert expected == pytest.approx([0.706, 0.2 + 0.64 + 0.506, 0.2 + 0.64 + 0.506 + 0.506])


def test_a_merge_and_new_nodes_wait_for_what_travels():
    def counted(step, merged, redistributed, *trainers):
        kinds = {"bytes_merged": merged, "bytes_redistributed": redistributed}
        return [row(step, trainer, nodes, 10 * nodes) | kinds for trainer, nodes in trainers]

    run = made_run(
        counted(1, 0, 0, (0, 2), (1, 2))
        + counted(2, 2 * 8_000, 0, (0, 2), (1, 2))
        + counted(3, 2 * 8_000, 0, (0, 2))
        + counted(4, 2 * 8_000, 2 * 16_004, (0, 4))
        + counted(5, 2 * 8_000, 2 * 16_004, (0, 4)),
        [MergeRecord(2, 0, {0: 0.5, 1: 0.5})],
    )
    two, four = 0.5 + 8 * 4_000 / 8_000, 0.5 + 8 * 6_000 / 8_000
    merge, moving = 0.5 + 8 * 16_000 / 8_000, 0.5 + 8 * 16_004 / 8_000
    first, second = 0.4 + two, 0.4 + two + two + merge  # the second round hides behind the first's transfer
    third = second + 0.4 + two
    fourth = third + moving + 0.4 + four
    expected = [first, second, third, fourth, fourth + four]
    assert simulated_seconds(run, DEVICE, NETWORK, overlap=True) == pytest.approx(expected)


def logged_run(folder, rows, exchanges, **values):
    """A run with a log of exchanges: (round, kind, through, count, sent, received, behind, first step, last step)."""
    lines = [",".join(map(str, (step, 0, *exchange))) for step, *exchange in exchanges]
    (folder / "exchange_log.csv").write_text("\n".join([",".join(COLUMNS), *lines, ""]))
    return made_run(rows, folder=folder, **values)


def test_an_exchange_at_the_end_of_a_round_takes_what_it_took_before_there_was_a_log(tmp_path):
    """Statistics go out with it; an exchange through a server goes up, and then down."""
    rows = [row(1, 0, 4, 16), row(2, 0, 4, 64, parts=2)]
    whole = (1, 6_000.0, 6_000.0, 0, 20, 20)
    run = logged_run(tmp_path, rows, [(step, "synchronisation", "all", *whole) for step in (1, 2)])
    for overlap in (False, True):
        expected = simulated_seconds(made_run(rows), DEVICE, NETWORK, overlap=overlap)
        assert simulated_seconds(run, DEVICE, NETWORK, overlap=overlap) == pytest.approx(expected)
    statistics = (1, "statistics", "all", 1, 2_000.0, 2_000.0, 0, 20, 20)
    run = logged_run(tmp_path, rows[:1], [(1, "synchronisation", "all", *whole), statistics])
    assert simulated_seconds(run, DEVICE, NETWORK) == pytest.approx([0.2 + 0.5 + 8 * 8_000 / 8_000])
    twice = Hardware("twice the parameters", 0.01, 0.002, parameters=2000)
    assert simulated_seconds(run, twice, NETWORK) == pytest.approx([0.2 + 0.5 + 8 * (2 * 6_000 + 2_000) / 8_000])


def test_rounds_from_before_there_was_a_log_are_counted_as_they_were_then(tmp_path):
    rows = [row(1, 0, 4, 16), row(2, 0, 4, 64, parts=2)]
    run = logged_run(tmp_path, rows, [(2, "synchronisation", "all", 1, 60_000.0, 60_000.0, 0, 20, 20)])
    first, second = simulated_seconds(run, DEVICE, NETWORK)
    assert first == pytest.approx(simulated_seconds(made_run(rows[:1]), DEVICE, NETWORK)[0])
    assert second - first == pytest.approx(0.64 + 0.5 + 8 * 60_000 / 8_000)


def test_nodes_of_given_speeds_take_as_many_times_as_long_and_the_slowest_counts(tmp_path):
    """16 examples as 6, 6, 3 and 1: 12, 12, 10 and 10 ms on the device itself; four times that on the slowest node."""
    columns = ("outer_step", "trainer_id", "worker", "node", "speed", "examples", "inner_steps")
    speeds = [2.0, 2.0, 1.0, 0.5]

    def seconds(shares, steps):
        rows = [",".join(map(str, (1, 0, n, n, speeds[n], shares[n], steps[n]))) for n in range(4)]
        (tmp_path / "node_log.csv").write_text("\n".join([",".join(columns), *rows, ""]))
        one = [row(1, 0, 4, 16, sample=8) | {"micro_batch": max(shares)}]
        return simulated_seconds(made_run(one, folder=tmp_path, node_speeds=speeds), DEVICE, Network("free", 1e99, 0.0))

    # And 1.4 passes over the 8 examples of a probe in the first step, and 0.4 over the step's own where it has two.
    statistics = PROBED_PASS * 0.016
    assert seconds([6, 6, 3, 1], [20] * 4) == pytest.approx([4 * (20 * 0.01 + statistics)])
    assert seconds([4, 4, 4, 4], [20] * 4) == pytest.approx([4 * (20.4 * 0.01 + statistics)])
    assert seconds([4, 4, 4, 4], [20, 20, 10, 5]) == pytest.approx([4 * (5.4 * 0.01 + statistics)])


def test_an_exchange_with_time_to_hide_delays_only_the_step_that_waits_for_it(tmp_path):
    """Rounds of 20 steps of 10 ms: after the 5th and the 15th something goes out that the 10th step after waits for."""
    rows = [row(step, 0, 4, 16) for step in (1, 2)]
    events = [(step, "synchronisation", "all", 2, 1_000.0, 1_000.0, 10, 5, 15) for step in (1, 2)]
    run = logged_run(tmp_path, rows, events)
    quick, slow = Network("quick", 8e5, 0.05), Network("slow", 8e4, 0.05)  # 0.06 and 0.15 s; 0.1 s are hidden
    assert simulated_seconds(run, DEVICE, quick) == pytest.approx([0.2, 0.4])
    # What leaves at 0.05 is there at 0.2, 0.05 late; what leaves then, at 0.35, 0.05 after step 5 of the next round.
    assert simulated_seconds(run, DEVICE, slow) == pytest.approx([0.25, 0.55])
    over_the_end = [(step, "synchronisation", "all", 1, 1_000.0, 1_000.0, 10, 15, 15) for step in (1, 2)]
    assert simulated_seconds(logged_run(tmp_path, rows, over_the_end), DEVICE, slow) == pytest.approx([0.2, 0.45])
    # At 0.05 and 0.06: the second has the link from 0.2 on, and is there at 0.35.
    together = [(1, "synchronisation", "all", 2, 1_000.0, 1_000.0, 14, 5, 6)]
    assert simulated_seconds(logged_run(tmp_path, rows[:1], together), DEVICE, slow) == pytest.approx([0.35])
    late = Network("very slow", 8e3, 0.0)  # 1 s each: one after the other on the link
    run = logged_run(tmp_path, rows, events)
    assert simulated_seconds(run, DEVICE, late) == pytest.approx([1.05 + 0.05, 3.05 + 0.05])


def test_steps_that_average_gradients_wait_or_hide_behind_themselves(tmp_path):
    rows = [row(1, 0, 4, 16)]
    run = logged_run(tmp_path, rows, [(1, "gradient", "all", 20, 1_000.0, 1_000.0, 0, 1, 20)])
    for bits, each, hidden in ((8e6, 0.011, 0.01), (8e5, 0.02, 0.01), (8e4, 0.11, 0.1)):
        network = Network("made", bits, 0.0)
        assert simulated_seconds(run, DEVICE, network) == pytest.approx([20 * each])
        assert simulated_seconds(run, DEVICE, network, overlap=True) == pytest.approx([20 * hidden])


def test_a_servers_link_carries_the_bytes_of_all_workers(tmp_path):
    run = logged_run(tmp_path, [row(1, 0, 4, 16)], [(1, "synchronisation", "server", 1, 1_000.0, 1_000.0, 0, 20, 20)])
    assert simulated_seconds(run, DEVICE, Network("free", 8e3, 0.5)) == pytest.approx([0.2 + 0.5 + 2.0])
    wide, narrow = (Network("made", 8e3, 0.5, server_bits_per_second=bits) for bits in (4 * 8e3, 8e3))
    assert simulated_seconds(run, DEVICE, wide) == pytest.approx([0.2 + 0.5 + 2.0])
    assert simulated_seconds(run, DEVICE, narrow) == pytest.approx([0.2 + 0.5 + 4 * 2.0])


def test_all_wait_for_the_slowest_link_and_pairs_for_each_other_only(tmp_path):
    links = Network("one is slow", [8e3, 8e3, 8e3, 2e3], 0.0)
    rows = [row(step, 0, 4, 16) for step in (1, 2)]

    def exchanged(through):
        events = [(step, "synchronisation", through, 1, 1_000.0, 1_000.0, 0, 20, 20) for step in (1, 2)]
        return logged_run(tmp_path, rows, events)

    assert simulated_seconds(exchanged("all"), DEVICE, links) == pytest.approx([4.2, 8.4])
    # First 0 with 3 and 1 with 2, who are there at 4.2 and 1.2 s; then 0 with 1, and 2 with 3, who are late again.
    clocks = Clocks(links, 4)
    for number, expected in ((0, [4.2, 1.2, 1.2, 4.2]), (1, [5.4, 5.4, 8.4, 8.4])):
        assert pairs(range(4), number) == [[(0, 3), (1, 2)], [(0, 1), (2, 3)]][number]
        clocks.round(0, range(4), 20, [0.01] * 4, [0.0] * 4, [Sending(20, 1_000.0, 1_000.0, through="groups")])
        assert clocks._ready == pytest.approx(expected)
    assert simulated_seconds(exchanged("groups"), DEVICE, links) == pytest.approx([4.2, 8.4])
    met = [frozenset(pair) for turn in range(5) for pair in pairs(range(5), turn)]
    assert len(met) == len(set(met)) == 10


def test_networks_are_the_same_whether_or_not_they_say_what_they_do_not_have():
    old = {"name": "a", "bits_per_second": 1.0, "latency": 0.0}
    assert same_networks([old], [old | {"server_bits_per_second": None}])
    assert not same_networks([old], [old | {"server_bits_per_second": 1.0}])
    with pytest.raises(ValidationError, match="at least 1 item"):
        Network("none", [], 0.0)


def test_synchronous_training_hides_what_it_sends_behind_its_own_passes():
    run, sent = made_run([row(1, 0, 1, 40)]), 8 * 6_000 / 8e6
    fast, slow = Network("fast", 8e6, 0.0), Network("slow", 8e6, 0.1)
    assert simulated_seconds(run, DEVICE, fast, 4, overlap=True) == pytest.approx([20 * 0.02])
    assert simulated_seconds(run, DEVICE, slow, 4, overlap=True) == pytest.approx([20 * (0.1 + sent)])


def test_synchronous_training_is_counted_per_step():
    used = usage(made_run([row(1, 0, 1, 40, tokens=7), row(2, 0, 1, 40, tokens=9)]), 4)
    assert [entry.communications for entry in used] == [20, 40]
    assert used[1].bytes_communicated == 40 * 2 * 3 * 4000
    assert (used[1].tokens, used[1].inner_steps, used[1].wall_seconds) == (9, 40, 3.0)


def test_one_worker_under_a_plain_outer_step_is_training_without_rounds():
    """So that synchronous AdamW over M workers can be run as one worker with the whole batch."""
    settings = {
        "number_of_initial_trainers": 1, "nodes_per_gpu": 1, "sampling_method": "none",
        "learning_rate_for_outer_opt": 1.0, "outer_momentum": 0.0,
    }  # fmt: skip
    found = []
    for rounds, steps in ((4, 3), (1, 12)):
        cluster = light_cluster(number_of_outer_steps=rounds, number_of_inner_steps_between_outers=steps, **settings)
        cluster.train(Recorder())
        found.append(cluster.trainers[0].parameters)
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-7)


def test_counting_matches_the_logs_of_a_run(tmp_path):
    run = read_run(record_run(tmp_path, nodes_per_gpu=4, max_batch_size=16))
    last = usage(run)[-1]
    assert len(run.merges) == 2
    for name in ("tokens", "communications", "bytes_communicated"):
        assert getattr(last, name) == run.summary[name]
    assert last.inner_steps == 3 * run.summary["outer_steps"]
    # With nothing but bytes to wait for, simulated time is that of the links, whose sum is what the log counts.
    free = Hardware("free", 0.0, 0.0)
    seconds = simulated_seconds(run, free, Network("bytes", 8.0, 0.0))
    slowest = 0.0
    for number in {row["outer_step"] for row in run.rounds}:
        own = [row["nodes"] for row in run.rounds if row["outer_step"] == number]
        # Four workers and more send sketches of their gradients as well.
        sizes = [2 * (n - 1) / n * 4 * (run.summary["parameters"] + (1024 if n > 3 else 0)) for n in own]
        slowest += max(sizes)
    model, nodes = (
        4 * run.summary["parameters"],
        {(row["outer_step"], row["trainer_id"]): row["nodes"] for row in run.rounds},
    )
    for merge in run.merges:  # x and velocity of one trainer in, and on to the other's second node where it has one
        slowest += 2 * model * (1 + (nodes[merge.outer_step, merge.representative] > 1))
    gained = {step for (step, trainer), count in nodes.items() if count > nodes.get((step - 1, trainer), count)}
    assert gained
    slowest += len(gained) * (4 * model + 4)  # a new node's x, velocity, moments and step count
    assert seconds[-1] == pytest.approx(slowest, rel=1e-6)
    kinds = ("bytes_synchronised", "bytes_merged", "bytes_redistributed")
    assert run.summary["bytes_communicated"] == sum(run.summary[kind] for kind in kinds)


def test_equal_tokens_are_equal():
    """The same budget of tokens: within one inner step, whatever the method does with it."""
    for settings in ({"sampling_method": "none"}, {"number_of_initial_trainers": 3, "ETA": 0.3}):
        cluster, recorder = light_cluster(number_of_outer_steps=None, max_tokens=3000, **settings), Recorder()
        cluster.train(recorder)
        step = sum(report.effective_batch for report in recorder.rounds[-1].reports.values()) * 9
        assert 3000 <= cluster.totals.tokens < 3000 + step


def test_the_step_cost_of_measured_passes():
    assert fit_step_cost([1, 2, 4, 8, 16], [0.011, 0.010, 0.012, 0.017, 0.032]) == (0.010, 0.002)


# Files


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
        "tune": {"learning_rate_for_inner_opt": ["1e-2"]},
        "methods": [
            {"name": "AdLoCo", "overrides": adaptive}, {"name": "DiLoCo", "overrides": fixed, "baseline": True},
        ],
        "hardware": [{"name": "paper", "t_min": 0.01, "t_example": 0.002}],
        "networks": [{"name": "1 Gb/s", "bits_per_second": 1e9, "latency": 0.001}],
    }  # fmt: skip
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(written | values))
    return path


def test_published_results_count_as_far_as_they_still_hold(tmp_path):
    comparison = load_comparison(small_comparison(tmp_path))
    path, outcomes = tmp_path / "small.json", [{"method": "AdLoCo", "id": "1"}, {"method": "DiLoCo", "id": "2"}]
    path.write_text(json.dumps({"comparison": comparison.model_dump(mode="json"), "outcomes": outcomes}))

    def left(**values) -> list[str]:
        changed = Comparison.model_validate(comparison.model_dump() | values)
        return [outcome["id"] for outcome in published(path, changed).get("outcomes", [])]

    (device,), (network,) = (vars(comparison.hardware[0]),), (vars(comparison.networks[0]),)
    assert left() == left(title="New", seeds=[1, 2, 3]) == ["1", "2"]
    assert left(hardware=[device | {"t_min": None}]) == ["1", "2"]  # measured then
    assert left(hardware=[device | {"t_min": 0.02}]) == []
    assert left(hardware=[device, device | {"name": "other"}]) == []
    assert left(networks=[network | {"latency": 0.01}]) == []
    methods = comparison.model_dump()["methods"]
    assert left(methods=[methods[0], methods[1] | {"synchronous_workers": 4}]) == ["1"]
    assert published(tmp_path / "none.json", comparison) == {}


def without_times(found: dict) -> dict:
    outcomes = [
        run | {"curves": {name: curve for name, curve in run["curves"].items() if name != "wall_seconds"}}
        for run in found["outcomes"]
    ]
    return found | {"outcomes": outcomes}


@functools.cache
def ours(name: str) -> Comparison:
    """A comparison that we publish."""
    return load_comparison(ROOT / "benchmarks" / "comparisons" / f"{name}.yaml")


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "comparisons").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_comparisons_that_we_publish_are_valid(path):
    comparison = ours(path.stem)
    least = 1 if comparison.search is not None else {"methods_adaptive": 1, "size": 2}.get(path.stem, 3)
    assert len(comparison.seeds) >= least, "one seed finds, three publish"
    best = {method.name: grid(comparison, method)[1][0] for method in comparison.methods}
    runs = seed_runs(comparison, best)
    assert len({run.id for run in runs}) == len(runs) == len(comparison.methods) * len(comparison.seeds)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"reference": "SGD"}, "reference: must be one of the methods, got 'SGD'"),
        ({"sedes": [1]}, "sedes: Extra inputs are not permitted"),
        ({"seeds": []}, "seeds: List should have at least 1 item"),
        ({"methods": [{"name": "AdLoCo", "overrides": {"ETTA": 1}}]}, "AdLoCo: ETTA: unknown key; did you mean ETA?"),
        ({"methods": [{"name": "AdLoCo"}, {"name": "AdLoCo"}]}, "methods: 'AdLoCo' is there twice"),
        ({"tune": {"ETA": [-1.0]}}, "AdLoCo: ETA: should be greater than 0"),
        ({"summary": "a\nb\nc\nd\ne"}, "summary: Value error, should have at most 4 lines, has 5"),
        ({"claims": [{"paper": "it helps"}]}, "claims.0.found: Field required"),
    ],
)
def test_a_wrong_comparison_is_refused_before_any_run(tmp_path, capsys, values, problem):
    path = small_comparison(tmp_path, **values)
    with pytest.raises(ConfigError) as error:
        load_comparison(path)
    assert any(problem in line for line in error.value.problems), error.value.problems
    assert main([str(path), "--runs", str(tmp_path / "runs"), "--output", str(tmp_path)]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_run_is_known_by_what_it_trains(tmp_path):
    comparison = load_comparison(small_comparison(tmp_path))
    method = comparison.methods[0]
    run = make_run(comparison, method, 0.01, 1)
    assert make_run(comparison, method.model_copy(update={"name": "other"}), 0.01, 1).id == run.id
    elsewhere = comparison.model_copy(update={"common": comparison.common | {"cache_dir": "elsewhere"}})
    assert make_run(elsewhere, method, 0.01, 1).id == run.id
    assert make_run(comparison, method, 0.02, 1).id != run.id
    own = method.model_copy(update={"overrides": {"sequence_length": 8}})  # over what all have in common
    assert "sequence_length=8" in make_run(comparison, own, 0.01, 1).overrides
    stricter = comparison.model_copy(update={"common": comparison.common | {"statistics_smoothing": 0.5}})
    assert make_run(stricter, method, 0.01, 1).id != run.id
    fixed = comparison.methods[1]
    assert make_run(stricter, fixed, 0.01, 1).id == make_run(comparison, fixed, 0.01, 1).id  # there is no batch test
    assert make_run(comparison, method, 0.01, 2).id != run.id


# Of the others the algorithm itself has changed since.
@pytest.mark.parametrize(
    "name",
    ["decay_packages", "decay_python_code", "methods", "methods_adaptive", "methods_code", "methods_packages", "pool"],
)
def test_published_runs_are_found(name):
    comparison = ours(name)
    results = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    found = results.get("found") or {method: entry["best"] for method, entry in results.get("search", {}).items()}
    runs = seed_runs(with_found(comparison, found), results["best"])
    assert {run.id for run in runs} == set(results["chosen"])


def test_a_default_that_was_another_one_is_another_run():
    def values(**synchronisation) -> dict:
        config = {"distributed_algo": "Decoupled", "synchronisation": synchronisation, "max_tokens": 9}
        return effective_values(parse_config(config)[0])

    assert "synchronisation" not in values(quorum=1)  # as it was called when that was the default
    assert values() == values(quorum=None) != values(quorum=1)
    assert values(quorum=1, steps=3)["synchronisation"] == {"steps": 3}


def test_a_key_with_another_name_is_the_same_run():
    values = [effective_values(parse_config({name: "zero", "max_tokens": 9})[0]) for name in
              ("joining_moments", "new_worker_moments")]  # fmt: skip
    assert (
        values[0]
        == values[1]
        == effective_values(parse_config({"max_tokens": 9})[0])
        | {
            "new_worker_moments": "zero"  # as it was called
        }
    )


@pytest.mark.parametrize(("participants", "changed"), [(1.0, []), (0.5, ["speeds: steps"])])
def test_words_that_ask_for_the_same_runs_are_no_change(tmp_path, participants, changed):
    words = (ROOT / "benchmarks" / "comparisons" / "pool.yaml").read_text(encoding="utf-8")
    path = tmp_path / "pool.yaml"
    path.write_text(words.replace("balance: steps}", f"balance: steps, participants: {participants}}}"))
    assert compare.with_new_words(path, ROOT / "docs" / "results" / "pool.json")["changed"] == changed


def test_a_small_comparison_through_its_command(programs, tmp_path, cache_dir, capsys):
    path = small_comparison(tmp_path)
    written = yaml.safe_load(path.read_text())
    written["common"]["cache_dir"] = str(cache_dir)
    path.write_text(yaml.safe_dump(written))
    command = ["benchmarks/compare/compare.py", path, "--runs", tmp_path / "runs", "--output", tmp_path / "docs"]

    assert main([*map(str, command[1:]), "--report-only"]) == 1
    assert "small.json is not there: the runs were not made yet" in capsys.readouterr().err
    programs.run(*command, "--jobs", "2")
    found = json.loads((tmp_path / "docs" / "results" / "small.json").read_text())
    results = Results(found)
    assert {name: len(runs) for name, runs in results.runs.items()} == {"AdLoCo": 2, "DiLoCo": 2}
    store = Store(tmp_path / "runs")
    for outcome in found["outcomes"]:
        folder = store.folder / outcome["id"]
        run = read_run(folder / json.loads((folder / "run.json").read_text())["folder"])
        assert run.config["training_seed"] == outcome["seed"]
        assert outcome["final_metric"] == run.summary["final_metric"]
        assert 6000 <= outcome["curves"]["tokens"][-1] == run.summary["tokens"]
        assert outcome["curves"]["communications"][-1] == run.summary["communications"] > 0
        assert outcome["curves"]["metric"][-1] == pytest.approx(run.summary["final_metric"], rel=1e-5)
    assert results.overlapped == ["simulated: paper, 1 Gb/s, overlapped"]
    for run in found["outcomes"]:
        apart, hidden = (run["curves"][axis][-1] for axis in (*results.simulated, *results.overlapped))
        assert hidden < apart
    text = (tmp_path / "docs" / "results" / "small.md").read_text()
    assert f"| DiLoCo | {results.mean_final('DiLoCo'):.2f} ±" in text
    assert "(results/small.md)" in (tmp_path / "docs" / "results.md").read_text()
    for name in ("small.png", "small_frontier.png"):
        assert (tmp_path / "docs" / "results" / name).stat().st_size > 10_000
    # What is finished is not made again; a run that broke off is, where no results hold it.
    (tmp_path / "docs" / "results" / "small.json").unlink()
    times = {file: file.stat().st_mtime_ns for file in store.folder.glob("*/run.json")}
    lost = sorted(times)[0]
    lost.unlink()
    assert main([*map(str, command[1:]), "--jobs", "2"]) == 0
    made_again = [file for file, before in times.items() if file.stat().st_mtime_ns != before]
    assert made_again == [lost]
    again, written_again = (tmp_path / "docs" / "results" / name for name in ("small.json", "small.md"))
    assert without_times(json.loads(again.read_text())) == without_times(found)
    text = written_again.read_text()
    # What is known of single runs is as good as they are.
    comparison, published = load_comparison(path), again.read_text()
    again.unlink()
    kept = Kept(comparison, store, again)
    for run in [*tuning_runs(comparison), *seed_runs(comparison, found["best"])]:
        kept.ended(run)
    shutil.rmtree(store.folder)
    assert unfinished(again).exists()
    assert main([*map(str, command[1:]), "--jobs", "2"]) == 0
    assert json.loads(again.read_text()) == json.loads(published)
    assert not store.folder.exists()
    assert not unfinished(again).exists()
    # So are published results.
    published = again.read_text()
    assert main([*map(str, command[1:]), "--jobs", "2"]) == 0
    assert again.read_text() == published
    assert not store.folder.exists()
    # New words need no runs. Where the file asks for other runs by now, the page says so.
    path.write_text(yaml.safe_dump(written | {"answer": "It does.", "caveat": "Too small."}))
    assert main([*map(str, command[1:]), "--report-only"]) == 0
    worded = text.replace("![Curves]", "## What we conclude\n\nIt does.\n\n![Curves]")
    assert written_again.read_text() == worded.replace("# Small\n", "# Small\n\n> **Too small.**\n", 1)
    assert "> **Too small.**" in (tmp_path / "docs" / "results.md").read_text()
    written["methods"][1]["overrides"]["INITIAL_BATCH_SIZE"] = 4
    path.write_text(yaml.safe_dump(written | {"seeds": [1, 3]}))
    assert main([*map(str, command[1:]), "--report-only"]) == 0
    assert "Its file asks for other runs by now (seeds; DiLoCo)" in written_again.read_text()
    assert "asks for other runs" in capsys.readouterr().err


@pytest.mark.parametrize("status", [-9, 1, 2])
def test_a_run_that_was_interrupted_goes_on_where_there_is_a_checkpoint_of_the_same_code(monkeypatch, tmp_path, status):
    monkeypatch.setattr(runs, "commit", lambda: "one")
    comparison, runner = load_comparison(small_comparison(tmp_path)), runs.Runner(Store(tmp_path), "config.yaml", 1)
    run = make_run(comparison, comparison.methods[0], 0.001, 1)
    folder, commands = tmp_path / run.id, []

    class Program:
        """Ends with the status at first, and with a checkpoint; well from the second time on."""

        pid = 2**22 + 1  # no process has it

        def __init__(self, command, stdout, **how):
            commands.append(command[2:])
            stdout.write(
                b"Traceback (most recent call last):\n" if status == -9 and len(commands) == 1 else b"a round\n"
            )
            (folder / "run" / "checkpoints" / "round_00002").mkdir(parents=True, exist_ok=True)

        def wait(self):
            return status if len(commands) == 1 else 0

    def make():
        runner.make([run], "small", (), lambda run: None)

    monkeypatch.setattr(runs.subprocess, "Popen", Program)
    monkeypatch.setattr(runs, "machine", lambda: "here")
    if status == 1:  # stopped by an error of training, which is an end, too
        make()
    else:
        with pytest.raises(compare.ComparisonError, match=f"exit status {status}"):
            make()
        make()
    resumed = ["--resume", str(folder / "run")]
    begun = ["--config", "config.yaml", *run.overrides, *runs._ALONE, f"log_dir={folder}"]
    assert commands == {-9: [begun, resumed], 1: [begun], 2: [begun, begun]}[status]
    assert (folder / "output.txt").read_text().count("\n") == (2 if status == -9 else 1)
    assert Store(tmp_path).record(run)["completed"] == (status != 1)
    assert not list(folder.glob("*/checkpoints"))
    for code in ("other", "other+") if status == -9 else ():
        monkeypatch.setattr(runs, "commit", lambda code=code: code)
        for _ in range(2):  # with files that differ from the commit it begins anew each time
            (folder / "run.json").unlink()
            (folder / "run" / "checkpoints" / "round_00002").mkdir(parents=True)
            runs.Runner(Store(tmp_path), "config.yaml", 1).make([run], "small", (), lambda run: None)
    if status == -9:
        assert commands == [begun, resumed, begun, resumed, begun, begun]
        (folder / "run.json").unlink()
        monkeypatch.setattr(
            runs, "_arguments", lambda process: f"run.py --resume {folder}/run" * (process == Program.pid)
        )
        with pytest.raises(compare.ComparisonError, match=rf"process {Program.pid} still makes this run"):
            make()
        monkeypatch.setattr(runs, "_arguments", lambda process: "")
        (folder / "begun.json").unlink()
        with held(folder / "run"), pytest.raises(compare.ComparisonError, match="another process is training this run"):
            make()
        assert (folder / "run" / ".lock").exists()


def test_a_run_that_ends_with_no_number_has_come_to_nothing(tmp_path):
    comparison = load_comparison(small_comparison(tmp_path))
    run = make_run(comparison, comparison.methods[0], 0.001, 1)

    class Ended:
        def record(self, run):
            return {"commit": "0", "machine": "here", "completed": True}

        def data(self, run):
            return SimpleNamespace(summary={"final_metric": None})

    assert compare.outcome(run, comparison.methods[0], [], comparison, Ended())["completed"] is False
