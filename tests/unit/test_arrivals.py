"""Workers without a barrier: who arrives when; Decoupled and repeated arrivals against independent implementations."""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch

from algorithms.nodes.async_clock import forget, in_steps
from algorithms.nodes.balance import turns
from algorithms.nodes.traffic import Link
from algorithms.nodes.virtual_clock import Clocks, Sending, Uniform
from algorithms.synchronisation.decoupled import Answered, Sent, Server, fragment_round
from algorithms.synchronisation.delayed_nesterov import Arrival, leg_round, legs_of
from algorithms.synchronisation.group import Event
from fabrics.training.worker import COPY, Node
from tests.support import oracles, oracles_clock
from tests.support.helpers import CPU, train
from tests.support.synchronising import history_of, problem_of, trainer_of
from tests.unit.test_methods_delayed import UNEVEN, assert_equals_diloco, parameter_count, refusals
from trainers import Trainer

SPEEDS = [1.0, 1.0, 0.5, 0.3]
H = 8
OWN = [8, 8, 4, 2]  # floor(8 speed)


# The clock


@pytest.mark.parametrize(
    ("own", "inner_steps", "leg", "begun", "expected"),
    [
        # One worker alone, after every second step; three steps a round from the middle of a leg.
        ([4], 4, 2, [0], [(2, 0), (4, 0)]),
        ([3], 3, 2, [1], [(1, 0), (3, 0)]),
        # The fast one three times while the slow one, with steps of 4, 8 and 12, once; ties in the order of workers.
        ([12, 3], 12, 4, [0, 1], [(4, 0), (8, 0), (12, 0), (12, 1)]),
        ([3, 12], 12, 3, [0, 0], [(3, 1), (6, 1), (9, 1), (12, 0), (12, 1)]),
        # Steps of 5/3: the second is made at 10/3, before the other's fourth.
        ([5, 3], 5, 2, [0, 0], [(2, 0), (Fraction(10, 3), 1), (4, 0)]),
        ([2, 1], 2, 5, [0, 3], []),
    ],
)
def test_who_arrives_when(own, inner_steps, leg, begun, expected):
    values = {f"begun_{worker}": steps for worker, steps in enumerate(begun)}
    found = leg_round(dict(enumerate(own)), inner_steps, leg, values)
    assert [(arrival.time, arrival.worker) for arrival in found.arrivals] == expected
    assert [own.active_steps for own in found.legs.values()] == [turns(each, inner_steps) for each in own]
    total = [before + each for before, each in zip(begun, own, strict=True)]
    assert found.values == {f"begun_{worker}": made % leg for worker, made in enumerate(total)}


def test_a_worker_arrives_at_the_first_stop_that_is_not_earlier():
    assert [arrival.stop for arrival in leg_round({0: 5, 1: 3}, 5, 1, {}).arrivals] == [1, 2, 2, 3, 4, 4, 5, 5]


# Steps of a worker, and when it arrives, in rounds of 12 with exchanges of 2: after legs of 4 steps of 1, 2 or 4.
WAITING = [
    (12, [[1, 2, 3, 4, 7, 8, 9, 10], [1, 2, 3, 4, 7, 8, 9, 10], [1, 2, 3, 4, 7, 8, 9, 10]], [[4, 10]] * 3),
    (6, [[2, 4, 6, 8, 12], [2, 4, 6, 10, 12], [2, 4, 8, 10, 12]], [[8], [6], [4]]),
    (3, [[4, 8, 12], [4, 10], [2, 6, 10]], [[], [4], [10]]),
]


@pytest.mark.parametrize(("own", "made", "ends"), WAITING)
def test_who_waits_for_an_answer_makes_fewer_steps_of_a_round(own, made, ends):
    values = {}
    for number in range(3):
        found = leg_round({0: own}, 12, 4, values, Fraction(2))
        (each,), values = found.legs.values(), found.values
        assert (list(each.made), list(each.ends)) == (made[number], ends[number])
        assert list(each.active_steps) == [time - 1 for time in made[number]]


@pytest.mark.parametrize(("own", "travel"), [(1, Fraction(1, 4)), (2, Fraction(9)), (4, Fraction(100))])
def test_everybody_makes_a_step_of_every_round(own, travel):
    """Of a step that would be done in a later round, or of an answer that is as late, nobody is let off."""
    values = {}
    for _ in range(3):
        found = leg_round({7: own}, 4, 1, values, travel)
        values = found.values
        assert len(found.legs[7].made) == 1
    assert found.legs[7].made == (4,)
    assert values == {"begun_7": 0, "late_7": travel}


def test_a_step_is_never_over_before_the_round_in_which_it_is_made():
    """Of the next step there is left what an answer took, which is too little to be remembered."""
    values = leg_round({0: 1}, 4, 1, {}, Fraction(1, 10**6)).values
    assert values == {"begun_0": 0, "late_0": 1e-6}
    each = legs_of(1, 4, 2, 0, Fraction(-1 + 10**-9))
    assert legs_of(1, 4, 2, 0, each.late).active_steps[0] >= 0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # Workers of 8, 4 and 2 steps, ready with every second: at 2, at 4, and at 8.
        ({"quorum": 1}, [(2, (0,)), (4, (0, 1)), (6, (0,)), (8, (0, 1, 2))]),
        ({"quorum": 2}, [(4, (0, 1)), (8, (0, 1, 2))]),
        ({"quorum": 3}, [(8, (0, 1, 2))]),
        ({"quorum": 9}, [(8, (0, 1, 2))]),  # of three, all
        ({"quorum": 1, "grace": 2}, [(4, (0, 1)), (8, (0, 1, 2))]),
        ({"quorum": 1, "grace": 1.5}, [(4, (0,)), (6, (1,)), (8, (0,))]),  # closes at 3.5, 5.5 and 7.5
        ({"quorum": 1, "grace": 100}, [(8, (0, 1, 2))]),  # not longer than until all are there
        ({"quorum": 1, "travel": 2.5}, [(2, (0,)), (5, (0, 1)), (8, (0, 1, 2))]),  # there and back at 5 and 8
        ({"quorum": 1, "back": 3}, [(3, (0,)), (4, (1,)), (5, (0,)), (7, (0,)), (8, (1, 2))]),
        ({"quorum": 2, "ready": [-1, 1, 2]}, [(2, (0, 1)), (6, (0, 1)), (8, (0, 2))]),
    ],
)
def test_what_a_server_collects(values, expected):
    ready = values.pop("ready", [2, 2, 2])
    back = values.pop("back", 0)
    server = Server(2, 2, values["quorum"], Fraction(values.get("grace", 0)), Fraction(values.get("travel", 0)))
    before = {f"ready_0_{worker}": steps for worker, steps in enumerate(ready)} | {"back_0_0": back}
    events, _ = fragment_round(0, before, server, [8, 4, 2], [1, 1, 1], 8)
    sent = [event for event in events if isinstance(event, Sent)]
    assert [(event.stop, tuple(event.weights)) for event in sent] == expected
    assert all(event.back == math.ceil(event.stop + server.server_steps) for event in sent)


def test_an_answer_may_come_in_a_round_to_come():
    waiting = Server(3, 2, 1, Fraction(0), Fraction(5))
    happens, values = fragment_round(0, {}, waiting, [4], [6], 4)
    assert happens == [Sent(3, {0: 18.0**2 / 3}, 8)]
    assert values == {"ready_0_0": 1, "steps_0_0": 1, "examples_0_0": 6, "back_0_0": 4}
    # The answer at 4 finds a worker that has gone on, and is ready since 1: it gives what it made since.
    happens, values = fragment_round(0, values, waiting, [4], [6], 4)
    assert happens == [Answered(4, {0: True}), Sent(4, {0: 30.0**2 / 5}, 9)]
    assert values == {"ready_0_0": 2, "steps_0_0": 0, "examples_0_0": 0, "back_0_0": 5}


@pytest.mark.parametrize(
    ("quorum", "grace", "expected"),
    [
        (1, 0, {4: "0", 8: "01", 12: "0", 16: "012"}),
        (2, 0, {8: "01", 16: "012"}),
        (3, 0, {16: "012"}),
        (1, 4, {8: "01", 16: "012"}),
    ],
)
def test_the_table_of_the_page(quorum, grace, expected):
    """Speeds 1, 0.5 and 0.25 in two rounds of 12, with steps 4; weights are counted over both."""
    values, waiting, own, found = {}, Server(4, 4, quorum, Fraction(grace), Fraction(0)), [12, 6, 3], {}
    for begins in (0, 12):
        happens, values = fragment_round(0, values, waiting, own, [2, 2, 2], 12)
        found |= {begins + each.stop: each for each in happens if isinstance(each, Sent)}
    assert {stop: "".join(map(str, each.weights)) for stop, each in found.items() if stop <= 16} == expected
    assert quorum < 3 or found[16].weights == {0: 32**2 / 16, 1: 16**2 / 8, 2: 8**2 / 4}
    first = leg_round(dict(enumerate(own)), 12, 4, {})
    assert [(arrival.stop, arrival.worker) for arrival in first.arrivals] == [(4, 0), (8, 0), (8, 1), (12, 0)]
    second = leg_round(dict(enumerate(own)), 12, 4, first.values)
    assert second.arrivals[:3] == tuple(Arrival(Fraction(4), worker) for worker in range(3))


def test_the_row_of_the_page_with_a_link():
    """Speeds 1, 0.5 and 0.25 in two rounds of 12, with steps 4 and exchanges of 2."""
    values, own, found = {}, {0: 12, 1: 6, 2: 3}, []
    for begins in (0, 12):
        both = leg_round(own, 12, 4, values, Fraction(2))
        values, found = both.values, [*found, *((begins + each.stop, each.worker) for each in both.arrivals)]
    assert found == [(4, 0), (8, 1), (10, 0), (16, 0), (16, 2), (18, 1), (22, 0)]


def test_seconds_are_counted_in_inner_steps_of_the_fastest():
    assert in_steps(1.5, 0.5) == 3
    assert in_steps(0.1 + 0.2, 0.1) == 3  # not a little more
    assert in_steps(1.5, 0.0) == 0


def test_values_of_workers_are_forgotten_by_their_numbers():
    values = {"waiting": 2, "begun_1": 1, "ready_0_1": 2, "ready_1_0": 3, "begun_11": 4}
    forget(values, [1, 5])
    assert values == {"waiting": 2, "ready_1_0": 3, "begun_11": 4}
    forget(values)
    assert values == {"waiting": 2}


def test_who_has_nothing_to_do_with_an_exchange_does_not_wait_for_it():
    clocks = Clocks(Uniform(Link(8.0, 0.5)), 3)
    clocks.round(0, [0, 2], 4, [2.0, 1.0], [0.0, 0.0], [Sending(2, 0.5, 0.25, through="server", by=(1,))])
    assert [(spent.busy, spent.waiting, spent.exchanging) for spent in clocks.spent] == [
        (8, 0, 0),
        (0, 0, 0),
        (4, 0, 1.25),
    ]
    # Node 2 is done with its step at 6.25, and does not wait for node 0 to make its own, until 10.
    clocks.round(0, [0, 2], 1, [2.0, 1.0], [0.0, 0.0], [Sending(1, 0.5, 0.0, through="server", by=(0, 1))])
    assert [clocks.ready(node) for node in (0, 2)] == [11, 7.25]
    # Workers 1, 4 and 7 take part; 4 alone sends 30 bytes, 10 on average.
    assert Event("synchronisation", 2, 10.0, 5.0, by=(4,)).sending([1, 4, 7]) == Sending(2, 30.0, 15.0, by=(1,))


# Against the oracles


def of_speeds(speeds=SPEEDS, max_batches=(), **values) -> Trainer:
    """As `trainer_of`, with nodes of these speeds."""
    values = {"node_speeds": list(speeds), "number_of_inner_steps_between_outers": H} | values
    trainer, batches = trainer_of(len(speeds), **values), max_batches or (64,) * len(speeds)
    nodes = zip(batches, speeds, strict=True)
    trainer.assign_nodes(tuple(Node(number, CPU, batch, speed) for number, (batch, speed) in enumerate(nodes)))
    return trainer


ROUNDS = 3


def assert_equals(oracle, trainer: Trainer, times: Sequence[Sequence[Fraction]], rounds: int = ROUNDS) -> None:
    """Parameters of the trainer and of each worker, which make their steps then, after every round, to 1e-10."""
    problem = problem_of(trainer, rounds, H, [list(map(math.ceil, each)) for each in times])
    expected, found = oracle(problem), history_of(trainer, rounds, H)
    assert np.abs(expected.shared[-1] - problem.start).max() > 1e-3
    for number in range(rounds):
        np.testing.assert_allclose(found.shared[number], expected.shared[number], rtol=0, atol=1e-10)
        np.testing.assert_allclose(found.workers[number], expected.workers[number], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("leg", "buffer", "link"),
    [
        (3, None, None),
        (4, 1, None),
        (8, 2, None),
        (3, None, "3s"),  # an inner step and a half of the fastest
        (2, 1, "500kb/s,100ms"),
        (1, 3, "4s"),  # a worker with two steps a round waits the half of one each time
    ],
)
def test_delayed_nesterov_with_repeated_arrivals(leg, buffer, link):
    settings = {"steps": leg, "buffer": buffer}
    trainer = of_speeds(distributed_algo="DelayedNesterov", synchronisation=settings, link=link)
    seconds = Link.parse(link).seconds(2 * 8 * parameter_count(trainer)) if link else 0.0
    step_seconds = 2 / 1.0  # examples of a worker, speed of the fastest
    times = oracles_clock.step_times(OWN, H, ROUNDS, leg, Fraction(seconds / step_seconds).limit_denominator(10**6))
    assert_equals(
        lambda problem: oracles_clock.delayed_nesterov_by_the_clock(problem, times, leg, buffer or 4, 0.7, 0.9),
        trainer,
        times,
    )
    steps = [len(each) for each in times]
    assert not link or sum(steps) < ROUNDS * sum(OWN)
    values = trainer.state_dict()["synchronisation"]
    assert [values[f"begun_{worker}"] for worker in range(4)] == [made % leg for made in steps]
    assert values["waiting"] == sum(made // leg for made in steps) % (buffer or 4)


@pytest.mark.parametrize(
    ("settings", "link"),
    [
        ({"fragments": 1, "quorum": 1, "steps": 8}, None),
        ({"fragments": 2, "quorum": 2, "steps": 5, "grace_window": 5.0}, None),
        ({"fragments": 2, "steps": 5}, "1s"),  # by default three of four
        ({"fragments": 3, "quorum": 3, "steps": 4, "mixing": 0.25}, "3s"),
        ({"fragments": 2, "quorum": 4, "steps": 6}, "500kb/s,1s"),
    ],
)
def test_decoupled_diloco(settings, link):
    trainer = of_speeds(distributed_algo="Decoupled", synchronisation=settings, link=link)
    values = {"mixing": 0.5, "grace_window": 0.0, "quorum": 3} | settings
    step_seconds = 2 / 1.0  # examples of a worker, speed of the fastest
    blocks, fragments = trainer.worker_group.first_model.blocks, settings["fragments"]
    shapes = [(block.name, block.start, block.start + block.size, block.shape) for block in blocks]
    sizes = oracles.fragment_indices(oracles.Problem(None, 4, H, 3, None, shapes=shapes), fragments, "strided")
    travel = [Link.parse(link).seconds(2 * 8 * len(each)) / step_seconds if link else 0.0 for each in sizes]
    assert_equals(
        lambda problem: oracles_clock.decoupled_diloco(
            problem, OWN, fragments, values["quorum"], values["grace_window"] / step_seconds, travel,
            settings["steps"], values["mixing"], 0.7, 0.9,
        ),
        trainer,
        oracles_clock.step_times(OWN, H, ROUNDS),
    )  # fmt: skip


# What they are where nobody is slower


@pytest.mark.parametrize("quorum", [1, 3])
def test_one_fragment_of_equally_fast_workers_is_diloco(quorum):
    assert_equals_diloco(3, "Decoupled", {"fragments": 1, "quorum": quorum})


def test_workers_count_as_the_squares_of_their_examples():
    """In as many steps: DiLoCo with other weights."""
    settings = {"fragments": 1, "quorum": 3}
    trainer = trainer_of(3, UNEVEN, distributed_algo="Decoupled", synchronisation=settings)
    problem = problem_of(trainer, 3, 4)
    squares = dataclasses.replace(problem, weights=[weight**2 for weight in problem.weights])
    expected, found = oracles.diloco(squares, 0.7, 0.9), history_of(trainer, 3, 4)
    np.testing.assert_allclose(found.shared, expected.shared, rtol=0, atol=1e-10)
    assert np.abs(oracles.diloco(problem, 0.7, 0.9).shared[-1] - expected.shared[-1]).max() > 1e-6


def same_bits(*methods: dict, nodes: int = 3) -> bool:
    trainers = [trainer_of(nodes, **values) for values in methods]
    histories = [history_of(trainer, 3, 4) for trainer in trainers]
    return all(
        np.array_equal(getattr(histories[0], what), getattr(histories[1], what)) for what in ("shared", "workers")
    )


def test_fragments_of_equally_fast_workers_are_streamed():
    settings = {"fragments": 2, "delay": 0, "mixing": 0.0}
    assert same_bits(
        {"distributed_algo": "StreamingDiLoCo", "synchronisation": settings},
        {"distributed_algo": "Decoupled", "synchronisation": {"fragments": 2}},
    )


@pytest.mark.parametrize("buffer", [None, 2])
def test_legs_of_a_round_of_equally_fast_workers_are_delayed_nesterov(buffer):
    assert same_bits(
        {"distributed_algo": "DelayedNesterov", "synchronisation": {"buffer": buffer}},
        {"distributed_algo": "DelayedNesterov", "synchronisation": {"buffer": buffer, "steps": 4}},
    )


# What they send and remember


def test_those_that_are_ready_alone_send_and_hear():
    settings = {"fragments": 1, "quorum": 1, "steps": 4}
    trainer = of_speeds(distributed_algo="Decoupled", synchronisation=settings)
    (report,) = train(trainer, 1, H)
    whole = 8 * parameter_count(trainer)
    assert [(event.step, event.by, event.sent, event.received) for event in report.events] == [
        (4, (0, 1), whole / 2, whole / 2),
        (8, (0, 1, 2), 3 * whole / 4, 3 * whole / 4),
    ]
    assert {event.through for event in report.events} == {"server"}
    assert (report.communications, report.bytes_synchronised) == (2, (2 + 3) * 2 * whole)
    assert [len(worker.losses) for worker in report.workers.values()] == OWN


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [([1.0, 0.25], [(8, (0, 1))]), ([1.0, 0.5, 0.25], [(4, (0, 1)), (8, (0, 1, 2))])],
)
def test_by_default_a_server_waits_for_more_than_half(speeds, expected):
    trainer = of_speeds(speeds, distributed_algo="Decoupled", synchronisation={"fragments": 1, "steps": 2})
    (report,) = train(trainer, 1, H)
    assert [(event.step, event.by) for event in report.events] == expected


def test_a_fast_worker_arrives_several_times_while_a_slow_one_computes_once():
    trainer = of_speeds([1.0, 0.25], distributed_algo="DelayedNesterov", synchronisation={"steps": 2})
    (report,) = train(trainer, 1, H)
    whole = 8 * parameter_count(trainer)
    assert [(event.step, event.by, event.sent) for event in report.events] == [
        (2, (0,), whole / 2), (4, (0,), whole / 2), (6, (0,), whole / 2), (8, (0, 1), whole)
    ]  # fmt: skip


def test_who_takes_the_place_of_another_begins_a_leg():
    trainer = of_speeds([1.0] * 4, distributed_algo="DelayedNesterov", synchronisation={"steps": 5})
    nodes = trainer.nodes
    train(trainer, 1, H)
    trainer.assign_nodes(nodes[:2])
    train(trainer, 1, H)
    assert trainer.state_dict()["synchronisation"] == {"begun_0": 1, "begun_1": 1, "waiting": 0}
    trainer.assign_nodes(nodes)
    start = trainer.parameters.clone()
    train(trainer, 1, 1)
    assert all(torch.equal(trainer.workers[worker].state["start"], start) for worker in (2, 3))
    assert not torch.equal(trainer.workers[0].state["start"], start)
    assert not torch.equal(trainer.workers[2].state[COPY], start)
    values = trainer.state_dict()["synchronisation"]
    assert [values[f"begun_{worker}"] for worker in range(4)] == [2, 2, 1, 1]


# What makes no sense


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"fragments": 0}, "synchronisation.fragments: must be a positive integer, got 0"),
        ({"fragments": 13}, "synchronisation.fragments: must be at most the inner steps of a round, 12, got 13"),
        ({"fragments": 5, "steps": 4}, "synchronisation.fragments: must be at most steps, 4, got 5"),
        ({"quorum": 0}, "synchronisation.quorum: must be a positive integer, got 0"),
        ({"steps": -1}, "synchronisation.steps: must be a positive integer, got -1"),
        ({"mixing": 1.0}, "synchronisation.mixing: must be at least 0 and less than 1, got 1.0"),
        ({"grace_window": -1.0}, "synchronisation.grace_window: must be a number of seconds, not negative, got -1.0"),
        ({"grace_window": 1.0}, "synchronisation: Decoupled needs node_speeds to count the seconds of grace_window"),
        ({"qorum": 1}, "synchronisation.qorum: Decoupled has no such parameter; did you mean quorum?"),
    ],
)
def test_parameters_of_decoupled_that_make_no_sense(settings, problem):
    assert refusals("Decoupled", settings) == [problem]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"steps": 0}, "synchronisation.steps: must be a positive integer, got 0"),
        ({"steps": 2, "dynamic_steps": True}, "synchronisation.steps: must be null with dynamic_steps, got 2"),
    ],
)
def test_legs_that_make_no_sense(settings, problem):
    assert refusals("DelayedNesterov", settings, node_speeds=[1, 1]) == [problem]
