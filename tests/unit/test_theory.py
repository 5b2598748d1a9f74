"""The laws of the batch against sums over rounds, fits against known laws, and bounds against gradient descent."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.theory import (
    DRIFT,
    GROWING,
    LAWS,
    BatchLaw,
    GeometricLaw,
    LinearLaw,
    best_fit,
    fit_laws,
    predict_rounds,
)

CONSTANT = BatchLaw(12.0)
LINEAR = LinearLaw(8.0, 3.0)
GEOMETRIC = GeometricLaw(8.0, math.log(1.25))
CAPPED = [LinearLaw(8.0, 3.0, 30.0), GeometricLaw(8.0, math.log(1.25), 40.0), BatchLaw(12.0, largest=12.0)]


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
    assert LinearLaw(8.0, 3.0, 12.0).examples(4, 1) == pytest.approx(43.0)
    capped = GeometricLaw(8.0, math.log(2.0), 20.0)
    assert [capped.batch(number) for number in (2, 3, 4, 10**6)] == pytest.approx([16.0, 20.0, 20.0, 20.0])


def test_communications_grow_like_the_examples_their_root_or_their_logarithm():
    assert CONSTANT.rounds(1e12, 20) / CONSTANT.rounds(1e10, 20) == pytest.approx(100.0)
    assert LINEAR.rounds(1e12, 20) / LINEAR.rounds(1e10, 20) == pytest.approx(10.0, rel=1e-3)
    per_decade = GEOMETRIC.rounds(1e10, 20) - GEOMETRIC.rounds(1e9, 20)
    assert per_decade == pytest.approx(math.log(10) / math.log(1.25), rel=1e-3)


# Fits


@settings(max_examples=20)
@given(st.sampled_from(GROWING), st.floats(20.0, 100.0), st.floats(0.08, 0.5), st.integers(8, 40))
def test_a_law_without_noise_is_found_exactly(regime, first, growth, count):
    true = LAWS[regime](first, growth * first if regime == "linear" else growth)
    fits = fit_laws([true.batch(number) for number in range(1, count + 1)])
    law = fits[regime].law
    assert law.first == pytest.approx(true.first, rel=1e-6)
    assert law.growth == pytest.approx(true.growth, rel=1e-5)
    assert best_fit(fits) is not fits["constant"]


@pytest.mark.parametrize("true", [CONSTANT, LINEAR, GEOMETRIC], ids=lambda law: law.regime)
def test_noise_hides_neither_the_regime_nor_the_number_of_rounds(true):
    """In most of twenty runs the regime is right, and the interval holds the truth."""
    right = 0
    held = 0
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(0.0, 0.05, 40)
        fits = fit_laws([true.batch(number) * math.exp(noise[number - 1]) for number in range(1, 41)])
        right += best_fit(fits).law.regime == true.regime
        prediction = predict_rounds(fits, lambda law: law.rounds(true.examples(120, 20), 20))
        assert prediction.low <= prediction.value <= prediction.high
        held += prediction.low <= 120 <= prediction.high
    assert right >= 15
    assert held >= 15
    assert prediction.high < 400


@pytest.mark.parametrize("regime", GROWING)
def test_the_error_of_the_growth_is_that_of_least_squares(regime):
    """Against the covariance (X'X)^-1 of the linearised model; alternating residuals have no autocorrelation."""
    true = LAWS[regime](200.0, 10.0 if regime == "linear" else 0.05)
    batches = [true.batch(number) * math.exp(0.05 * (-1) ** number) for number in range(1, 31)]
    fit = fit_laws(batches)[regime]

    def relative(law):
        return law.growth / law.first if regime == "linear" else law.growth

    passed = np.arange(30)
    growth = relative(fit.law)
    slopes = passed / (1.0 + growth * passed) if regime == "linear" else passed
    residuals = np.log(batches) - np.log([fit.law.batch(number) for number in range(1, 31)])
    covariance = np.mean(residuals**2) * np.linalg.inv(
        np.stack([np.ones(30), slopes]) @ np.stack([np.ones(30), slopes]).T
    )
    error = math.sqrt(covariance[1, 1])
    assert relative(fit.faster) - growth == pytest.approx(error, rel=1e-3)
    assert growth - relative(fit.slower) == pytest.approx(error, rel=1e-3)


def test_correlated_residuals_widen_the_interval():
    """The same deviations from the law, alternating and in two long waves."""
    true = GeometricLaw(16.0, 0.05)
    widths = []
    for signs in ([1.0, -1.0] * 20, ([1.0] * 10 + [-1.0] * 10) * 2):
        batches = [true.batch(number) * math.exp(0.05 * sign) for number, sign in enumerate(signs, start=1)]
        prediction = predict_rounds(fit_laws(batches), lambda law: law.rounds(true.examples(100, 20), 20))
        widths.append(prediction.high - prediction.low)
    assert widths[1] > 2.0 * widths[0]


def correlated(generator) -> np.ndarray:
    """Deviations of 0.1 whose neighbours have a correlation of 0.8."""
    values = [generator.normal(0.0, 0.1)]
    for _ in range(59):
        values.append(0.8 * values[-1] + generator.normal(0.0, 0.06))
    return np.array(values)


def white(generator) -> np.ndarray:
    return generator.normal(0.0, 0.05, 60)


@pytest.mark.parametrize(
    ("noise_of", "wander", "least", "most"), [(correlated, 0.0, 0.85, 1.0), (white, DRIFT, 0.85, 0.97)]
)
def test_nine_in_ten_intervals_hold_the_rest_of_a_run(noise_of, wander, least, most):
    """Of 100 runs whose first 20 of 60 rounds are fitted, with correlated noise, or with white noise and a drift."""
    held = 0
    ratios = []
    for seed in range(100):
        generator = np.random.default_rng(seed)
        true = LINEAR if seed % 2 else GeometricLaw(8.0, 0.06)
        noise = noise_of(generator)
        batches = [true.batch(number + 1) * math.exp(noise[number]) for number in range(60)]
        examples = 20 * math.fsum(batches[20:])
        fits = fit_laws(batches[:20], regimes=GROWING)
        prediction = predict_rounds(fits, lambda law, examples=examples: law.after(20).rounds(examples, 20), DRIFT)
        held += prediction.low <= 40 * math.exp(wander * generator.normal()) <= prediction.high
        ratios.append(prediction.high / prediction.low)
    assert least <= held / 100 <= most
    assert np.median(ratios) < 3.5


def test_few_rounds_do_not_prove_that_a_batch_never_grows():
    batches = [8.0, 9.5, 8.2, 9.9, 9.6]
    assert best_fit(fit_laws(batches)).law.regime == "constant"
    grown = fit_laws(batches, regimes=GROWING)
    assert set(grown) == {"linear", "geometric"}
    assert math.fsum(fit.weight for fit in grown.values()) == pytest.approx(1.0)
    assert best_fit(grown).law.growth > 0.0


@pytest.mark.parametrize("law", [CONSTANT, LINEAR, GEOMETRIC, *CAPPED], ids=str)
def test_a_law_from_a_later_round_on_is_the_same_law(law):
    later = [law.after(7).batch(number) for number in range(1, 20)]
    assert later == pytest.approx([law.batch(7 + number) for number in range(1, 20)])


def test_rounds_at_the_largest_batch_say_nothing_about_growth():
    true = LinearLaw(8.0, 4.0, largest=40.0)
    law = best_fit(fit_laws([true.batch(number) for number in range(1, 30)], largest=40.0)).law
    assert law.regime == "linear"
    assert law.growth == pytest.approx(4.0)
    assert law.rounds(true.examples(100, 20), 20) == pytest.approx(100.0)


def test_a_constant_batch_is_constant_and_three_rounds_are_too_few():
    fits = fit_laws([16.0] * 12)
    assert best_fit(fits).law.regime == "constant"
    assert predict_rounds(fits, lambda law: law.rounds(16 * 20 * 50, 20)).value == pytest.approx(50.0)
    with pytest.raises(ValueError, match=r"at least 4 rounds .* got 3"):
        fit_laws([8.0, 9.0, 10.0, 16.0, 16.0], largest=16.0)


# Bounds


def test_a_quadratic_obeys_the_bounds_of_the_norm_test():
    """Gradient descent on F = sum of a_i x_i^2 / 2 with noise whose size passes the norm test at every step.

    docs/theory.md: the smallest ||grad F||^2 of K steps is at most 2 L (1 + eta^2) gap / K, and the gap shrinks by
    1 - mu / (L (1 + eta^2)) per step.
    """
    curvatures = np.array([0.2, 0.5, 1.0, 2.0])
    eta = 0.8
    runs = 400
    steps = 60
    scaled = curvatures.max() * (1.0 + eta**2)
    generator = np.random.default_rng(0)
    x = np.ones((runs, 4))
    first_gap = 0.5 * curvatures.sum()
    smallest = math.inf
    for step in range(steps):
        gradient = curvatures * x
        gap = 0.5 * (curvatures * x**2).sum(1).mean()
        assert gap <= 1.02 * first_gap * (1.0 - curvatures.min() / scaled) ** step
        smallest = min(smallest, (gradient**2).sum(1).mean())
        assert smallest <= 2.0 * scaled * first_gap / (step + 1)
        noise = generator.normal(size=(runs, 4)) * eta * np.linalg.norm(gradient, axis=1, keepdims=True) / 2.0
        x = x - (gradient + noise) / scaled
