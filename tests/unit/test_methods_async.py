"""Workers that are not equally fast: simulated clocks, and methods without and with a barrier against oracles."""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch

from algorithms.nodes.balance import forget, in_steps
from algorithms.nodes.traffic import Event, Link
from algorithms.nodes.virtual_clock import Clocks
from algorithms.synchronisation.decoupled import Sent, fragment_round
from algorithms.synchronisation.delayed_nesterov import leg_round
from fabrics.training.worker import COPY
from tests.support import oracles
from tests.support.helpers import train
from tests.support.synchronising import assert_equals_oracle, assert_same, history_of, problem_of, trainer_of
from trainers import Trainer

H = 8
SPEEDS = [1.0, 1.0, 0.5, 0.3]
OWN = [8, 8, 4, 2]  # floor(8 speed)
EQUAL = [1.0] * 3


# The clock


@pytest.mark.parametrize(("own", "server_steps"), [(1, Fraction(1, 4)), (2, Fraction(9)), (4, Fraction(100))])
def test_every_worker_makes_a_step_in_every_round(own, server_steps):
    values = {}
    for _ in range(3):
        found = leg_round({7: own}, 4, 1, values, server_steps)
        values = found.values
        assert len(found.made[7]) == 1
    assert found.made[7] == [4]
    assert values == {"begun_7": 0, "late_7": server_steps}


def test_a_step_never_ends_before_its_round():
    """The answer leaves so little of the next step that it is not remembered."""
    values = leg_round({0: 1}, 4, 1, {}, Fraction(1, 10**6)).values
    assert values == {"begun_0": 0, "late_0": 1e-6}
    late = leg_round({0: 1}, 4, 2, {"late_0": -1 + 10**-9}).values
    assert leg_round({0: 1}, 4, 2, late).made[0][0] > 0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # Workers of 8, 4 and 2 steps, ready with every second: at 2, at 4, and at 8.
        ({"server_steps": 2.5}, [(2, (0,)), (5, (0, 1)), (8, (0, 1, 2))]),  # there and back at 5 and 8
        ({"back": 3}, [(3, (0,)), (4, (1,)), (5, (0,)), (7, (0,)), (8, (1, 2))]),
    ],
)
def test_when_a_server_takes_a_fragment_and_from_whom(values, expected):
    before = {f"ready_0_{worker}": 2 for worker in range(3)} | {"back_0_0": values.get("back", 0)}
    travel = Fraction(values.get("server_steps", 0))
    events, _ = fragment_round(0, before, [8, 4, 2], [1, 1, 1], 8, 2, 2, 1, travel)
    assert [(event.stop, tuple(event.weights)) for event in events if isinstance(event, Sent)] == expected


def test_seconds_are_counted_in_inner_steps_of_the_fastest():
    assert in_steps(1.5, 0.5) == 3
    assert in_steps(0.1 + 0.2, 0.1) == 3  # not a little more
    assert in_steps(1.5, 0.0) == 0


def test_values_of_workers_are_dropped_by_their_numbers():
    values = {"waiting": 2, "begun_1": 1, "ready_0_1": 2, "ready_1_0": 3, "begun_11": 4}
    forget(values, [1, 5])
    assert values == {"waiting": 2, "ready_1_0": 3, "begun_11": 4}
    forget(values)
    assert values == {"waiting": 2}


def test_a_node_waits_only_for_exchanges_in_which_it_takes_part():
    clocks = Clocks(Link(8.0, 0.5), 3)
    nodes = {3: 0, 7: 2}
    clocks.round(0, nodes, 4, [2.0, 1.0], [Event("", 2, 0.25, 0.125, through="server", by=(7,))])  # 0.75 of node 2
    assert [(spent.busy, spent.waiting, spent.exchanging) for spent in clocks.spent] == [
        (8, 0, 0),
        (0, 0, 0),
        (4, 0, 1.25),
    ]
    # Node 2 is done with its step at 6.25, and does not wait for node 0 to make its own, until 10.
    clocks.round(0, nodes, 1, [2.0, 1.0], [Event("", 1, 0.5, 0.0, through="server", by=(3, 7))])
    assert [clocks.ready(node) for node in (0, 2)] == [11, 7.25]


def test_nodes_wait_for_their_whole_group():
    """In pairs, one of three nodes rests; in groups of three, the last two of five send half as much each."""
    clocks = Clocks(Link(8.0, 0.0), 4)
    clocks.round(0, dict(enumerate(range(4))), 1, [1.0, 1.0, 1.0, 5.0], [Event("", 1, 3.0, 3.0, through="groups of 4")])
    assert [spent.waiting for spent in clocks.spent] == [4, 4, 4, 0]
    clocks = Clocks(Link(8.0, 0.0), 3)
    clocks.round(0, {0: 0, 1: 1, 2: 2}, 1, [1.0, 1.0, 1.0], [Event("", 1, 3.0, 3.0, through="groups of 2")])
    assert sorted(spent.exchanging for spent in clocks.spent) == [0, 4.5, 4.5]
    clocks = Clocks(Link(8.0, 0.0), 5)
    event = Event("", 1, (3 * 2 + 2 * 1) / 5, 0.0, through="groups of 3")
    clocks.round(0, dict(enumerate(range(5))), 1, [1.0] * 5, [event])
    assert sorted(spent.exchanging for spent in clocks.spent) == [1, 1, 2, 2, 2]


# Against the oracles


def of_speeds(method: str, parameters: dict, speeds: Sequence[float] = SPEEDS, max_batches=(), **values) -> Trainer:
    values = {"node_speeds": list(speeds), "number_of_inner_steps_between_outers": H} | values
    return trainer_of(len(speeds), max_batches, speeds, distributed_algo=method, synchronisation=parameters, **values)


ROUNDS = 3
STEP_SECONDS = 2 / 1.0  # examples of a worker, speed of the fastest


def assert_equals(oracle, trainer: Trainer, times: Sequence[Sequence[Fraction]]) -> None:
    """The rounds of a trainer whose workers make their steps at these times are the oracle's."""
    problem = problem_of(trainer, ROUNDS, H, [list(map(math.ceil, each)) for each in times])
    expected = oracle(problem)
    assert np.abs(expected[-1][0] - problem.start).max() > 1e-3
    assert_same(history_of(trainer, ROUNDS, H), expected)


@pytest.mark.parametrize(("nodes", "buffer"), [(3, None), (3, 1), (2, 3), (1, 2), (1, None)])
def test_delayed_nesterov(nodes, buffer):
    times = oracles.step_times([2] * nodes, 2, 3)
    assert_equals_oracle(
        lambda problem: oracles.delayed_nesterov(problem, times, 2, buffer or nodes),
        nodes,
        inner_steps=2,
        distributed_algo="DelayedNesterov",
        synchronisation={"buffer": buffer},
    )


@pytest.mark.parametrize(
    ("leg", "buffer", "link"),
    [
        (3, None, None),
        (4, 1, None),
        (8, 2, None),
        (3, None, "3s"),  # an inner step and a half of the fastest
        (2, 1, "500kb/s,100ms"),
        (1, 3, "4s"),  # a worker with two steps a round waits half of one each time
    ],
)
def test_delayed_nesterov_with_repeated_arrivals(leg, buffer, link):
    trainer = of_speeds("DelayedNesterov", {"steps": leg, "buffer": buffer}, link=link)
    seconds = Link.parse(link).seconds(2 * 8 * trainer.worker_group.parameter_count) if link else 0.0
    wait = Fraction(seconds / STEP_SECONDS).limit_denominator(10**6)
    times = oracles.step_times(OWN, H, ROUNDS, leg, wait)
    assert_equals(lambda problem: oracles.delayed_nesterov(problem, times, leg, buffer or 4), trainer, times)
    steps = [len(each) for each in times]
    assert not wait or sum(steps) < ROUNDS * sum(OWN)
    values = trainer.worker_group.values
    assert [values[f"begun_{worker}"] for worker in range(4)] == [made % leg for made in steps]
    assert values["waiting"] == sum(made // leg for made in steps) % (buffer or 4)


@pytest.mark.parametrize(
    ("parameters", "link", "speeds", "max_batches"),
    [
        ({"fragments": 1, "quorum": 1, "steps": 8}, None, SPEEDS, ()),
        ({"fragments": 2, "quorum": 2, "steps": 5}, None, SPEEDS, ()),
        ({"fragments": 2, "steps": 5}, "1s", SPEEDS, ()),  # by default three of four
        ({"fragments": 3, "quorum": 3, "steps": 4, "mixing": 0.25}, "3s", SPEEDS, ()),
        ({"fragments": 2, "quorum": 4, "steps": 6}, "500kb/s,1s", SPEEDS, ()),
        ({"fragments": 2, "quorum": 1}, None, EQUAL, ()),
        ({"fragments": 1, "quorum": 3}, None, EQUAL, (64, 1, 64)),
    ],
)
def test_decoupled_diloco(parameters, link, speeds, max_batches):
    trainer = of_speeds("Decoupled", parameters, speeds, max_batches, link=link)
    own = [int(H * speed) for speed in speeds]
    values = {"mixing": 0.5, "quorum": 3, "steps": H} | parameters

    def oracle(problem):
        sizes = [len(each) for each in oracles.fragment_indices(problem.shapes, parameters["fragments"])]
        travel = [Link.parse(link).seconds(2 * 8 * size) / STEP_SECONDS if link else 0.0 for size in sizes]
        return oracles.decoupled(problem, own, travel=travel, **values)

    assert_equals(oracle, trainer, oracles.step_times(own, H, ROUNDS))


@pytest.mark.parametrize(
    ("method", "oracle", "parameters"),
    [
        ("DiLoCo", oracles.diloco, {}),
        ("StreamingDiLoCo", oracles.streaming_diloco, {"fragments": 2, "delay": 1, "mixing": 0.25}),
    ],
)
def test_slower_workers_make_fewer_inner_steps_and_count_less(method, oracle, parameters):
    """With a barrier; the learning rate warms up in the steps of the fastest."""
    trainer = of_speeds(method, parameters, balance="steps", warmup_steps=20)
    assert_equals(
        lambda problem: oracle(dataclasses.replace(problem, weights=OWN), **parameters),
        trainer,
        oracles.step_times(OWN, H, ROUNDS),
    )


# Bytes and values


@pytest.mark.parametrize(("dtype", "size"), [("float32", 8), ("bfloat16", 2)])
def test_the_server_receives_a_model_from_every_worker_and_sends_one_back(dtype, size):
    trainer = trainer_of(3, distributed_algo="DelayedNesterov", communication_dtype=dtype)
    (event,) = train(trainer, 1, 1)[0].events
    elements = trainer.worker_group.parameter_count
    assert (event.sent, event.received, event.through) == (size * elements, 8 * elements, "server")


def test_only_ready_workers_send_and_receive():
    trainer = of_speeds("Decoupled", {"fragments": 1, "quorum": 1, "steps": 4})
    (report,) = train(trainer, 1, H)
    whole = 8 * trainer.worker_group.parameter_count
    assert [(event.step, event.by, event.sent, event.received) for event in report.events] == [
        (4, (0, 1), whole / 2, whole / 2),
        (8, (0, 1, 2), 3 * whole / 4, 3 * whole / 4),
    ]
    assert {event.through for event in report.events} == {"server"}
    assert (report.communications, report.bytes_synchronised) == (2, (2 + 3) * 2 * whole)
    assert [len(worker.losses) for worker in report.workers.values()] == OWN


def test_a_server_answers_with_a_fragment_as_it_is():
    """A worker that was not asked for the fragments in between cannot tell it from a rounded mean."""
    parameters = {"fragments": 1, "quorum": 1, "steps": 4, "mixing": 0.0}
    trainer = of_speeds("Decoupled", parameters, communication_dtype="bfloat16")
    (report,) = train(trainer, 1, H)
    whole = trainer.worker_group.parameter_count
    assert [(event.sent, event.received) for event in report.events] == [(whole, 4 * whole), (1.5 * whole, 6 * whole)]
    exact = [torch.equal(worker.state[COPY], trainer.parameters) for worker in trainer.local_workers.values()]
    assert exact == [True, True, True, False]  # the last one has not sent it
    slow = of_speeds("Decoupled", parameters, communication_dtype="bfloat16", link="1kb/s,1s")
    assert slow.worker_group.server_seconds(10) == pytest.approx(1 + 8 * (20 + 80) / 1000)


def test_a_worker_that_replaces_another_begins_a_leg():
    trainer = of_speeds("DelayedNesterov", {"steps": 5}, [1.0] * 4)
    nodes = trainer.nodes
    train(trainer, 1, H)
    trainer.assign_nodes(nodes[:2])
    train(trainer, 1, H)
    assert trainer.worker_group.values == {"begun_0": 3, "begun_1": 3, "waiting": 0}  # both began anew: 8 steps
    trainer.assign_nodes(nodes)
    start = trainer.parameters.clone()
    train(trainer, 1, 1)
    assert all(torch.equal(trainer.local_workers[worker].state["start"], start) for worker in (2, 3))
    assert not torch.equal(trainer.local_workers[0].state["start"], start)
    assert not torch.equal(trainer.local_workers[2].state[COPY], start)
    values = trainer.worker_group.values
    assert [values[f"begun_{worker}"] for worker in range(4)] == [4, 4, 1, 1]


def test_momentum_waits_for_new_arrivals_after_workers_have_left():
    trainer = of_speeds("DelayedNesterov", {"steps": 5}, [1.0, 0.75, 0.5, 0.5])
    train(trainer, 3, H)
    assert trainer.worker_group.values["waiting"] == 3
    trainer.assign_nodes(trainer.nodes[:2])
    assert trainer.worker_group.values == {"waiting": 0}
    assert not trainer.shared["buffer"].any()
    before = {name: tensor.clone() for name, tensor in trainer.shared.items()}
    train(trainer, 1, 5)  # one worker arrives: the first of two
    assert torch.equal(trainer.shared["velocity"], before["velocity"])
    moved = before["parameters"] - trainer.parameters  # 0.7 g / 2
    torch.testing.assert_close(trainer.shared["buffer"], moved * 2 / 0.7, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lengths", [(H, H - 3), (H - 3, H)], ids=["the last is shorter", "the last is longer"])
def test_a_round_of_another_length_ends_with_an_exchange(lengths):
    """With equal speeds, one fragment and no link Decoupled is DiLoCo, whatever the length of a round."""
    found = []
    for method, parameters in (("Decoupled", {"fragments": 1}), ("DiLoCo", {})):
        trainer = of_speeds(method, parameters, EQUAL)
        for steps in lengths:
            train(trainer, 1, steps)
        found.append(trainer.parameters)
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def test_fragments_are_sent_at_the_same_shares_of_a_shorter_round():
    trainer = of_speeds("Decoupled", {"fragments": 2}, EQUAL)
    for steps, stops in ((12, [6, 12]), (9, [5, 9]), (12, [7, 12])):  # 5 of 9 are 7 of 12
        events = train(trainer, 1, steps)[0].events
        assert sorted({event.step for event in events}) == stops
