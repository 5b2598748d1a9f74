"""How far batch tests end from what they should ask for: python benchmarks/performance/noise.py [--json FILE]
[--tests ...] ...

Synthetic gradients whose true gradient G and covariance stay as they are, so that the right request is known: for the
norm test with eta 1 the noise scale V / ||G||^2. Statistics, average over rounds, batch tests and switch mode are the
project's own code; only gradients are drawn. Settings are the defaults of the configuration (first batch 8, test from
round 3 on, one step with statistics a round, smoothing 0.9, growth 2, debias, two standard errors) but for eta.

Gradients are Gaussian. Examples that are held against a mean gradient are drawn one by one; of many others only what
enters the statistics, exactly: their sum, and that of their squared norms given it (a weighted sum of chi-squares).
Only the sum of their ||g_i||^4, which sets the error of V alone, is its expectation.

Spectra: `isotropic` in 100 dimensions; `decaying` as 1/k over 300, (tr C)^2 / tr C^2 = 24 effective ones, with G in the
directions of the noise. For the inner product tests half of V is along G, and theta 0.9, nu 0.5.

Columns: median, 10th and 90th percentile over seeds of the final request over the right one; `rise`, the median factor
by which the request grew in the last half of the rounds; `all`, the relative standard error of the ratio that the test
is made of if the mean gradient of all examples with statistics were known; `window`, the same of what one window of the
average holds at the last batch, whose rounds and workers are different samples. The bar is a median between 2/3 and 1.5
and percentiles between 1/2 and 2. Where `window` is above 1 / confidence, the bound that the test keeps to is zero: the
request stays, and no average over as few rounds could tell better ("unknown").
"""

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from algorithms.batch.across_workers import MINIMUM_WORKERS, across_workers_estimate, gradient_moments, sketch
from algorithms.batch.batch_control import BatchControl, BatchControlSettings
from algorithms.batch.calc_batch import NEED_INNER_PRODUCTS
from algorithms.batch.gradient_statistics import Comparison, SampleEstimate, sample_estimate
from algorithms.batch.per_example import compared_micro_batches
from algorithms.batch.switch_mode import ExecutionPlan, in_parts, only_gradient_accumulation, threshold_switch_mode
from utils.config.schema import Config

SPECTRA = ("isotropic", "decaying")
TESTS = ("norm_test", *NEED_INNER_PRODUCTS)
THETA, NU = 0.9, 0.5
# Up to so many examples between those that are held against a mean are drawn one by one.
DRAWN = 32


@dataclass(frozen=True)
class Gradients:
    """Gaussian gradients in the basis of their covariance's eigenvectors: G [d] and the eigenvalues [d]."""

    mean: np.ndarray
    eigenvalues: np.ndarray

    def __post_init__(self):
        mean, values = self.mean, self.eigenvalues
        moments = {
            "squared_norm": mean @ mean,
            "variance": values.sum(),
            "inner_product_variance": values @ mean**2,
            "overlap": values @ values,
        }
        for name, value in moments.items():
            object.__setattr__(self, name, float(value))

    @property
    def mean_fourth_power(self) -> float:
        """E ||g_i||^4."""
        second = self.squared_norm + self.variance
        return second**2 + 2.0 * self.overlap + 4.0 * self.inner_product_variance

    def request(self, test: str) -> float:
        """What the debiased test with eta 1, THETA and NU should ask for."""
        if test == "norm_test":
            return self.variance / self.squared_norm
        inner = self.inner_product_variance / (THETA * self.squared_norm) ** 2
        orthogonal = self.variance - self.inner_product_variance / self.squared_norm
        return inner if test == "inner_product_test" else max(inner, orthogonal / (NU**2 * self.squared_norm))

    def relative_error(self, test: str, examples: float) -> float:
        """Of the ratio that is estimated, with the mean gradient of so many examples: of ||G||^2, and of P with it."""
        n, along, values = examples, self.inner_product_variance, self.eigenvalues
        norm = math.sqrt(4.0 * along / n + 2.0 * self.overlap / n**2) / self.squared_norm
        if self.request(test) > self.request("inner_product_test") or test == "norm_test":
            return norm
        inner = 2.0 * (along + self.overlap / n) ** 2 / n
        inner += 4.0 * values**3 @ self.mean**2 / n + 2.0 * (values**4).sum() / n**2
        return math.hypot(2.0 * norm, math.sqrt(inner) / along)

    def draw(self, generator: np.random.Generator, *shape: int) -> np.ndarray:
        """Gradients [*shape, d]."""
        noise = generator.standard_normal((*shape, len(self.mean)), dtype=np.float32)
        return self.mean + np.sqrt(self.eigenvalues) * noise


def make_gradients(spectrum: str, noise_scale: float, along: float) -> Gradients:
    """||G||^2 = 1 and V = noise_scale, a share `along` of it in the direction of G."""
    weights = np.ones(100) if spectrum == "isotropic" else 1.0 / np.arange(1, 301)
    weights /= weights.sum()
    if not along:
        return Gradients(np.sqrt(weights), noise_scale * weights)
    eigenvalues = noise_scale * np.concatenate([[along], (1.0 - along) * weights])
    return Gradients(np.concatenate([[1.0], np.zeros(len(weights))]), eigenvalues)


def _blocks(sizes: Sequence[int]) -> Iterator[tuple[bool, int]]:
    """(held against the mean, examples) of a step's micro-batches, all between two that are held as one."""
    compared = compared_micro_batches(sizes)
    for held, group in itertools.groupby(enumerate(sizes), key=lambda entry: entry[0] in compared):
        own = [size for _, size in group]
        yield from ((True, size) for size in own) if held else ((False, sum(own)),)


def draw_samples(
    gradients: Gradients, plan: ExecutionPlan, workers: int, generator: np.random.Generator
) -> tuple[list[SampleEstimate], np.ndarray]:
    """What the steps of so many workers say, and the sums of their examples' gradients [workers, d]."""
    total = np.zeros((workers, len(gradients.mean)))
    squares, fourth_powers = np.zeros(workers), np.zeros(workers)
    seen, held_against = 0, []
    for held, n in _blocks(plan.micro_batches):
        seen += n
        if held or n <= DRAWN:
            drawn = gradients.draw(generator, workers, n)
            norms = (drawn**2).sum(2)
            total += drawn.sum(1)
            squares += norms.sum(1)
            fourth_powers += (norms**2).sum(1)
        else:
            noise = np.sqrt(n * gradients.eigenvalues) * generator.standard_normal(total.shape)
            total += n * gradients.mean + noise
            about_the_mean = generator.chisquare(n - 1, total.shape) @ gradients.eigenvalues
            squares += about_the_mean + (noise**2).sum(1) / n
            squares += 2.0 * noise @ gradients.mean + n * gradients.squared_norm
            fourth_powers += n * gradients.mean_fourth_power
        if held:
            mean = total / seen
            products = np.einsum("wid,wd->wi", drawn, mean)
            held_against.append((seen, (mean**2).sum(1), squares.copy(), norms, products))
    samples = []
    for worker in range(workers):
        comparisons = [
            Comparison(n, float(norm[worker]), float(sums[worker]), norms[worker].tolist(), products[worker].tolist())
            for n, norm, sums, norms, products in held_against
        ]
        part = next((comparison for comparison in comparisons if 2 < comparison.examples < seen), None)
        samples.append(sample_estimate(comparisons[-1], float(fourth_powers[worker]), part))
    return samples, total


def _between(sums: np.ndarray, batch: int, round_number: int) -> SampleEstimate | None:
    """What sketches of the workers' sums say beside each other."""
    if len(sums) < MINIMUM_WORKERS:
        return None
    sketches = [sketch(torch.from_numpy(vector), round_number) for vector in sums]
    mean = torch.stack(sketches).mean(0)
    return across_workers_estimate([gradient_moments(vector, mean) for vector in sketches], [batch] * len(sums))


@dataclass
class Run:
    """Requests after half of the rounds and at the end, the last effective batch, and examples with statistics."""

    half: int
    request: int
    batch: int
    examples: int


def simulate(
    gradients: Gradients, test: str, workers: int, max_batch: int, rounds: int, seed: int, config: Config
) -> Run:
    """One trainer over so many rounds."""
    generator = np.random.default_rng(seed)
    control = BatchControl(
        BatchControlSettings(
            test=test,
            eta=1.0,
            eta_at_end=None,
            theta=THETA,
            nu=NU,
            debias=config.debias,
            first_round=config.batch_test_start,
            smoothing=config.statistics_smoothing,
            confidence=config.batch_test_confidence,
            largest_growth=config.max_batch_growth,
        ),
        config.INITIAL_BATCH_SIZE,
    )
    parts, smallest = (2 if test in NEED_INNER_PRODUCTS else 1), config.statistics_batch_size
    run = Run(control.requested_batch, control.requested_batch, 0, 0)
    for round_number in range(config.batch_test_start, rounds + 1):
        plan = threshold_switch_mode(-(-control.requested_batch // workers), max_batch, config.switch_multiplier)
        plans = [in_parts(plan, parts)] if plan.effective_batch > 1 else []
        if plan.effective_batch < smallest:
            plans.append(in_parts(only_gradient_accumulation(smallest, max_batch), parts))
        samples = []
        for step in plans:
            found, sums = draw_samples(gradients, step, workers, generator)
            samples += found
        run.examples += workers * sum(step.effective_batch for step in plans)
        run.batch = plan.effective_batch * workers
        between = _between(sums, plans[-1].effective_batch, round_number)
        control.conclude(samples, between, run.batch, 0.0, 10**9)
        if round_number == rounds // 2:
            run.half = control.requested_batch
    run.request = control.requested_batch
    return run


def measure(
    test: str, spectrum: str, noise_scale: int, workers: int, max_batch: int, rounds: int, seeds: int, config: Config
) -> dict:
    """One line of the table."""
    gradients = make_gradients(spectrum, noise_scale, along=0.0 if test == "norm_test" else 0.5)
    right = gradients.request(test)
    runs = [simulate(gradients, test, workers, max_batch, rounds, seed, config) for seed in range(seeds)]
    low, median, high = np.quantile([run.request / right for run in runs], [0.1, 0.5, 0.9])
    batch = statistics.median(run.batch for run in runs)
    # Only for the squared norm are the workers' samples held against each other.
    samples = (1.0 + config.statistics_smoothing) / (1.0 - config.statistics_smoothing)
    if workers < MINIMUM_WORKERS or test == "inner_product_test":
        samples, batch = samples * workers, max(batch / workers, config.statistics_batch_size)
    window = gradients.relative_error(test, max(batch, config.statistics_batch_size)) / math.sqrt(samples)
    within = 2 / 3 <= median <= 1.5 and low >= 0.5 and high <= 2.0
    unknown = config.batch_test_confidence * window > 1.0
    return {
        "test": test,
        "spectrum": spectrum,
        "noise_scale": noise_scale,
        "workers": workers,
        "micro_batch": max_batch,
        "right": right,
        "median": median,
        "low": low,
        "high": high,
        "rise": statistics.median(run.request / run.half for run in runs),
        "all": gradients.relative_error(test, statistics.median(run.examples for run in runs)),
        "window": window,
        "verdict": "within" if within else "unknown" if unknown else "outside",
    }


def _line(row: dict) -> str:
    return (
        f"{row['test']:28} {row['spectrum']:9} {row['noise_scale']:>6,} {row['workers']:>3} {row['micro_batch']:>3} "
        f"{row['right']:>10,.1f} {row['median']:7.2f} {row['low']:5.2f} {row['high']:5.2f} {row['rise']:5.2f} "
        f"{row['all']:7.3f} {row['window']:8.3f} {row['verdict']}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 where a line is outside the bar that could be within."""
    parser = argparse.ArgumentParser(description="Simulate the batch tests on gradients of known noise.")
    parser.add_argument("--json", type=Path, help="write the lines and the settings here as well")
    parser.add_argument("--tests", nargs="+", choices=TESTS, default=list(TESTS))
    parser.add_argument("--spectra", nargs="+", choices=SPECTRA, default=list(SPECTRA))
    parser.add_argument("--noise-scales", nargs="+", type=int, default=[50, 500, 5_000, 50_000])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--confidence", type=float, default=Config().batch_test_confidence)
    options = parser.parse_args(arguments)
    config = Config(batch_test_confidence=options.confidence)
    print(
        "test                         spectrum   noise   M   m      right  median   low  high  rise     all   window",
        flush=True,
    )
    rows = []
    for cell in itertools.product(
        options.tests, options.spectra, options.noise_scales, options.workers, options.micro_batches
    ):
        rows.append(measure(*cell, options.rounds, options.seeds, config))
        print(_line(rows[-1]), flush=True)
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in ("within", "outside", "unknown")}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if options.json:
        settings = {"rounds": options.rounds, "seeds": options.seeds, "config": asdict(config)}
        options.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1), encoding="utf-8")
    return int(counts["outside"] > 0)


if __name__ == "__main__":
    sys.exit(main())
