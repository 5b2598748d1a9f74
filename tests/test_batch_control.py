"""The requested batch: decisions on numbers that can be checked on paper, and its state."""

import json

import pytest

from algorithms.batch_control import BatchControl, BatchControlSettings
from algorithms.gradient_statistics import GradientStatistics

SETTINGS = {
    "test": "norm_test",
    "eta": 1.0,
    "eta_at_end": None,
    "theta": 0.9,
    "nu": 5.84,
    "debias": True,
    "first_round": 1,
    "smoothing": 0.0,
    "largest_growth": 100.0,
}


def control(initial: int = 4, **values) -> BatchControl:
    return BatchControl(BatchControlSettings(**SETTINGS | values), initial)


def sample(noise_scale: float, size: int = 8) -> GradientStatistics:
    """Of a gradient with ||grad F||^2 = 1, without an error: ||g||^2 = 1 + V / size."""
    return GradientStatistics(size, 1.0 + noise_scale / size, noise_scale, 1.0, noise_scale)


def test_the_request_becomes_the_noise_scale_within_bounds():
    batch = control(largest_growth=2.0)
    requests = []
    for _ in range(6):
        batch.conclude([sample(40.0)], batch.requested_batch, 0.0, 1000)
        requests.append(batch.requested_batch)
    assert requests == [8, 16, 32, 40, 40, 40]
    assert control().conclude([sample(40.0)], 4, 0.0, 30)[0] is not None
    batch = control()
    batch.conclude([sample(40.0)], 4, 0.0, 30)
    assert batch.requested_batch == 30


def test_it_never_shrinks():
    batch = control(initial=50)
    batch.conclude([sample(40.0)], 50, 0.0, 1000)
    assert batch.requested_batch == 50


def test_eta_follows_the_progress_of_the_run():
    requests = []
    for progress in (0.0, 0.5, 1.0):
        batch = control(eta=2.0, eta_at_end=1.0)
        batch.conclude([sample(36.0)], 4, progress, 1000)
        requests.append(batch.requested_batch)
    assert requests == [9, 16, 36]


@pytest.mark.parametrize("useless", [float("nan"), float("inf")])
def test_statistics_that_are_not_finite_leave_the_request_with_a_warning(useless):
    batch = control()
    statistics, warning = batch.conclude([GradientStatistics(8, useless, 1.0, 1.0, 1.0)], 4, 0.0, 1000)
    assert statistics is not None
    assert "the requested batch stays as it is" in warning
    assert batch.requested_batch == 4
    assert batch.statistics is None


def test_without_statistics_nothing_is_said():
    batch = control()
    assert batch.conclude([], 4, 0.0, 1000) == (None, None)
    assert batch.requested_batch == 4


def test_rounds_with_a_test_begin_where_they_are_told_to():
    assert [control(first_round=3).tests_after(number) for number in (1, 2, 3, 4)] == [False, False, True, True]
    assert not control(test="none").tests_after(10)


def test_a_schedule_by_hand_moves_the_request_and_keeps_the_limit():
    batch = control(test="none", schedule=[(0.25, 10), (0.5, 30)])
    requests = []
    for progress in (0.2, 0.25, 0.6):
        batch.conclude([], 4, progress, 20)
        requests.append(batch.requested_batch)
    assert requests == [4, 10, 20]


def test_it_goes_on_from_its_state():
    one, other = control(smoothing=0.5), control(smoothing=0.5)
    one.conclude([sample(10.0)], 4, 0.0, 1000)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for batch in (one, other):
        batch.conclude([sample(90.0)], 10, 0.5, 1000)
    assert one.requested_batch == other.requested_batch == 50
    assert one.statistics == other.statistics
