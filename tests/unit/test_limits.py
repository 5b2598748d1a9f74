"""The inner steps of the last round, and the progress of a run."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.schedule.limits import Limits, RunCounters


def test_the_last_round_by_hand():
    # 61 tokens at 12 a step: 6 steps; 44 examples at 10 a step: 5; a whole round has 10.
    whole = RunCounters(3, 100, 1000)
    for limits, steps in (
        (Limits(None, None, 1061), 6),
        (Limits(None, None, 1060), 5),
        (Limits(None, 143.5, None), 5),
        (Limits(None, 143.5, 1040), 4),
        (Limits(9, None, 5000), 10),
        (Limits(None, 101, 1001), 1),
    ):
        assert limits.next_round(whole, 10, lambda steps: 10 * steps, lambda steps: 12 * steps).inner_steps == steps


def test_a_very_long_round_is_not_counted_beyond_the_limit():
    counted = []

    def tokens(steps: int) -> int:
        counted.append(steps)
        return 3 * steps

    schedule = Limits(None, None, 10_000).next_round(RunCounters(3, 100, 1000), 2**31, lambda steps: steps, tokens)
    assert (schedule.inner_steps, schedule.progress_after) == (3000, 1.0)
    assert max(counted) < 2 * 3000


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 300))
def test_a_limit_in_tokens_is_exceeded_by_less_than_one_step(added, left):
    sums = [0, *itertools.accumulate(added)]
    limits = Limits(None, None, 1000 + left)
    schedule = limits.next_round(RunCounters(3, 100, 1000), len(added), lambda steps: 10 * steps, sums.__getitem__)
    steps = schedule.inner_steps
    assert 1 <= steps <= len(added)
    assert sums[steps] >= left or steps == len(added)
    assert sums[steps - 1] < left
    assert schedule.progress_before == 1000 / (1000 + left)
    assert schedule.progress_after == pytest.approx(min(1.0, (1000 + sums[steps]) / (1000 + left)), rel=1e-12)
