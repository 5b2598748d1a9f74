"""Predict the communications of a run for more examples, from the laws of algorithms/theory.py fitted to its log.

python -m training_logs.prediction RUN_DIR [--examples N] [--share 0.33]
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from algorithms.theory import BatchLaw, Prediction, TooFewRoundsError, fit_laws, predict_rounds
from training_logs.showing.run_data import RunData, RunFolderError, read_run
from utils.config.schema import BUDGETS


class NoLawError(ValueError):
    """The run follows no law, or is too short to fit one."""


@dataclass(frozen=True)
class RunFit:
    """Laws fitted to a run, or to its beginning.

    Attributes:
        laws: the best one first; their round 1 is `first_round`.
        batches: of the fitted rounds: examples per inner step over all workers of all trainers.
        first_round: the first fitted round.
        examples: after every round up to the last fitted one, from 0.
        communications_per_round: of every later round.
    """

    laws: list[BatchLaw]
    batches: list[float]
    first_round: int
    inner_steps: int
    examples: list[float]
    communications: list[float]
    communications_per_round: int
    living: int

    def predict(self, examples: float) -> Prediction:
        """Predict the communications of a run with this many examples, without future merges."""
        known = self.communications[-1]
        each = self.communications_per_round
        more = examples - self.examples[-1]
        if more <= 0.0:
            value = float(np.interp(examples, self.examples, self.communications))
            return Prediction(value, value, value)
        rounds = predict_rounds(self.laws, len(self.batches), more, self.inner_steps)
        # No batch is smaller than the last one, or larger than the largest.
        last = self.batches[-1]
        least = more / self.inner_steps / max(self.laws[0].largest, last)
        most = more / self.inner_steps / last
        value, low, high = (min(max(each, least), most) for each in (rounds.value, rounds.low, rounds.high))
        return Prediction(known + each * value, known + each * low, known + each * high)

    def sentences(self, examples: Sequence[float]) -> list[str]:
        """Describe the best law, and the predictions for these numbers of examples."""
        law = self.laws[0]
        formula = f"b = {law.first:.1f}"
        if law.growth > 0.0 and law.regime == "linear":
            formula = f"b_t = {law.first:.1f} + {law.growth:.2f} (t - {self.first_round})"
        elif law.growth > 0.0:
            formula = f"b_t = {law.first:.1f} * {math.exp(law.growth):.4f}^(t - {self.first_round})"
        name = law.regime if law.growth > 0.0 else "constant"
        lines = [f"{name} law, {formula} from round {self.first_round} on ({len(self.batches)} rounds)"]
        for count in examples:
            found = self.predict(count)
            interval = f"90% interval {found.low:.1f} to {found.high:.1f}"
            lines.append(f"{count:,.0f} examples: {found.value:.1f} communications ({interval})")
        if self.living > 1:
            lines.append(f"{self.living} trainers live; future merges are not in the prediction")
        return lines


def _lawless(run: RunData) -> str | None:
    """Return the reason why a run follows none of the laws; None if it may follow one."""
    config = run.config
    for name, unit in BUDGETS.items():
        if config.get(name) is not None:
            return f"a budget sets the rounds: {config[name]:,} {unit}"
    if config.get("smallest_worker_batch") is not None:
        return "workers join as the batch grows (smallest_worker_batch), and a lone worker communicates nothing"
    if config.get("node_schedule") is not None:
        return "nodes come and go (node_schedule), and a lone worker communicates nothing"
    if config["sampling_method"] == "norm_test" and config.get("ETA_at_end") is not None:
        return "eta changes over the run (ETA_at_end)"
    if config["sampling_method"] != "none" and config.get("learning_rate_schedule") == "warmup_stable_decay":
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
    last_merge = max((merge.outer_step for merge in run.merges if merge.outer_step <= len(used)), default=0)
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
        laws = fit_laws(batches, largest, grows)
    except TooFewRoundsError as error:
        raise NoLawError(f"too few rounds after the last merge: {error}") from None
    examples, communications = measured(run)
    return RunFit(
        laws=laws,
        batches=batches,
        first_round=int(fitted[0]["outer_step"][0]),
        inner_steps=inner_steps,
        examples=[0.0, *examples[: len(used)]],
        communications=[0.0, *communications[: len(used)]],
        communications_per_round=int((fitted[-1]["nodes"] > 1).sum()),
        living=len(fitted[-1]),
    )


def measured(run: RunData) -> tuple[list[float], list[float]]:
    """Return examples and communications after every round."""
    rounds = list(run.by_round.values())
    return [float(rows["examples"][0]) for rows in rounds], [float(rows["communications"][0]) for rows in rounds]


def main(arguments: list[str] | None = None) -> int:
    """Print the fit; return 0, or 2 if there is none."""
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
        found = fit(run, options.share)
    except NoLawError as error:
        print(f"error: {options.run}: {error}; docs/theory.md says which runs can be predicted", file=sys.stderr)
        return 2
    except RunFolderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    examples, communications = measured(run)
    factors = (2, 4, 10) if options.share == 1.0 else (1,)
    wanted = options.examples or [factor * examples[-1] for factor in factors]
    print("\n".join(found.sentences(wanted)))
    if options.share < 1.0:
        error = found.predict(examples[-1]).value / communications[-1] - 1.0
        print(f"measured at {examples[-1]:,.0f} examples: {communications[-1]:.0f} communications; error {error:+.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
