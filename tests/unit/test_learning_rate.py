"""Schedules of the inner learning rate and of eta."""

import math

import pytest

from algorithms.schedule.limits import RoundSchedule
from algorithms.schedule.schedules import LearningRateSchedule


@pytest.mark.parametrize(
    ("progress", "minimum", "expected"),
    [(0.0, 0.1, 1.0), (0.5, 0.0, 0.5), (0.5, 0.2, 0.6), (1.0, 0.1, 0.1), (2.0, 0.1, 0.1)],
)
@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_cosine_and_linear_fall_to_the_minimum(name, progress, minimum, expected):
    schedule = LearningRateSchedule(name, minimum_ratio=minimum)
    assert schedule.without_warmup(progress) == pytest.approx(expected)


def test_cosine_and_linear_differ_at_a_quarter():
    assert LearningRateSchedule("linear").without_warmup(0.25) == pytest.approx(0.75)
    assert LearningRateSchedule("cosine").without_warmup(0.25) == pytest.approx((1 + math.sqrt(0.5)) / 2)


@pytest.mark.parametrize(("progress", "expected"), [(0.0, 1.0), (0.5, 1.0), (0.8, 1.0), (0.85, 0.775), (1.0, 0.1)])
def test_warmup_stable_decay_falls_in_the_last_fifth(progress, expected):
    schedule = LearningRateSchedule("warmup_stable_decay", minimum_ratio=0.1)
    assert schedule.without_warmup(progress) == pytest.approx(expected)


def test_a_decay_completes_with_the_run():
    """The last inner step is one step's share of the decay above the end."""
    schedule = LearningRateSchedule("warmup_stable_decay")
    factors = schedule.factors(RoundSchedule(10, 0.95, 1.0), 500, 0, 0)
    assert factors == pytest.approx([(0.05 - 0.005 * step) / 0.2 for step in range(10)])


def factors(steps: int = 5, tokens: int = 0, before: tuple[int, int] = (0, 0), **values) -> list[float]:
    return LearningRateSchedule(**values).factors(RoundSchedule(steps, 0.0, 0.5), *before, tokens)


def test_warm_up_is_linear_in_steps():
    assert factors(warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert factors(warmup_steps=4, before=(2, 0)) == pytest.approx([0.75, 1.0, 1.0, 1.0, 1.0])


def test_warm_up_is_linear_in_tokens_and_the_slower_counts():
    assert factors(tokens=100, warmup_tokens=80) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert factors(tokens=100, warmup_tokens=200, before=(9, 140)) == pytest.approx([0.8, 0.9, 1.0, 1.0, 1.0])
    both = factors(tokens=100, warmup_tokens=80, warmup_steps=10)
    assert both == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


def test_progress_is_spread_evenly_over_the_steps_and_multiplies_the_warm_up():
    assert factors(name="linear", warmup_steps=4) == pytest.approx([0.25, 0.45, 0.6, 0.7, 0.6])
