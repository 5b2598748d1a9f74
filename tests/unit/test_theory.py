"""The laws of the batch against sums over rounds, and fits against known laws."""

import math

import numpy as np
import pytest

from algorithms.theory import DRIFT, REGIMES, BatchLaw, TooFewRoundsError, fit_laws, predict_rounds

CONSTANT = BatchLaw("linear", 12.0)
LINEAR = BatchLaw("linear", 8.0, 3.0)
GEOMETRIC = BatchLaw("geometric", 8.0, math.log(1.25))
CAPPED = [
    BatchLaw("linear", 8.0, 3.0, 30.0),
    BatchLaw("geometric", 8.0, math.log(1.25), 40.0),
    BatchLaw("linear", 12.0, largest=12.0),
]


@pytest.mark.parametrize("law", [CONSTANT, LINEAR, GEOMETRIC, *CAPPED], ids=str)
def test_examples_are_the_sum_over_rounds_and_rounds_are_their_inverse(law):
    used = 0.0
    for number in range(1, 26):
        used += 20 * law.batch(number)
        assert law.examples(number, 20) == pytest.approx(used)
        assert law.rounds(used, 20) == pytest.approx(number)
    assert law.rounds(0.0, 20) == 0.0


def test_the_laws_by_hand():
    # 8 + 11 + 14 = 33; 8 + 10 + 12.5 = 30.5; capped at 12: 8 + 11 + 12 + 12 = 43.
    assert LINEAR.examples(3, 10) == pytest.approx(330.0)
    assert GEOMETRIC.examples(3, 1) == pytest.approx(30.5)
    assert BatchLaw("linear", 8.0, 3.0, 12.0).examples(4, 1) == pytest.approx(43.0)
    capped = BatchLaw("geometric", 8.0, math.log(2.0), 20.0)
    assert [capped.batch(number) for number in (2, 3, 4, 10**6)] == pytest.approx([16.0, 20.0, 20.0, 20.0])


def test_communications_grow_like_the_examples_their_root_or_their_logarithm():
    assert CONSTANT.rounds(1e12, 20) / CONSTANT.rounds(1e10, 20) == pytest.approx(100.0)
    assert LINEAR.rounds(1e12, 20) / LINEAR.rounds(1e10, 20) == pytest.approx(10.0, rel=1e-3)
    per_decade = GEOMETRIC.rounds(1e10, 20) - GEOMETRIC.rounds(1e9, 20)
    assert per_decade == pytest.approx(math.log(10) / math.log(1.25), rel=1e-3)


# Fits


@pytest.mark.parametrize("true", [LINEAR, GEOMETRIC, BatchLaw("linear", 90.0, 30.0), BatchLaw("geometric", 20.0, 0.08)])
def test_a_law_without_noise_is_found_exactly(true):
    law, other = fit_laws([true.batch(number) for number in range(1, 20)])
    assert (law.regime, {law.regime, other.regime}) == (true.regime, set(REGIMES))
    assert law.first == pytest.approx(true.first, rel=1e-6)
    assert law.growth == pytest.approx(true.growth, rel=1e-5)


def test_a_falling_batch_is_fitted_with_the_constant_law():
    # The least squares of logarithms give the geometric mean.
    assert fit_laws([32.0, 16.0, 8.0, 4.0])[0].growth == 0.0
    assert fit_laws([32.0, 16.0, 8.0, 4.0])[0].first == pytest.approx(math.sqrt(128.0))


def correlated(generator) -> np.ndarray:
    """Deviations of 0.1 whose neighbours have a correlation of 0.8."""
    values = [generator.normal(0.0, 0.1)]
    for _ in range(59):
        values.append(0.8 * values[-1] + generator.normal(0.0, 0.06))
    return np.array(values)


def white(generator) -> np.ndarray:
    return generator.normal(0.0, 0.05, 60)


@pytest.mark.parametrize(("noise_of", "wander"), [(correlated, 0.0), (white, DRIFT)])
def test_nine_in_ten_intervals_hold_the_rest_of_a_run(noise_of, wander):
    """Fit the first 20 of 60 rounds of 100 runs, with correlated noise, or with white noise and a drift."""
    held = 0
    ratios = []
    for seed in range(100):
        generator = np.random.default_rng(seed)
        true = LINEAR if seed % 2 else BatchLaw("geometric", 8.0, 0.06)
        noise = noise_of(generator)
        batches = [true.batch(number + 1) * math.exp(noise[number]) for number in range(60)]
        prediction = predict_rounds(fit_laws(batches[:20]), 20, 20 * math.fsum(batches[20:]), 20)
        held += prediction.low <= 40 * math.exp(wander * generator.normal()) <= prediction.high
        ratios.append(prediction.high / prediction.low)
    assert held >= 85
    assert np.median(ratios) < 4.5


def test_rounds_at_the_largest_batch_say_nothing_about_growth():
    true = BatchLaw("linear", 8.0, 4.0, largest=40.0)
    law = fit_laws([true.batch(number) for number in range(1, 30)], largest=40.0)[0]
    assert law.growth == pytest.approx(4.0)
    assert law.rounds(true.examples(100, 20), 20) == pytest.approx(100.0)


def test_a_constant_batch_is_constant_and_three_rounds_are_too_few():
    (law,) = fit_laws([16.0] * 12, grows=False)
    prediction = predict_rounds([law], 12, 16 * 20 * 50, 20)
    assert (prediction.value, prediction.low, prediction.high) == pytest.approx((50.0, 50.0, 50.0))
    with pytest.raises(TooFewRoundsError, match=r"at least 4 rounds .* got 3"):
        fit_laws([8.0, 9.0, 10.0, 16.0, 16.0], largest=16.0)
