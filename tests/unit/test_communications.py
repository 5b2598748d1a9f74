"""The laws of the batch against sums over rounds, and fits against laws that are known."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.theory import (
    DRIFT,
    GROWING,
    BatchLaw,
    Problem,
    best_fit,
    fit_laws,
    fixed_batch_need,
    norm_test_need,
    predict_rounds,
)

LAWS = [
    BatchLaw("constant", 12.0),
    BatchLaw("linear", 8.0, 3.0),
    BatchLaw("geometric", 8.0, math.log(1.25)),
    BatchLaw("linear", 8.0, 3.0, largest=30.0),
    BatchLaw("geometric", 8.0, math.log(1.25), largest=40.0),
    BatchLaw("constant", 12.0, largest=12.0),
]


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_examples_are_the_sum_over_rounds_and_rounds_are_their_inverse(law):
    used = 0.0
    for number in range(1, 26):
        used += 20 * law.batch(number)
        assert law.examples(number, 20) == pytest.approx(used)
        assert law.rounds(used, 20) == pytest.approx(number)
    assert law.rounds(0.0, 20) == 0.0


def test_the_laws_on_paper():
    # 8 + 11 + 14 = 33; 8 + 10 + 12.5 = 30.5; capped at 12: 8 + 11 + 12 + 12 = 43.
    assert BatchLaw("linear", 8.0, 3.0).examples(3, 10) == pytest.approx(330.0)
    assert BatchLaw("geometric", 8.0, math.log(1.25)).examples(3, 1) == pytest.approx(30.5)
    assert BatchLaw("linear", 8.0, 3.0, 12.0).examples(4, 1) == pytest.approx(43.0)


def test_a_batch_stays_at_its_largest_however_many_rounds_follow():
    law = BatchLaw("geometric", 8.0, math.log(2.0), largest=20.0)
    assert [law.batch(number) for number in (2, 3, 4, 10**6)] == pytest.approx([16.0, 20.0, 20.0, 20.0])


@pytest.mark.parametrize(
    ("law", "ratio"), [(LAWS[0], 100.0), (LAWS[1], 10.0)], ids=["constant: C ~ N", "linear: C ~ sqrt(N)"]
)
def test_how_communications_grow_with_examples(law, ratio):
    assert law.rounds(1e12, 20) / law.rounds(1e10, 20) == pytest.approx(ratio, rel=1e-3)


def test_communications_grow_like_the_logarithm_in_the_geometric_regime():
    law = LAWS[2]
    per_decade = law.rounds(1e10, 20) - law.rounds(1e9, 20)
    assert per_decade == pytest.approx(math.log(10) / math.log(1.25), rel=1e-3)


@settings(max_examples=40)
@given(
    st.sampled_from(["linear", "geometric"]),
    st.floats(20.0, 100.0),
    st.floats(0.08, 0.5),
    st.integers(8, 40),
)
def test_a_law_without_noise_is_found_exactly(regime, first, growth, count):
    true = BatchLaw(regime, first, growth * first if regime == "linear" else growth)
    fits = fit_laws([true.batch(number) for number in range(1, count + 1)])
    law = fits[regime].law
    assert law.first == pytest.approx(true.first, rel=1e-6)
    assert law.growth == pytest.approx(true.growth, rel=1e-5)
    assert best_fit(fits) is not fits["constant"]


@pytest.mark.parametrize("true", LAWS[:3], ids=lambda law: law.regime)
def test_the_regime_is_picked_and_the_interval_holds_the_truth(true):
    """Over twenty noisy runs: nearly always the right regime, and a 90% interval that is right most of the time."""
    right = held = 0
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(0.0, 0.05, 40)
        batches = [true.batch(number) * math.exp(noise[number - 1]) for number in range(1, 41)]
        fits = fit_laws(batches)
        right += best_fit(fits).law.regime == true.regime
        prediction = predict_rounds(fits, lambda law: law.rounds(true.examples(120, 20), 20))
        assert prediction.low <= prediction.value <= prediction.high
        held += prediction.low <= 120 <= prediction.high
    assert right >= 15
    assert held >= 15
    assert prediction.high < 400


def test_drawn_parameters_have_the_covariance_of_least_squares():
    true, count = BatchLaw("geometric", 200.0, 0.05), 30
    batches = [true.batch(number) * math.exp(0.05 * (-1) ** number) for number in range(1, count + 1)]
    fit = fit_laws(batches)["geometric"]
    design = np.stack([np.ones(count), np.arange(count)], axis=1)
    expected = fit.error**2 * np.linalg.inv(design.T @ design)
    drawn = np.cov([[math.log(law.first), law.growth] for law in fit.draws], rowvar=False, bias=True)
    np.testing.assert_allclose(drawn, expected, rtol=0.06)


def test_residuals_that_go_together_widen_the_interval():
    """The same deviations from the law, once alternating and once in two long waves: two waves say less."""
    true, widths = BatchLaw("geometric", 16.0, 0.05), []
    for signs in ([1.0, -1.0] * 20, ([1.0] * 10 + [-1.0] * 10) * 2):
        batches = [true.batch(number) * math.exp(0.05 * sign) for number, sign in enumerate(signs, start=1)]
        prediction = predict_rounds(fit_laws(batches), lambda law: law.rounds(true.examples(100, 20), 20))
        widths.append(prediction.high - prediction.low)
    assert widths[1] > 2.0 * widths[0]


def test_smoothed_statistics_widen_the_interval():
    """As far as their smoothing makes neighbours alike, whatever few residuals happen to look like."""
    batches = [16.0 * math.exp(0.05 * index + 0.05 * (-1) ** index) for index in range(20)]
    widths = []
    for smoothing in (0.0, 0.6):
        law = fit_laws(batches, smoothing=smoothing)["geometric"]
        widths.append(np.std([draw.growth for draw in law.draws]))
    assert widths[1] == pytest.approx(2.0 * widths[0], rel=1e-6)  # (1 + 0.6) / (1 - 0.6) = 4 times the variance


def coverage(noise_of, drift: float, wander: float = 0.0) -> tuple[float, float]:
    """Of 100 runs whose first 20 of 60 rounds are fitted: intervals that hold the rest, and their median high / low."""
    held, ratios = 0, []
    for seed in range(100):
        generator = np.random.default_rng(seed)
        true = LAWS[1] if seed % 2 else BatchLaw("geometric", 8.0, 0.06)
        noise = noise_of(generator)
        batches = [true.batch(number + 1) * math.exp(noise[number]) for number in range(60)]
        examples = 20 * math.fsum(batches[20:])
        fits = fit_laws(batches[:20], regimes=GROWING)
        prediction = predict_rounds(fits, lambda law, examples=examples: law.after(20).rounds(examples, 20), drift)
        held += prediction.low <= 40 * math.exp(wander * generator.normal()) <= prediction.high
        ratios.append(prediction.high / prediction.low)
    return held / 100, float(np.median(ratios))


def correlated(generator) -> np.ndarray:
    """Deviations of 0.1 whose neighbours have a correlation of 0.8."""
    noise, values = generator.normal(0.0, 0.06, 60), [generator.normal(0.0, 0.1)]
    for number in range(1, 60):
        values.append(0.8 * values[-1] + noise[number])
    return np.array(values)


def white(generator) -> np.ndarray:
    return generator.normal(0.0, 0.05, 60)


def test_the_interval_holds_where_deviations_are_correlated():
    held, ratio = coverage(correlated, DRIFT)
    assert held >= 0.85
    assert ratio < 3.5


def test_the_interval_is_as_wide_as_the_drift_that_it_is_for():
    """Of white noise, whose parameters are nearly known, nine in ten of what wanders by the drift."""
    assert 0.85 <= coverage(white, DRIFT, wander=DRIFT)[0] <= 0.97


def test_few_rounds_are_no_proof_that_a_batch_never_grows():
    batches = [8.0, 9.5, 8.2, 9.9, 9.6]
    assert best_fit(fit_laws(batches)).law.regime == "constant"
    grown = fit_laws(batches, regimes=GROWING)
    assert set(grown) == {"linear", "geometric"}
    assert math.fsum(fit.weight for fit in grown.values()) == pytest.approx(1.0)
    assert best_fit(grown).law.growth > 0.0


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_a_law_from_a_later_round_on_is_the_same_law(law):
    assert [law.after(7).batch(number) for number in range(1, 20)] == pytest.approx(
        [law.batch(7 + number) for number in range(1, 20)]
    )


def test_rounds_at_the_largest_batch_say_nothing_of_growth():
    true = BatchLaw("linear", 8.0, 4.0, largest=40.0)
    fits = fit_laws([true.batch(number) for number in range(1, 30)], largest=40.0)
    assert best_fit(fits).law.regime == "linear"
    assert best_fit(fits).law.growth == pytest.approx(4.0)
    assert best_fit(fits).law.rounds(true.examples(100, 20), 20) == pytest.approx(100.0)


def test_a_batch_that_stays_is_constant_and_too_few_rounds_are_refused():
    fits = fit_laws([16.0] * 12)
    assert best_fit(fits).law.regime == "constant"
    assert predict_rounds(fits, lambda law: law.rounds(16 * 20 * 50, 20)).value == pytest.approx(50.0)
    with pytest.raises(ValueError, match="at least 4 rounds below the largest batch, got 3"):
        fit_laws([8.0, 9.0, 10.0, 16.0, 16.0], largest=16.0)


# Bounds: L = 2, V = 30, gap = 5, target 0.1.
PROBLEM = Problem(smoothness=2.0, variance=30.0, gap=5.0)


def test_bounds_on_paper():
    # gamma = min(1/2, 0.1 * 6 / 120) = 0.005; K = 4 * 5 / (0.005 * 0.1) = 40,000.
    fixed = fixed_batch_need(PROBLEM, 0.1, 6.0, 20)
    assert (fixed.inner_steps, fixed.communications, fixed.examples) == pytest.approx((40_000, 2_000, 240_000))
    assert fixed_batch_need(PROBLEM, 0.1, 6.0, 1).communications == pytest.approx(40_000)
    # A batch so large that noise does not matter: gamma = 1/2, K = 400, however large it is.
    assert fixed_batch_need(PROBLEM, 0.1, 1e6, 20).inner_steps == pytest.approx(400)
    # eta = 1: K = 2 * 2 * 2 * 5 / 0.1 = 400; the batches are 0.75 k, the last of them 300 = V / (eta^2 target).
    tested = norm_test_need(PROBLEM, 0.1, 1.0, 20)
    assert (tested.inner_steps, tested.communications) == pytest.approx((400, 20))
    assert tested.examples == pytest.approx(sum(0.75 * k for k in range(1, 401)))
    # mu = 1: rho = 1 - 1/4; K = ln(2 * 2 * 5 / 0.1) / ln(4/3).
    curved = norm_test_need(Problem(2.0, 30.0, 5.0, 1.0), 0.1, 1.0, 20)
    assert curved.inner_steps == pytest.approx(math.log(200) / math.log(4 / 3))
    assert curved.examples == pytest.approx(1.5 * (200 - 1) / (4 / 3 - 1))


def test_a_quadratic_obeys_the_bounds_of_the_norm_test():
    """Gradient descent with noise whose size passes the test at every step, on F = sum of a_i x_i^2 / 2."""
    curvatures, eta, steps = np.array([0.2, 0.5, 1.0, 2.0]), 0.8, 60
    smoothness, mu = curvatures.max(), curvatures.min()
    generator, gaps, gradients = np.random.default_rng(0), np.zeros(steps), np.zeros(steps)
    runs, start = 400, np.ones(4)
    for _ in range(runs):
        x = start.copy()
        for step in range(steps):
            gradient = curvatures * x
            gradients[step] += gradient @ gradient / runs
            gaps[step] += 0.5 * (curvatures * x) @ x / runs
            noise = generator.normal(size=4)
            noise *= eta * np.linalg.norm(gradient) / np.sqrt(4.0)
            x = x - (gradient + noise) / (smoothness * (1.0 + eta**2))
    gap = 0.5 * curvatures @ start**2
    scaled = smoothness * (1.0 + eta**2)
    for step in range(1, steps):
        assert gradients[: step + 1].min() <= 2.0 * scaled * gap / (step + 1)
        assert gaps[step] <= 1.02 * gap * (1.0 - mu / scaled) ** step


def test_laws_drawn_without_growth_pass_through_the_batches():
    """Of a linear law that starts near nothing: a growth of 0 goes with the geometric mean of the batches, not b_1."""
    batches = [(1.0 + 2.0 * number) * math.exp(0.8 * (-1) ** number) for number in range(12)]
    still = [law.first for law in fit_laws(batches, smoothing=0.9)["linear"].draws if law.growth == 0.0]
    assert len(still) > 10
    assert np.median(still) == pytest.approx(math.exp(np.mean(np.log(batches))), rel=0.3)
