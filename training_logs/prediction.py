"""Predict the communications of a run for more examples, from a law of its batch (docs/theory.md, section 4):

python -m training_logs.prediction RUN_DIR [--examples N] [--share 0.33]
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from scipy.optimize import minimize_scalar

from training_logs.showing.run_data import RunData, RunFolderError, damage_reported, read_run
from utils.config.schema import BUDGETS

MINIMUM_ROUNDS = 4
# Standard deviation of the logarithm of future rounds about a law of growth: no regime lasts.
DRIFT = 0.25
# Multiple of the fitted rounds' examples that is predicted at most.
FARTHEST = 10_000.0


class NoLawError(Exception):
    """The run follows no law, or is too short to fit one."""


@dataclass(frozen=True)
class BatchLaw:
    """The batch of round t = 1, 2, ...: b_1 + g (t - 1) (linear) or b_1 exp(g (t - 1)) (geometric), at most `largest`.

    A constant batch is the linear law with g = 0.

    Attributes:
        first: b_1, examples of an inner step over all workers.
        growth: g.
    """

    regime: str
    first: float
    growth: float = 0.0
    largest: float = math.inf

    def batch(self, round_number: int) -> float:
        passed = round_number - 1
        if self.regime == "linear":
            return min(self.first + self.growth * passed, self.largest)
        return min(self.first * math.exp(self.growth * passed), self.largest)

    def rounds(self, done: int, total: float) -> float:
        """Return the rounds after the first `done` whose batches sum to this total; a fraction for a part of one."""
        rounds = 0
        while True:
            batch = self.batch(done + rounds + 1)
            stays = self.batch(done + rounds + 2) == batch
            if stays or batch >= total:
                return rounds + total / batch
            total -= batch
            rounds += 1


def fit_laws(batches: Sequence[float], largest: float = math.inf) -> list[BatchLaw]:
    """Fit both laws to the batches of rounds 1, 2, ... by least squares of ln b_t; the best law comes first.

    batches: at least MINIMUM_ROUNDS below `largest`; rounds at `largest` say nothing about growth.

    Raises:
        NoLawError: there are too few rounds.
    """
    logs = np.log([batch for batch in batches if batch < largest])
    if len(logs) < MINIMUM_ROUNDS:
        raise NoLawError(
            f"too few rounds after the last merge: a law needs at least {MINIMUM_ROUNDS} rounds below the largest "
            f"batch, got {len(logs)}"
        )
    fits = [_fit(regime, logs, largest) for regime in ("linear", "geometric")]
    return [law for _, law in sorted(fits, key=lambda each: each[0])]


def _fit(regime: str, logs: np.ndarray, largest: float) -> tuple[float, BatchLaw]:
    """Return the variance of the residuals and the law."""
    passed = np.arange(len(logs))

    def first_logs(growth: float) -> np.ndarray:  # the ln b_1 that each batch gives; linear growth relative to b_1
        return logs - (np.log1p(growth * passed) if regime == "linear" else growth * passed)

    best = minimize_scalar(
        lambda log_growth: first_logs(math.exp(log_growth)).var(),
        bounds=(-20.0, 10.0),
        method="bounded",
        options={"xatol": 1e-9},
    )
    growth = math.exp(best.x) if best.fun < logs.var() else 0.0
    rest = first_logs(growth)
    first = math.exp(rest.mean())
    return rest.var(), BatchLaw(regime, first, growth * first if regime == "linear" else growth, largest)


@dataclass(frozen=True)
class RunFit:
    """Laws fitted to a run, or to its beginning.

    Attributes:
        laws: the best one first; their round 1 is `first_round`.
        batches: of the fitted rounds: examples per inner step over all workers of all trainers.
        first_round: the first fitted round.
        examples: until the last fitted round.
        communications: until then.
        communications_per_round: of every later round, as of the fitted ones on average.
    """

    laws: list[BatchLaw]
    batches: list[float]
    first_round: int
    inner_steps: int
    examples: float
    communications: float
    communications_per_round: float
    living: int

    def predict(self, examples: float) -> tuple[float, float, float]:
        """Predict the communications for more examples, without future merges, and their 90% interval.

        The interval is normal in the logarithm. Its deviation joins DRIFT and half the difference between the laws.
        """
        total = (examples - self.examples) / self.inner_steps
        if total < 0.0:
            raise NoLawError(f"after {self.examples:,.0f} examples nothing can be predicted for {examples:,.0f}")
        if not total <= FARTHEST * sum(self.batches):  # nan as well
            raise NoLawError(f"a law of {len(self.batches)} rounds says nothing about {examples:.3g} examples")
        counts = [law.rounds(len(self.batches), total) for law in self.laws]
        factor = 1.0
        if total and any(law.growth for law in self.laws):
            deviation = math.hypot(DRIFT, 0.5 * math.log(max(counts) / min(counts)))
            factor = math.exp(NormalDist().inv_cdf(0.95) * deviation)
        # No batch is smaller than the last one, or larger than the largest.
        last = self.batches[-1]
        bounds = (total / max(self.laws[0].largest, last), total / last)
        rounds = np.clip([counts[0], counts[0] / factor, counts[0] * factor], *bounds)
        return tuple((self.communications + self.communications_per_round * rounds).tolist())

    def sentences(self, examples: Sequence[float]) -> list[str]:
        """Describe the best law, and the predictions for these numbers of examples."""
        law = self.laws[0]
        name = law.regime
        formula = f"b_t = {law.first:.1f} * {math.exp(law.growth):.4f}^(t - {self.first_round})"
        if law.growth == 0.0:
            name = "constant"
            formula = f"b = {law.first:.1f}"
        elif name == "linear":
            formula = f"b_t = {law.first:.1f} + {law.growth:.2f} (t - {self.first_round})"
        lines = [f"{name} law, {formula} from round {self.first_round} on ({len(self.batches)} rounds)"]
        for count in examples:
            value, low, high = self.predict(count)
            lines.append(f"{count:,.0f} examples: {value:.1f} communications (90% interval {low:.1f} to {high:.1f})")
        if self.living > 1:
            lines.append(f"{self.living} trainers live; future merges are not in the prediction")
        return lines


def _lawless(run: RunData) -> str | None:
    """Return the reason why a run follows none of the laws; None if it may follow one."""
    config = run.config
    for name in (*BUDGETS, "smallest_worker_batch", "node_schedule", "batch_schedule"):
        if config.get(name) is not None:
            return f"{name} sets the batch or the communications of the rounds"
    for (step, _), rows in run.nodes.items():
        if step in run.by_round and (rows["inner_steps"] < run.by_round[step]["inner_steps"][0]).any():
            return "workers make fewer inner steps than their rounds have"
    if config["sampling_method"] == "none":
        return None
    if config["sampling_method"] == "norm_test" and config.get("ETA_at_end") is not None:
        return "eta changes over the run (ETA_at_end)"
    if config.get("learning_rate_schedule") == "warmup_stable_decay":
        return "the batch stops growing when the learning rate decays (warmup_stable_decay)"
    if len(run.rounds) and (run.rounds["effective_batch"] < run.rounds["requested_batch"]).any():
        return "requests run only in part (switch_mode)"
    return None


def fit(run: RunData, share: float = 1.0) -> RunFit:
    """Fit the laws to the batches of a run after its last merge, from where they begin to grow.

    Args:
        share: the part of the run's rounds to use, from the first one.

    Raises:
        NoLawError: the run follows none of the laws, or has too few rounds.
    """
    reason = _lawless(run)
    if reason is not None:
        raise NoLawError(reason)
    config = run.config
    rounds = list(run.by_round.values())
    used = rounds[: math.ceil(share * len(rounds) - 1e-9)]
    last_merge = max((step for step in run.merges if step <= len(used)), default=0)
    inner_steps = config["number_of_inner_steps_between_outers"]
    fitted = [rows for rows in used if rows["outer_step"][0] > last_merge and rows["inner_steps"][0] == inner_steps]
    batches = [float(rows["effective_batch"].sum()) for rows in fitted]
    # Before the batch begins to grow the test asks for less, and says nothing about growth.
    grown = next((index for index, batch in enumerate(batches) if batch != batches[0]), 0)
    fitted = fitted[max(grown - 1, 0) :]
    batches = batches[max(grown - 1, 0) :]
    per_round = np.diff([rows["communications"][0] for rows in fitted])
    if len(per_round) and per_round.min() < per_round.max():
        raise NoLawError(
            f"rounds have {per_round.min():.0f} to {per_round.max():.0f} communications, and a law needs equal ones"
        )
    largest = math.inf
    if config["max_requested_batch"] is not None and fitted:
        largest = float(config["max_requested_batch"] * len(fitted[-1]))
    return RunFit(
        laws=fit_laws(batches, largest),
        batches=batches,
        first_round=int(fitted[0]["outer_step"][0]),
        inner_steps=inner_steps,
        examples=float(used[-1]["examples"][0]),
        communications=float(used[-1]["communications"][0]),
        communications_per_round=float(per_round[0]),
        living=len(fitted[-1]),
    )


def main(arguments: list[str] | None = None) -> int:
    """Return 0, or 2 if the run cannot be read or predicted."""
    parser = argparse.ArgumentParser(
        prog="python -m training_logs.prediction",
        description="Predict the communications of a run for more examples.",
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--examples", type=float, nargs="+", help="default: 2, 4 and 10 times those of the run")
    parser.add_argument(
        "--share", type=float, default=1.0, help="fit this share of the rounds, and compare the prediction with the end"
    )
    options = parser.parse_args(arguments)
    if not 0.0 < options.share <= 1.0:
        parser.error("--share must be above 0 and at most 1")
    try:
        run = read_run(options.run)
        with damage_reported(options.run):
            found = fit(run, options.share)
            examples = run.rounds["examples"][-1]
        factors = (2, 4, 10) if options.share == 1.0 else (1,)
        print("\n".join(found.sentences(options.examples or [factor * examples for factor in factors])))
        if options.share < 1.0:
            communications = run.rounds["communications"][-1]
            predicted = found.predict(examples)[0]
            error = f"; error {predicted / communications - 1.0:+.1%}" if communications else ""
            print(f"measured at {examples:,.0f} examples: {communications:.0f} communications{error}")
    except NoLawError as error:
        print(f"error: {options.run}: {error}; docs/theory.md says which runs can be predicted", file=sys.stderr)
        return 2
    except RunFolderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
