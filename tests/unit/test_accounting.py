"""Simulated time on paper, and usage against the logs of a run."""

import math
from pathlib import Path

import pytest

from algorithms.nodes.traffic import Event
from benchmarks.compare.accounting import PROBED_PASS, Hardware, Network, simulated_seconds, usage
from tests.support.runs import record_run, table_of
from training_logs.showing.run_data import RunData, read_run

# Paper-sized: a pass takes 10 ms, or 2 ms per example from 5 on; 1,000 parameters are 4,000 bytes.
DEVICE = Hardware("paper", t_min=0.01, t_example=0.002)
NETWORK = Network("slow", bits_per_second=8_000.0, latency=0.5)
NOTHING = float("nan")


def row(step, trainer, nodes, batch, parts=1, sample=NOTHING, **totals):
    return {
        "outer_step": step, "trainer_id": trainer, "nodes": nodes, "effective_batch": batch, "inner_steps": 20,
        "accumulation_steps": parts, "micro_batch": math.ceil(batch / nodes / parts), "gradient_sample_size": sample,
        "seconds": 1.5, "tokens": 0, "communications": 0, "bytes_communicated": 0,
        "link_bytes_merged": 0, "link_bytes_redistributed": 0,
    } | totals  # fmt: skip


def worker_rows(rows, nodes):
    """Rows of node_log.csv of workers with equal shares; trainers take nodes in turn."""
    found = []
    for entry in rows:
        place = {name: entry[name] for name in ("outer_step", "trainer_id", "inner_steps")}
        taken = sum(other["outer_step"] == entry["outer_step"] for other in found)
        for worker in range(entry["nodes"]):
            share = {"worker": worker, "node": (taken + worker) % nodes, "speed": 1.0}
            found.append(place | share | {"examples": entry["effective_batch"] // entry["nodes"]})
    return found


def made_run(rows, nodes_per_gpu=4, workers=None, **config):
    values = {"nodes_per_gpu": nodes_per_gpu, "communication_dtype": "float32", "statistics_estimator": "per_example"}
    values |= {"statistics_batch_size": 8}
    summary = {"parameters": 1000, "devices": ["cpu"]}
    run = RunData(Path("made"), values | config, summary, table_of(rows), {})
    run.__dict__["node_rows"] = table_of(workers or worker_rows(rows, nodes_per_gpu))
    run.__dict__["exchanges"] = {  # an all-reduce of the parameters at the end of every round
        (entry["outer_step"], entry["trainer_id"]): [
            Event("synchronisation", 20, *[2 * (entry["nodes"] - 1) / entry["nodes"] * 4_000] * 2)
        ]
        for entry in rows
        if entry["nodes"] > 1
    }
    return run


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


def test_simulated_time_of_trainers_side_by_side_and_in_turn():
    rows = [row(1, trainer, 1, batch) for trainer, batch in ((0, 10), (1, 5))]
    for nodes, seconds in ((2, 20 * 0.02), (1, 20 * 0.02 + 20 * 0.01)):
        assert simulated_seconds(made_run(rows, nodes_per_gpu=nodes), DEVICE, NETWORK) == pytest.approx([seconds])


UNEQUAL = {"node_speeds": [2.0, 2.0, 1.0, 0.5]}


@pytest.mark.parametrize(
    "values",
    [
        {"participants": 0.5},
        {"number_of_initial_trainers": 3, "merge_frequency": 2},
        UNEQUAL | {"distributed_algo": "DelayedNesterov", "synchronisation": {"steps": 3}},
        UNEQUAL | {"distributed_algo": "Decoupled", "synchronisation": {"steps": 3, "quorum": 1}},
    ],
    ids=["half", "merges", "DelayedNesterov", "Decoupled"],
)
def test_simulated_time_is_that_of_the_clock_of_the_run(tmp_path, values):
    settings = {"node_speeds": [2.0] * 4, "link": "80kb/s,1s", "sampling_method": "none", "INITIAL_BATCH_SIZE": 16}
    settings |= {"number_of_initial_trainers": 1, "max_batch_size": 16, "max_requested_batch": 64}
    run = read_run(record_run(tmp_path, **settings | values))
    found = simulated_seconds(run, Hardware("2 a second", 0.0, 0.5), Network("the link", 80e3, 1.0))
    assert found[-1] == pytest.approx(run.summary["simulated_seconds"])


def test_nodes_of_given_speeds_take_as_many_times_as_long_and_the_slowest_counts():
    """16 examples as 6, 6, 3 and 1: 12, 12, 10 and 10 ms on the device itself; four times that on the slowest node."""
    speeds = [2.0, 2.0, 1.0, 0.5]

    def seconds(shares, steps):
        one = row(1, 0, 4, 16, sample=8) | {"micro_batch": max(shares)}
        workers = worker_rows([one], 4)
        for worker, speed, examples, inner_steps in zip(workers, speeds, shares, steps, strict=True):
            worker |= {"speed": speed, "examples": examples, "inner_steps": inner_steps}
        run = made_run([one], workers=workers, node_speeds=speeds)
        return simulated_seconds(run, DEVICE, Network("free", 1e99, 0.0))

    # And 1.4 passes over the 8 examples of a probe in the first step, and 0.4 over the step's own where it has two.
    statistics = PROBED_PASS * 0.016
    assert seconds([6, 6, 3, 1], [20] * 4) == pytest.approx([4 * (20 * 0.01 + statistics)])
    assert seconds([4, 4, 4, 4], [20] * 4) == pytest.approx([4 * (20.4 * 0.01 + statistics)])
    assert seconds([4, 4, 4, 4], [20, 20, 10, 5]) == pytest.approx([4 * (5.4 * 0.01 + statistics)])


def test_counting_matches_the_logs_of_a_run(tmp_path):
    run = read_run(record_run(tmp_path, nodes_per_gpu=4, max_batch_size=16))
    used = usage(run)
    assert len(run.merges) == 2
    for name in ("tokens", "communications", "bytes_communicated"):
        assert used[name][-1] == run.summary[name]
    assert used["inner_steps"][-1] == 3 * run.summary["outer_steps"]
    kinds = ("bytes_synchronised", "bytes_merged", "bytes_redistributed")
    assert run.summary["bytes_communicated"] == sum(run.summary[kind] for kind in kinds)
