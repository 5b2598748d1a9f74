"""The rounds that a budget pays for, and their inner steps."""

import dataclasses
import math
from unittest.mock import patch

import numpy as np
import pytest

from algorithms.nodes.traffic import (
    Exchange,
    ExchangeSizes,
    Link,
    even_exchange,
    even_split,
    merge_exchange,
    rounds_ahead,
    synchronisation_exchange,
)
from algorithms.schedule.budget import Budget, Remaining, affordable_rounds, growth_exponent, remaining_steps
from cluster import Cluster
from tests.support.helpers import (
    TINY_ARCHITECTURE,
    VOCABULARY,
    Recorder,
    build_light,
    make_config,
    padded,
    tiny_data,
)


def test_the_exponent_of_growth_is_the_slope_so_far_from_a_prior_of_four_tenths():
    """The slope is ln batch over ln (examples + a hundredth of all); a batch of 8 has grown to 8 * 1.5^4."""
    assert growth_exponent(1.0, Remaining(0, 9, 0, 10_000.0)) == pytest.approx(0.4)
    passed = math.log((4_900 + 100) / 100)
    expected = (passed * 4 * math.log(1.5) + 0.5 * 0.4) / (passed**2 + 0.5)
    assert growth_exponent(1.5**4, Remaining(5, 9, 4_900, 5_100.0)) == pytest.approx(expected)
    assert growth_exponent(1e9, Remaining(5, 9, 4_900, 5_100.0)) == 1.0


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
    to_come = rounds_ahead(trainers, nodes, 1, 3, 4, SIZES)
    assert affordable(Budget("communications", communications), to_come)[0] == expected


# A round of M workers sends 100 (M - 1) bytes, 110 (M - 1) from the third on; in a merge a trainer gives 70, and a node
# that is new to a trainer gets 300.
SIZES = ExchangeSizes(lambda workers, number: (workers - 1) * (110 if number >= 3 else 100), 70, 300)


def affordable(budget: Budget, ahead, used=0.0, computing=None, examples=1000.0):
    return affordable_rounds(budget, used, computing, ahead, examples)


def test_future_exchanges_by_hand():
    """Four trainers on eight nodes: merged to two after round 2 and to one after round 4."""
    rounds = rounds_ahead(4, 8, 1, merge_frequency=2, merge_count=3, sizes=SIZES)
    found = [next(rounds) for _ in range(5)]
    assert [nodes for nodes, _ in found[1:3]] == [((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 1, 2, 3), (6, 7, 4, 5))]
    assert [nodes for nodes, _ in found[3:]] == [found[2][0], (tuple(range(8)),)]
    assert found[0][1] == [Exchange(4, 400, 50.0)]
    # Two others to the representative's first node, and the average to its second one.
    assert found[1][1] == [Exchange(4, 400, 50.0), Exchange(1, 210, 210.0)]
    # The four nodes of those two go to who is left.
    assert found[2][1] == [Exchange(0, 1200, 300.0), Exchange(2, 660, 82.5)]
    assert found[3][1] == [Exchange(2, 660, 82.5), Exchange(1, 280, 140.0)]
    assert found[4][1] == [Exchange(0, 1200, 300.0), Exchange(1, 770, 96.25)]


def test_rounds_of_equal_price_are_not_counted_one_by_one():
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
        assert affordable_rounds(Budget("bytes", amount), 0.0, None, to_come(), 1e9) == (rounds, 0)


def test_statistics_of_later_rounds_are_paid_for():
    """Three rounds send 100 bytes, later ones 110."""
    ahead = (((2,), [Exchange(1, 110 if number > 3 else 100, 50.0)]) for number in range(1, 1000))
    assert affordable_rounds(Budget("bytes", 300 + 50 * 110), 0.0, None, ahead, 1e9, settled=3) == (53, 0)


def test_a_growing_batch_leaves_fewer_steps_except_in_the_last_round():
    """The batch grows like the square root of the examples, over the second half of them."""
    ahead = [Remaining(9, rounds, 100_000, 100_000.0) for rounds in (2, 1)]
    steps = [remaining_steps(each, 8.0, 0.5, 1.0, math.inf) for each in ahead]
    # The integral of sqrt((100,000 + 2,000) / (x + 2,000)) / 8 from 100,000 to 200,000.
    assert steps[0] == pytest.approx(2 * math.sqrt(102_000) * (math.sqrt(202_000) - math.sqrt(102_000)) / 8, rel=1e-4)
    assert steps[1] == 100_000 / 8


def test_nodes_that_serve_several_trainers_send_nothing_but_merges_with_others():
    """Trainers 0 and 2 are on the first node, 1 and 3 on the second; 0 merges with 1, 2 and 3."""
    rounds = rounds_ahead(4, 2, 1, merge_frequency=1, merge_count=2, sizes=SIZES)
    bytes_of = [[exchange.sent for exchange in next(rounds)[1]] for _ in range(4)]
    assert bytes_of == [[0, 70], [0, 0], [0, 70], [300, 110]]
    assert even_split(7, 3) == (3, 2, 2)
    assert synchronisation_exchange([], None) == Exchange()
    assert synchronisation_exchange([(4, 12.0), (5, 8.0)], 2) == Exchange(2, 20.0, 12 * 2 / (3 * 2))
    assert merge_exchange(1, 1, 70).link == 70
    assert even_exchange(0, 12).link == 12  # a copy of what a worker has lost
    sizes = dataclasses.replace(SIZES, settling=lambda workers: 24.0)
    *_, merge = next(rounds_ahead(2, 8, 1, merge_frequency=1, merge_count=2, sizes=sizes))[1]
    # Two rings of four at the same time, then the merge: the first node receives the other's tensors and sends the
    # average to three.
    assert merge == Exchange(1, 2 * 24 + SIZES.merge * 4, 24 / 4 + SIZES.merge * 2)


@pytest.mark.parametrize(
    ("budget", "used", "computing", "expected"),
    [
        # Rounds of 330 bytes.
        (Budget("bytes", 2000), 350, None, 5),
        (Budget("bytes", 2000), 351, None, 4),
        # Each worker sends 82.5 bytes: 2.1 seconds at 600 bit/s. What computing takes is known to be 10.
        (Budget("seconds", 20.0, Link(600.0, 1.0)), 1.59, 10.0, 4),
        (Budget("seconds", 20.0, Link(600.0, 1.0)), 1.61, 10.0, 3),
        # Or unknown, and half of what is left.
        (Budget("seconds", 20.0, Link(600.0, 1.0)), 3.19, None, 4),
        (Budget("seconds", 20.0, Link(600.0, 1.0)), 3.21, None, 3),
    ],
)
def test_rounds_that_bytes_and_seconds_allow(budget, used, computing, expected):
    assert affordable(budget, rounds_ahead(1, 4, 3, 2, 2, SIZES), used, computing) == (expected, 0)


def test_there_is_always_one_round_and_never_one_without_examples():
    def to_come():
        return rounds_ahead(1, 4, 3, 2, 2, SIZES)

    assert affordable(Budget("bytes", 500), to_come(), used=400) == (1, 330 - 100)
    assert affordable(Budget("seconds", 3.0, Link(600.0, 1.0)), to_come())[1] == 0  # all may yet be the link's
    assert affordable(Budget("communications", 10), rounds_ahead(4, 4, 1, 99, 4, SIZES), examples=7)[0] == 7


# Runs


@pytest.mark.parametrize("schedule", ["linear", "warmup_stable_decay"])
def test_examples_of_unequal_length_need_no_additional_round(schedule):
    """The last examples may be short, so that more of them are needed; the learning rate falls to its end."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(2.0, 0.8, 400).astype(int), 3, 64)
    texts = padded([generator.integers(1, VOCABULARY, length).tolist() for length in lengths], None, 64)
    data = dataclasses.replace(tiny_data(), train=texts)
    for seed in range(2):
        config = make_config(
            model_config=TINY_ARCHITECTURE, number_of_outer_steps=None, max_tokens=2000, number_of_initial_trainers=1,
            sampling_method="none", number_of_inner_steps_between_outers=2, communication_budget=8,
            learning_rate_schedule=schedule, minimum_learning_rate_ratio=0.0, eval_every=99, training_seed=seed,
            nodes_per_gpu=2,
        )  # fmt: skip
        with patch("fabrics.models.initialisation.build_model", build_light):
            cluster = Cluster(config, data)
        recorder = Recorder()
        cluster.train(recorder)
        assert (cluster.counters.communications, recorder.warnings) == (8, [])
        rates = [rate for result in recorder.rounds for rate in result.reports[0].workers[0].learning_rates]
        falling = rates[len(rates) // 10 :] if schedule == "linear" else rates[-len(rates) // 5 :]
        assert falling == sorted(falling, reverse=True)
        assert rates[-1] < 0.6 * rates[-len(rates) // 5]
