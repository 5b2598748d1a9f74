"""How many communications a run would need for more examples: the laws of algorithms/communications.py, fitted."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from algorithms.communications import (
    MINIMUM_ROUNDS,
    BatchLaw,
    LawFit,
    Prediction,
    Requests,
    best_fit,
    fit_laws,
    predict_rounds,
    rounds_one_by_one,
)
from algorithms.learning_rate import eta_during
from training_logs.showing.number_log import Row, Rows
from training_logs.showing.run_data import RunData, read_run

_TOTALS = ("outer_step", "examples", "communications")


class TooFewRoundsError(ValueError):
    """There is not enough of a run to fit a law to; the message says what is missing."""


@dataclass(frozen=True)
class RunFit:
    """The laws fitted to a run, or to the beginning of it.

    Attributes:
        fits: by regime; with an eta that changes, of b_t (eta_t / ETA)^2.
        asked: what was fitted is what the test asked for, not what the run had, which never shrinks.
        batches: b_t, examples per inner step over all workers of all trainers, of the rounds that were fitted.
        shares: (eta_t / ETA)^2 of these rounds.
        first_round: the first of them, which comes after the last merge.
        inner_steps: H.
        examples_before, communications_before: what the run had used before that round.
        communications_per_round: of every later round, as in the last one that was fitted.
        living: trainers that live; predictions take it that they stay.
        workers: of all of them.
        largest: batch that all of them together may have.
        eta, eta_at_end: of the config.
    """

    fits: dict[str, LawFit]
    asked: bool
    batches: list[float]
    shares: list[float]
    first_round: int
    inner_steps: int
    examples_before: float
    communications_before: float
    communications_per_round: int
    living: int
    workers: int
    largest: float
    eta: float
    eta_at_end: float | None

    def _predict(self, examples: float) -> Prediction:
        wanted = examples - self.examples_before
        first, workers = (self.batches[0], self.workers) if self.asked else (0.0, 0)
        requests = Requests(self._share, first, workers, self.largest)

        def rounds(law: BatchLaw) -> float:
            if self.eta_at_end is None and not self.asked:
                return law.rounds(wanted, self.inner_steps)
            return rounds_one_by_one(law, wanted, self.inner_steps, requests, self.examples_before)

        return predict_rounds(self.fits, rounds)

    def _share(self, progress: float) -> float:
        return (eta_during(self.eta, self.eta_at_end, progress) / self.eta) ** 2

    def rounds(self, examples: float) -> Prediction:
        """The number of the round in which a run of so many examples ends; a fraction within it."""
        found, before = self._predict(examples), self.first_round - 1
        return Prediction(before + found.value, before + found.low, before + found.high)

    def communications(self, examples: float) -> Prediction:
        """Communications of a run of so many examples in all; merges to come are not among them."""
        found = self._predict(examples)
        base, each = self.communications_before, self.communications_per_round
        return Prediction(*(base + each * value for value in (found.value, found.low, found.high)))


def _progress(run: RunData, row: Row) -> float:
    """How much of the run was done after a round, as far as its limits say; they do not where it counts epochs."""
    limits = (("tokens", "max_tokens"), ("outer_step", "number_of_outer_steps"))
    return max([row[used] / run.config[limit] for used, limit in limits if run.config[limit]], default=0.0)


def _plateau(batches: Sequence[float]) -> int:
    """Rounds at the beginning in which the test asks for less than the first batch, and so says nothing."""
    same = next((index for index, batch in enumerate(batches) if batch != batches[0]), 0)
    return max(same - 1, 0)


def _asked(rows: Rows, eta: float) -> float:
    """What a debiased norm test makes of the statistics of a round, all trainers together; NaN without statistics.

    Not algorithms.calc_batch, which imports PyTorch and rounds.
    """
    names = ("gradient_variance", "gradient_squared_norm", "gradient_sample_size")
    if not all(rows.has(name) for name in names):
        return math.nan
    asked = 0.0
    of_old = not rows.has("gradient_squared_norm_error")  # logged the squared norm of a worker's sample
    for variance, squared_norm, sample_size in zip(*(rows[name].tolist() for name in names), strict=True):
        true_norm = squared_norm - variance / sample_size if of_old else squared_norm
        asked += math.inf if true_norm <= 0.0 else variance / (eta**2 * true_norm)
    return asked


def _requests_fitted(own: Sequence[Rows], config: Mapping) -> list[float]:
    """What the test asked for in the last of these rounds, from where it asked for least; [] where that is not known.

    The request of a round comes from the statistics of the one before it.
    """
    if config["sampling_method"] != "norm_test" or not config.get("debias"):
        return []
    asked = [_asked(rows, config["ETA"]) for rows in own[:-1]]
    silent = [index for index, value in enumerate(asked) if not math.isfinite(value)]
    asked = asked[silent[-1] + 1 :] if silent else asked
    if len(asked) < MINIMUM_ROUNDS:
        return []
    return asked[min(asked.index(min(asked)), len(asked) - MINIMUM_ROUNDS) :]


def fit(run: RunData | Path, share: float = 1.0) -> RunFit:
    """Fit the laws to the rounds of a run after its last merge, once what is fitted has begun to grow.

    Where the log holds the statistics of a debiased norm test, to what it asked for; else to the batches.

    Args:
        run: or its folder.
        share: how much of the run to use, from its first round on, by rounds.

    Raises:
        TooFewRoundsError: fewer than MINIMUM_ROUNDS rounds of full length with a batch below the largest allowed.
        RunFolderError: the folder is not that of a run.
    """
    run = run if isinstance(run, RunData) else read_run(run)
    config, rounds = run.config, list(run.by_round.values())
    used = rounds[: math.ceil(share * len(rounds) - 1e-9)]
    last = int(used[-1][0]["outer_step"]) if used else 0
    merged = max((merge.outer_step for merge in run.merges if merge.outer_step <= last), default=0)
    steps = config["number_of_inner_steps_between_outers"]
    own = [rows for rows in used if rows["outer_step"][0] > merged and rows["inner_steps"][0] == steps]
    asked = _requests_fitted(own, config)
    own = own[-len(asked) if asked else _plateau([float(rows["effective_batch"].sum()) for rows in own]) :]
    batches = [float(rows["effective_batch"].sum()) for rows in own]
    eta_at_end = config.get("ETA_at_end") if config["sampling_method"] == "norm_test" else None
    before = [rows for rows in used if own and rows["outer_step"][0] < own[0]["outer_step"][0]]
    done = [_progress(run, rows[0]) for rows in [*before[-1:], *own]]
    done = done[:-1] if before else [0.0, *done[:-1]]  # a round's batch was decided when the one before it ended
    shares = [(eta_during(config["ETA"], eta_at_end, progress) / config["ETA"]) ** 2 for progress in done]
    cap = config["max_requested_batch"]
    largest = math.inf if cap is None or not own else float(cap * len(own[-1]))
    try:
        if asked:
            fits = fit_laws(asked, smoothing=config["statistics_smoothing"])
        elif eta_at_end is None:
            fits = fit_laws(batches, largest)
        else:
            fits = fit_laws([b * ratio for b, ratio in zip(batches, shares, strict=True) if b < largest])
    except ValueError as error:
        raise TooFewRoundsError(f"{run.folder}: after the last merge, {error}") from None
    return RunFit(
        fits=fits,
        asked=bool(asked),
        batches=batches,
        shares=shares,
        first_round=int(own[0][0]["outer_step"]),
        inner_steps=steps,
        examples_before=before[-1][0]["examples"] if before else 0.0,
        communications_before=before[-1][0]["communications"] if before else 0.0,
        communications_per_round=int((own[-1]["nodes"] > 1).sum()),
        living=len(own[-1]),
        workers=int(own[-1]["nodes"].sum()),
        largest=largest,
        eta=config["ETA"],
        eta_at_end=eta_at_end,
    )


def measured(run: RunData) -> tuple[list[float], list[float], list[float]]:
    """Rounds, examples and communications of the run so far, after every round."""
    steps, first = np.unique(run.rounds["outer_step"], return_index=True)
    return steps.tolist(), run.rounds["examples"][first].tolist(), run.rounds["communications"][first].tolist()


def sentences(found: RunFit, examples: Sequence[float]) -> list[str]:
    """The fit, and its predictions, in words."""
    law = best_fit(found.fits).law
    laws = {
        "constant": f"b = {law.first:.1f}",
        "linear": f"b_t = {law.first:.1f} + {law.growth:.2f} (t - {found.first_round})",
        "geometric": f"b_t = {law.first:.1f} * {math.exp(law.growth):.4f}^(t - {found.first_round})",
    }
    scaled = "" if found.eta_at_end is None else ", times (ETA / eta_t)^2"
    weights = ", ".join(f"{regime} {entry.weight:.2f}" for regime, entry in found.fits.items())
    lines = [
        f"{law.regime} regime, {laws[law.regime]} from round {found.first_round} on{scaled} "
        f"({len(found.batches)} rounds; Akaike weights: {weights})"
    ]
    for count in examples:
        value = found.communications(count)
        interval = f"90% interval {value.low:.1f} to {value.high:.1f}"
        lines.append(f"{count:,.0f} examples: {value.value:.1f} communications ({interval})")
    if found.living > 1:
        lines.append(f"{found.living} trainers live; merges to come are not in the prediction")
    return lines
