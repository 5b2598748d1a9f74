"""Merge policies and node distribution: tables of numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.policies import best_with_worst, distribute_nodes, worst_with_worst


@pytest.mark.parametrize(
    ("requests", "count", "representative", "weights"),
    [
        ({0: 10, 1: 30, 2: 20, 3: 40}, 2, 2, {0: 1 / 3, 2: 2 / 3}),
        ({0: 10, 1: 30, 2: 20, 3: 40}, 3, 1, {0: 1 / 6, 1: 3 / 6, 2: 2 / 6}),
        ({0: 8, 1: 8, 2: 8}, 2, 0, {0: 0.5, 1: 0.5}),  # ties: the smaller id
        ({5: 1, 7: 1}, 2, 5, {5: 0.5, 7: 0.5}),
        ({3: 6, 9: 2}, 4, 3, {3: 0.75, 9: 0.25}),  # fewer than count live
    ],
)
def test_worst_with_worst(requests, count, representative, weights):
    plan = worst_with_worst(requests, count)
    assert plan.representative == representative
    assert plan.weights == pytest.approx(weights)


@pytest.mark.parametrize(
    ("requests", "count", "representative", "weights"),
    [
        ({0: 10, 1: 30, 2: 20, 3: 40}, 2, 3, {0: 0.2, 3: 0.8}),
        ({0: 10, 1: 30, 2: 20, 3: 40}, 3, 3, {0: 1 / 7, 2: 2 / 7, 3: 4 / 7}),
        ({0: 8, 1: 8, 2: 8}, 2, 0, {0: 0.5, 1: 0.5}),
    ],
)
def test_best_with_worst(requests, count, representative, weights):
    plan = best_with_worst(requests, count)
    assert plan.representative == representative
    assert plan.weights == pytest.approx(weights)


@given(st.dictionaries(st.integers(0, 50), st.integers(1, 10_000), min_size=2, max_size=12), st.integers(2, 5))
def test_a_merge_plan_is_a_weighted_average_led_by_its_largest(requests, count):
    for policy in (worst_with_worst, best_with_worst):
        plan = policy(requests, count)
        assert len(plan.weights) == min(count, len(requests))
        assert sum(plan.weights.values()) == pytest.approx(1.0)
        assert requests[plan.representative] == max(requests[trainer] for trainer in plan.weights)


@pytest.mark.parametrize("policy", [worst_with_worst, best_with_worst])
@pytest.mark.parametrize(("requests", "count"), [({0: 1}, 2), ({0: 1, 1: 2}, 1), ({0: 0, 1: 2}, 2)])
def test_an_impossible_merge_is_refused(policy, requests, count):
    with pytest.raises(ValueError, match=r"at least 2|positive"):
        policy(requests, count)


@pytest.mark.parametrize(
    ("requests", "nodes", "expected"),
    [
        ({0: 1, 1: 1, 2: 1, 3: 1}, 4, {0: (0,), 1: (1,), 2: (2,), 3: (3,)}),
        ({0: 30, 1: 10}, 4, {0: (0, 1, 2), 1: (3,)}),
        ({0: 10, 1: 30}, 4, {0: (3,), 1: (0, 1, 2)}),  # the larger trainer first
        ({0: 8, 1: 8}, 4, {0: (0, 1), 1: (2, 3)}),
        ({0: 8, 1: 8}, 5, {0: (0, 1, 2), 1: (3, 4)}),  # the odd node to the smaller id
        ({0: 1000, 1: 1, 2: 1}, 4, {0: (0, 1), 1: (2,), 2: (3,)}),  # everybody keeps one
        ({4: 7}, 3, {4: (0, 1, 2)}),
        ({0: 5, 1: 9}, 1, {0: (0,), 1: (0,)}),  # one node serves both in turn
        ({0: 1, 1: 2, 2: 3, 3: 4, 5: 5}, 2, {0: (0,), 1: (1,), 2: (0,), 3: (1,), 5: (0,)}),
    ],
)
def test_distribution_of_nodes(requests, nodes, expected):
    assert distribute_nodes(requests, dict.fromkeys(range(nodes), 0)) == expected


@given(st.dictionaries(st.integers(0, 50), st.integers(1, 1000), min_size=1, max_size=10), st.integers(1, 24))
def test_every_trainer_has_a_node_and_none_lies_idle(requests, nodes):
    assignment = distribute_nodes(requests, dict.fromkeys(range(nodes), 0))
    assert set(assignment) == set(requests)
    assert all(assignment.values())
    used = [node for own in assignment.values() for node in own]
    if nodes >= len(requests):
        assert sorted(used) == list(range(nodes))
        for one in requests:
            for other in requests:
                if requests[one] > requests[other]:
                    assert len(assignment[one]) >= len(assignment[other])
    else:
        assert set(used) == set(range(nodes))


def test_there_must_be_a_node():
    with pytest.raises(ValueError, match="at least one node"):
        distribute_nodes({0: 1}, {})


def test_trainers_stay_within_groups_where_they_fit():
    halves = {0: 0, 1: 0, 2: 1, 3: 1}
    assert distribute_nodes({0: 1, 1: 2, 2: 1}, halves) == {0: (2,), 1: (0, 1), 2: (3,)}
    assert distribute_nodes({0: 1, 1: 3}, halves) == {0: (3,), 1: (0, 1, 2)}
    fours = dict.fromkeys(range(4), 0) | dict.fromkeys(range(4, 8), 1)
    # 3, 2, 2 and 1 nodes fit as 3 + 1 and 2 + 2.
    assert distribute_nodes({0: 30, 1: 20, 2: 20, 3: 9}, fours) == {0: (0, 1, 2), 1: (4, 5), 2: (6, 7), 3: (3,)}
    # Into the fullest group that still holds it: the one of two stays whole for the trainer of two.
    assert distribute_nodes({0: 20, 1: 20, 2: 9}, {0: 0, 1: 0, 2: 0, 3: 1, 4: 1}) == {0: (3, 4), 1: (0, 1), 2: (2,)}


@given(
    st.dictionaries(st.integers(0, 50), st.integers(1, 1000), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
)
def test_how_many_nodes_a_trainer_gets_does_not_depend_on_the_groups(requests, groups):
    grouped = distribute_nodes(requests, dict(enumerate(groups)))
    plain = distribute_nodes(requests, dict.fromkeys(range(len(groups)), 0))
    assert {trainer: len(nodes) for trainer, nodes in grouped.items()} == {
        trainer: len(nodes) for trainer, nodes in plain.items()
    }
    if len(groups) > len(requests):
        assert sorted(node for nodes in grouped.values() for node in nodes) == list(range(len(groups)))
