"""Communications that a run would need for more examples: the laws of algorithms/theory.py, fitted to its log.

    python -m training_logs.prediction RUN_DIR [--examples N] [--share 0.33]

prints the law and a prediction. With a share below 1 only the beginning of the run is fitted, and the prediction of its
end is compared with the measurement.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from algorithms.theory import (
    DRIFT,
    GROWING,
    LawFit,
    Prediction,
    TooFewRoundsError,
    best_fit,
    fit_laws,
    predict_rounds,
)
from training_logs.showing.run_data import RunData, RunFolderError, read_run
from utils.config.schema import BUDGETS


class NoLawError(ValueError):
    """A run follows no law, or is too short to fit one."""


@dataclass(frozen=True)
class RunFit:
    """Laws fitted to a run, or to its beginning.

    Attributes:
        fits: by regime.
        batches: b_t, examples per inner step over all workers of all trainers, of the fitted rounds.
        first_round: the first fitted round.
        inner_steps: H.
        done: rounds, examples and communications after every round up to the last fitted one, each from 0.
        communications_per_round: of every later round.
        living: trainers in the last fitted round.
        largest: the largest batch of all trainers together.
        moves: whether the batch may change.
    """

    fits: dict[str, LawFit]
    batches: list[float]
    first_round: int
    inner_steps: int
    done: tuple[list[float], list[float], list[float]]
    communications_per_round: int
    living: int
    largest: float
    moves: bool

    def _more_rounds(self, examples: float) -> Prediction:
        fitted = len(self.batches)
        found = predict_rounds(
            self.fits,
            lambda law: law.after(fitted).rounds(examples, self.inner_steps),
            DRIFT if self.moves else 0.0,
        )
        if not self.moves:
            return found
        # No batch is smaller than the last one, or larger than the largest.
        last = self.batches[-1]
        most = examples / self.inner_steps / last
        least = examples / self.inner_steps / max(self.largest, last)
        found = found.within(least, most)
        return replace(found, high=math.ceil(found.high))

    def communications(self, examples: float) -> Prediction:
        """Predict the communications of a run of so many examples, without merges to come."""
        _, known, communications = self.done
        if examples <= known[-1]:
            value = float(np.interp(examples, known, communications))
            return Prediction(value, value, value)
        more = self._more_rounds(examples - known[-1])
        values = (
            communications[-1] + self.communications_per_round * each for each in (more.value, more.low, more.high)
        )
        return Prediction(*values)


def _lawless(run: RunData) -> str | None:
    """Say why the rounds and batches of a run are not those of the laws; None: they are."""
    config = run.config
    for name, unit in BUDGETS.items():
        if config.get(name) is not None:
            return f"a budget sets batches or rounds: {config[name]:,} {unit}"
    if config.get("smallest_worker_batch") is not None:
        return "workers join as the batch grows, and one alone communicates nothing"
    if config.get("node_schedule") is not None:
        return "nodes come and go, and one alone communicates nothing"
    if config["sampling_method"] == "norm_test" and config.get("ETA_at_end") is not None:
        return "eta changes along the run (ETA_at_end)"
    if config["sampling_method"] != "none" and config.get("learning_rate_schedule") == "warmup_stable_decay":
        return "the batch grows until the learning rate falls, and then stays"
    for (step, _), rows in run.nodes.items():
        if step in run.by_round and (rows["inner_steps"] < run.by_round[step]["inner_steps"][0]).any():
            return "workers make fewer inner steps than their rounds have"
    return None


def _plateau(batches: Sequence[float]) -> int:
    """Count the first rounds before the batch grows: there the test asks for less, and says nothing about growth."""
    same = next((index for index, batch in enumerate(batches) if batch != batches[0]), 0)
    return max(same - 1, 0)


def fit(run: RunData, share: float = 1.0) -> RunFit:
    """Fit the laws to the batches of a run after its last merge, from where they begin to grow.

    Args:
        share: the part of the run to use, from its first round, by rounds.

    Raises:
        NoLawError: the run has fewer than MINIMUM_ROUNDS such rounds with a batch below the largest allowed, or its
            rounds are not those of the laws.
    """
    reason = _lawless(run)
    if reason is not None:
        raise NoLawError(reason)
    config: Mapping = run.config
    rounds = list(run.by_round.values())
    used = rounds[: math.ceil(share * len(rounds) - 1e-9)]
    last = used[-1]["outer_step"][0] if used else 0
    merged = max((merge.outer_step for merge in run.merges if merge.outer_step <= last), default=0)
    steps = config["number_of_inner_steps_between_outers"]
    own = [rows for rows in used if rows["outer_step"][0] > merged and rows["inner_steps"][0] == steps]
    batches = [float(rows["effective_batch"].sum()) for rows in own]
    first = _plateau(batches)
    own = own[first:]
    batches = batches[first:]
    moves = config["sampling_method"] != "none" or bool(config.get("batch_schedule"))
    largest = math.inf
    if config["max_requested_batch"] is not None and own:
        largest = float(config["max_requested_batch"] * len(own[-1]))
    try:
        fits = fit_laws(batches, largest, regimes=GROWING if moves else ("constant",))
    except TooFewRoundsError as error:
        raise NoLawError(f"too few rounds after the last merge: {error}") from None
    return RunFit(
        fits=fits,
        batches=batches,
        first_round=int(own[0]["outer_step"][0]),
        inner_steps=steps,
        done=tuple([0.0, *values[: len(used)]] for values in measured(run)),
        communications_per_round=int((own[-1]["nodes"] > 1).sum()),
        living=len(own[-1]),
        largest=largest,
        moves=moves,
    )


def measured(run: RunData) -> tuple[list[float], list[float], list[float]]:
    """Return rounds, examples and communications after every round."""
    totals = [[float(rows[name][0]) for rows in run.by_round.values()] for name in ("examples", "communications")]
    return [float(step) for step in run.by_round], *totals


def sentences(found: RunFit, examples: Sequence[float]) -> list[str]:
    """Describe the fit, and its predictions."""
    law = best_fit(found.fits).law
    laws = {
        "constant": f"b = {law.first:.1f}",
        "linear": f"b_t = {law.first:.1f} + {law.growth:.2f} (t - {found.first_round})",
        "geometric": f"b_t = {law.first:.1f} * {math.exp(law.growth):.4f}^(t - {found.first_round})",
    }
    weights = ", ".join(f"{regime} {entry.weight:.2f}" for regime, entry in found.fits.items())
    lines = [
        f"{law.regime} regime, {laws[law.regime]} from round {found.first_round} on "
        f"({len(found.batches)} rounds; Akaike weights: {weights})"
    ]
    for count in examples:
        value = found.communications(count)
        interval = f"90% interval {value.low:.1f} to {value.high:.1f}"
        lines.append(f"{count:,.0f} examples: {value.value:.1f} communications ({interval})")
    if found.living > 1:
        lines.append(f"{found.living} trainers live; merges to come are not in the prediction")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Print the fit; return 0, or 2 if there is none."""
    parser = argparse.ArgumentParser(description="Predict the communications of a run for more examples.")
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
    _, examples, communications = measured(run)
    wanted = options.examples
    if wanted is None:
        wanted = [examples[-1]] if options.share < 1.0 else [factor * examples[-1] for factor in (2, 4, 10)]
    print("\n".join(sentences(found, wanted)))
    if options.share < 1.0:
        error = found.communications(examples[-1]).value / communications[-1] - 1.0
        print(f"measured at {examples[-1]:,.0f} examples: {communications[-1]:.0f} communications; error {error:+.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
