"""Plots of a run, drawn from its run folder. A trainer has the same look in all of them."""

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from training_logs.showing.run_data import RunData, Table
from training_logs.showing.styles import (
    MARKS,
    OVER,
    binary_logarithmic,
    colour,
    decimal_logarithmic,
    draw_line,
    label_axes,
    make_figure,
)
from utils.files import write_atomically

Draw = Callable[[Axes, RunData, str], None]

# Most rings on the line of a trainer that was merged away.
_RINGS = 5


def _look(run: RunData, trainer: int) -> dict:
    """Return the look of a trainer: a wide line if it lives at the end, else a thin one above it.

    The others have different patterns and a few rings of different sizes, so that lines of equal values stay visible.
    """
    if trainer in run.rounds[run.rounds["outer_step"] == run.rounds["outer_step"][-1]]["trainer_id"]:
        return {"color": colour(trainer), "lw": 2.4, "ls": "-", "zorder": 2}
    pattern = ("-", "--", ":", "-.")[trainer % 4]
    rings = {"marker": "o", "mfc": "none", "ms": 4 + 3 * (trainer % 4)}
    every = -(-len(run.by_trainer[trainer]) // _RINGS)
    return {"color": colour(trainer), "lw": 1.2, "ls": pattern, "zorder": 3, "markevery": every} | rings


def _mark(points: int) -> str | None:
    """Return the mark of a line without marks: a line of one point would not be seen."""
    return "." if points == 1 else None


def _mark_merges(axes: Axes, run: RunData, x: str) -> None:
    """Draw a grey line at the end of each round after which trainers merged."""
    label = "trainers merge"
    for outer_step in run.merges:
        if outer_step in run.by_round:
            axes.axvline(run.by_round[outer_step][x][0], ls=":", lw=1, color="grey", label=label)
            label = None


def _draw_trainers(
    axes: Axes, run: RunData, x: str, title: str, label: str, values: Callable[[Table], np.ndarray]
) -> None:
    for trainer, rows in run.by_trainer.items():
        draw_line(axes, rows[x], values(rows), label=f"trainer {trainer}", **_look(run, trainer))
    _mark_merges(axes, run, x)
    label_axes(axes, x, label, title)
    axes.legend(fontsize=8)


# Panels


def draw_step_loss(axes: Axes, run: RunData, x: str) -> None:
    """Training loss of every inner step (pale), and its mean over a twentieth of the trainer's steps around it."""
    for trainer, (steps, losses) in run.step_losses.items():
        axes.plot(steps, losses, lw=0.6, alpha=0.35, color=colour(trainer))
        half = len(losses) // 40
        width = 2 * half + 1
        sums = np.cumsum(np.insert(losses, 0, 0.0))  # a convolution would take quadratic time
        mean = (sums[width:] - sums[:-width]) / width
        look = _look(run, trainer) | {"marker": _mark(len(mean))}
        axes.plot(steps[half : half + len(mean)], mean, label=f"trainer {trainer}", **look)
    axes.plot([], [], lw=1, color="grey", alpha=0.5, label="single steps (pale); bold: their mean over 5% of the steps")
    label_axes(axes, x, "loss (nats per target)", "Training loss per inner step")
    axes.set_xlabel("inner step")
    axes.legend(fontsize=8)


def draw_loss(axes: Axes, run: RunData, x: str) -> None:
    """Validation loss, and training loss (pale), of every trainer."""
    for trainer, rows in run.by_trainer.items():
        axes.plot(rows[x], rows["train_loss"], color=colour(trainer), lw=1, alpha=0.5, marker=_mark(len(rows)))
    axes.plot([], [], lw=1, color="grey", alpha=0.5, label="training (pale); validation is bold")
    _draw_trainers(axes, run, x, "Loss per round", "loss (nats per target)", lambda rows: rows["validation_loss"])


def draw_metric(axes: Axes, run: RunData, x: str) -> None:
    """Validation metric of every trainer."""
    name = run.metric.name
    title = f"{name.capitalize()} over {OVER[x].split(',')[0]}"
    _draw_trainers(axes, run, x, title, name, lambda rows: rows["validation_metric"])
    if name == "perplexity":
        decimal_logarithmic(axes)


def draw_best_metric(axes: Axes, run: RunData, x: str) -> None:
    """Best validation metric of the living trainers."""
    draw_line(axes, *run.best_metrics(x), color="black")
    name = run.metric.name
    if name == "perplexity":
        decimal_logarithmic(axes)
    label_axes(axes, x, name, f"Best {name} over {OVER[x]}")


def draw_batches(axes: Axes, run: RunData, x: str) -> None:
    """Requested batch (line) and effective batch (circles) of every trainer; filled where it accumulates."""
    every = -(-len(run.by_round) // MARKS)  # marks of all rounds of a long run could not be distinguished
    for trainer, rows in run.by_trainer.items():
        look = _look(run, trainer)
        lines = look | {"marker": "_" if len(rows) == 1 else None}
        axes.step(rows[x], rows["requested_batch"], where="mid", label=f"trainer {trainer}", **lines)
        for accumulates, fill in ((False, look.get("mfc", "white")), (True, colour(trainer))):
            own = rows[(rows["accumulation_steps"] > 1) == accumulates][:: look.get("markevery", every)]
            axes.plot(own[x], own["effective_batch"], "o", ms=look.get("ms", 4.8), color=colour(trainer), mfc=fill)
    axes.plot([], [], "o", color="grey", mfc="white", label="effective, one micro-batch")
    axes.plot([], [], "o", color="grey", label="effective, accumulated")
    binary_logarithmic(axes)
    _mark_merges(axes, run, x)
    label_axes(axes, x, "examples per inner step", "Requested and effective batch")
    axes.legend(fontsize=8)


def draw_noise_scale(axes: Axes, run: RunData, x: str) -> None:
    """Variance over squared norm: the batch at which noise and gradient are equally large."""

    def ratio(rows: Table) -> np.ndarray:
        found = np.full(len(rows), np.nan)  # a logarithmic axis shows no estimate that is not positive
        numbers = (rows["gradient_variance"], rows["gradient_squared_norm"])
        return np.divide(*numbers, out=found, where=(numbers[0] > 0) & (numbers[1] > 0))

    # The batch test sees these averages, not the statistics of one round.
    averaged = ", averaged over rounds" if run.config.get("statistics_smoothing") else ""
    _draw_trainers(axes, run, x, f"Gradient noise scale{averaged}", "V / ||G||² (examples)", ratio)
    decimal_logarithmic(axes)


def draw_living(axes: Axes, run: RunData, x: str) -> None:
    """Number of living trainers (line), nodes of each (stacked areas) and, if some are idle, all nodes (dashed)."""
    rounds = list(run.by_round.values())
    xs = [rows[x][0] for rows in rounds]
    if len(rounds) == 1:  # areas and steps need two points: the round is as wide as in a longer run
        rounds *= 2
        xs = [xs[0] - 0.5, xs[0] + 0.5]
    nodes = {trainer: np.zeros(len(rounds)) for trainer in run.by_trainer}
    for place, rows in enumerate(rounds):
        for row in rows:
            nodes[int(row["trainer_id"])][place] = row["nodes"]
    colours = [colour(trainer) for trainer in nodes]
    labels = [f"nodes of trainer {trainer}" for trainer in nodes]
    axes.stackplot(xs, *nodes.values(), step="mid", colors=colours, alpha=0.35, labels=labels)
    living = [len(rows) for rows in rounds]
    axes.step(xs, living, where="mid", color="black", lw=2, label="living trainers")
    highest = max(max(living), sum(nodes.values()).max())
    if run.summary.get("nodes", 0) > sum(nodes.values()).min():
        axes.axhline(run.summary["nodes"], color="grey", lw=1, ls="--", label="all nodes")
        highest = max(highest, run.summary["nodes"])
    axes.set_ylim(bottom=0, top=1.45 * highest)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    label_axes(axes, x, "trainers, nodes", "Living trainers and their nodes")
    axes.legend(fontsize=8, ncols=2, loc="upper right")


def draw_node_times(axes: Axes, run: RunData, x: str) -> None:
    """Seconds that each node was busy, waiting, exchanging and idle, by its clock (simulated with node_speeds)."""
    rows = run.node_rows
    nodes = np.arange(max(rows["node"].max() + 1, run.summary.get("nodes", 0)), dtype=int)
    bottom = np.zeros(len(nodes))
    for name, filled in (("busy", colour(0)), ("waiting", "#d9dee5"), ("exchanging", "#f0a830")):
        seconds = np.array([rows[name][rows["node"] == node].sum() for node in nodes])
        axes.bar(nodes, seconds, bottom=bottom, color=filled, label=name)
        bottom += seconds
    end = rows["ends"].max()
    idle = np.maximum(end - bottom, 0)
    axes.bar(nodes, idle, bottom=bottom, color="none", edgecolor="grey", hatch="//", label="idle")
    clock = "simulated" if run.config.get("node_speeds") else "measured"
    label_axes(axes, x, f"{clock} seconds", "Time of the nodes")
    axes.set_xlabel("node")
    axes.set_axisbelow(True)
    axes.set_ylim(top=1.2 * end)
    axes.legend(fontsize=8, ncols=4, loc="upper left")


# Figures


def plots_of(run: RunData) -> dict[str, list[tuple[Draw, str]]]:
    """Return by file name the panels of each plot, and the column that each panel is drawn over.

    Panels about something that the run does not have are left out.
    """
    communicates = run.rounds["communications"][-1] > 0
    tested = bool((run.rounds["gradient_variance"] > 0).any())
    panels = {
        "overview.png": {
            (draw_metric, "tokens"): True,
            (draw_best_metric, "communications"): communicates,
            (draw_batches, "outer_step"): True,
            (draw_living, "outer_step"): True,
        },
        "loss.png": {(draw_step_loss, "outer_step"): bool(run.step_losses), (draw_loss, "outer_step"): True},
        "metric.png": {(draw_metric, "wall_seconds"): True, (draw_best_metric, "bytes_communicated"): communicates},
        "gradient_noise.png": {(draw_noise_scale, "outer_step"): tested},
        "resources.png": {(draw_node_times, "outer_step"): len(run.node_rows) > 0},
    }
    shown = {name: [panel for panel, present in own.items() if present] for name, own in panels.items()}
    return {name: own for name, own in shown.items() if own}


def draw(run: RunData, panels: list[tuple[Draw, str]]) -> Figure:
    figure, axes = make_figure(len(panels))
    # Fixed margins: a layout that measures all texts first takes as long as the drawing itself.
    figure.set_layout_engine(None)
    width, height = figure.get_size_inches()
    margins = {"left": 0.9 / width, "right": 1 - 0.1 / width, "bottom": 0.55 / height, "top": 1 - 0.4 / height}
    figure.subplots_adjust(**margins, wspace=0.2, hspace=0.34)
    for place, (panel, x) in zip(axes, panels, strict=True):
        panel(place, run, x)
    return figure


def plot_run(run: RunData) -> None:
    """Draw all plots of a run into its report folder; none if it has no round yet."""
    if not len(run.rounds):
        return
    for name, panels in plots_of(run).items():
        figure = draw(run, panels)
        write_atomically(run.report_dir / name, lambda path, figure=figure: figure.savefig(path, dpi=110))
