"""The division of work by speed: shares of a batch, inner steps and slices, by hand; measured speeds of nodes."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.batch.switch_mode import ExecutionPlan, execution_plans
from algorithms.nodes.balance import batch_shares, slice_offsets, steps_each, turns
from fabrics.pool.node_pool import NodePool
from fabrics.training.worker import WorkerRound
from tests.support.helpers import CPU, make_config

SPEEDS = (1.0, 1.0, 0.5, 0.25)


def last(shares, speeds) -> float:
    """Seconds until the last worker has finished."""
    return max(count / speed for count, speed in zip(shares, speeds, strict=True))


@pytest.mark.parametrize(
    ("examples", "shares", "seconds"),
    [
        (4, (1, 1, 1, 1), 4),  # at least one each, for which the slowest takes 4 seconds
        (8, (3, 3, 1, 1), 4),
        (11, (4, 4, 2, 1), 4),  # 4 times the sum of the speeds: exactly in proportion
        (16, (6, 6, 3, 1), 6),
        (32, (12, 12, 6, 2), 12),
        (44, (16, 16, 8, 4), 16),
        (1100, (400, 400, 200, 100), 400),
    ],
)
def test_shares_of_a_batch_by_hand(examples, shares, seconds):
    assert batch_shares(examples, SPEEDS) == shares
    assert sum(shares) == examples
    assert last(shares, SPEEDS) == seconds


def test_shares_depend_only_on_ratios_of_speeds():
    assert batch_shares(33, (3.0,) * 3) == (11, 11, 11)
    assert batch_shares(35, (3.0,) * 3) == (12, 12, 11)
    assert batch_shares(44, tuple(1e3 * speed for speed in SPEEDS)) == (16, 16, 8, 4)


@given(st.lists(st.sampled_from([0.1, 0.3, 1.0, 1.7, 4.0]), min_size=1, max_size=4), st.integers(0, 9))
def test_no_other_shares_finish_earlier(speeds, more):
    total = len(speeds) + more
    shares = batch_shares(total, tuple(speeds))
    assert sum(shares) == total
    assert min(shares) >= 1
    others = itertools.product(range(1, more + 2), repeat=len(speeds))
    assert last(shares, speeds) == min(last(other, speeds) for other in others if sum(other) == total)


def test_every_node_switches_by_its_own_max_batch():
    # 44 examples as 16, 16, 8 and 4; the second and the last node run 4 at a time.
    plans = execution_plans("threshold_switch_mode", 44, [16, 4, 16, 4], 2, SPEEDS)
    assert plans == [ExecutionPlan(parts) for parts in ((16,), (4, 4, 4, 4), (8,), (4,))]
    # A request is rounded up to a multiple of the workers, as with equal shares: 42 becomes 44.
    assert [plan.effective_batch for plan in execution_plans("only_gradient_accumulation", 42, [64] * 4, 2)] == [11] * 4
    assert execution_plans("only_gradient_accumulation", 42, [16, 4, 16, 4], 2, SPEEDS) == plans


def test_inner_steps_by_hand():
    assert steps_each(20, SPEEDS) == [20, 20, 10, 5]
    assert steps_each(3, SPEEDS) == [3, 3, 1, 1]  # 0.75 rounded down would be none
    assert steps_each(3, SPEEDS, least=2) == [3, 3, 2, 2]
    assert steps_each(1, SPEEDS, least=2) == [1, 1, 1, 1]
    assert steps_each(100, [100, 29.0]) == [100, 29]  # 28.999999999999996 in floating point
    assert turns(4, 4) == (0, 1, 2, 3)
    assert turns(2, 4) == (1, 3)  # as the fastest ends its second and its fourth
    assert turns(3, 10) == (3, 6, 9)
    assert turns(1, 7) == (6,)


@given(st.integers(1, 40), st.data())
def test_a_slow_worker_spreads_its_steps_and_finishes_with_the_round(inner_steps, data):
    own = data.draw(st.integers(1, inner_steps))
    made = turns(own, inner_steps)
    assert len(made) == own
    for over in range(inner_steps + 1):
        assert sum(turn < over for turn in made) == over * own // inner_steps


def test_slices_of_a_round_follow_each_other():
    # Steps of 3 and 2 examples; the second worker makes the second and the fourth of four.
    assert slice_offsets([3, 2], [(0, 1, 2, 3), (1, 3)]) == [[0, 3, 8, 11], [6, 14]]
    assert slice_offsets([3, 2], [(0, 1), (0, 1)]) == [[0, 5], [3, 8]]


# Speeds of nodes


def measured(node: int, seconds: float, examples: int) -> WorkerRound:
    return WorkerRound(
        node, ExecutionPlan((4,)), [1.0], [0.1], (), 99.0, 64, steady_seconds=seconds, steady_examples=examples
    )


def test_a_measured_speed_is_that_of_the_last_three_rounds():
    pool = NodePool([CPU] * 2, make_config(balance="batch", deterministic=False))
    assert [node.speed for node in pool.nodes] == [None, None]
    for seconds, expected in ((1.0, 8.0), (3.0, 4.0), (4.0, 3.0), (1.0, 3.0), (1.0, 4.0)):
        pool.update([measured(0, seconds, 8)])
        assert [node.speed for node in pool.nodes] == [expected, None]
    pool.update([measured(0, 0.0, 0)])  # a single inner step
    assert pool.nodes[0].speed == 4.0
    again = NodePool([CPU] * 2, make_config(balance="batch", deterministic=False))
    again.load_state_dict(json.loads(json.dumps(pool.state_dict())))
    for each in (pool, again):
        each.update([measured(0, 3.0, 16), measured(1, 2.0, 8)])
    assert [node.speed for node in again.nodes] == [node.speed for node in pool.nodes] == [6.4, 4.0]


def test_given_speeds_are_not_measured():
    pool = NodePool([CPU] * 2, make_config(node_speeds=[2, 1], balance="batch"))
    pool.update([measured(0, 1.0, 99)])
    assert [node.speed for node in pool.nodes] == [2.0, 1.0]


def test_nodes_join_at_their_share_of_a_sum_of_seconds():
    pool = NodePool([CPU] * 2, make_config(nodes_per_gpu=2, node_schedule=[[0, 1], [0.8, 2]]))
    progress = sum([0.08] * 10)
    assert progress < 0.8
    assert [len(pool.working(share)) for share in (0.79, progress, 0.8)] == [1, 2, 2]
