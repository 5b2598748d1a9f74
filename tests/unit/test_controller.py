"""The plan of a round for `objective: time`, with numbers on paper."""

import dataclasses

import numpy as np
import pytest

from algorithms.schedule.controller import RoundPlan, Situation, best_inner_steps, next_plan, remaining_worth

# Two workers exchange in 4 s; 2 examples take a second.
SITUATION = Situation(
    speeds=(2.0, 2.0),
    exchange_seconds=(0.0, 4.0),
    joining_seconds=4.0,
    seconds_left=36.0,
    longest_round=100.0,
    noise_scale=48.0,
    smallest_batch=16,
    smallest_share=8,
    largest_batch=400,
    free_steps=30,
    synchronous=False,
)
DRIFTED = (1 + 3 / 2.4) ** -0.114  # of two workers that are 3 steps apart


def situation(**values) -> Situation:
    return dataclasses.replace(SITUATION, **values)


@pytest.mark.parametrize(
    ("values", "plan", "worth"),
    [
        # Steps of 8 s, and an example is worth 48 / (48 + 16).
        ({}, RoundPlan(1, 16, 30), 36 / 8 * 16 * 0.75),
        # Rounds of 3 steps of 4 s and an exchange of 4 s, in which workers are 3 steps apart.
        ({}, RoundPlan(2, 16, 3), 36 / 16 * 3 * 16 * 0.75 * DRIFTED),
        ({"workers": 1}, RoundPlan(2, 16, 3), 32 / 16 * 3 * 16 * 0.75 * DRIFTED),  # one joins in 4 s
        ({"workers": 2}, RoundPlan(2, 16, 3), 36 / 16 * 3 * 16 * 0.75 * DRIFTED),
        ({"synchronous": True}, RoundPlan(2, 16, 30), 36 / (4 + 4) * 16 * 0.75),
        ({"speeds": (2.0, 1.0)}, RoundPlan(2, 16, 3), 36 / 28 * 3 * 16 * 0.75 * DRIFTED),  # steps of 8 s
        ({"workers": 1, "seconds_left": 3.0}, RoundPlan(2, 16, 3), 0.0),
    ],
)
def test_the_worth_of_the_seconds_left_by_hand(values, plan, worth):
    assert remaining_worth(situation(**values), plan) == pytest.approx(worth)


@pytest.mark.parametrize(("step", "exchange", "workers"), [(0.02, 0.6, 4), (0.02, 0.002, 2), (1.0, 9.0, 8)])
def test_the_best_inner_steps_are_those_of_the_largest_progress_per_second(step, exchange, workers):
    steps = np.arange(0.01, 2000.0, 0.01)
    progress = steps / (steps * step + exchange) * (1.0 + steps / 2.4) ** (-0.114 * np.log2(workers))
    assert best_inner_steps(step, exchange, workers) == pytest.approx(steps[progress.argmax()], abs=0.02)


@pytest.mark.parametrize(
    ("values", "plan"),
    [
        ({"exchange_seconds": (0.0, 1e6)}, RoundPlan(1, 16, 30)),
        ({"exchange_seconds": (0.0, 1e-6)}, RoundPlan(2, 16, 10)),  # no round is shorter than 10 steps
        ({"exchange_seconds": (0.0, 1e-6), "synchronous": True}, RoundPlan(2, 16, 30)),
        ({"exchange_seconds": (0.0, 1e-6), "smallest_share": 20}, RoundPlan(2, 40, 10)),
        # Steps of 4 s and 5 in a round are the most that 24 s have room for; the exchange takes 4 s.
        ({"longest_round": 24.0, "workers": 2, "batch": 16, "decays": True}, RoundPlan(2, 16, 5)),
        # One worker is better, but while the learning rate falls nothing changes.
        ({"exchange_seconds": (0.0, 68.0), "workers": 2, "batch": 64}, RoundPlan(1, 16, 30)),
        ({"exchange_seconds": (0.0, 68.0), "workers": 2, "batch": 64, "decays": True}, RoundPlan(2, 64, 2)),
    ],
)
def test_the_plan_of_a_round_by_hand(values, plan):
    assert next_plan(situation(**values)) == plan


@pytest.mark.parametrize(("present", "following"), [(17, 17), (18, 16)])
def test_a_plan_changes_only_for_two_percent(present, following):
    """Of a batch of 16 an example is worth 48 / 64, which is 1.6% more than 48 / 65 and 3.1% more than 48 / 66."""
    alone = situation(speeds=(2.0,), exchange_seconds=(0.0,), workers=1, batch=present)
    assert next_plan(alone).batch == following


@pytest.mark.parametrize(("noise_scale", "batch"), [(400.0, 80), (1600.0, 160)])
def test_noise_makes_the_batch_of_synchronous_workers_larger(noise_scale, batch):
    """N / (N + B) B / (B / 4 + 4) is largest at B = sqrt(16 N); batches are tried in steps of a quarter."""
    synchronous = situation(synchronous=True, noise_scale=noise_scale, smallest_share=1, smallest_batch=1)
    plan = next_plan(synchronous)
    assert plan.workers == 2
    assert plan.batch == pytest.approx(batch, rel=0.15)
