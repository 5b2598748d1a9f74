"""Batch schedules, and the learning rate that follows the batch."""

import math

import pytest

from algorithms.batch.calc_batch import BatchControl, BatchControlSettings, BatchTestParameters
from algorithms.schedule.schedules import BatchSchedule, LearningRateSchedule, critical_batch, seesaw, token_thresholds


def test_a_schedule_sets_the_request():
    schedule = BatchSchedule([(0.0, 8.0), (0.5, 64.0), (0.9, 16.0)])
    assert [schedule.request(progress, 4) for progress in (0.0, 0.49, 0.5, 0.9, 1.0)] == [8, 8, 64, 16, 16]
    assert schedule.request(0.6, 80) == 64
    assert BatchSchedule([(0.3, 9.0)]).request(0.2, 4) == 4
    assert schedule.rate_factor(0.5, 8.0) == 1.0


def test_thresholds_in_tokens_become_shares_of_the_run():
    assert token_thresholds("0:16 500k:32 1M:64", 2_000_000) == [(0.0, 16.0), (0.25, 32.0), (0.5, 64.0)]
    assert token_thresholds("0:768 1.5B:1536", 6_000_000_000) == [(0.0, 768.0), (0.25, 1536.0)]
    ((_, _), (share, _)) = token_thresholds("0:16 16.1k:32", 30_000)
    assert share == 16_100 / 30_000  # 16.1 * 1e3 is a little more
    for bad in ("16", " ", "0:16,1M:32", "1m:32", "-1:16", "1M:6.5"):
        with pytest.raises(ValueError, match="TOKENS:BATCH"):
            token_thresholds(bad, 2_000_000)


def test_seesaw_doubles_the_batch_where_the_schedule_halves_the_learning_rate():
    # A cosine is at 1/2, 1/4 and 1/8 where its angle is 90, 120 and acos(-3/4) = 138.59 degrees of 180.
    schedule = seesaw(LearningRateSchedule("cosine", minimum_ratio=0.0), 16)
    assert schedule.pairs[:3] == [
        (pytest.approx(1 / 2), 32),
        (pytest.approx(2 / 3), 64),
        (pytest.approx(0.76995, abs=1e-5), 128),
    ]
    assert len(schedule.pairs) == 10
    growth = {0.49: 1, 0.51: 2, 0.67: 4, 0.78: 8}
    found = {progress: schedule.rate_factor(progress, factor) for progress, factor in growth.items()}
    assert found == pytest.approx({0.49: 1.0, 0.51: math.sqrt(1 / 2), 0.67: 1 / 2, 0.78: math.sqrt(1 / 8)})
    # A batch that is limited to twice the first leaves the second halving to the learning rate.
    assert schedule.rate_factor(0.67, 2.0) == pytest.approx(math.sqrt(2) / 4)


@pytest.mark.parametrize(
    ("name", "minimum", "shares"),
    [
        ("linear", 0.1, [5 / 9, 5 / 6, 35 / 36]),  # 0.1 + 0.9 (1 - p) = 1/2, 1/4, 1/8
        ("warmup_stable_decay", 0.2, [0.8 + 0.2 * 5 / 8, 0.8 + 0.2 * 15 / 16]),
        ("cosine", 0.25, [math.acos(-1 / 3) / math.pi]),  # it ends at the second halving
    ],
)
def test_seesaw_follows_every_schedule_to_its_minimum(name, minimum, shares):
    schedule = LearningRateSchedule(name, minimum_ratio=minimum)
    pairs = seesaw(schedule, 8).pairs
    assert [share for share, _ in pairs] == pytest.approx(shares)
    assert [schedule.without_warmup(share) for share, _ in pairs] == pytest.approx([0.5, 0.25, 0.125][: len(shares)])


def test_critical_batch_warmup_takes_43_percent_fewer_steps():
    schedule = critical_batch(1024)
    assert [batch for _, batch in schedule.pairs] == [2048, 4096]
    first, second = (share for share, _ in schedule.pairs)
    steps = first + (second - first) / 2 + (1 - second) / 4
    assert round(1 - steps, 2) == 0.43
    assert [schedule.rate_factor(0.5, growth) for growth in (1, 2, 4)] == pytest.approx([1.0, math.sqrt(2), 2.0])


def test_the_learning_rate_follows_the_batch_that_is_run():
    parameters = BatchTestParameters(0.8, 0.9, 5.84, False, 0.0)
    settings = BatchControlSettings("none", parameters, None, 1, 0.0, None, critical_batch(16))
    control = BatchControl(settings, 16)
    assert control.learning_rate_factor(8) == 1.0
    control.conclude([], None, 8, 0.8, 40)
    assert control.requested_batch == 40
    again = BatchControl(settings, 16)
    again.load_state_dict(control.state_dict())
    for each in (control, again):
        assert each.learning_rate_factor(20) == pytest.approx(math.sqrt(2.5))
        assert each.learning_rate_factor(8) == 1.0  # the switch mode runs no more than the max batch
