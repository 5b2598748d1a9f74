"""Plans for nodes, a link and a time: numbers on paper, and recorded runs that the formula predicts."""

import re
import shlex

import numpy as np
import pytest

from algorithms.nodes.traffic import Link
from algorithms.schedule import controller
from algorithms.schedule.controller import NOISE_SCALE, RoundPlan, example_value
from benchmarks.compare.accounting import gradient_bytes
from benchmarks.compare.plan import main
from benchmarks.compare.which_method import LATENCIES, NODES, RATES, TIMES, all_plans, open_plans
from fabrics.config_checks import CHECKS
from utils.config.reading import parse_config


def test_the_value_of_an_example_by_hand():
    assert example_value(16, 1, 0, noise_scale=48) == pytest.approx(0.75)
    # Four workers for 7.2 steps: (1 + 7.2 / 2.4) ** (-0.114 * 2) of it.
    assert example_value(16, 4, 7.2, noise_scale=48) == pytest.approx(0.75 / 4**0.228)


def test_numbers_without_a_plan_are_refused(capsys):
    given = {"--nodes": "4", "--speed": "350", "--link": "10Mb/s,1ms", "--seconds": "80"}
    for option, value in (("--nodes", "0"), ("--speed", "nan"), ("--seconds", "inf")):
        with pytest.raises(SystemExit):
            main([word for each in (given | {option: value}).items() for word in each])
        assert f"{option}: must be positive and finite, got {value}" in capsys.readouterr().err


def planned(capsys, **given) -> list[str]:
    """Return what is printed, without the commands."""
    given = {"nodes": 4, "speed": 350, "link": "10Mb/s,1ms", "seconds": 80} | given
    main([word for name, value in given.items() for word in (f"--{name}", str(value))])
    return [line for line in capsys.readouterr().out.splitlines() if "python run.py" not in line]


def test_plans_that_are_worth_nothing_and_idle_nodes_are_named(capsys):
    assert planned(capsys, seconds=0.001, nodes=10) == [
        "one worker: makes no step in this time",
        "synchronous: worth less than one worker",
        "DiLoCo: worth less than one worker",
        "2 nodes are idle: recorded runs have at most 8 workers",
        "The formula is fitted to runs of 125,248 parameters, at least 15 rounds and 10 to 150 inner steps per round; "
        "other plans are extrapolated. The commands simulate the plans with the demo's model.",
    ]


def test_many_workers_may_have_more_examples_than_four(capsys):
    """The plan of docs/results/eight_nodes.md; 16 examples of each of eight workers are the limit."""
    main(["--nodes", "8", "--speed", "350", "--link", "10Mb/s,1ms", "--seconds", "40"])
    assert "INITIAL_BATCH_SIZE=104 number_of_inner_steps_between_outers=40 " in capsys.readouterr().out


def errors_of_the_formula(noise_scale: float) -> np.ndarray:
    """The logarithm of the perplexity is a parabola in that of the examples times their value, fitted to the plans."""
    plans = [plan for plan in all_plans() if plan.family == "DiLoCo" or plan.workers == 1]
    log_perplexity = np.log([plan.perplexity for plan in plans])
    rounds = [plan.steps / plan.exchanges if plan.exchanges else 0.0 for plan in plans]
    values = [
        example_value(plan.batch, plan.workers, steps, noise_scale) for plan, steps in zip(plans, rounds, strict=True)
    ]
    amounts = np.log([plan.batch * plan.steps for plan in plans]) + np.log(values)
    return np.expm1(np.polynomial.Polynomial.fit(amounts, log_perplexity, 2)(amounts) - log_perplexity)


def test_the_formula_predicts_the_recorded_plans():
    errors = errors_of_the_formula(NOISE_SCALE)
    assert len(errors) == 30
    assert np.sqrt(np.mean(errors**2)) < 0.016
    assert np.abs(errors).max() < 0.037


@pytest.mark.parametrize(("noise_scale", "percent"), [(100, 2.6), (248, 1.6), (400, 1.4), (1000, 1.4), (1e12, 1.5)])
def test_the_recorded_plans_give_the_noise_scale_no_upper_bound(noise_scale, percent):
    assert 100 * np.sqrt(np.mean(errors_of_the_formula(noise_scale) ** 2)) == pytest.approx(percent, abs=0.05)


@pytest.mark.parametrize(("noise_scale", "batch", "inner_steps"), [(248, 64, 48), (1000, 252, 14)])
def test_the_noise_scale_decides_the_plan_on_a_slow_link(noise_scale, batch, inner_steps):
    link = Link.parse("10Mb/s,1ms")
    exchanges = [0.0, *(link.seconds(gradient_bytes(workers, 125_248) / workers) for workers in (2, 3, 4))]
    situation = controller.Situation(
        speeds=(350.0,) * 4, exchange_seconds=tuple(exchanges), joining_seconds=0.0, seconds_left=80.0,
        longest_round=80.0 / controller.LEAST_ROUNDS, noise_scale=noise_scale, smallest_batch=16, smallest_share=16,
        largest_batch=256, free_steps=30, synchronous=False,
    )  # fmt: skip
    assert controller.next_plan(situation) == RoundPlan(4, batch, inner_steps)


def test_the_formula_picks_a_recorded_plan_near_the_best_on_every_link_of_the_map():
    plans = [plan for plan in all_plans() if plan.family != "AdLoCo-J"]

    def worth(plan) -> float:
        rounds = plan.steps / plan.exchanges if plan.family == "DiLoCo" else 0
        workers = plan.workers if plan.family == "DiLoCo" else 1
        return plan.batch * plan.steps * example_value(plan.batch, workers, rounds)

    for seconds in TIMES:
        for nodes in NODES:
            for rate in RATES.values():
                for latency in LATENCIES.values():
                    possible = open_plans(plans, Link(rate, latency), nodes, seconds)
                    best = min(plan.perplexity for plan in possible)
                    assert max(possible, key=worth).perplexity < 1.016 * best


@pytest.mark.parametrize(
    ("link", "seconds", "kinds"),
    [
        ("10Gb/s,1ms", 60, ["synchronous", "DiLoCo", "one worker"]),
        ("10Mb/s,1ms", 80, ["DiLoCo", "one worker"]),
        ("1Mb/s,1ms", 262, ["one worker"]),
    ],
)
def test_a_plan_is_a_configuration_that_run_accepts(link, seconds, kinds, capsys):
    main(["--nodes", "4", "--speed", "350", "--link", link, "--seconds", str(seconds)])
    printed = capsys.readouterr().out
    assert re.findall(r"^(\w.*): worth \d", printed, flags=re.MULTILINE) == kinds
    commands = re.findall(r"python run.py (.*)", printed)
    assert len(commands) == len(kinds)
    for command in commands:
        assert parse_config({}, shlex.split(command), CHECKS)[0].simulates_time_budget
