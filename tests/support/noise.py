"""Batch control on synthetic gradients: Gaussian, with a known mean and covariance, so that the right request is known.

For the norm test with eta 1 it is the noise scale V / ||G||^2. Only the gradients are drawn; statistics, smoothing,
batch test and switch mode are those of a run.
"""

import numpy as np
import torch

from algorithms.batch.batch_control import BatchControl, BatchControlSettings
from algorithms.batch.gradient_statistics import (
    MINIMUM_WORKERS,
    Comparison,
    SampleEstimate,
    across_workers_estimate,
    gradient_moments,
    sample_estimate,
)
from algorithms.batch.switch_mode import threshold_switch_mode
from algorithms.flat import sketch
from utils.config.schema import Config

# The batch test of config.yaml.
ADDITIONS = {
    "debias": True,
    "statistics_smoothing": 0.9,
    "batch_test_confidence": 2.0,
    "batch_test_start": 3,
    "max_batch_growth": 2.0,
}


def noise_variances(spectrum: str, noise_scale: float) -> np.ndarray:
    """Variances of the noise per dimension; their sum is noise_scale."""
    weights = np.ones(100) if spectrum == "isotropic" else 1.0 / np.arange(1, 301)
    return noise_scale * weights / weights.sum()


def draw_sample(variances: np.ndarray, batch: int, generator: np.random.Generator) -> tuple[SampleEstimate, np.ndarray]:
    """The statistics of one worker's batch, and the sum of its gradients; ||G|| = 1, in the directions of the noise."""
    mean = np.sqrt(variances / variances.sum())
    gradients = mean + np.sqrt(variances) * generator.standard_normal((batch, len(mean)), dtype=np.float32)
    norms = (gradients**2).sum(1)
    average = gradients.mean(0)
    whole = Comparison(
        batch, float(average @ average), float(norms.sum()), norms.tolist(), (gradients @ average).tolist()
    )
    return sample_estimate(whole, float((norms**2).sum()), None), gradients.sum(0)


def last_request(
    spectrum: str, noise_scale: float, workers: int, max_batch: int, rounds: int, seed: int, config: Config
) -> int:
    """The request of one trainer after some rounds of the norm test with eta 1."""
    variances = noise_variances(spectrum, noise_scale)
    generator = np.random.default_rng(seed)
    settings = BatchControlSettings(
        test="norm_test",
        eta=1.0,
        eta_at_end=None,
        theta=config.vartheta,
        nu=config.nu,
        debias=config.debias,
        first_round=config.batch_test_start,
        smoothing=config.statistics_smoothing,
        confidence=config.batch_test_confidence,
        largest_growth=config.max_batch_growth,
    )
    control = BatchControl(settings, config.INITIAL_BATCH_SIZE)
    for round_number in range(config.batch_test_start, rounds + 1):
        plan = threshold_switch_mode(-(-control.requested_batch // workers), max_batch, config.switch_multiplier)
        batches = [plan.effective_batch] if plan.effective_batch > 1 else []
        if plan.effective_batch < config.statistics_batch_size:
            batches.append(config.statistics_batch_size)  # the probe batch
        samples = []
        for batch in batches:
            drawn = [draw_sample(variances, batch, generator) for _ in range(workers)]
            samples += [sample for sample, _ in drawn]
        between = None
        if workers >= MINIMUM_WORKERS:
            sketches = [sketch(torch.from_numpy(total), round_number) for _, total in drawn]
            mean = torch.stack(sketches).mean(0)
            moments = [gradient_moments(vector, mean) for vector in sketches]
            between = across_workers_estimate(moments, [batches[-1]] * workers)
        control.conclude(samples, between, plan.effective_batch * workers, 0.0, 10**9)
    return control.requested_batch
