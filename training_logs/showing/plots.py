"""Plots of a run, drawn from its run folder. A trainer has the same colour in all of them."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from algorithms.theory import best_fit
from training_logs.prediction import NoLawError, RunFit, fit, measured
from training_logs.showing.run_data import Rows, RunData
from training_logs.showing.styles import (
    MARKS,
    POINTS,
    axis,
    binary_logarithmic,
    colour,
    legend,
    line_style,
    make_figure,
    plain_logarithmic,
    thinned,
)
from utils.files import write_atomically


def _series(rows: Rows, x: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    measured_values = np.isfinite(values)
    return thinned(rows[x][measured_values], values[measured_values])


def _note(axes: Axes, text: str) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8}
    axes.text(0.45, 0.5, textwrap.fill(text, 40), ha="center", fontsize=8, bbox=box, transform=axes.transAxes)


def _mark_merges(axes: Axes, run: RunData, x: str) -> None:
    """Draw a dotted line at the end of each round after which trainers merged."""
    for number, merge in enumerate(run.merges):
        if merge.outer_step in run.by_round:
            place = run.by_round[merge.outer_step][x][0]
            axes.axvline(place, ls=":", lw=1, color="grey", label=None if number else "trainers merge")


def mode_switches(rows: Rows) -> Rows:
    """Return those of one trainer's rows at which it begins to accumulate gradients."""
    accumulates = rows["accumulation_steps"] > 1
    return rows.where(accumulates & ~np.concatenate([[False], accumulates[:-1]]))


def marked(run: RunData, rows: Rows) -> Rows:
    """Return those of one trainer's rows that get a mark: every round, or every n-th round of a long run."""
    every = -(-len(run.by_round) // MARKS)
    return rows.where((rows["outer_step"] - 1) % every == 0)


# Panels


def draw_step_loss(axes: Axes, run: RunData, x: str) -> None:
    """Training loss of every inner step (pale), and its mean over a twentieth of the trainer's steps."""
    for trainer, curve in run.step_losses.items():
        xs, ys = thinned(*curve)
        axes.plot(xs, ys, lw=0.6, alpha=0.35, color=colour(trainer))
        width = max(len(ys) // 20, 1)
        mean = np.convolve(ys, np.full(width, 1 / width), "valid") if len(ys) else ys
        axes.plot(xs[width - 1 :], mean, color=colour(trainer), label=f"trainer {trainer}")
    axis(axes, x, "loss (nats per target)", "Training loss per inner step")
    axes.set_xlabel("inner step")
    legend(axes)


def draw_loss(axes: Axes, run: RunData, x: str) -> None:
    """Training loss (dashed) and validation loss of every trainer."""
    for trainer in run.trainers:
        rows = run.of(trainer)
        axes.plot(*_series(rows, x, rows["train_loss"]), "--", lw=1, color=colour(trainer), alpha=0.7)
        points = _series(rows, x, rows["validation_loss"])
        axes.plot(*points, line_style(points), color=colour(trainer), label=f"trainer {trainer}")
    axes.plot([], [], "--", lw=1, color="grey", label="training (dashed)")
    _mark_merges(axes, run, x)
    axis(axes, x, "loss (nats per target)", "Loss per round")
    legend(axes)


def draw_metric(axes: Axes, run: RunData, x: str) -> None:
    """Validation metric of every trainer; a cross where it was merged, a triangle where it began to accumulate."""
    last_round = run.rounds[-1]["outer_step"]
    switched = False
    for trainer in run.trainers:
        rows = run.of(trainer)
        points = _series(rows, x, rows["validation_metric"])
        axes.plot(*points, line_style(points), color=colour(trainer), label=f"trainer {trainer}")
        if rows[-1]["outer_step"] < last_round and len(points[0]):
            axes.plot(points[0][-1], points[1][-1], "x", ms=9, mew=2, color=colour(trainer))
        switches = mode_switches(rows)
        marks = _series(switches, x, switches["validation_metric"])
        axes.plot(*marks, "^", ms=7, color=colour(trainer))
        switched = switched or len(marks[0]) > 0
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
        requested = _series(rows, x, rows["requested_batch"])
        axes.step(*requested, where="mid", color=colour(trainer), label=f"trainer {trainer}")
        shown = marked(run, rows)
        for accumulates, fill in ((False, "white"), (True, colour(trainer))):
            chosen = shown.where((shown["accumulation_steps"] > 1) == accumulates)
            axes.plot(chosen[x], chosen["effective_batch"], "o", ms=5, color=colour(trainer), mfc=fill)
    axes.plot([], [], "o", color="grey", mfc="white", label="effective, one micro-batch")
    axes.plot([], [], "o", color="grey", label="effective, accumulated")
    binary_logarithmic(axes)
    _mark_merges(axes, run, x)
    axis(axes, x, "examples per inner step", "Requested and effective batch")
    legend(axes)


def accumulation_threshold(run: RunData) -> float | None:
    """Return the request per worker above which gradients are accumulated, in max batches; None: never."""
    multiplier = float(run.config["switch_multiplier"])
    thresholds = {"threshold_switch_mode": multiplier, "only_gradient_accumulation": 1.0}
    return thresholds.get(run.config["switch_mode"])


def draw_worker_batches(axes: Axes, run: RunData, x: str) -> None:
    """Per worker: request (line), effective batch (dots), max batch, and the region in which it accumulates."""
    largest = run.rounds["max_batch"].max()
    top = largest
    for trainer in run.trainers:
        rows = run.of(trainer)
        request = np.ceil(rows["requested_batch"] / rows["nodes"])
        top = max(top, request.max())
        axes.step(*_series(rows, x, request), where="mid", color=colour(trainer), label=f"trainer {trainer}")
        shown = marked(run, rows)
        axes.plot(shown[x], shown["effective_batch"] / shown["nodes"], "o", ms=4, color=colour(trainer))
    axes.axhline(largest, color="black", lw=1.2, ls="--", label="max batch")
    threshold = accumulation_threshold(run)
    if threshold is not None:
        top = max(top, threshold * largest)
        axes.axhspan(threshold * largest, 1.3 * top, color="orange", alpha=0.15, label="accumulates above")
    binary_logarithmic(axes)
    axes.set_ylim(top=1.3 * top)
    axis(axes, x, "examples per worker and inner step", "Batch per worker: request (line), effective (dots)")
    legend(axes)


def _draw_statistic(axes: Axes, run: RunData, x: str, title: str, label: str, value: Callable) -> None:
    """Draw positive values of every trainer on a logarithmic axis; others are gaps."""
    found = False
    for trainer in run.trainers:
        rows = run.of(trainer)
        values = value(rows)
        points = _series(rows, x, np.where(values > 0, values, np.nan))
        found = found or len(points[0]) > 0
        axes.plot(*points, line_style(points), color=colour(trainer), label=f"trainer {trainer}")
    _mark_merges(axes, run, x)
    axis(axes, x, label, title)
    if found:
        plain_logarithmic(axes)
        legend(axes)
    else:
        _note(axes, "not measured in this run")


def draw_variance(axes: Axes, run: RunData, x: str) -> None:
    """Variance of the per-example gradients (the trace of their covariance)."""
    _draw_statistic(axes, run, x, "Gradient variance", "V", lambda rows: rows["gradient_variance"])


def draw_squared_norm(axes: Axes, run: RunData, x: str) -> None:
    """Estimated squared norm of the true gradient."""
    _draw_statistic(axes, run, x, "Squared gradient norm", "||∇F||²", lambda rows: rows["gradient_squared_norm"])


def _noise_ratio(rows: Rows) -> np.ndarray:
    squared_norm = rows["gradient_squared_norm"]
    return rows["gradient_variance"] / np.where(squared_norm == 0, np.nan, squared_norm)


def draw_noise_ratio(axes: Axes, run: RunData, x: str) -> None:
    """Variance over squared norm: the batch at which noise and gradient are equally large."""
    title = "Gradient noise: variance / squared norm"
    _draw_statistic(axes, run, x, title, "V / ||∇F||² (examples)", _noise_ratio)


def draw_throughput(axes: Axes, run: RunData, x: str) -> None:
    """Training tokens per second of every trainer's rounds, without evaluation."""
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
    """Number of living trainers (line), and nodes of each (stacked areas)."""
    rounds = list(run.by_round.values())
    rounds = [rounds[place] for place in spread(len(rounds), POINTS)]
    own = [dict(zip(rows["trainer_id"].astype(int), rows["nodes"], strict=True)) for rows in rounds]
    xs = [rows[x][0] for rows in rounds]
    nodes = [[held.get(trainer, 0.0) for held in own] for trainer in run.trainers]
    colours = [colour(trainer) for trainer in run.trainers]
    labels = [f"nodes of trainer {trainer}" for trainer in run.trainers]
    axes.stackplot(xs, nodes, step="mid", colors=colours, alpha=0.35, labels=labels)
    living = [len(rows) for rows in rounds]
    axes.step(xs, living, where="mid", color="black", lw=2, label="living trainers")
    axes.set_ylim(bottom=0, top=1.45 * max(*living, *map(sum, zip(*nodes, strict=True))))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis(axes, x, "count", "Living trainers and their nodes")
    legend(axes, ncols=2, loc="upper right")


def draw_genealogy(axes: Axes, run: RunData, x: str) -> None:
    """A lane per trainer while it lives; at a merge an arrow to the representative, and the weight."""
    lane = {trainer: place for place, trainer in enumerate(run.trainers)}
    for trainer in run.trainers:
        rows = run.of(trainer)
        axes.plot([rows[x][0], rows[x][-1]], [lane[trainer]] * 2, lw=5, color=colour(trainer), solid_capstyle="round")
    for merge in run.merges:
        place = run.by_round[merge.outer_step][x][0]
        for trainer, weight in merge.weights.items():
            side = 0.12
            if trainer != merge.representative:
                side = -0.28
                arrow = {"arrowstyle": "->", "color": colour(trainer), "lw": 1.8}
                axes.annotate("", (place, lane[merge.representative]), (place, lane[trainer]), arrowprops=arrow)
            text = f"{weight:.2f}  "
            axes.text(place, lane[trainer] + side, text, fontsize=8, ha="right", color=colour(trainer))
    axes.set_yticks(list(lane.values()), [f"trainer {trainer}" for trainer in lane])
    axes.set_ylim(-0.6, len(lane) - 0.4)
    axes.margins(x=0.06)
    axis(axes, x, "", "Which trainer became which, with weights")


def spread(count: int, points: int) -> np.ndarray:
    """Choose at most `points` of `count` places in equal steps, with the first and the last."""
    return np.arange(count) if count <= points else np.linspace(0, count - 1, points).astype(int)


def draw_batch_law(axes: Axes, run: RunData, x: str) -> None:
    """Effective batch of all trainers together (dots), and the laws fitted to it after the last merge."""
    totals = np.array([rows["effective_batch"].sum() for rows in run.by_round.values()])
    shown = spread(len(totals), MARKS)
    rounds = np.array(list(run.by_round))
    axes.plot(rounds[shown], totals[shown], "o", ms=4, color="black", label="measured, all trainers")
    found = _fitted(axes, run)
    if found is not None:
        places = spread(len(found.batches), POINTS)
        for index, (regime, law) in enumerate(found.fits.items()):
            batches = [law.law.batch(place + 1) for place in places]
            width = 2.5 if law is best_fit(found.fits) else 1
            label = f"{regime}, weight {law.weight:.2f}"
            axes.plot(found.first_round + places, batches, lw=width, color=colour(index), label=label)
    binary_logarithmic(axes)
    axis(axes, x, "examples per inner step", "Law of the batch")
    legend(axes)


def draw_prediction(axes: Axes, run: RunData, x: str) -> None:
    """Communications over examples: measured, and predicted for up to three times as many, with a 90% interval."""
    examples, communications = measured(run)
    points = thinned(np.array([0, *examples]), np.array([0, *communications]))
    axes.plot(*points, line_style(points), color="black", label="measured")
    found = _fitted(axes, run)
    if found is not None:
        ahead = np.linspace(examples[-1], 3.0 * examples[-1], 9)
        values = [found.predict(count) for count in ahead]
        axes.plot(ahead, [value.value for value in values], color=colour(0), label="predicted")
        low = [value.low for value in values]
        high = [value.high for value in values]
        axes.fill_between(ahead, low, high, color=colour(0), alpha=0.2, lw=0)
    axis(axes, x, "communications", "Communications: measured and predicted")
    axes.set_xlabel("training examples, all trainers")
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.set_ylim(bottom=0)
    legend(axes, loc="upper left")


def _fitted(axes: Axes, run: RunData) -> RunFit | None:
    try:
        return fit(run)
    except NoLawError as error:
        _note(axes, f"no law: {error}")
        return None


def draw_memory(axes: Axes, run: RunData, x: str) -> None:
    """Memory of the process and of every GPU: allocated (line) and the largest so far (dashed)."""
    devices = {device: columns for device, columns in run.memory.items() if device != "host"}
    for index, (device, columns) in enumerate(devices.items()):
        allocated = thinned(columns["seconds"], columns["allocated_bytes"])
        peak = thinned(columns["seconds"], columns["peak_bytes"])
        axes.plot(*allocated, lw=1.5, color=colour(index), label=device)
        axes.plot(*peak, "--", lw=1, color=colour(index), label=f"{device}, peak")
    axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.set_ylim(bottom=0)
    axis(axes, x, "memory", "Memory")
    axes.set_xlabel("seconds since training began")
    if devices:
        legend(axes, loc="lower right")


def draw_node_times(axes: Axes, run: RunData, x: str) -> None:
    """Seconds that each node was busy, waiting and exchanging, by its clock (simulated with node_speeds)."""
    rows = run.node_rows
    nodes = np.unique(rows["node"]).astype(int)
    bottom = np.zeros(len(nodes))
    for name, filled in (("busy", colour(0)), ("waiting", "#d9dee5"), ("exchanging", "#f0a830")):
        seconds = np.array([rows[name][rows["node"] == node].sum() for node in nodes])
        axes.bar(nodes, seconds, bottom=bottom, color=filled, label=name)
        bottom += seconds
    clock = "simulated" if run.config.get("node_speeds") else "measured"
    axis(axes, x, f"{clock} seconds", "Time of the nodes")
    axes.set_xlabel("node")
    axes.set_axisbelow(True)
    axes.set_ylim(top=1.2 * bottom.max())
    legend(axes, ncols=3, loc="upper left")


def draw_node_speeds(axes: Axes, run: RunData, x: str) -> None:
    """Examples per second of each node, measured or given."""
    rows = run.node_rows
    for node in np.unique(rows["node"]).astype(int):
        own = rows.where(rows["node"] == node)
        points = _series(own, x, own["speed"])
        axes.plot(*points, line_style(points), color=colour(node), label=f"node {node}" if node < 12 else None)
    axis(
        axes, x, "examples per second", "Speed of the nodes, " + ("given" if run.config["node_speeds"] else "measured")
    )
    axes.set_ylim(bottom=0)
    legend(axes, ncols=2)


def share_losses(run: RunData) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return by share of non-IID data the rounds, and the best trainer's validation loss on it."""
    found = {}
    rows = run.share_rows
    for share in np.unique(rows["share"]).astype(int) if rows else ():
        own = rows.where(rows["share"] == share)
        rounds = np.unique(own["outer_step"])
        best = [own["validation_loss"][own["outer_step"] == step].min() for step in rounds]
        found[int(share)] = (rounds, np.array(best))
    return found


def draw_share_losses(axes: Axes, run: RunData, x: str) -> None:
    """Validation loss of the best trainer on each share of non-IID data."""
    for share, points in share_losses(run).items():
        axes.plot(*thinned(*points), line_style(points), color=colour(share), label=f"share {share}")
    _mark_merges(axes, run, x)
    axis(axes, x, "loss (nats per target)", "Validation loss per share, of its best trainer")
    legend(axes, ncols=2)


Draw = Callable[[Axes, RunData, str], None]

# File name: its panels, and the column that each is drawn over.
PLOTS: dict[str, list[tuple[Draw, str]]] = {
    "overview.png": [
        (draw_metric, "tokens"),
        (draw_batches, "outer_step"),
        (draw_living, "outer_step"),
        (draw_metric, "communications"),
    ],
    "loss.png": [(draw_step_loss, "outer_step"), (draw_loss, "outer_step")],
    "metric.png": [(draw_metric, "bytes_communicated"), (draw_metric, "wall_seconds")],
    "batch_sizes.png": [(draw_worker_batches, "outer_step"), (draw_noise_ratio, "outer_step")],
    "gradient_statistics.png": [(draw_variance, "outer_step"), (draw_squared_norm, "outer_step")],
    "trainers.png": [(draw_genealogy, "outer_step"), (draw_living, "tokens")],
    "communications.png": [(draw_batch_law, "outer_step"), (draw_prediction, "communications")],
    "resources.png": [
        (draw_throughput, "outer_step"),
        (draw_memory, "wall_seconds"),
        (draw_node_times, "outer_step"),
        (draw_node_speeds, "outer_step"),
    ],
}


def plots_of(run: RunData) -> dict[str, list[tuple[Draw, str]]]:
    """Return the plots of a run; shares of non-IID data have one if they are evaluated."""
    if not run.share_rows:
        return PLOTS
    return PLOTS | {"shares.png": [(draw_share_losses, "outer_step"), (draw_loss, "outer_step")]}


def draw(run: RunData, panels: list[tuple[Draw, str]]) -> Figure:
    figure, axes = make_figure(len(panels))
    # Fixed margins: a layout that measures all texts first takes as long as the drawing itself.
    figure.set_layout_engine(None)
    height = figure.get_figheight()
    figure.subplots_adjust(left=0.07, right=0.99, bottom=0.55 / height, top=1 - 0.4 / height, wspace=0.2, hspace=0.34)
    for place, (panel, x) in zip(axes, panels, strict=True):
        panel(place, run, x)
    return figure


def plot_run(run: RunData) -> list[Path]:
    """Draw all plots of a run into its report folder; none if it has no round yet."""
    if not run.rounds:
        return []
    paths = []
    for name, panels in plots_of(run).items():
        figure = draw(run, panels)
        write_atomically(run.report_dir / name, lambda path, figure=figure: figure.savefig(path, dpi=110))
        paths.append(run.report_dir / name)
    return paths
