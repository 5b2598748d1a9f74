"""Nodes of different speeds and trainers: who gets which, when a move pays, and runs that do so; numbers on paper."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.nodes.redistribution import differ, distributions, evened, slowest_seconds, worthwhile
from tests.support.helpers import Recorder, light_cluster
from tests.unit.test_config import problems
from utils.config.reading import parse_config
from utils.config.schema import ConfigError

SPEEDS = {0: 1.0, 1: 1.0, 2: 0.5, 3: 0.25}
ALONE = dict.fromkeys(SPEEDS, 0)


@pytest.mark.parametrize(
    ("requests", "expected", "seconds"),
    [
        ({0: 8}, {0: (0, 1, 2, 3)}, 8 / 2.75),
        ({0: 8, 1: 8}, {0: (0, 2), 1: (1, 3)}, 8 / 1.25),  # two and two nodes as well: but not both fast ones for one
        ({0: 24, 1: 8}, {0: (0, 1), 1: (2, 3)}, 24 / 2),  # 2 to 0.75 for 3 to 1; three nodes and one are 24 / 2.25
        ({0: 8, 1: 24}, {0: (2, 3), 1: (0, 1)}, 24 / 2),
        ({0: 8, 1: 8, 2: 8}, {0: (0,), 1: (1,), 2: (2, 3)}, 8 / 0.75),
        ({0: 1, 1: 2, 2: 4, 3: 8}, {0: (3,), 1: (2,), 2: (0,), 3: (1,)}, 8),  # the slowest node for the smallest
        ({0: 4, 1: 4, 2: 4, 3: 4, 4: 4}, {0: (0,), 1: (1,), 2: (0,), 3: (1,), 4: (2,)}, 8),  # node 3 would need 16
    ],
)
def test_compute_follows_the_requests(requests, expected, seconds):
    found = distributions(requests, SPEEDS, ALONE, {})[-1]
    assert slowest_seconds(requests, SPEEDS, found) == pytest.approx(seconds)
    compute = {trainer: sum(SPEEDS[node] for node in nodes) for trainer, nodes in found.items()}
    assert compute == {trainer: sum(SPEEDS[node] for node in nodes) for trainer, nodes in expected.items()}


@pytest.mark.parametrize(
    ("requests", "present", "expected"),
    [
        ({0: 8, 1: 8}, {0: (0, 2), 1: (1, 3)}, [{0: (0, 2), 1: (1, 3)}]),  # at rest
        # The node that comes takes the place of the one that goes.
        ({0: 8, 1: 8}, {0: (0, 1), 1: (2, 3)}, [{0: (0, 1), 1: (2, 3)}, {0: (2, 1), 1: (0, 3)}]),
        ({0: 24, 1: 4}, {0: (0, 3), 1: (1, 2)}, [{0: (0, 3), 1: (1, 2)}, {0: (0, 3, 1), 1: (2,)}]),
        ({0: 8, 1: 8}, {0: (0, 9), 1: (2, 3)}, [{0: (0,), 1: (2, 3, 1)}, {0: (0, 2), 1: (1, 3)}]),  # node 9 has failed
        ({1: 8, 2: 8}, {0: (0,), 1: (1, 2), 2: (3,)}, [{1: (1, 2), 2: (3, 0)}]),  # trainer 0 was merged away
        ({0: 8, 1: 2}, {0: (3,), 1: (3,)}, [{0: (3, 0, 1), 1: (2,)}]),  # who shared a node have their own again
        ({0: 9, 1: 9, 2: 9}, {0: (0, 1, 2, 3)}, [{0: (0,), 1: (1,), 2: (3, 2)}]),
    ],
)
def test_nodes_stay_where_they_are_but_for_steps_that_help(requests, present, expected):
    found = distributions(requests, SPEEDS, ALONE, present)
    if requests == {0: 9, 1: 9, 2: 9}:  # everybody gets one; how much compute matters, not which equal node
        assert sorted(sum(SPEEDS[node] for node in nodes) for nodes in found[-1].values()) == [0.75, 1.0, 1.0]
    else:
        assert found == expected


def test_trainers_in_turn_move_to_faster_nodes():
    """Three trainers and nodes of speeds 1 and 0.25: 8 + 8 / 0.25 becomes 8 + 8 and 1 / 0.25."""
    speeds, requests = {0: 1.0, 1: 0.25}, {0: 8, 1: 8, 2: 1}
    found = distributions(requests, speeds, {0: 0, 1: 0}, {0: (0,), 1: (1,), 2: (0,)})
    assert [slowest_seconds(requests, speeds, one) for one in found] == [32, 16]
    assert found[-1] == {0: (0,), 1: (0,), 2: (1,)}


def test_among_equal_nodes_those_of_a_group_of_the_trainer_come():
    """Trainer 0 is in group 0 and gives its slow node for a fast one: both of the other's are as good."""
    speeds, seconds = {0: 1.0, 1: 0.25, 2: 1.0, 3: 1.0}, {0: 16, 1: 8}
    for group_of_3, came in ((0, 3), (1, 2)):
        groups = {0: 0, 1: 0, 2: 1 - group_of_3, 3: group_of_3}

        def time(trainer, nodes):
            return seconds[trainer] / sum(speeds[node] for node in nodes) if nodes else float("inf")

        assert came in evened({0: (0, 1), 1: (2, 3)}, time, groups)[1][0]


@pytest.mark.parametrize(
    ("seconds", "costs", "steps", "expected"),
    [
        ([20, 15], [0, 99], 20, 1),  # 5 seconds in each of 20 inner steps are worth 99
        ([20, 15], [0, 101], 20, 0),
        ([20, 15], [50, 149], 20, 1),  # what has to be sent at any rate is no cost of the move
        ([20, 15.5, 15], [0, 10, 21], 20, 1),  # part of the way is worth 90 - 10, all of it 100 - 21
        ([20, 15.5, 15], [0, 10, 19], 20, 2),
        ([20, 16.1], [0, 0], 20, 0),  # less than a quarter faster
        ([20, 15.9], [0, 0], 20, 1),
        ([20], [7], 20, 0),
    ],
)
def test_moves_are_made_where_they_pay(seconds, costs, steps, expected):
    assert worthwhile(seconds, costs, steps, 0.25) == expected


def test_speeds_count_where_all_are_known_and_differ():
    assert differ(SPEEDS.values())
    assert not differ([2.0, 2.0])
    assert not differ([1.0, None, 0.5])


@given(
    st.dictionaries(st.integers(0, 20), st.integers(1, 1000), min_size=1, max_size=6),
    st.lists(st.sampled_from([0.25, 0.5, 1.0, 3.0]), min_size=1, max_size=9),
    st.data(),
)
def test_every_step_is_whole_and_none_is_slower(requests, speeds, data):
    speeds = dict(enumerate(speeds))
    before = data.draw(st.dictionaries(st.integers(0, 20), st.integers(1, 1000), min_size=1, max_size=6))
    old = dict.fromkeys(range(data.draw(st.integers(1, 9))), 1.0)
    present = distributions(before, old, dict.fromkeys(old, 0), {})[-1]
    found = distributions(requests, speeds, dict.fromkeys(speeds, 0), present)
    for one in found:
        used = [node for nodes in one.values() for node in nodes]
        assert list(one) == sorted(requests)
        assert all(one.values())
        assert set(used) <= set(speeds)
        if len(requests) <= len(speeds):
            assert sorted(used) == sorted(speeds)
    times = [slowest_seconds(requests, speeds, one) for one in found]
    assert times == sorted(times, reverse=True)
    assert distributions(requests, speeds, dict.fromkeys(speeds, 0), found[-1]) == [found[-1]]


# Runs

TWO = {"number_of_initial_trainers": 2, "balance": "batch", "merge_frequency": 9, "INITIAL_BATCH_SIZE": 8}


def nodes_of(cluster) -> dict[int, list[int]]:
    return {number: [node.id for node in trainer.nodes] for number, trainer in cluster.trainers.items()}


def run(**values):
    cluster = light_cluster(**(TWO | values))
    cluster.train(Recorder())
    return cluster


def test_equal_speeds_make_the_same_run_to_the_bit():
    values = {"node_speeds": [2.0] * 4, "ETA": 0.3, "number_of_outer_steps": 4}
    plain, found = run(**values), run(redistribute_horizon=5, **values)
    assert plain.totals.bytes_redistributed == found.totals.bytes_redistributed
    for number, trainer in plain.trainers.items():
        assert torch.equal(trainer.parameters, found.trainers[number].parameters)


@pytest.mark.parametrize(("seconds", "moved"), [(29.0, True), (31.0, False)])
@pytest.mark.parametrize("latency", [False, True])
def test_a_run_moves_nodes_where_that_pays(seconds, moved, latency):
    """Requests of 30 and 8 on compute of 1.5 and 1.25: 20 seconds an inner step; 15 when nodes 1 and 2 are exchanged.

    In two rounds of three inner steps that gains 30.
    """
    values = TWO | {"node_speeds": list(SPEEDS.values()), "redistribute_horizon": 2, "sampling_method": "none"}
    cluster = light_cluster(**values, link_bits_per_second=1.0)
    assert nodes_of(cluster) == {0: [0, 2], 1: [1, 3]}
    arriving = cluster.trainers[0].bytes_to_move([0, 1])
    link = {"link_latency_seconds": seconds} if latency else {"link_bits_per_second": 8 * arriving / seconds}
    cluster = light_cluster(**values, **link)
    cluster.trainers[0].batch.requested_batch = 30
    cluster.distribute()
    assert nodes_of(cluster) == ({0: [0, 1], 1: [2, 3]} if moved else {0: [0, 2], 1: [1, 3]})
    assert cluster.totals.bytes_redistributed == moved * 2 * arriving
    cluster.train(Recorder())


CHANGING = {
    "number_of_initial_trainers": 3, "balance": "batch", "node_speeds": list(SPEEDS.values()), "ETA": 0.3,
    "redistribute_horizon": 4, "redistribution_hysteresis": 0.0, "number_of_outer_steps": 6, "merge_frequency": 3,
}  # fmt: skip


@pytest.mark.parametrize("rounds", [3, 4])
def test_a_run_by_speeds_is_resumed_with_the_same_bits(rounds):
    """Before and after the redistribution that follows a merge."""
    whole, first, resumed = (light_cluster(**CHANGING) for _ in range(3))
    whole.train(Recorder())
    for _ in range(rounds):
        first.run_round(Recorder())
    state, tensors = json.loads(json.dumps(first.state_dict())), first.tensors()
    resumed.load_state_dict(state, lambda group, name: tensors[group][name].clone())
    resumed.train(Recorder())
    assert nodes_of(resumed) == nodes_of(whole)
    assert resumed.totals.bytes_redistributed == whole.totals.bytes_redistributed > 0
    expected, found = whole.tensors(), resumed.tensors()
    assert found.keys() == expected.keys()
    for group, values in expected.items():
        for name, tensor in values.items():
            assert tensor.equal(found[group][name]), (group, name)


def test_nodes_are_alike_without_a_horizon():
    cluster = light_cluster(**TWO, node_speeds=list(SPEEDS.values()))
    assert nodes_of(cluster) == {0: [0, 1], 1: [2, 3]}


def test_measured_speeds_count_once_all_are_known():
    cluster = light_cluster(
        **TWO, redistribute_horizon=10**9, link_bits_per_second=1e9, number_of_outer_steps=1, deterministic=False
    )
    assert nodes_of(cluster) == {0: [0, 1], 1: [2, 3]}
    cluster.train(Recorder())
    assert all(cluster.pool.speed(node) for node in range(4))


def test_what_a_redistribution_by_speeds_cannot_do_is_refused():
    assert problems({"max_tokens": 9, "redistribute_horizon": 3, "deterministic": False}) == [
        "redistribute_horizon: must be null with balance equal, in which every node of a trainer does as much as the "
        "others, got 3",
        "redistribute_horizon: needs link_bits_per_second, by which moves take time, or node_speeds",
    ]
    steps = {"max_tokens": 9, "redistribute_horizon": 3, "balance": "steps", "node_speeds": [1, 0.5]}
    with pytest.raises(ConfigError, match="must be null with smallest_worker_batch, which counts workers, got 3"):
        parse_config(steps | {"smallest_worker_batch": 2})
    assert parse_config(steps | {"link_bits_per_second": 1e9})[1] == []
    assert parse_config(steps | {"number_of_initial_trainers": 1})[1] == [
        "redistribute_horizon: has no effect with one trainer"
    ]
    assert parse_config(steps | {"node_speeds": [2, 2]})[1] == [
        "redistribute_horizon: has no effect with node_speeds that are all the same"
    ]
