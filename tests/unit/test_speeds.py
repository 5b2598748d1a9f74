"""Nodes of unequal speed: the division of work, measured speeds, and the virtual clock."""

import contextlib
import csv
import json
import math
from types import SimpleNamespace

import pytest
import torch

from algorithms.nodes.traffic import Event, Link
from algorithms.nodes.virtual_clock import Clocks, joined
from algorithms.synchronisation import METHODS
from algorithms.synchronisation.delayed_nesterov import DelayedNesterov
from algorithms.synchronisation.group import Outer
from fabrics.config_checks import CHECKS
from fabrics.training import inner_loop
from fabrics.training.inner_loop import InnerLoop
from tests.support.helpers import Recorder, light_cluster, make_config, train
from tests.support.synchronising import trainer_of
from training_logs.recording.node_log import NodeLog
from utils.config.reading import parse_config
from utils.config.schema import ConfigError

SPEEDS = [1.0, 1.0, 0.5, 0.25]
GROWING = {"number_of_outer_steps": 4, "number_of_initial_trainers": 1, "INITIAL_BATCH_SIZE": 8, "ETA": 0.3}


def trained(**values):
    """A cluster of four nodes after its run, and its rounds."""
    cluster, recorder = light_cluster(**(GROWING | values)), Recorder()
    cluster.train(recorder)
    return cluster, recorder.rounds


def same_bits(one, other) -> bool:
    return torch.equal(one.trainers[0].parameters, other.trainers[0].parameters)


# Shares


def test_equal_speeds_give_the_same_bits_as_none():
    plain, rounds = trained()
    assert len({result.reports[0].requested_batch for result in rounds}) > 1
    for values in ({"balance": "batch"}, {"balance": "steps"}):
        assert same_bits(plain, trained(node_speeds=[2.0] * 4, **values)[0])
    assert same_bits(plain, trained(node_speeds=SPEEDS)[0])  # speeds without balance only drive the clock


def test_epochs_end_exactly_with_fewer_steps():
    """One and a half epochs of 96 examples, in rounds of (8 + 8 + 4 + 2) x 2 examples."""
    cluster, rounds = trained(
        number_of_outer_steps=None, number_of_training_epochs=1.5, number_of_inner_steps_between_outers=8,
        sampling_method="none", node_speeds=SPEEDS, balance="steps",
    )  # fmt: skip
    assert [result.reports[0].examples for result in rounds] == [44, 44, 44, 2 * (2 + 2 + 1 + 1)]
    assert cluster.counters.examples == cluster.trainers[0].cursor.positions[0] == 144
    assert cluster.counters.tokens == 144 * 9


@pytest.mark.parametrize("name", METHODS)
def test_every_method_balances_work_or_refuses(name):
    weighted = name not in ("NoLoCo", "LoCoDL", "DelayedNesterov")
    fewer_steps = weighted and name not in ("Synchronous", "DeMo")
    clipping = {"gradient_clipping": None} if name == "LoCoDL" else {}
    for balance, allowed in (("batch", weighted), ("steps", fewer_steps)):
        values = clipping | {"distributed_algo": name, "balance": balance, "node_speeds": SPEEDS, "max_tokens": 9}
        refusal = contextlib.nullcontext() if allowed else pytest.raises(ConfigError, match=f"^balance: .* {name}")
        with refusal:
            parse_config(values, (), CHECKS)


# Measured speeds


@pytest.fixture
def slow_node(monkeypatch):
    """A fake clock on which an example takes 10 ms, and 40 ms on node 3."""
    now, step = [0.0], InnerLoop._step

    def timed(self):
        now[0] += self._plan.effective_batch * (0.04 if self.worker.node.id == 3 else 0.01)
        step(self)

    monkeypatch.setattr(InnerLoop, "_step", timed)
    monkeypatch.setattr(inner_loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))


@pytest.mark.usefixtures("slow_node")
def test_a_slow_node_gets_its_measured_share():
    """Three nodes make 100 examples per second, one makes 25."""
    _, rounds = trained(INITIAL_BATCH_SIZE=32, sampling_method="none", balance="batch")
    shares = [[worker.plan.effective_batch for worker in result.reports[0].workers.values()] for result in rounds]
    assert shares == [[8] * 4, [10, 10, 10, 2], [10, 10, 10, 2], [10, 10, 10, 2]]


# Delayed Nesterov


def test_workers_arrive_in_the_order_in_which_they_finish():
    """The rule with K = 1: x = x - lr g; v = mu v + g; x = x - lr mu v for workers 2, 0 and 1."""
    moved = {0: 1.0, 1: 10.0, 2: 100.0}
    names = ("parameters", "velocity", "buffer")
    starts = [torch.zeros(1, dtype=torch.float64) for _ in moved]
    group = SimpleNamespace(
        shared={name: torch.zeros(1, dtype=torch.float64) for name in names},
        values={},
        weights=[1 / 3] * 3,
        clock=SimpleNamespace(seconds=[4.0, 4.0, 3.0]),
        outer=Outer(0.5, 0.9),
        local_workers=[SimpleNamespace(index=index, start=start) for index, start in enumerate(starts)],
    )
    arrived = {worker: [torch.tensor([value], dtype=torch.float64)] for worker, value in moved.items()}
    method = DelayedNesterov(buffer=1, dynamic_steps=True)
    method.apply(group, arrived)
    expected, parameters, velocity = {}, 0.0, 0.0
    for worker in (2, 0, 1):
        velocity = 0.9 * velocity + moved[worker]
        parameters -= 0.5 * moved[worker] + 0.5 * 0.9 * velocity
        expected[worker] = parameters
    assert [start.item() for start in starts] == pytest.approx([expected[worker] for worker in range(3)], rel=1e-14)


def test_dynamic_steps_let_slow_workers_make_fewer():
    method = {"distributed_algo": "DelayedNesterov", "synchronisation": {"dynamic_steps": True}}
    (report,) = train(trainer_of(4, (), SPEEDS, node_speeds=SPEEDS, **method), 1, inner_steps=5)
    assert [len(worker.losses) for worker in report.workers.values()] == [5, 5, 2, 1]


# The virtual clock


def test_clocks_distinguish_waiting_from_exchanging():
    # Two nodes with 4 steps of 2 and 1 seconds, and an exchange of 1 second after every second step.
    clocks = Clocks(Link(8.0, 0.5), 3)
    sent = [Event("", step, 0.5, 0.25) for step in (2, 4)]
    clocks.round(0, {0: 0, 1: 2}, 4, [2.0, 1.0], sent)
    assert [(spent.busy, spent.waiting, spent.exchanging) for spent in clocks.spent] == [
        (8, 0, 2),
        (0, 0, 0),
        (4, 4, 2),
    ]
    assert clocks.waiting_share == 4 / 20
    clocks.skip([1])
    assert (clocks.ready(1), clocks.waiting_share, clocks.idle_share) == (10, 4 / 20, pytest.approx(1 / 3))
    # Waited for one step later: it travels from 14 to 15, and node 0 makes its third step until 16.
    clocks.round(0, {0: 0, 1: 2}, 4, [2.0, 1.0], [Event("", 2, 0.5, 0.5, behind=1)])
    assert [(spent.busy, spent.waiting, spent.exchanging) for spent in clocks.spent][::2] == [(16, 0, 2), (8, 5, 3)]
    assert clocks.idle_share == pytest.approx(20 / 54)  # node 0 is ready at 18: node 2 is idle for 2, node 1 for 18
    again = Clocks(Link(8.0, 0.5), 3)
    again.load_state_dict(json.loads(json.dumps(clocks.state_dict())))
    for each in (clocks, again):
        each.exchange_all(1.5)  # 0.5 + 8 * 1.5 / 8 seconds
    assert again.spent == clocks.spent
    assert again.elapsed == clocks.elapsed == 20


@pytest.mark.parametrize(
    ("link", "steps", "ends"),
    [
        # 6 s are hidden.
        (Link(8.0, 5.0), (5, 15), [20, 40]),
        # 15 s: what leaves at 5 arrives at 20, 5 late; what leaves then, at 35, 5 after step 5 of the next round.
        (Link(0.8, 5.0), (5, 15), [25, 55]),
        # What leaves at 15 arrives at 30, 5 after step 5 of the next round.
        (Link(0.8, 5.0), (15,), [20, 45]),
    ],
)
def test_an_exchange_with_time_to_hide_delays_only_the_step_that_waits_for_it(link, steps, ends):
    """Rounds of 20 steps of 1 s; the 10th step after an exchange waits for it."""
    clocks = Clocks(link, 2)
    for end in ends:
        clocks.round(0, {0: 0, 1: 1}, 20, [1.0, 1.0], [Event("", step, 1.0, 1.0, behind=10) for step in steps])
        assert clocks.elapsed == end


def test_messages_sent_at_one_time_travel_together():
    sent = [Event("mean", 4, 1.0, 2.0), Event("mean", 2, 1.0, 1.0), Event("statistics", 4, 8.0, 9.0)]
    assert joined(sent) == [Event("mean", 2, 1.0, 1.0), Event("mean", 4, 9.0, 11.0)]


def logged(folder, state=None, **values):
    """A run's rows of node_log.csv, and the log."""
    cluster, rounds = trained(sampling_method="none", **values)
    log = NodeLog(folder, cluster.config, state)
    for result in rounds:
        log.log(4, result)
    return node_rows(folder / "node_log.csv"), log, rounds


def node_rows(path):
    with path.open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


@pytest.mark.parametrize(
    ("balance", "busy", "share"),
    [
        # 44 examples per step, 3 steps: 11 x 3 examples at 0.25 a second take 132 s; in proportion 16 x 3 take 48 s.
        ("equal", [33, 33, 66, 132], (2 * 99 + 66) / (4 * 132)),
        ("batch", [48, 48, 48, 48], 0.0),
        ("steps", [33, 33, 22, 44], (11 + 11 + 22) / (4 * 44)),
    ],
)
def test_the_node_log_by_hand(tmp_path, balance, busy, share):
    rows, log, _ = logged(tmp_path, INITIAL_BATCH_SIZE=44, node_speeds=SPEEDS, balance=balance)
    assert [row["busy"] for row in rows] == pytest.approx(4 * busy)
    assert [row["waiting"] for row in rows] == pytest.approx(4 * [max(busy) - each for each in busy])
    assert [row["begins"] for row in rows[8:12]] == pytest.approx([2 * max(busy)] * 4)
    assert log.summary()["waiting_share"] == pytest.approx(share)
    assert log.summary()["simulated_seconds"] == pytest.approx(4 * max(busy))
    examples = sum(row["examples"] * row["inner_steps"] for row in rows)
    ideal = sum(SPEEDS) * log.summary()["simulated_seconds"]
    assert (examples >= 0.9 * ideal) == (balance == "batch")


def test_a_resumed_node_log_equals_an_uninterrupted_one(tmp_path):
    values = {"INITIAL_BATCH_SIZE": 44, "node_speeds": SPEEDS, "link": "80kb/s,1s"}
    values |= {"number_of_initial_trainers": 2, "merge_frequency": 1}
    rows, log, rounds = logged(tmp_path, **values)
    assert sum(row["exchanging"] for row in rows) > 16
    # The rows of a node follow each other without gaps.
    for node in range(4):
        own = [row for row in rows if row["node"] == node]
        assert own[0]["begins"] == 0.0
        assert [row["begins"] for row in own[1:]] == [row["ends"] for row in own[:-1]]
        for row in own:
            spent = math.fsum(row[name] for name in ("busy", "waiting", "exchanging"))
            assert row["ends"] - row["begins"] == pytest.approx(spent)
    folder = tmp_path / "again"
    folder.mkdir()
    config = make_config(**values)
    half = NodeLog(folder, config)
    for result in rounds[:2]:
        half.log(4, result)
    half = NodeLog(folder, config, json.loads(json.dumps(half.state_dict())))
    for result in rounds[2:]:
        half.log(4, result)
    assert (folder / "node_log.csv").read_text() == (tmp_path / "node_log.csv").read_text()
    assert half.summary()["waiting_share"] == log.summary()["waiting_share"]


def test_the_node_log_of_a_run_that_is_resumed_with_more_nodes_continues_in_time(tmp_path):
    _, log, rounds = logged(tmp_path, INITIAL_BATCH_SIZE=44, node_speeds=SPEEDS, balance="batch")
    log = NodeLog(tmp_path, log._config, json.loads(json.dumps(log.state_dict())))
    assert log.summary()["simulated_seconds"] == pytest.approx(4 * 48)
    for result in rounds[:2]:
        log.log(6, result)
    rows = node_rows(tmp_path / "node_log.csv")[16:]
    assert [row["begins"] for row in rows] == pytest.approx([4 * 48] * 4 + [5 * 48] * 4)
    assert [row["busy"] for row in rows] == pytest.approx([48] * 8)
    assert log.summary()["simulated_seconds"] == pytest.approx(6 * 48)


def test_without_a_barrier_all_nodes_take_equally_long(tmp_path):
    """Four rounds of eight inner steps of 2 s, up to one own step and one answer under way."""
    values = {"number_of_initial_trainers": 1, "INITIAL_BATCH_SIZE": 8, "number_of_inner_steps_between_outers": 8}
    method = {"distributed_algo": "DelayedNesterov", "synchronisation": {"steps": 3}, "link": "3s"}
    rows, log, _ = logged(tmp_path, node_speeds=SPEEDS, number_of_outer_steps=4, **values | method)
    for node, row in enumerate(rows[-4:]):
        assert abs(row["ends"] - 4 * 8 * 2) < 2 / SPEEDS[node] + 3
    assert sum(row["exchanging"] for row in rows if row["node"] == 0) == 7 * 3
    assert log.summary()["waiting_share"] == 0


def test_a_node_that_left_does_not_wait_for_what_was_on_its_way(tmp_path):
    """The others do, before their next step: they start together from what arrives."""
    values = {"number_of_initial_trainers": 1, "node_schedule": [[0.0, 4], [0.5, 2]], "node_speeds": [1.0] * 4}
    method = {"distributed_algo": "StreamingDiLoCo", "synchronisation": {"fragments": 1}, "link": "9s"}
    rows, log, _ = logged(tmp_path, INITIAL_BATCH_SIZE=4, number_of_outer_steps=4, **values | method)
    spent = log.state_dict()["clock"]["clocks"]["spent"]
    for kind in ("busy", "waiting", "exchanging"):
        of_nodes = [sum(row[kind] for row in rows if row["node"] == node) for node in range(4)]
        assert of_nodes == pytest.approx([node[kind] for node in spent])
    third = [row for row in rows if row["outer_step"] == 3]
    assert [(row["node"], row["exchanging"]) for row in third] == [(0, 9), (1, 9)]


def test_without_given_speeds_the_clock_shows_measured_seconds(tmp_path):
    rows, log, rounds = logged(tmp_path)
    workers = [worker for result in rounds for worker in result.reports[0].workers.values()]
    assert [row["busy"] for row in rows] == pytest.approx([worker.seconds for worker in workers])
    assert [row["speed"] for row in rows] == pytest.approx(
        [worker.steady_examples / worker.steady_seconds for worker in workers]
    )
    assert log.summary()["simulated_seconds"] is None
    assert 0.0 <= log.summary()["waiting_share"] < 1.0
