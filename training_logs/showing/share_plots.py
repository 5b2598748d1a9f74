"""Panels of non-IID data: the size of each share, and the loss of the trainers on each share over the run."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from training_logs.showing.run_data import RunData
from training_logs.showing.series import thinned
from training_logs.showing.styles import axis, colour, legend, line_style

# Shares that can be told apart by name.
_NAMED = 12


def has_shares(run: RunData) -> bool:
    """Whether the run's data are in shares."""
    return bool(run.summary.get("data_shares"))


def owners(run: RunData) -> list[dict[int, int]]:
    """The trainer that has each share, in the rounds up to the first merge, then up to the second, and so on."""
    found = [{entry["share"]: entry["first_trainer"] for entry in run.summary["data_shares"]["shares"]}]
    for merge in run.merges:
        now = found[-1]
        found.append({s: merge.representative if trainer in merge.weights else trainer for s, trainer in now.items()})
    return found


def share_losses(run: RunData, x: str) -> dict[int, np.ndarray]:
    """By share, over a column of the round log: [4, evaluations], x and the validation loss of the trainer that has the
    share, of the best living one, and of the worst."""
    rows, owned = run.share_rows, owners(run)
    merged = [merge.outer_step for merge in run.merges]
    found: dict[int, list[list[float]]] = {}
    for step, of_round in rows.by("outer_step").items() if rows else ():
        if step in run.by_round:
            owner, place = owned[int(np.searchsorted(merged, step, side="left"))], run.by_round[step][0][x]
            for share in np.unique(of_round["share"]).astype(int).tolist():
                own = of_round.where(of_round["share"] == share)
                losses, its = own["validation_loss"], own["validation_loss"][own["trainer_id"] == owner[share]]
                found.setdefault(share, []).append(
                    [place, *(its[:1] if len(its) else [np.nan]), losses.min(), losses.max()]
                )
    return {share: np.array(points).T for share, points in sorted(found.items())}


def _bars(axes: Axes, run: RunData, values: Sequence[float | None], title: str, label: str) -> None:
    shown = [np.nan if value is None else value for value in values]
    axes.bar(range(len(shown)), shown, color=[colour(share) for share in range(len(shown))])
    axis(axes, "outer_step", label, title)
    axes.set_xlabel("share")
    axes.set_xticks(range(0, len(shown), -(-len(shown) // _NAMED)))
    axes.margins(y=0.15)


def draw_share_sizes(axes: Axes, run: RunData, x: str) -> None:
    """Training tokens of every share, and above how many documents they are."""
    entries = run.summary["data_shares"]["shares"]
    _bars(axes, run, [entry["tokens"] for entry in entries], "Size of the shares", "training tokens")
    axes.yaxis.set_major_formatter(EngFormatter())
    for entry in entries if len(entries) <= _NAMED else ():
        text = f"{entry['documents']:,}\ndocuments"
        axes.text(entry["share"], entry["tokens"], text, ha="center", va="bottom", fontsize=8)


def draw_share_losses(axes: Axes, run: RunData, x: str) -> None:
    """Validation loss on every share: of the trainer that has it (line), and from the best to the worst (pale)."""
    losses = share_losses(run, x)
    for share, points in losses.items():
        xs, its, best, worst = (thinned(points[0], row)[1] for row in points)
        axes.plot(xs, its, line_style((xs,)), color=colour(share), label=f"share {share}")
        axes.fill_between(xs, best, worst, color=colour(share), alpha=0.15, lw=0)
    axis(axes, x, "loss (nats per target)", "Validation loss per share (pale: of all trainers)")
    if not losses:
        text = "not evaluated by share\n(validation_per_share)"
        axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
    elif len(losses) <= _NAMED:
        legend(axes, ncols=2)
