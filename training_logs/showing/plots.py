"""Plots of a run, drawn from its run folder alone. A trainer has the same colour in all of them."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from algorithms.theory import best_fit
from training_logs.showing.node_plots import (
    draw_last_measured_times,
    draw_last_times,
    draw_measured_times,
    draw_node_shares,
    draw_node_speeds,
    draw_times,
    has_both_times,
)
from training_logs.showing.number_log import Rows
from training_logs.showing.prediction import NoLawError, RunFit, fit, measured
from training_logs.showing.run_data import RunData
from training_logs.showing.series import MARKS, marked, mode_switches, spread, step_losses, thinned
from training_logs.showing.share_plots import draw_share_losses, draw_share_sizes, has_shares
from training_logs.showing.styles import axis, colour, legend, line_style, plain_logarithmic
from utils.utils import write_atomically


def _series(rows: Rows, x: str, y: str | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A column, or values of the same length, over another: what was measured of it, thinned."""
    values = rows[y] if isinstance(y, str) else y
    measured = np.isfinite(values)
    return thinned(rows[x][measured], values[measured])


def _mark_merges(axes: Axes, run: RunData, x: str) -> None:
    """A dotted line where trainers merged: after the round, so at the end of what it shows."""
    for number, merge in enumerate(run.merges):
        if merge.outer_step in run.by_round:
            place = run.by_round[merge.outer_step][0][x]
            axes.axvline(place, ls=":", lw=1, color="grey", label=None if number else "trainers merge")


# Panels


def draw_step_loss(axes: Axes, run: RunData, x: str) -> None:
    """Training loss of every inner step (pale), and its running mean over a twentieth of the trainer's steps."""
    for trainer in run.trainers:
        xs, ys = thinned(*step_losses(run, trainer))
        axes.plot(xs, ys, lw=0.6, alpha=0.35, color=colour(trainer))
        width = max(len(ys) // 20, 1)
        mean = np.convolve(ys, np.full(width, 1 / width), "valid") if len(ys) else ys
        axes.plot(xs[width - 1 :], mean, color=colour(trainer), label=f"trainer {trainer}")
    axis(axes, x, "loss (nats per target)", "Training loss per inner step")
    axes.set_xlabel("inner step")
    legend(axes)


def draw_loss(axes: Axes, run: RunData, x: str) -> None:
    """Training loss (thin, dashed) and validation loss of every trainer."""
    for trainer in run.trainers:
        rows = run.of(trainer)
        axes.plot(*_series(rows, x, "train_loss"), "--", lw=1, color=colour(trainer), alpha=0.7)
        points = _series(rows, x, "validation_loss")
        axes.plot(*points, line_style(points), color=colour(trainer), label=f"trainer {trainer}")
    axes.plot([], [], "--", lw=1, color="grey", label="training (dashed)")
    _mark_merges(axes, run, x)
    axis(axes, x, "loss (nats per target)", "Loss per round")
    legend(axes)


def draw_metric(axes: Axes, run: RunData, x: str) -> None:
    """The validation metric of every trainer; a cross where it was merged, a triangle where it began to accumulate."""
    last_round = run.rounds[-1]["outer_step"]
    switched = False
    for trainer in run.trainers:
        rows = run.of(trainer)
        xs, values = _series(rows, x, "validation_metric")
        axes.plot(xs, values, line_style((xs, values)), color=colour(trainer), label=f"trainer {trainer}")
        if rows[-1]["outer_step"] < last_round and len(xs):
            axes.plot(xs[-1], values[-1], "x", ms=9, mew=2, color=colour(trainer))
        switches = _series(mode_switches(rows), x, "validation_metric")
        axes.plot(*switches, "^", ms=7, color=colour(trainer))
        switched = switched or len(switches[0]) > 0
    if run.merges:
        axes.plot([], [], "x", mew=2, color="grey", label="merged into another")
    if switched:
        axes.plot([], [], "^", color="grey", label="begins to accumulate")
    if run.metric.name == "perplexity":
        plain_logarithmic(axes)
    axis(axes, x, run.metric.name, f"Validation {run.metric.name}")
    legend(axes)


def draw_batches(axes: Axes, run: RunData, x: str) -> None:
    """Requested batch (line) and effective batch (circles) of every trainer; filled where it accumulates."""
    for trainer in run.trainers:
        rows = run.of(trainer)
        axes.step(*_series(rows, x, "requested_batch"), where="mid", color=colour(trainer), label=f"trainer {trainer}")
        shown = marked(run, rows)
        for accumulates, fill in ((False, "white"), (True, colour(trainer))):
            chosen = shown.where((shown["accumulation_steps"] > 1) == accumulates)
            axes.plot(*_series(chosen, x, "effective_batch"), "o", ms=5, color=colour(trainer), mfc=fill)
    axes.plot([], [], "o", color="grey", mfc="white", label="effective, one micro-batch")
    axes.plot([], [], "o", color="grey", label="effective, accumulated")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _mark_merges(axes, run, x)
    axis(axes, x, "examples per inner step", "Requested and effective batch")
    legend(axes)


def accumulation_threshold(run: RunData) -> float | None:
    """The per-worker request above which gradients are accumulated, in max batches; None: never."""
    multiplier = float(run.config["switch_multiplier"])
    thresholds = {"threshold_switch_mode": multiplier, "only_gradient_accumulation": 1.0}
    return thresholds.get(run.config["switch_mode"])


def draw_worker_batches(axes: Axes, run: RunData, x: str) -> None:
    """Per worker: request (line) and effective batch (dots), max batch, and the region in which it accumulates."""
    largest = run.rounds["max_batch"].max()
    top = largest
    for trainer in run.trainers:
        rows = run.of(trainer)
        request = np.ceil(rows["requested_batch"] / rows["nodes"])
        top = max(top, request.max())
        axes.step(*_series(rows, x, request), where="mid", color=colour(trainer), label=f"trainer {trainer}")
        shown = marked(run, rows)
        axes.plot(*_series(shown, x, shown["effective_batch"] / shown["nodes"]), "o", ms=4, color=colour(trainer))
    axes.axhline(largest, color="black", lw=1.2, ls="--", label="max batch")
    threshold = accumulation_threshold(run)
    top = 1.3 * top
    if threshold is not None:
        axes.axhspan(threshold * largest, max(top, 1.3 * threshold * largest), color="orange", alpha=0.15,
                     label="accumulates above")  # fmt: skip
        top = max(top, 1.3 * threshold * largest)
    axes.set_yscale("log", base=2)
    axes.set_ylim(top=top)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis(axes, x, "examples per worker and inner step", "Batch per worker: request (line), effective (dots)")
    legend(axes)


def _draw_column(axes: Axes, run: RunData, x: str, title: str, label: str, value: Callable[[Rows], np.ndarray]) -> None:
    found = False
    for trainer in run.trainers:
        rows = run.of(trainer)
        values = value(rows)
        values[~(values > 0)] = np.nan  # not measured, or nothing that a logarithmic axis could show
        points = _series(rows, x, values)
        found = found or len(points[0]) > 0
        axes.plot(*points, line_style(points), color=colour(trainer), label=f"trainer {trainer}")
    if found:
        plain_logarithmic(axes)
        legend(axes)
    else:
        axes.text(0.5, 0.5, "not measured in this run", ha="center", transform=axes.transAxes)
    _mark_merges(axes, run, x)
    axis(axes, x, label, title)


def draw_variance(axes: Axes, run: RunData, x: str) -> None:
    """The variance of the per-example gradients (trace of their covariance)."""
    _draw_column(axes, run, x, "Gradient variance", "V", lambda rows: rows["gradient_variance"])


def draw_squared_norm(axes: Axes, run: RunData, x: str) -> None:
    """The squared norm of the true gradient, as it is estimated: where that is not above zero there is a gap."""
    _draw_column(axes, run, x, "Squared gradient norm", "||∇F||²", lambda rows: rows["gradient_squared_norm"])


def draw_noise_ratio(axes: Axes, run: RunData, x: str) -> None:
    """Variance over squared norm: the batch, in examples, at which noise and gradient are as large."""
    _draw_column(
        axes,
        run,
        x,
        "Gradient noise: variance / squared norm",
        "V / ||∇F||² (examples)",
        lambda rows: (
            rows["gradient_variance"]
            / np.where(rows["gradient_squared_norm"] == 0, np.nan, rows["gradient_squared_norm"])
        ),
    )


def draw_throughput(axes: Axes, run: RunData, x: str) -> None:
    """Training tokens per second of every trainer's rounds, evaluation excluded."""
    for trainer in run.trainers:
        rows = run.of(trainer)
        points = _series(rows, x, rows["round_tokens"] / rows["seconds"])
        axes.plot(*points, line_style(points), color=colour(trainer), label=f"trainer {trainer}")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter())
    _mark_merges(axes, run, x)
    axis(axes, x, "tokens per second", "Throughput")
    legend(axes)


def draw_living(axes: Axes, run: RunData, x: str) -> None:
    """How many trainers live (line), and how many nodes work for each (stacked areas)."""
    rounds = list(run.by_round.values())
    rounds = [rounds[place] for place in spread(len(rounds))]
    own = [dict(zip(rows["trainer_id"].astype(int), rows["nodes"], strict=True)) for rows in rounds]
    xs = [rows[0][x] for rows in rounds]
    nodes = [[held.get(trainer, 0.0) for held in own] for trainer in run.trainers]
    axes.stackplot(
        xs,
        nodes,
        step="mid",
        colors=[colour(trainer) for trainer in run.trainers],
        alpha=0.35,
        labels=[f"nodes of trainer {trainer}" for trainer in run.trainers],
    )
    living = [len(rows) for rows in rounds]
    axes.step(xs, living, where="mid", color="black", lw=2, label="living trainers")
    axes.set_ylim(bottom=0, top=1.45 * max(*living, *map(sum, zip(*nodes, strict=True))))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis(axes, x, "count", "Living trainers and their nodes")
    legend(axes, ncols=2, loc="upper right")


def draw_genealogy(axes: Axes, run: RunData, x: str) -> None:
    """A lane per trainer, as long as it lives; where it merges, an arrow to its representative, and its weight."""
    lane = {trainer: place for place, trainer in enumerate(run.trainers)}
    for trainer in run.trainers:
        rows = run.of(trainer)
        xs = [rows[0][x], rows[-1][x]]
        axes.plot(xs, [lane[trainer]] * 2, lw=5, color=colour(trainer), solid_capstyle="round")
    for merge in run.merges:
        place = run.by_round[merge.outer_step][0][x]
        for trainer, weight in merge.weights.items():
            if trainer != merge.representative:
                axes.annotate(
                    "", (place, lane[merge.representative]), (place, lane[trainer]),
                    arrowprops={"arrowstyle": "->", "color": colour(trainer), "lw": 1.8},
                )  # fmt: skip
            side = 0.12 if trainer == merge.representative else -0.28
            text = f"{weight:.2f}  "
            axes.text(place, lane[trainer] + side, text, fontsize=8, ha="right", color=colour(trainer))
    axes.set_yticks(list(lane.values()), [f"trainer {trainer}" for trainer in lane])
    axes.set_ylim(-0.6, len(lane) - 0.4)
    axes.margins(x=0.06)
    axis(axes, x, "", "Which trainer became which, with weights")


def draw_batch_law(axes: Axes, run: RunData, x: str) -> None:
    """Effective batch of all trainers together (dots), and the laws fitted to it after the last merge."""
    totals = np.array([rows["effective_batch"].sum() for rows in run.by_round.values()])
    shown = spread(len(totals), MARKS)
    axes.plot(
        np.array(list(run.by_round))[shown], totals[shown], "o", ms=4, color="black", label="measured, all trainers"
    )
    found = _fitted(axes, run)
    if found is not None:
        for index, (regime, law) in enumerate(found.fits.items()):
            places = spread(len(found.shares))
            batches = [law.law.batch(place + 1) / found.shares[place] for place in places]
            style = {"lw": 2.5 if law is best_fit(found.fits) else 1, "color": colour(index)}
            axes.plot(found.first_round + places, batches, label=f"{regime}, weight {law.weight:.2f}", **style)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis(axes, x, "examples per inner step", "Law of the batch")
    legend(axes)


def draw_prediction(axes: Axes, run: RunData, x: str) -> None:
    """Communications over examples: measured, and predicted up to three times as many, with a 90% interval."""
    _, examples, communications = measured(run)
    points = thinned(np.array([0, *examples]), np.array([0, *communications]))
    axes.plot(*points, line_style(points), color="black", label="measured")
    found = _fitted(axes, run)
    if found is not None:
        ahead = np.linspace(examples[-1], 3.0 * examples[-1], 9)
        values = [found.communications(count) for count in ahead]
        axes.plot(ahead, [value.value for value in values], color=colour(0), label="predicted")
        axes.fill_between(
            ahead, [value.low for value in values], [value.high for value in values], color=colour(0), alpha=0.2, lw=0
        )
    axis(axes, x, "communications", "Communications: measured and predicted")
    axes.set_xlabel("training examples, all trainers")
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.set_ylim(bottom=0)
    legend(axes, loc="upper left")


def _fitted(axes: Axes, run: RunData) -> RunFit | None:
    try:
        return fit(run)
    except NoLawError as error:
        box, words = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8}, textwrap.fill(f"no law: {error}", 40)
        axes.text(0.4, 0.5, words, ha="center", fontsize=8, bbox=box, transform=axes.transAxes)
        return None


def draw_memory(axes: Axes, run: RunData, x: str) -> None:
    """Memory of the process and of every GPU over time: allocated (line) and the largest so far (dashed)."""
    devices = {device: columns for device, columns in run.memory.items() if device != "host"}
    for index, (device, columns) in enumerate(devices.items()):
        for column, style, name in (("allocated_bytes", "-", device), ("peak_bytes", "--", f"{device}, peak")):
            points = thinned(columns["seconds"], columns[column])
            axes.plot(*points, style, lw=1.5 if style == "-" else 1, color=colour(index), label=name)
    axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.set_ylim(bottom=0)
    axis(axes, x, "memory", "Memory")
    axes.set_xlabel("seconds since training began")
    if devices:
        legend(axes, loc="lower right")


Draw = Callable[[Axes, RunData, str], None]

# File name -> what its panels show, and over what.
PLOTS: dict[str, list[tuple[Draw, str]]] = {
    "overview.png": [
        (draw_metric, "tokens"),
        (draw_batches, "outer_step"),
        (draw_living, "outer_step"),
        (draw_metric, "communications"),
    ],
    "loss.png": [(draw_step_loss, "outer_step"), (draw_loss, "outer_step")],
    "metric.png": [
        (draw_metric, "outer_step"),
        (draw_metric, "tokens"),
        (draw_metric, "bytes_communicated"),
        (draw_metric, "wall_seconds"),
    ],
    "batch_sizes.png": [(draw_batches, "tokens"), (draw_worker_batches, "outer_step")],
    "gradient_statistics.png": [(draw_variance, "outer_step"), (draw_squared_norm, "outer_step"),
                                (draw_noise_ratio, "outer_step"), (draw_noise_ratio, "tokens")],
    "trainers.png": [(draw_living, "tokens"), (draw_genealogy, "outer_step")],
    "nodes.png": [
        (draw_times, "wall_seconds"),
        (draw_last_times, "wall_seconds"),
        (draw_node_shares, "outer_step"),
        (draw_node_speeds, "outer_step"),
    ],
    "communications.png": [(draw_batch_law, "outer_step"), (draw_prediction, "communications")],
    "resources.png": [(draw_throughput, "outer_step"), (draw_memory, "wall_seconds")],
}  # fmt: skip

# Instead, where there are simulated and measured times.
BOTH_TIMES: dict[str, list[tuple[Draw, str]]] = {
    "nodes.png": [
        *((draw_times, "wall_seconds"), (draw_measured_times, "wall_seconds")),
        *((draw_last_times, "wall_seconds"), (draw_last_measured_times, "wall_seconds")),
        *PLOTS["nodes.png"][2:],
    ]
}
# Those that there are besides where data are in shares.
SHARE_PLOTS: dict[str, list[tuple[Draw, str]]] = {
    "shares.png": [
        (draw_share_sizes, "outer_step"),
        (draw_share_losses, "outer_step"),
        (draw_share_losses, "tokens"),
    ]
}


def plots_of(run: RunData) -> dict[str, list[tuple[Draw, str]]]:
    """The plots that a run has."""
    return PLOTS | (BOTH_TIMES if has_both_times(run) else {}) | (SHARE_PLOTS if has_shares(run) else {})


def make_figure(panels: int, columns: int = 2, size: tuple[float, float] | None = None) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels; size: of all, in inches, where the usual one does not fit."""
    lines = -(-panels // columns)
    # Figures made without pyplot need no display, and nothing global has to be closed.
    figure = Figure(figsize=size or (5.5 * columns, 4.2 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(lines, columns, number) for number in range(1, panels + 1)]


def draw(run: RunData, panels: list[tuple[Draw, str]]) -> Figure:
    """The figure of some panels; a run on a fallback dataset says so above them."""
    figure, axes = make_figure(len(panels))
    fallen_back = bool(run.summary.get("dataset_fallback_reason"))
    # Fixed margins: a layout that measures all texts first takes as long as the drawing itself.
    figure.set_layout_engine(None)
    height = figure.get_figheight()
    figure.subplots_adjust(
        left=0.07,
        right=0.99,
        bottom=0.55 / height,
        top=1 - (0.75 if fallen_back else 0.4) / height,
        wspace=0.2,
        hspace=0.34,
    )
    for place, (panel, x) in zip(axes, panels, strict=True):
        panel(place, run, x)
    if fallen_back:
        asked, used = run.summary["dataset_asked_for"], run.summary["dataset"]
        figure.suptitle(f"{asked} could not be loaded: trained on {used} instead", color="#b00020")
    return figure


def plot_run(run: RunData) -> list[Path]:
    """Draw all plots of a run into its report folder; nothing where it has no round yet."""
    if not run.rounds:
        return []
    paths = []
    for name, panels in plots_of(run).items():
        figure = draw(run, panels)
        write_atomically(run.report_dir / name, lambda path, figure=figure: figure.savefig(path, dpi=110))
        paths.append(run.report_dir / name)
    return paths
