"""The requested batch over the rounds, without a model."""

import dataclasses
import json

import numpy as np
import pytest

from algorithms.batch.calc_batch import BATCH_TESTS, BatchControl, BatchControlSettings, BatchTestParameters
from algorithms.batch.gradient_statistics import Comparison, SampleEstimate, sample_estimate
from algorithms.batch.switch_mode import threshold_switch_mode
from algorithms.schedule.schedules import LearningRateSchedule

PARAMETERS = BatchTestParameters(eta=1.0, theta=0.9, nu=5.84, debias=True, confidence=2.0)
SETTINGS = BatchControlSettings(
    test="norm_test",
    parameters=PARAMETERS,
    eta_at_end=None,
    first_round=1,
    smoothing=0.0,
    max_batch_growth=1e6,
)


def control(request: int = 4, **changes) -> BatchControl:
    of_test = {name: changes.pop(name) for name in list(changes) if hasattr(PARAMETERS, name)}
    parameters = dataclasses.replace(PARAMETERS, **of_test)
    return BatchControl(dataclasses.replace(SETTINGS, parameters=parameters, **changes), request)


def sample(squared_norm: float, error: float, variance: float = 80.0) -> SampleEstimate:
    return SampleEstimate(8, 56, squared_norm, error, variance, 0.0)


def conclude(own: BatchControl, *samples: SampleEstimate, largest: int = 1000):
    return own.conclude(samples, None, own.requested_batch, 0.5, largest)


def test_a_request_grows_as_far_as_the_lower_bound_asks():
    """80 / (2 + 2 * 1) = 20, where the estimate alone would ask for 40."""
    own = control()
    statistics, warning = conclude(own, sample(2.0, 1.0))
    assert (own.requested_batch, statistics.squared_norm, statistics.squared_norm_error) == (20, 2.0, 1.0)
    assert warning is None
    plain = control(confidence=0.0)
    conclude(plain, sample(2.0, 1.0))
    assert plain.requested_batch == 40


def test_products_between_workers_count_like_those_within_them():
    """A squared norm of 2 and one of 6, of equally many pairs: 80 / 4."""
    own = control(confidence=0.0)
    own.conclude([sample(2.0, 0.0)], sample(6.0, 0.0), own.requested_batch, 0.5, 1000)
    assert own.requested_batch == 20


def test_eta_follows_the_progress_of_the_run():
    requests = []
    for progress in (0.0, 0.5, 1.0):
        own = control(eta=2.0, eta_at_end=1.0)
        own.conclude([sample(1.0, 0.0, variance=36.0)], None, 4, progress, 1000)
        requests.append(own.requested_batch)
    assert requests == [9, 16, 36]


def test_a_request_stays_where_it_is_once_the_learning_rate_falls():
    own = control(frozen_from=0.8)
    own.conclude([sample(1.0, 0.0)], None, 4, 0.8, 1000)
    grown = own.requested_batch
    assert grown > 4
    statistics, warning = own.conclude([sample(0.1, 0.0)], None, 4, 0.81, 1000)
    assert (own.requested_batch, warning) == (grown, None)
    assert statistics.squared_norm < 1.0  # what was seen is still told
    assert LearningRateSchedule("warmup_stable_decay").decay_begins == 0.8
    assert LearningRateSchedule("cosine").decay_begins == 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_statistics_that_are_not_finite_are_forgotten_with_a_warning(bad):
    own = control(smoothing=0.9)
    conclude(own, sample(2.0, 1.0))
    before = own.state_dict()
    for samples in ([sample(bad, 1.0)], [sample(bad, 1.0), sample(-bad, 1.0)]):
        _, warning = conclude(own, *samples)
        assert "zero or not finite" in warning
    assert own.state_dict() == before


@pytest.mark.parametrize(
    ("answer", "request_", "problem"),
    [(12.5, 13, None), (float("inf"), 1000, None), (None, 4, None), (float("nan"), 4, "own returned NaN")],
)
def test_a_request_is_an_integer(monkeypatch, answer, request_, problem):
    monkeypatch.setitem(BATCH_TESTS, "own", lambda *seen: answer)
    own = control(test="own")
    _, warning = conclude(own, sample(2.0, 1.0))
    assert own.requested_batch == request_
    assert isinstance(own.requested_batch, int)
    assert warning is None if problem is None else problem in warning


@pytest.mark.parametrize("smoothing", [0.0, 0.9])
def test_a_test_of_inner_products_without_enough_samples_is_warned_of(smoothing):
    """With z > 0 the error of their variance needs more samples than one."""
    own = control(test="inner_product_test", smoothing=smoothing, confidence=0.0)
    _, warning = conclude(own, dataclasses.replace(sample(2.0, 1.0), inner_product_variance=float("nan")))
    assert "too few samples for inner_product_test" in warning
    own = control(test="inner_product_test", smoothing=smoothing)
    _, warning = conclude(own, dataclasses.replace(sample(2.0, 1.0), inner_product_variance=6.0, overlap=4.0))
    assert "too few samples for inner_product_test" in warning
    assert own.requested_batch == 4
    own = control(test="inner_product_test", confidence=0.0)  # noise alone is no lack of samples
    noise = dataclasses.replace(sample(-1.0, 1.0), inner_product_variance=6.0, overlap=4.0)
    assert conclude(own, noise)[1] is None


def test_without_samples_nothing_is_said():
    own = control()
    assert conclude(own) == (None, None)
    assert own.requested_batch == 4


def test_a_control_continues_from_its_state():
    own, other = control(smoothing=0.9), control(smoothing=0.9)
    conclude(own, sample(2.0, 1.0))
    other.load_state_dict(json.loads(json.dumps(own.state_dict())))
    for each in (own, other):
        conclude(each, sample(0.5, 0.1))
    assert other.state_dict() == own.state_dict()


# Gaussian gradients with a known mean and covariance, so that the right request is known: with eta 1 it is the noise
# scale V / ||G||^2. Only the gradients are drawn; statistics, smoothing, batch test and switch mode are those of a run.


def draw_sample(variances: np.ndarray, batch: int, generator: np.random.Generator) -> SampleEstimate:
    """Return the statistics of a batch; ||G|| = 1, along the noise."""
    mean = np.sqrt(variances / variances.sum())
    gradients = mean + np.sqrt(variances) * generator.standard_normal((batch, len(mean)), dtype=np.float32)
    norms = (gradients**2).sum(1)
    g = gradients.mean(0)
    whole = Comparison(batch, float(g @ g), float(norms.sum()), norms.tolist(), (gradients @ g).tolist())
    return sample_estimate(whole, float((norms**2).sum()))


def last_request(
    weights: np.ndarray, noise_scale: float, max_batch: int, rounds: int, seed: int, confidence: float
) -> int:
    """Return the request of one worker, which starts with 8, after n rounds of the norm test."""
    variances = noise_scale * weights / weights.sum()
    generator = np.random.default_rng(seed)
    own = control(8, first_round=3, smoothing=0.9, confidence=confidence, max_batch_growth=2.0)
    for _ in range(3, rounds + 1):
        batch = threshold_switch_mode(own.requested_batch, max_batch).effective_batch
        own.conclude([draw_sample(variances, batch, generator)], None, batch, 0.0, 10**9)
    return own.requested_batch


ISOTROPIC = np.ones(100)
DECAYING = 1.0 / np.arange(1, 301)


@pytest.mark.parametrize("weights", [ISOTROPIC, DECAYING])
def test_the_largest_of_300_requests_does_not_drift_above_the_right_one(weights):
    """The same runs without a lower bound end 1.1 to 2.6 times too high."""
    ends = {}
    for confidence in (0.0, 2.0):
        requests = [last_request(weights, 50, 32, 300, seed, confidence) for seed in range(3)]
        ends[confidence] = np.array(requests) / 50
    assert 0.8 < np.median(ends[2.0]) < 1.25
    assert ends[2.0].max() < 1.5
    assert (ends[0.0] > ends[2.0]).all()
