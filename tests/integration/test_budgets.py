"""Limits and budgets of a run: examples, tokens, communications, bytes and seconds."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest

from algorithms.nodes.traffic import rounds_ahead
from cluster import Cluster
from fabrics.training.method_config import exchange_sizes
from fabrics.training.outer_round import OuterRound
from tests.support.helpers import (
    TINY_ARCHITECTURE,
    Recorder,
    bits,
    budget_settings,
    light_cluster,
    make_config,
    padded,
    peek,
    resumed,
    tiny_data,
)
from training_logs.recording.node_log import NodeLog
from utils.checkpoint.checkpoint import newest_checkpoint
from utils.config.schema import BUDGETS

pytestmark = pytest.mark.long

MODEL_BYTES = 27_072
H = "number_of_inner_steps_between_outers"
SEQUENCE_TOKENS = 9
# Computing takes 333 / 4 + 6 seconds by the clock below; a synchronisation of four workers takes 1.38.
TIME = {"time_budget": 110.0, "link": "300kb/s,0.3s", "max_tokens": 3000, "sampling_method": "none"}


class Clock:
    """Simulated training time: a second per 4 examples, and 1.5 more in the first round."""

    def __init__(self, monkeypatch, extra: float = 0.0):
        self.now = 0.0
        run = OuterRound.run

        def timed(outer_round):
            examples = outer_round.group.clock.inner_steps * sum(outer_round.group.clock.batches)
            self.now += 0.25 * examples + 1.5 * (outer_round._key.round == 0) + extra
            run(outer_round)

        monkeypatch.setattr(OuterRound, "run", timed)
        monkeypatch.setattr("trainers.time", SimpleNamespace(perf_counter=lambda: self.now))


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


def run(trainers: int, **settings) -> tuple[Cluster, Recorder]:
    cluster = light_cluster(**budget_settings(trainers) | {"max_tokens": 3000} | settings)
    recorder = Recorder()
    cluster.train(recorder)
    return cluster, recorder


def lengths(recorder: Recorder) -> list[int]:
    return [result.reports[0].inner_steps for result in recorder.rounds]


def test_sequences_of_different_lengths_end_a_run_at_the_step_that_reaches_the_token_limit():
    lengths = np.random.default_rng(3).choice([2, 60], 96)
    data = dataclasses.replace(tiny_data(), train=padded([[1] * length for length in lengths]))
    config = make_config(
        model_config=TINY_ARCHITECTURE, number_of_outer_steps=None, max_tokens=1700, INITIAL_BATCH_SIZE=1,
        sampling_method="none", number_of_initial_trainers=1, nodes_per_gpu=1, **{H: 96},
    )  # fmt: skip
    cluster = Cluster(config, data)
    order = peek(cluster.trainers[0].cursor, 0, 96)
    cluster.train(Recorder())
    steps = 1 + np.searchsorted(lengths[order].cumsum(), 1700)
    assert (cluster.counters.outer_steps, cluster.counters.examples) == (1, steps)


@pytest.mark.parametrize(
    ("trainers", "settings"),
    [
        (1, {"communication_budget": 5, "smallest_worker_batch": 4}),
        (
            4,
            {
                "communication_budget": 20,
                "nodes_per_gpu": 4,
                "max_tokens": 6000,
                "max_requested_batch": 24,  # larger batches leave fewer inner steps than rounds
                "number_of_inner_steps_between_outers": 2,
            },
        ),
        (1, {"communication_budget": 8, "sampling_method": "none", "batch_schedule": [[0.2, 8], [0.7, 24]]}),
        (1, {"byte_budget": 500_000, "smallest_worker_batch": 4}),
        (
            4,
            {"byte_budget": 1_400_000, "merge_count": 2, "nodes_per_gpu": 4, H: 3},
        ),
        (2, {"byte_budget": 2_070_000, "statistics_estimator": "across_workers", "nodes_per_gpu": 4}),
    ],
)
def test_a_budget_is_spent_through_merges_and_growing_batches(trainers, settings):
    common = {"INITIAL_BATCH_SIZE": 4, H: 7, "nodes_per_gpu": 2}
    cluster, recorder = run(trainers, **common | settings)
    budget = cluster.config.budget
    used = cluster.counters.used(BUDGETS[budget])
    assert abs(used - settings[budget]) <= max(0.05 * settings[budget], 1)
    assert recorder.warnings == []
    assert 0 <= cluster.counters.tokens - cluster.config.max_tokens < SEQUENCE_TOKENS * 64
    # The learning rate has fallen with the tokens, over the last fifth of the run.
    if trainers == 1:
        last = recorder.rounds[-1].reports[0]
        step = last.examples / last.inner_steps * SEQUENCE_TOKENS / cluster.config.max_tokens
        assert 0.0 < last.workers[0].learning_rates[-1] <= 0.01 * 5 * step * 1.001


def test_a_byte_budget_pays_for_the_copies_that_workers_send_before_a_merge():
    settings = {"distributed_algo": "NoLoCo", "merge_frequency": 5, "merge_count": 2, "nodes_per_gpu": 8, H: 7}
    settings |= {"byte_budget": 5_000_000, "sampling_method": "none", "max_tokens": 6000}
    cluster, recorder = run(4, **settings)
    assert cluster.merges == 2
    assert cluster.counters.bytes_communicated <= 5_000_000
    assert recorder.warnings == []


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        # 3,000 tokens are 334 sequences of 9, and 42 steps of 8 of them.
        ({"communication_budget": 6}, [7] * 6),
        # For two workers a synchronisation is twice a model's bytes.
        ({"byte_budget": 6 * 2 * MODEL_BYTES}, [7] * 6),
        # Many more than there are steps, and planned at once.
        ({"communication_budget": 10**9}, [1] * 42),
    ],
)
def test_rounds_of_a_constant_batch_are_equal(budget, expected):
    # Two of four workers have work.
    _, recorder = run(1, sampling_method="none", INITIAL_BATCH_SIZE=8, smallest_worker_batch=4, **budget)
    assert lengths(recorder) == expected


@pytest.mark.parametrize(
    ("settings", "examples", "rounds"),
    [
        # Two of four workers send two models a round; the others do not work.
        ({"smallest_worker_batch": 4, "sampling_method": "none"}, 0, 20 // 2),
        # They will, and get parameters, velocity, two moments and a step count each.
        ({"smallest_worker_batch": 4, "sampling_method": "none", "batch_schedule": [[0.9, 16]]}, 0, (20 - 2 * 4) // 2),
        # One of them will: the largest batch, of a schedule or of a batch test, is one of 12.
        ({"smallest_worker_batch": 4, "sampling_method": "none", "batch_schedule": [[0.9, 12]]}, 0, (20 - 4) // 2),
        ({"smallest_worker_batch": 4, "max_requested_batch": 12}, 0, (20 - 4) // 2),
        # Six will, for more than there is: half of it is for rounds.
        ({"smallest_worker_batch": 4, "max_requested_batch": 32, "nodes_per_gpu": 8}, 0, 20 // 2 // 2),
        # None will: the learning rate decays, after which the batch stays.
        ({"smallest_worker_batch": 4, "max_requested_batch": 12}, 600, 20 // 2),
        # All work.
        ({"sampling_method": "none"}, 0, 20 // 6),
    ],
)
def test_a_budget_pays_for_working_and_for_joining_nodes(settings, examples, rounds):
    budget = budget_settings(1, byte_budget=20 * MODEL_BYTES + 8)
    cluster = light_cluster(**budget, INITIAL_BATCH_SIZE=8, **settings)
    cluster.counters.examples = examples
    cluster.counters.tokens = examples * SEQUENCE_TOKENS
    trainers = cluster.trainers.values()
    splits = [trainer.split_work() for trainer in trainers]
    remaining = cluster.scheduler.remaining(cluster.counters, trainers, splits, Recorder().warn)
    assert remaining.rounds_left == rounds


@pytest.mark.parametrize(
    ("settings", "synchronisations"),
    [({"INITIAL_BATCH_SIZE": 4, "sampling_method": "norm_test"}, 3), ({"batch_schedule": [[0.2, 12], [0.4, 16]]}, 2)],
)
def test_a_budget_of_few_synchronisations_is_exceeded_by_less_than_one(settings, synchronisations):
    """A synchronisation of all four workers sends six models, and a joining worker gets four."""
    joining = 4 - settings.get("INITIAL_BATCH_SIZE", 8) // 4
    allowed = (6 * synchronisations + 4 * joining) * MODEL_BYTES
    common = {"INITIAL_BATCH_SIZE": 8, "smallest_worker_batch": 4, "sampling_method": "none"}
    common |= {H: 7, "max_tokens": 6000}
    cluster, recorder = run(1, **common | {"byte_budget": allowed} | settings)
    assert len(recorder.rounds[-1].reports[0].workers) >= 3
    assert cluster.counters.bytes_communicated - allowed < 6 * MODEL_BYTES
    assert lengths(recorder)[-1] > 1


@pytest.mark.parametrize(
    "settings",
    [{"communication_dtype": "int8"}, {"statistics_estimator": "across_workers", "nodes_per_gpu": 8}],
)
def test_rounds_send_the_planned_bytes(settings):
    """Four trainers with equally many nodes become one after the second round."""
    budget = budget_settings(4, byte_budget=10**7)
    cluster = light_cluster(**budget | {"batch_test_start": 2, "max_tokens": 3000} | settings)
    group = cluster.trainers[0].worker_group
    sizes = exchange_sizes(cluster.config, group.method, group.model)
    planned = rounds_ahead(4, len(cluster.nodes), 1, cluster.config.merge_frequency, 4, sizes)
    for _ in range(4):
        before = cluster.counters.bytes_communicated
        cluster.run_round(Recorder())
        _, exchanges = next(planned)
        assert cluster.counters.bytes_communicated - before == sum(exchange.sent for exchange in exchanges)


# Seconds


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("trainers", "settings"), [(4, {"time_budget": 115.0, "nodes_per_gpu": 6}), (1, {})])
def test_a_budget_of_seconds_is_spent(trainers, settings):
    cluster, recorder = run(trainers, **TIME | settings)
    counters = cluster.counters
    assert counters.training_seconds + counters.link_seconds == pytest.approx(cluster.config.time_budget, rel=0.05)
    assert counters.link_seconds > 0.1 * cluster.config.time_budget
    assert recorder.warnings == []


@pytest.mark.usefixtures("clock")
def test_the_seconds_of_the_link_are_those_on_paper():
    cluster = light_cluster(**budget_settings(2) | TIME | {"merge_frequency": 1})
    for _ in range(2):
        cluster.run_round(Recorder())
    size = next(iter(cluster.trainers.values())).worker_group.parameter_bytes
    # Two workers each, side by side; the other's parameters and velocity to the first node, the average from there;
    # both and the moments with their step to the two new nodes; four workers.
    sent = [size, 2 * 2 * size, 2 * size + 2 * size + 4, 2 * 3 / 4 * size]
    assert cluster.counters.link_seconds == pytest.approx(sum(0.3 + 8 * each / 3e5 for each in sent))


def test_one_slow_round_does_not_end_the_run(monkeypatch, clock):
    cluster = light_cluster(**budget_settings(1) | TIME | {"time_budget": 130.0})
    recorder = Recorder()
    cluster.run_round(recorder)
    timed = OuterRound.run

    def slow(outer_round):
        clock.now += 60.0 * (outer_round._key.round == 1)
        timed(outer_round)

    monkeypatch.setattr(OuterRound, "run", slow)
    cluster.train(recorder)
    found = lengths(recorder)
    assert len(found) >= 5
    for number in range(1, len(found)):
        assert found[number] <= 4 * math.ceil(sum(found[:number]) / number)


# Seconds of the virtual clock

# Four workers with 4 examples each take 2 s for an inner step, and an exchange takes 1 s and 1 s more for its bytes.
SIMULATED = {"node_speeds": [2.0] * 4, "link": f"{8 * MODEL_BYTES * 6 // 4}b/s,1s", H: 3, "max_tokens": None}
SIMULATED |= {"sampling_method": "none", "INITIAL_BATCH_SIZE": 16}


@pytest.mark.parametrize(
    ("settings", "expected", "seconds"),
    [
        ({"time_budget": 30.0}, [3, 3, 3, 2], 30),  # three rounds of 8 s, and 6 s
        ({"time_budget": 27.0}, [3, 3, 5], 28),  # after three rounds, 3 s are too few for another of 4 s at least
        ({"time_budget": 30.0, "node_speeds": [2.0, 2.0, 2.0, 1.0]}, [3, 4], 32),  # 4 s for an inner step
        ({"time_budget": 30.0, "distributed_algo": "Synchronous"}, [3, 3, 2], 32),  # 4 s for every inner step
        ({"time_budget": 30.0, "node_speeds": [2.0], "nodes_per_gpu": 1}, [4], 32),  # 8 s, and nothing is sent
        ({"time_budget": 30.0, "max_tokens": 50 * SEQUENCE_TOKENS}, [3, 1], 12),  # the first limit: 50 examples
    ],
)
def test_a_budget_of_simulated_seconds_ends_the_run_by_hand(settings, expected, seconds):
    cluster, recorder = run(1, **SIMULATED | settings)
    assert lengths(recorder) == expected
    assert cluster.counters.simulated_seconds == pytest.approx(seconds)
    assert sorted(recorder.rounds[-1].evaluations) == [0]


@pytest.mark.parametrize(
    ("settings", "expected", "seconds"),
    [
        # A mean of 2 s arrives before the next round of 6 s has ended, so that the workers never wait but at the end.
        ({"time_budget": 30.0, "distributed_algo": "EagerDiLoCo"}, [3] * 5, 30),
        # Two models to one other worker take 4/3 s, and 1 s of latency.
        ({"time_budget": 30.0, "distributed_algo": "NoLoCo"}, [3, 3, 3, 2], 22 + 4 * (1 + 4 / 3)),
    ],
)
def test_rounds_are_planned_with_the_exchanges_that_they_have(settings, expected, seconds):
    cluster, recorder = run(1, **SIMULATED | settings)
    assert (lengths(recorder), cluster.counters.simulated_seconds) == (expected, pytest.approx(seconds))


def test_the_learning_rate_follows_the_share_of_the_simulated_time():
    _, recorder = run(1, **SIMULATED | {"time_budget": 30.0})
    # The last round begins after 24 of 30 s, where the rate begins to fall, and has two inner steps.
    assert recorder.rounds[-2].reports[0].workers[0].learning_rates == pytest.approx([0.01] * 3)
    assert recorder.rounds[-1].reports[0].workers[0].learning_rates == pytest.approx([0.01, 0.005])


def test_resting_workers_of_a_representative_receive_the_average_of_a_merge():
    """One of three workers makes three inner steps of 8 s; then its node receives two tensors and sends the average."""
    settings = budget_settings(2) | SIMULATED | {"nodes_per_gpu": 6, "node_speeds": [2.0] * 6, "participants": 0.3}
    cluster = light_cluster(**settings | {"time_budget": 150.0, "merge_frequency": 1})
    cluster.run_round(Recorder())
    assert cluster.counters.bytes_merged == (1 + 2) * 2 * MODEL_BYTES
    assert cluster.counters.simulated_seconds == pytest.approx(3 * 8 + 1 + 4 / 1.5)


def test_a_run_resumed_on_other_nodes_continues_the_time():
    settings = budget_settings(1) | SIMULATED | {"time_budget": 30.0}
    before = light_cluster(**settings)
    before.run_round(Recorder())
    after = resumed(before, light_cluster(**settings | {"node_speeds": [2.0] * 2, "nodes_per_gpu": 2}))
    after.run_round(Recorder())
    # 8 s before; then three inner steps of 8 examples in 4 s, and an exchange with 2/3 of the bytes per worker.
    assert after.counters.simulated_seconds == pytest.approx(8 + 12 + 1 + 2 / 3)


# The most of the time

# Workers with 4 examples each make an inner step in 2 s.
PLANNED = SIMULATED | {"objective": "time", "time_budget": 400.0, "sampling_method": "norm_test"}
PLANNED |= {"INITIAL_BATCH_SIZE": 8, "smallest_worker_batch": 4, "statistics_smoothing": 0.5, "max_requested_batch": 64}


def planned(**settings) -> Cluster:
    return light_cluster(**budget_settings(1) | PLANNED | settings)


def test_a_run_that_makes_the_most_of_its_time_leaves_nodes_idle_on_a_slow_link():
    cluster, recorder = planned(link="1b/s"), Recorder()
    cluster.train(recorder)
    assert {len(result.reports[0].workers) for result in recorder.rounds} == {1}
    assert cluster.counters.communications == cluster.counters.bytes_redistributed == 0
    assert 400.0 <= cluster.counters.simulated_seconds < 404.0  # steps of 8 examples
    # 33 rounds are too few for outer steps.
    plan = "objective time: from round 1 on Synchronous, 1 worker, a batch of 8, 3 inner steps"
    assert recorder.notes == [f"{plan}; measured noise scale: none yet"]


@pytest.mark.parametrize(("seconds", "method"), [(1199.0, "Synchronous"), (1200.0, "DiLoCo")])
def test_one_worker_makes_outer_steps_if_it_has_a_hundred_rounds(seconds, method):
    """A round of 3 steps of 8 examples takes 12 s."""
    assert planned(link="1b/s", time_budget=seconds).config.distributed_algo == method


def test_a_run_that_makes_the_most_of_its_time_is_synchronous_on_a_fast_link(tmp_path):
    cluster = planned(link="100Gb/s", time_budget=60.0, communication_dtype="int4")
    cluster.train(Recorder(), tmp_path)
    # The configuration that a resume compares with is the one that the user gave.
    checkpoint = newest_checkpoint(tmp_path / "checkpoints", cluster.processes)
    assert "distributed_algo: DiLoCo" in (checkpoint.folder / "config.yaml").read_text()
    assert (cluster.config.distributed_algo, cluster.config.communication_dtype) == ("Synchronous", "float32")
    assert len(cluster.trainers[0].nodes) == 4


def test_smaller_messages_pay_for_smaller_batches():
    batches = {}
    for encoding in ("float32", "int4"):
        cluster = planned(link="100kb/s", time_budget=8000.0, communication_dtype=encoding)
        cluster.run_round(Recorder())
        assert (cluster.config.distributed_algo, cluster.config.communication_dtype) == ("DiLoCo", encoding)
        batches[encoding] = cluster.round_plan.batch
    assert batches["int4"] < batches["float32"]


def test_the_slowest_node_is_idle_if_it_would_slow_the_others_down():
    cluster, recorder = planned(node_speeds=[0.1, 2.0, 2.0, 2.0], time_budget=60.0), Recorder()
    cluster.train(recorder)
    assert all(0 not in {w.node for w in result.reports[0].workers.values()} for result in recorder.rounds)


# Settings, and the rounds before the interruption.
RESUMED = {
    "bytes, in int8": (
        budget_settings(4)
        | {"warmup_tokens": 1500, "max_tokens": 3000, "statistics_smoothing": 0.5}
        | {"byte_budget": 1_600_000, "communication_dtype": "int8"},
        3,
    ),
    "measured seconds": (budget_settings(4) | TIME, 3),
    "simulated seconds": (
        budget_settings(4) | SIMULATED | {"time_budget": 150.0, "merge_frequency": 1, "merge_count": 2},
        2,
    ),
    "plans for a time": (budget_settings(1) | PLANNED | {"link": "20kb/s,1s"}, 2),
}


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_equals_the_uninterrupted_run(name, tmp_path):
    """Through growing batches, merges and new nodes; the virtual clock is that of node_log.csv."""
    settings, rounds = RESUMED[name]
    whole, first, second = (light_cluster(**settings) for _ in range(3))
    recorder = Recorder()
    whole.train(recorder)
    for _ in range(rounds):
        first.run_round(Recorder())
    resumed(first, second)
    first.run_round(Recorder())  # the loaded tensors are copies, which this does not change
    second.train(Recorder())
    assert bits(second) == bits(whole)
    assert (second.counters, second.merges) == (whole.counters, whole.merges)
    requests = [{t.id: t.requested_batch for t in cluster.trainers.values()} for cluster in (second, whole)]
    assert requests[0] == requests[1]
    if name == "plans for a time":
        assert "from round 3 on" in recorder.notes[1]
    if name == "simulated seconds":
        log = NodeLog(tmp_path, whole.config)
        for result in recorder.rounds:
            log.log(4, result)
        assert log.summary()["simulated_seconds"] == whole.counters.simulated_seconds > 150


# Budgets that cannot be kept


@pytest.mark.parametrize("settings", [{"communication_budget": 3}, {"time_budget": 0.1, "link": "1Gb/s,1s"}])
def test_a_budget_that_is_too_small_is_a_warning_before_the_start(settings):
    common = {"INITIAL_BATCH_SIZE": 8, "sampling_method": "none", "max_tokens": 3000, "nodes_per_gpu": 8}
    cluster = light_cluster(**budget_settings(4) | common | settings)
    recorder = Recorder()
    warnings_at_start = []
    recorder.on_start = lambda *_: warnings_at_start.append(len(recorder.warnings))
    cluster.train(recorder)
    assert warnings_at_start == [1]
    assert len(recorder.warnings) == 1
    assert f"{cluster.config.budget}: " in recorder.warnings[0]


def test_a_budget_of_seconds_that_is_too_small_is_a_warning_after_the_first_round(monkeypatch):
    Clock(monkeypatch, extra=30.0)
    cluster = light_cluster(**budget_settings(4) | TIME)
    recorder = Recorder()
    cluster.run_round(recorder)
    assert recorder.warnings == []
    cluster.train(recorder)
    (warning,) = recorder.warnings
    assert "time_budget: " in warning
