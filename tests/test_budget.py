"""Batches planned for a budget of communications."""

import math
import random

import pytest

from algorithms.budget import Ahead, NoiseTrend, planned_batch, rounds_ahead, time_to_go
from algorithms.learning_rate import LearningRateSchedule

CONSTANT = LearningRateSchedule()
DECAYING = LearningRateSchedule("warmup_stable_decay", decay_share=0.2)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # A(u) = 1 - u.
        (CONSTANT, lambda u: (1 - u) ** -0.5),
        # A(u) = 0.9 - u until the decay begins, then (1 - u)^2 / 0.4.
        (DECAYING, lambda u: (0.9 - u) ** -0.5 if u < 0.8 else 0.4**0.5 / 0.2),
        # A(u) = (1 - u)^2 / 2.
        (LearningRateSchedule("linear"), lambda u: 2**0.5),
    ],
    ids=["constant", "decaying", "linear"],
)
def test_the_shape_is_that_on_paper(schedule, expected):
    shape = time_to_go(schedule, 50)
    found = [value / shape[0] for value in shape]
    assert found == pytest.approx([expected((r + 0.5) / 50) / expected(0.01) for r in range(50)], rel=0.01)


def test_a_cosine_never_asks_for_less():
    shape = time_to_go(LearningRateSchedule("cosine"), 50)
    assert list(shape) == sorted(shape)
    assert shape[20] > shape[0]


def simulate(ahead_of, largest: float = math.inf, noise=lambda r: None, rounds: int = 500, **exponents) -> list[float]:
    """The batches of a run that uses what is planned, and whose rounding goes into the examples that are left."""
    trend, done, left, batches = NoiseTrend(), 0, ahead_of.examples_left, []
    for number in range(rounds):
        if left <= 0:
            return batches
        ahead = Ahead(
            number, max(1, ahead_of.rounds_left - number), done, left, ahead_of.inner_steps, ahead_of.schedule
        )
        if (measured := noise(number)) is not None:
            trend = trend.after(ahead.position(ahead.progress), *measured)
        batch = max(4, 4 * round(planned_batch(ahead, trend, exponents.get("growth", 1.0), 0.5, 4, largest) / 4))
        batches.append(batch)
        used = min(batch * ahead.inner_steps, left)
        done, left = done + used, left - used
    return batches


@pytest.mark.parametrize("schedule", [CONSTANT, DECAYING])
@pytest.mark.parametrize("budget", [15, 50, 200])
@pytest.mark.parametrize("noise", ["none", "rising", "wild"])
def test_the_rounds_are_those_of_the_budget(schedule, budget, noise):
    """Whatever the noise scale does."""
    generator = random.Random(0)
    measured = {
        "none": lambda r: None,
        "rising": lambda r: (5 + 0.1 * r, 0.3),
        "wild": lambda r: (generator.gauss(5, 3), 1.0),
    }[noise]
    batches = simulate(Ahead(0, budget, 0, 1_000 * budget, 20, schedule), noise=measured)
    assert abs(len(batches) - budget) <= max(1, 0.05 * budget)
    # Later batches are larger: by 2.5 in the middle of the stable part of a decaying learning rate, and so on.
    assert sum(batches[-budget // 5 :]) > 1.5 * sum(batches[: budget // 5])


def test_without_growth_the_batch_is_constant():
    batches = simulate(Ahead(0, 50, 0, 50_000, 20, CONSTANT), growth=0.0)
    assert set(batches) <= {44, 48, 52}


def test_a_bound_makes_more_rounds_and_the_other_batches_larger():
    free = simulate(Ahead(0, 50, 0, 50_000, 20, DECAYING))
    bounded = simulate(Ahead(0, 50, 0, 50_000, 20, DECAYING), largest=60)
    assert max(free) > 60 >= max(bounded)
    assert len(bounded) in (50, 51)
    assert bounded[0] > free[0]
    assert len(simulate(Ahead(0, 50, 0, 50_000, 20, DECAYING), largest=40)) == 63  # 50,000 / (20 * 40)


def test_the_trend_follows_what_is_measured_and_knows_its_slope():
    trend = NoiseTrend()
    assert trend.slope == pytest.approx(0.4)  # before anything is known
    assert trend.trust == pytest.approx(1 / 5)
    for step in range(1, 201):
        trend = trend.after(math.log(step), 3.0 + 0.8 * math.log(step), 0.1)
    assert trend.level == pytest.approx(3.0 + 0.8 * math.log(200), abs=0.1)
    assert trend.slope == pytest.approx(0.8, abs=0.06)
    assert trend.trust > 0.9


@pytest.mark.parametrize(
    ("communications", "trainers", "nodes", "expected"),
    [
        (50, 1, 4, 50),
        # Three rounds with a node each for nothing, the merge costs one, then one a round.
        (50, 4, 4, 3 + 49),
        # Four trainers with two nodes each: 4 a round, 5 with the merge of the third, then one a round.
        (50, 4, 8, 3 + 37),
        (3, 4, 8, 1),
        (50, 1, 1, 1),
    ],
)
def test_rounds_that_a_budget_allows(communications, trainers, nodes, expected):
    assert rounds_ahead(communications, trainers, nodes, 1, merge_frequency=3, merge_count=4) == expected
