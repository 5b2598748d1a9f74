"""Schedules and scaling of the inner learning rate."""

import pytest

from algorithms.learning_rate import batch_scaling_factor, eta_during, schedule_factor


@pytest.mark.parametrize(
    ("progress", "minimum", "expected"),
    [(0.0, 0.1, 1.0), (0.5, 0.0, 0.5), (0.5, 0.2, 0.6), (1.0, 0.1, 0.1), (2.0, 0.1, 0.1)],
)
def test_cosine_falls_to_the_minimum(progress, minimum, expected):
    assert schedule_factor("cosine", progress, step=100, minimum_ratio=minimum) == pytest.approx(expected)


@pytest.mark.parametrize(("step", "expected"), [(0, 0.25), (1, 0.5), (3, 1.0), (9, 1.0)])
def test_warm_up_is_linear(step, expected):
    assert schedule_factor("constant", 0.0, step, warmup_steps=4) == pytest.approx(expected)


@pytest.mark.parametrize(("rule", "expected"), [("none", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_scaling_with_a_batch_four_times_the_first(rule, expected):
    assert batch_scaling_factor(rule, 32, 8) == pytest.approx(expected)


def test_eta_goes_along_a_line_to_its_end():
    assert [eta_during(2.0, 0.5, progress) for progress in (0.0, 0.5, 1.0)] == [2.0, 1.25, 0.5]
    assert eta_during(2.0, None, 0.7) == 2.0
