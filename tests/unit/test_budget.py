"""Batches planned for a budget of communications."""

import itertools
import math
import random

import pytest

from algorithms.batch.budget import Ahead, Budget, Trend, planned_batch, rounds_ahead, steps_left, time_to_go
from algorithms.nodes.communication_rounds import (
    Exchange,
    Link,
    Traffic,
    even_shares,
    merged,
    redistributed,
    rounds_to_come,
    synchronised,
)
from algorithms.schedule.learning_rate import LearningRateSchedule

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
    trend, done, left, batches = Trend(), 0, ahead_of.examples_left, []
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
@pytest.mark.parametrize(("noise", "budget"), [*itertools.product(("none", "rising", "wild"), (15, 50)), ("wild", 200)])
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


def test_the_batch_rises_with_the_noise_scale_on_paper_until_it_is_frozen():
    trend = Trend(level=0.0, variance=0.0, count=2, sum_xx=1e9, sum_xy=1e9)  # the noise scale grows like the examples
    # Rounds of one step at 200, 400, 600 and 800 of 1,000 examples, to each of which a hundredth of all is added.
    batch = planned_batch(Ahead(1, 4, 200, 800, 1, CONSTANT), trend, 0.0, 1.0, 1, math.inf)
    assert batch == pytest.approx(800 * 210 / (210 + 410 + 610 + 810))
    root = planned_batch(Ahead(1, 4, 200, 800, 1, CONSTANT), trend, 0.0, 0.5, 1, math.inf)
    assert root == pytest.approx(800 * 210**0.5 / sum(number**0.5 for number in (210, 410, 610, 810)))
    assert planned_batch(Ahead(8, 2, 800, 200, 1, CONSTANT), trend, 0.0, 1.0, 1, math.inf) == pytest.approx(100)


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
    trend = Trend()
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
    to_come = rounds_to_come(trainers, nodes, 1, 3, 4, TRAFFIC)
    assert outlook(Budget("communications", communications), to_come).rounds == expected


# A round of M workers sends 100 (M - 1) bytes, 110 (M - 1) from the third on; in a merge a trainer gives 70, and a node
# that is new to a trainer gets 300.
TRAFFIC = Traffic(lambda workers, number: (workers - 1) * (110 if number >= 3 else 100), 70, 300)


def outlook(budget: Budget, to_come, used=0.0, computing=None, examples=1000.0, inner_steps=1, largest=1e9):
    return rounds_ahead(budget, used, computing, to_come, examples, inner_steps, lambda shares: largest)


def test_the_exchanges_to_come_are_those_on_paper():
    """Four trainers on eight nodes: merged to two after round 2 and to one after round 4."""
    rounds = rounds_to_come(4, 8, 1, merge_frequency=2, merge_count=3, traffic=TRAFFIC)
    found = [next(rounds) for _ in range(5)]
    assert [shares for shares, _ in found] == [(2,) * 4, (2,) * 4, (4, 4), (4, 4), (8,)]
    assert found[0][1] == [Exchange(4, 400, 50.0)]
    # Two others to the representative's first node, and the average to its second one.
    assert found[1][1] == [Exchange(4, 400, 50.0), Exchange(1, 210, 210.0)]
    # The four nodes of those two go to who is left.
    assert found[2][1] == [Exchange(0, 1200, 300.0), Exchange(2, 660, 82.5)]
    assert found[3][1] == [Exchange(2, 660, 82.5), Exchange(1, 280, 140.0)]
    assert found[4][1] == [Exchange(0, 1200, 300.0), Exchange(1, 770, 96.25)]


def test_rounds_that_stay_the_same_are_not_counted_one_by_one():
    """A merge after the first round; every later one sends 330 bytes, however many of them the budget has."""

    def to_come():
        yield (2, 2), [Exchange(2, 200, 50.0), Exchange(1, 70, 70.0)]
        yield (4,), [Exchange(0, 600, 300.0), Exchange(1, 330, 82.5)]
        yield (4,), [Exchange(1, 330, 82.5)]
        for _ in range(3):
            yield (4,), [Exchange(1, 330, 82.5)]
        pytest.fail("counted one by one")

    paid = 270 + 930 + 330 * 10**6
    for amount, rounds in ((paid, 2 + 10**6), (paid - 1, 1 + 10**6)):
        found = rounds_ahead(Budget("bytes", amount), 0.0, None, to_come(), 1e9, 20, None)
        assert (found.rounds, found.missing) == (rounds, 0)


def test_steps_left_are_fewer_where_the_batch_will_grow_but_not_in_the_last_round():
    """It grows like the square root of the examples, from half of them to all."""
    ahead = [Ahead(9, rounds, 100_000, 100_000.0, 20, CONSTANT) for rounds in (2, 1)]
    steps = [steps_left(each, 8.0, 0.5, 1.0, math.inf) for each in ahead]
    # The integral of sqrt((100,000 + 2,000) / (x + 2,000)) / 8 from 100,000 to 200,000.
    assert steps[0] == pytest.approx(2 * math.sqrt(102_000) * (math.sqrt(202_000) - math.sqrt(102_000)) / 8, rel=1e-4)
    assert steps[1] == 100_000 / 8


def test_nodes_that_serve_several_trainers_send_nothing_but_merges():
    rounds = rounds_to_come(4, 2, 1, merge_frequency=1, merge_count=2, traffic=TRAFFIC)
    bytes_of = [[exchange.sent for exchange in next(rounds)[1]] for _ in range(4)]
    assert bytes_of == [[0, 70], [0, 70], [0, 70], [300, 110]]
    assert even_shares(7, 3) == (3, 2, 2)
    assert synchronised([]) == Exchange()
    assert merged(1, 1, 70).link == 70
    assert redistributed(0, 12).link == 12  # a copy of what a worker has lost


@pytest.mark.parametrize(
    ("budget", "used", "computing", "expected"),
    [
        # Rounds of 300 and 330 bytes: two at 300 and three at 330.
        (Budget("bytes", 2000), 400, None, 5),
        (Budget("bytes", 2000), 411, None, 4),
        # Each worker sends 75 bytes, then 82.5: 2 and 2.1 seconds at 600 bit/s. What computing takes is known to be 10.
        (Budget("seconds", 20.0, Link(600.0, 1.0)), 1.79, 10.0, 4),
        (Budget("seconds", 20.0, Link(600.0, 1.0)), 1.81, 10.0, 3),
        # Or unknown, and half of what is left.
        (Budget("seconds", 20.0, Link(600.0, 1.0)), 3.59, None, 4),
        (Budget("seconds", 20.0, Link(600.0, 1.0)), 3.61, None, 3),
    ],
)
def test_rounds_that_bytes_and_seconds_allow(budget, used, computing, expected):
    found = outlook(budget, rounds_to_come(1, 4, 1, 2, 2, TRAFFIC), used, computing)
    assert (found.rounds, found.missing) == (expected, 0)


def test_bounds_of_the_batches_bound_the_rounds():
    def to_come():
        return rounds_to_come(1, 4, 3, 2, 2, TRAFFIC)

    plenty = outlook(Budget("bytes", 10**9), to_come(), examples=100.0, inner_steps=3)
    assert plenty.rounds == 9  # 8 rounds of 3 steps with 4 examples are 96
    assert plenty.missing == 0
    little = outlook(Budget("bytes", 500), to_come(), used=100, examples=100.0, inner_steps=3, largest=11.0)
    assert little.rounds == 4  # 3 rounds of 3 steps with 11 examples are 99
    assert little.missing == 4 * 330 - 400
    assert outlook(Budget("bytes", 500), to_come(), used=400).missing == 330 - 100  # one round is always made
    unmeasured = outlook(Budget("seconds", 3.0, Link(600.0, 1.0)), to_come())
    assert (unmeasured.rounds, unmeasured.missing) == (1, 0)  # all of the 3 seconds may yet be the link's
