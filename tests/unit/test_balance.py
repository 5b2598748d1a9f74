"""Who does how much, on paper: shares of a batch, inner steps, where slices begin; when measurements change that."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.batch.switch_mode import ExecutionPlan, execution_plans
from algorithms.nodes.balance import batch_shares, places, steps_each, throughput, turns
from fabrics.pool.node_speeds import MeasuredSpeeds, first_speeds
from fabrics.training.worker import Node, WorkerRound
from tests.support.helpers import CPU, make_config
from utils.config.schema import ConfigError

SPEEDS = (1.0, 1.0, 0.5, 0.25)


@pytest.mark.parametrize(
    ("examples", "shares", "seconds"),
    [
        (4, (1, 1, 1, 1), 4),  # one each at least: the slowest takes 4 seconds for it
        (8, (3, 3, 1, 1), 4),  # and nobody else more than 4
        (11, (4, 4, 2, 1), 4),  # the sum of speeds times 4: in proportion exactly
        (16, (6, 6, 3, 1), 6),
        (32, (12, 12, 6, 2), 12),
        (44, (16, 16, 8, 4), 16),
        (1100, (400, 400, 200, 100), 400),
    ],
)
def test_shares_of_a_batch_on_paper(examples, shares, seconds):
    assert batch_shares(examples, SPEEDS) == shares
    assert sum(shares) == examples
    assert throughput(shares, SPEEDS) == examples / seconds


def test_shares_do_not_depend_on_the_unit_of_speed_and_equal_speeds_have_equal_shares():
    assert batch_shares(33, (3.0,) * 3) == (11, 11, 11)
    assert batch_shares(35, (3.0,) * 3) == (12, 12, 11)
    assert batch_shares(44, tuple(1e3 * speed for speed in SPEEDS)) == (16, 16, 8, 4)
    with pytest.raises(ValueError, match="an example for each of 4 workers, got 3"):
        batch_shares(3, SPEEDS)


@given(st.lists(st.sampled_from([0.1, 0.3, 1.0, 1.7, 4.0]), min_size=1, max_size=4), st.integers(0, 9))
def test_no_other_shares_are_done_earlier(speeds, more):
    total = len(speeds) + more
    shares = batch_shares(total, tuple(speeds))
    assert sum(shares) == total
    assert min(shares) >= 1

    def last(some) -> float:
        return max(count / speed for count, speed in zip(some, speeds, strict=True))

    others = itertools.product(range(1, more + 2), repeat=len(speeds))
    assert last(shares) == min(last(other) for other in others if sum(other) == total)


@pytest.mark.parametrize("examples", [16, 24, 32, 48, 64, 100, 500])
def test_in_proportion_nodes_have_nine_tenths_of_the_ideal_throughput(examples):
    """Of speeds 1, 1, 0.5 and 0.25, whose sum is 2.75; equal shares wait for the slowest, 1 example a second."""
    assert throughput(batch_shares(examples, SPEEDS), SPEEDS) >= 0.9 * 2.75
    assert throughput([examples // 4] * 4, SPEEDS) == 1.0


def test_every_node_has_its_own_max_batch_and_switches_by_itself():
    # 44 examples as 16, 16, 8 and 4; the second and the last node run 4 at a time.
    plans = execution_plans("threshold_switch_mode", 44, [16, 4, 16, 4], 2, SPEEDS)
    assert plans == [ExecutionPlan(parts) for parts in ((16,), (4, 4, 4, 4), (8,), (4,))]
    # A request is rounded up to a multiple of the workers, as with equal shares: 42 becomes 44.
    assert [plan.effective_batch for plan in execution_plans("only_gradient_accumulation", 42, [64] * 4, 2)] == [11] * 4
    assert execution_plans("only_gradient_accumulation", 42, [16, 4, 16, 4], 2, SPEEDS) == plans


def test_inner_steps_on_paper():
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
def test_a_worker_is_as_far_as_its_speed_allows_and_done_at_the_end(inner_steps, data):
    own = data.draw(st.integers(1, inner_steps))
    made = turns(own, inner_steps)
    assert len(made) == own
    for over in range(inner_steps + 1):
        assert sum(turn < over for turn in made) == over * own // inner_steps


def test_slices_of_a_round_follow_each_other():
    # Steps of 3 and 2 examples; the second worker makes the second and the fourth of four.
    assert places([3, 2], [(0, 1, 2, 3), (1, 3)]) == [[0, 3, 8, 11], [6, 14]]
    assert places([3, 2], [(0, 1), (0, 1)]) == [[0, 5], [3, 8]]


# Measured speeds


def measured(node: int, seconds: float, examples: int, failed: bool = False) -> WorkerRound:
    return WorkerRound(
        node, ExecutionPlan((4,)), [1.0], [0.1], (), 99.0, 64, steady_seconds=seconds, steady_examples=examples,
        failed=failed,
    )  # fmt: skip


def test_a_speed_is_that_of_the_last_three_rounds():
    speeds = MeasuredSpeeds(0.1)
    assert speeds.of(0) is None
    for seconds, expected in ((1.0, 8.0), (3.0, 4.0), (4.0, 3.0), (1.0, 3.0), (1.0, 4.0)):
        speeds.measure([measured(0, seconds, 8)])
        assert speeds.of(0) == expected
    speeds.measure([measured(0, 0.0, 0), measured(0, 9.0, 9, failed=True)])  # nothing, but for a first step
    assert speeds.of(0) == 4.0


def test_shares_change_only_where_it_pays_and_the_reason_is_said():
    nodes = [Node(0, CPU, 64, 1.0), Node(1, CPU, 64, 1.0)]

    def change(hysteresis, slow):
        speeds = MeasuredSpeeds(hysteresis)
        speeds.measure([measured(0, 1.0, 100), measured(1, 1.0, slow)])
        return speeds.change(nodes, lambda speeds: batch_shares(20, tuple(speeds)))

    # At 100 and 50 examples a second: 20 are done in 0.2 s as 10 and 10, in 0.14 s as 14 and 6; 43% more a second.
    found, why = change(0.4, 50)
    assert found == {0: 100.0, 1: 50.0}
    assert why == (
        "nodes 0, 1 make 100, 50 examples per second; with 14 / 6 examples a round instead of 10 / 10 all of them "
        "together make 142.9 instead of 100, 43% more"
    )
    assert change(0.45, 50) is None
    # 100 and 90: 11 and 9 are done in 0.11 s instead of 0.1111, which is 1% more; 95 changes no share.
    assert change(0.0, 90) is not None
    assert change(0.02, 90) is None
    assert change(0.0, 95) is None


def test_nothing_changes_before_all_nodes_are_measured():
    speeds = MeasuredSpeeds(0.0)
    speeds.measure([measured(0, 1.0, 100)])
    assert speeds.change([Node(0, CPU, 64), Node(1, CPU, 64)], lambda speeds: [1, 1]) is None


def test_what_was_measured_comes_back():
    speeds, again = MeasuredSpeeds(0.1), MeasuredSpeeds(0.1)
    speeds.measure([measured(2, 1.0, 8), measured(3, 3.0, 8)])
    again.load_state_dict(speeds.state_dict())
    speeds.measure([measured(2, 3.0, 8)])
    again.measure([measured(2, 3.0, 8)])
    assert (again.of(2), again.of(3)) == (speeds.of(2), speeds.of(3)) == (4.0, 8 / 3)


def test_every_node_needs_a_speed():
    assert first_speeds(make_config(), 3) == (None, None, None)
    assert first_speeds(make_config(node_speeds=[2, 1]), 2) == (2.0, 1.0)
    with pytest.raises(ConfigError, match=r"^node_speeds: must be one number for each of the run's 4 nodes, got 2$"):
        first_speeds(make_config(node_speeds=[2, 1]), 4)
