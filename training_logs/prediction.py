"""Predict the communications of a run for more examples, from the laws of algorithms/theory.py fitted to its log.

    python -m training_logs.prediction RUN_DIR [--examples N] [--share 0.33]

prints the fitted law and predictions. With a share below 1 only the beginning of the run is fitted, and the prediction
for its end is compared with the measurement.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from algorithms.theory import (
    DRIFT,
    GROWING,
    BatchLaw,
    LawFit,
    Prediction,
    TooFewRoundsError,
    best_fit,
    fit_laws,
    predict_rounds,
)
from training_logs.showing.run_data import RunData, RunFolderError, read_run
from utils.config.schema import BUDGETS

APPLIES_TO = (
    "It is for runs with a constant batch, or with one that grows by the same rule from the first round to the last. "
    "A run is refused if it has a budget, smallest_worker_batch, node_schedule, workers with fewer inner steps, or a "
    "batch test with ETA_at_end or warmup_stable_decay. The demo has three of these."
)


class NoLawError(ValueError):
    """The run follows no law, or is too short to fit one."""


@dataclass(frozen=True)
class RunFit:
    """Laws fitted to a run, or to its beginning.

    Attributes:
        fits: by regime.
        batches: b_t of the fitted rounds: examples per inner step over all workers of all trainers.
        first_round: the first fitted round.
        inner_steps: H.
        examples: after every round up to the last fitted one, from 0.
        communications: after every round up to the last fitted one, from 0.
        communications_per_round: of every later round.
        living: trainers in the last fitted round.
        largest: the largest batch of all trainers together.
        grows: whether a test or a schedule may change the batch.
    """

    fits: dict[str, LawFit]
    batches: list[float]
    first_round: int
    inner_steps: int
    examples: list[float]
    communications: list[float]
    communications_per_round: int
    living: int
    largest: float
    grows: bool

    def predict(self, examples: float) -> Prediction:
        """Predict the communications of a run with this many examples, without future merges."""
        if examples <= self.examples[-1]:
            value = float(np.interp(examples, self.examples, self.communications))
            return Prediction(value, value, value)
        more = self._more_rounds(examples - self.examples[-1])
        known = self.communications[-1]
        each = self.communications_per_round
        return Prediction(known + each * more.value, known + each * more.low, known + each * more.high)

    def _more_rounds(self, examples: float) -> Prediction:
        fitted = len(self.batches)

        def rounds(law: BatchLaw) -> float:
            return law.after(fitted).rounds(examples, self.inner_steps)

        if not self.grows:
            return predict_rounds(self.fits, rounds)
        found = predict_rounds(self.fits, rounds, DRIFT)
        # No batch is smaller than the last one, or larger than the largest.
        last = self.batches[-1]
        most = examples / self.inner_steps / last
        least = examples / self.inner_steps / max(self.largest, last)

        def possible(rounds: float) -> float:
            return min(max(rounds, least), most)

        return Prediction(possible(found.value), possible(found.low), math.ceil(possible(found.high)))


def _lawless(run: RunData) -> str | None:
    """The reason why a run follows none of the laws; None if it may follow one."""
    config = run.config
    tested = config["sampling_method"] != "none"
    for name, unit in BUDGETS.items():
        if config.get(name) is not None:
            return f"a budget sets the rounds: {config[name]:,} {unit}"
    if config.get("smallest_worker_batch") is not None:
        return "workers join as the batch grows (smallest_worker_batch), and a lone worker communicates nothing"
    if config.get("node_schedule") is not None:
        return "nodes come and go (node_schedule), and a lone worker communicates nothing"
    if config["sampling_method"] == "norm_test" and config.get("ETA_at_end") is not None:
        return "eta changes over the run (ETA_at_end)"
    if tested and config.get("learning_rate_schedule") == "warmup_stable_decay":
        return "the batch stops growing when the learning rate decays (warmup_stable_decay)"
    for (step, _), rows in run.nodes.items():
        if step in run.by_round and (rows["inner_steps"] < run.by_round[step]["inner_steps"][0]).any():
            return "workers make fewer inner steps than their rounds have"
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
    last_round = used[-1]["outer_step"][0] if used else 0
    last_merge = max((merge.outer_step for merge in run.merges if merge.outer_step <= last_round), default=0)
    inner_steps = config["number_of_inner_steps_between_outers"]
    fitted = [rows for rows in used if rows["outer_step"][0] > last_merge and rows["inner_steps"][0] == inner_steps]
    batches = [float(rows["effective_batch"].sum()) for rows in fitted]
    # Before the batch begins to grow the test asks for less, and says nothing about growth.
    grown = next((index for index, batch in enumerate(batches) if batch != batches[0]), 0)
    start = max(grown - 1, 0)
    fitted = fitted[start:]
    batches = batches[start:]
    grows = config["sampling_method"] != "none" or bool(config.get("batch_schedule"))
    largest = math.inf
    if config["max_requested_batch"] is not None and fitted:
        largest = float(config["max_requested_batch"] * len(fitted[-1]))
    try:
        fits = fit_laws(batches, largest, GROWING if grows else ("constant",))
    except TooFewRoundsError as error:
        raise NoLawError(f"too few rounds after the last merge: {error}") from None
    examples, communications = measured(run)
    return RunFit(
        fits=fits,
        batches=batches,
        first_round=int(fitted[0]["outer_step"][0]),
        inner_steps=inner_steps,
        examples=[0.0, *examples[: len(used)]],
        communications=[0.0, *communications[: len(used)]],
        communications_per_round=int((fitted[-1]["nodes"] > 1).sum()),
        living=len(fitted[-1]),
        largest=largest,
        grows=grows,
    )


def measured(run: RunData) -> tuple[list[float], list[float]]:
    """Return examples and communications after every round."""
    rounds = list(run.by_round.values())
    examples = [float(rows["examples"][0]) for rows in rounds]
    communications = [float(rows["communications"][0]) for rows in rounds]
    return examples, communications


def sentences(found: RunFit, examples: Sequence[float]) -> list[str]:
    """Describe the fit and its predictions."""
    law = best_fit(found.fits).law
    formulas = {
        "constant": f"b = {law.first:.1f}",
        "linear": f"b_t = {law.first:.1f} + {law.growth:.2f} (t - {found.first_round})",
        "geometric": f"b_t = {law.first:.1f} * {math.exp(law.growth):.4f}^(t - {found.first_round})",
    }
    weights = ", ".join(f"{regime} {entry.weight:.2f}" for regime, entry in found.fits.items())
    lines = [
        f"{law.regime} regime, {formulas[law.regime]} from round {found.first_round} on "
        f"({len(found.batches)} rounds; Akaike weights: {weights})"
    ]
    for count in examples:
        value = found.predict(count)
        interval = f"90% interval {value.low:.1f} to {value.high:.1f}"
        lines.append(f"{count:,.0f} examples: {value.value:.1f} communications ({interval})")
    if found.living > 1:
        lines.append(f"{found.living} trainers live; future merges are not in the prediction")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Print the fit; return 0, or 2 if there is none."""
    parser = argparse.ArgumentParser(description=f"Predict the communications of a run for more examples. {APPLIES_TO}")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--examples", type=float, nargs="+", help="default: 2, 4 and 10 times those of the run")
    parser.add_argument("--share", type=float, default=1.0, help="part of the run to fit, from its beginning")
    options = parser.parse_args(arguments)
    if not 0.0 < options.share <= 1.0:
        parser.error("--share must be above 0 and at most 1")
    try:
        run = read_run(options.run)
        found = fit(run, options.share)
    except (RunFolderError, NoLawError) as error:
        print(f"error: {options.run}: {error}", file=sys.stderr)
        return 2
    examples, communications = measured(run)
    wanted = options.examples
    if wanted is None:
        wanted = [examples[-1]] if options.share < 1.0 else [factor * examples[-1] for factor in (2, 4, 10)]
    print("\n".join(sentences(found, wanted)))
    if options.share < 1.0:
        error = found.predict(examples[-1]).value / communications[-1] - 1.0
        print(f"measured at {examples[-1]:,.0f} examples: {communications[-1]:.0f} communications; error {error:+.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
