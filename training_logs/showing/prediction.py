"""How many communications a run would need for more examples: the laws of algorithms/theory.py, fitted."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from algorithms.batch.calc_batch import lower_ratio
from algorithms.schedule.learning_rate import eta_during
from algorithms.theory import (
    DRIFT,
    GROWING,
    MINIMUM_ROUNDS,
    BatchLaw,
    LawFit,
    Prediction,
    Requests,
    TooFewRoundsError,
    best_fit,
    fit_laws,
    predict_rounds,
    rounds_one_by_one,
)
from training_logs.showing.run_data import Row, Rows, RunData, read_run
from utils.config.schema import BUDGETS

_TOTALS = ("outer_step", "examples", "communications")


class NoLawError(ValueError):
    """A run follows no law, or there is not enough of it to fit one to; the message says which."""


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
        done: rounds, examples and communications after every round up to the last that was used, from 0 on.
        communications_per_round: of every later round, as in the last one that was fitted.
        living: trainers that live; predictions take it that they stay.
        workers: of all of them.
        largest: batch that all of them together may have.
        eta, eta_at_end: of the config.
        planned: examples of the run as its config has it; infinite where that counts epochs.
        moved: the batch does not stay what it is, and nobody knows how it goes on.
    """

    fits: dict[str, LawFit]
    asked: bool
    batches: list[float]
    shares: list[float]
    first_round: int
    inner_steps: int
    done: tuple[list[float], list[float], list[float]]
    communications_per_round: int
    living: int
    workers: int
    largest: float
    eta: float
    eta_at_end: float | None
    planned: float
    moved: bool

    def _start(self, examples: float) -> int:
        """The last round that a run of so many examples has in common with this one: an eta that falls more slowly
        makes all batches smaller.
        """
        if self.eta_at_end is None or math.isclose(examples, self.planned, rel_tol=0.05):
            return len(self.done[0]) - 1
        return self.done[0].index(self.first_round) - 1

    def _more_rounds(self, examples: float, start: int) -> Prediction:
        """How many rounds come after one of them; the interval ends with a whole one."""
        before = self.done[1][start]
        wanted = examples - before
        if not self.moved:
            return predict_rounds(self.fits, lambda law: law.rounds(wanted, self.inner_steps))
        fitted = min(max(start + 1 - self.done[0].index(self.first_round), 0), len(self.batches))
        last = self.batches[max(fitted - 1, 0)]
        requests = Requests(self._share, last, self.workers if self.asked else 0, self.largest)

        def rounds(law: BatchLaw) -> float:
            return rounds_one_by_one(law.after(fitted), wanted, self.inner_steps, requests, before)

        # No batch is smaller than the last, and none larger than the largest.
        least, most = (wanted / self.inner_steps / batch for batch in (max(self.largest, last), last))
        found = predict_rounds(self.fits, rounds, DRIFT).within(least, most)
        return replace(found, high=math.ceil(found.high))

    def _share(self, progress: float) -> float:
        return (eta_during(self.eta, self.eta_at_end, progress) / self.eta) ** 2

    def _predict(self, examples: float, per_round: float, measured: Sequence[float]) -> Prediction:
        if examples <= self.done[1][-1]:
            known = float(np.interp(examples, self.done[1], measured))
            return Prediction(known, known, known)
        start = self._start(examples)
        more = self._more_rounds(examples, start)
        return Prediction(*(measured[start] + per_round * value for value in (more.value, more.low, more.high)))

    def rounds(self, examples: float) -> Prediction:
        """The number of the round in which a run of so many examples ends; a fraction within it."""
        return self._predict(examples, 1, self.done[0])

    def communications(self, examples: float) -> Prediction:
        """Communications of a run of so many examples in all; merges to come are not among them."""
        return self._predict(examples, self.communications_per_round, self.done[2])


def _progress(run: RunData, row: Row) -> float:
    """How much of the run was done after a round, as far as its limits say; they do not where it counts epochs."""
    limits = (("tokens", "max_tokens"), ("outer_step", "number_of_outer_steps"))
    return max([row[used] / run.config[limit] for used, limit in limits if run.config[limit]], default=0.0)


def _plateau(batches: Sequence[float]) -> int:
    """Rounds at the beginning in which the test asks for less than the first batch, and so says nothing."""
    same = next((index for index, batch in enumerate(batches) if batch != batches[0]), 0)
    return max(same - 1, 0)


def _asked(rows: Rows, config: Mapping) -> float:
    """Return the request of a debiased norm test with the first eta, for all trainers together, not rounded.

    0 or NaN if the statistics of the round give none.
    """
    names = ("gradient_variance", "gradient_variance_error", "gradient_squared_norm", "gradient_squared_norm_error")
    asked = 0.0
    for row in rows:
        asked += lower_ratio(*(row[name] for name in names), config.get("batch_test_confidence", 0.0))
    return asked / config["ETA"] ** 2


def _requests_fitted(own: Sequence[Rows], config: Mapping) -> list[float] | None:
    """What the test asked for in the last of these rounds, from where it asked for least; None where no log says it.

    The request of a round comes from the statistics of the one before it.
    """
    if config["sampling_method"] != "norm_test" or not config.get("debias"):
        return None
    asked = [_asked(rows, config) for rows in own[:-1]]
    if all(math.isnan(value) for value in asked):
        return None
    silent = [index for index, value in enumerate(asked) if not 0.0 < value < math.inf]
    asked = asked[silent[-1] + 1 :] if silent else asked
    return asked[max(min(asked.index(min(asked)), len(asked) - MINIMUM_ROUNDS), 0) :] if asked else []


def lawless(config: Mapping, fewer_steps: bool) -> str | None:
    """Why rounds and batches of such a run are not those of the laws; None where they are.

    fewer_steps: whether workers make fewer inner steps than its rounds have, whatever `balance` says.
    """
    for name, unit in BUDGETS.items():
        if config.get(name) is not None:
            return f"a budget sets batches or rounds: {config[name]:,} {unit}"
    if config.get("inner_steps_rule", "fixed") != "fixed":
        return "rounds lengthen as the learning rate falls"
    if config.get("smallest_worker_batch") is not None:
        return "workers join as the batch grows, and one alone communicates nothing"
    if config.get("node_schedule") is not None:
        return "nodes come and go, and one alone communicates nothing"
    if config.get("balance") == "steps" or fewer_steps:
        return "workers make fewer inner steps than their rounds have"
    if config["sampling_method"] != "none" and config.get("learning_rate_schedule") == "warmup_stable_decay":
        return "the batch grows until the learning rate falls, and then stays"
    return None


def fit(run: RunData | Path, share: float = 1.0) -> RunFit:
    """Fit the laws to the rounds of a run after its last merge, once what is fitted has begun to grow.

    Where the log holds the statistics of a debiased norm test, to what it asked for; else to the batches.

    Args:
        run: or its folder.
        share: how much of the run to use, from its first round on, by rounds.

    Raises:
        NoLawError: fewer than MINIMUM_ROUNDS rounds of full length with a batch below the largest allowed, or a run
            whose rounds are not those of the laws.
        RunFolderError: the folder is not that of a run.
    """
    run = run if isinstance(run, RunData) else read_run(run)
    config, rounds = run.config, list(run.by_round.values())
    whole = {step: rows["inner_steps"][0] for step, rows in run.by_round.items()}
    fewer = any((rows["inner_steps"] < whole.get(step, 0)).any() for (step, _), rows in run.nodes.items())
    if (reason := lawless(config, fewer)) is not None:
        raise NoLawError(reason)
    used = rounds[: math.ceil(share * len(rounds) - 1e-9)]
    last = int(used[-1][0]["outer_step"]) if used else 0
    merged = max((merge.outer_step for merge in run.merges if merge.outer_step <= last), default=0)
    steps = config["number_of_inner_steps_between_outers"]
    own = [rows for rows in used if rows["outer_step"][0] > merged and rows["inner_steps"][0] == steps]
    asked = _requests_fitted(own, config)
    batches = [float(rows["effective_batch"].sum()) for rows in own]
    first = _plateau(batches) if asked is None else len(own) - len(asked)
    own, batches = own[first:], batches[first:]
    eta_at_end = config.get("ETA_at_end") if config["sampling_method"] == "norm_test" else None
    before = [rows for rows in used if own and rows["outer_step"][0] < own[0]["outer_step"][0]]
    done = [_progress(run, rows[0]) for rows in [*before[-1:], *own]]
    done = (done if before else [0.0, *done])[: len(own)]  # a round's batch was decided when the one before it ended
    shares = [(eta_during(config["ETA"], eta_at_end, progress) / config["ETA"]) ** 2 for progress in done]
    cap = config["max_requested_batch"]
    moved = config["sampling_method"] != "none" or bool(config.get("batch_schedule"))
    regimes = GROWING if moved else ("constant",)
    largest = math.inf if cap is None or not own else float(cap * len(own[-1]))
    try:
        if asked is not None:
            fits = fit_laws(asked, smoothing=config["statistics_smoothing"], regimes=regimes)
        elif eta_at_end is None:
            fits = fit_laws(batches, largest, regimes=regimes)
        else:
            scaled = [b * ratio for b, ratio in zip(batches, shares, strict=True) if b < largest]
            fits = fit_laws(scaled, regimes=regimes)
    except TooFewRoundsError as error:
        raise NoLawError(f"too few rounds after the last merge: {error}") from None
    return RunFit(
        fits=fits,
        asked=asked is not None,
        batches=batches,
        shares=shares,
        first_round=int(own[0][0]["outer_step"]),
        inner_steps=steps,
        done=tuple([0.0, *(float(rows[0][name]) for rows in used)] for name in _TOTALS),
        communications_per_round=int((own[-1]["nodes"] > 1).sum()),
        living=len(own[-1]),
        workers=int(own[-1]["nodes"].sum()),
        largest=largest,
        eta=config["ETA"],
        eta_at_end=eta_at_end,
        planned=used[-1][0]["examples"] / progress if (progress := _progress(run, used[-1][0])) else math.inf,
        moved=moved,
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
