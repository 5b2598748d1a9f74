"""Plots of a run, drawn from its round log alone."""

import csv
from collections.abc import Callable, Iterable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from utils.utils import write_atomically

Row = dict[str, float]

# What a plot can be drawn over: column of the round log -> label of the axis.
OVER = {"outer_step": "round", "tokens": "training tokens, all trainers", "communications": "communications"}
_COLOURS = (
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#9467bd",
    "#ff7f0e",
    "#17becf",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
)


def read_round_log(path: Path) -> list[Row]:
    """The rows of training_log.csv as numbers; an empty cell is NaN."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {name: float(value) if value else float("nan") for name, value in row.items()}
            for row in csv.DictReader(file)
        ]


def _trainers(rows: Iterable[Row]) -> list[int]:
    return sorted({int(row["trainer_id"]) for row in rows})


def colour(trainer: int) -> str:
    """A trainer's colour, the same in every plot."""
    return _COLOURS[trainer % len(_COLOURS)]


def _series(rows: list[Row], trainer: int, x: str, y: str) -> tuple[list[float], list[float]]:
    points = [(row[x], row[y]) for row in rows if row["trainer_id"] == trainer and row[y] == row[y]]
    return [point[0] for point in points], [point[1] for point in points]


def _axis(axes: Axes, x: str, y_label: str) -> None:
    axes.set_xlabel(OVER[x])
    axes.set_ylabel(y_label)
    axes.grid(True, alpha=0.3)
    if x == "tokens":
        axes.xaxis.set_major_formatter(EngFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_loss(axes: Axes, rows: list[Row], x: str, metric: str) -> None:
    """Training loss (thin, dashed) and validation loss of every trainer."""
    for trainer in _trainers(rows):
        axes.plot(*_series(rows, trainer, x, "train_loss"), "--", lw=1, color=colour(trainer), alpha=0.7)
        axes.plot(
            *_series(rows, trainer, x, "validation_loss"), ".-", color=colour(trainer), label=f"trainer {trainer}"
        )
    axes.plot([], [], "--", lw=1, color="grey", label="training (dashed)")
    axes.set_title("Loss")
    _axis(axes, x, "loss (nats per target)")
    axes.legend(fontsize=8)


def draw_metric(axes: Axes, rows: list[Row], x: str, metric: str) -> None:
    """The validation metric of every trainer, a cross where it was merged; perplexity on a logarithmic scale."""
    last_round = max(row["outer_step"] for row in rows)
    for trainer in _trainers(rows):
        xs, values = _series(rows, trainer, x, "validation_metric")
        axes.plot(xs, values, ".-", color=colour(trainer), label=f"trainer {trainer}")
        merged = max(row["outer_step"] for row in rows if row["trainer_id"] == trainer) < last_round
        if merged and xs:
            axes.plot(xs[-1], values[-1], "x", ms=9, mew=2, color=colour(trainer))
    axes.plot([], [], "x", mew=2, color="grey", label="merged into another")
    if metric == "perplexity":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(f"Validation {metric}")
    _axis(axes, x, metric)
    axes.legend(fontsize=8)


def draw_batches(axes: Axes, rows: list[Row], x: str, metric: str) -> None:
    """Requested batch (line) and effective batch (circles) of every trainer; filled where it accumulates."""
    for trainer in _trainers(rows):
        own = [row for row in rows if row["trainer_id"] == trainer]
        axes.step(
            *_series(rows, trainer, x, "requested_batch"),
            where="mid",
            color=colour(trainer),
            label=f"trainer {trainer}",
        )
        for row in own:
            accumulates = row["accumulation_steps"] > 1
            axes.plot(
                row[x],
                row["effective_batch"],
                "o",
                ms=5,
                color=colour(trainer),
                mfc=colour(trainer) if accumulates else "white",
            )
    axes.plot([], [], "o", color="grey", mfc="white", label="effective, one micro-batch")
    axes.plot([], [], "o", color="grey", label="effective, accumulated")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_title("Requested and effective batch")
    _axis(axes, x, "examples per inner step")
    axes.legend(fontsize=8)


def draw_living(axes: Axes, rows: list[Row], x: str, metric: str) -> None:
    """How many trainers live (line), and how many nodes work for each (stacked areas)."""
    rounds = sorted({row["outer_step"] for row in rows})
    own = {step: {int(row["trainer_id"]): row for row in rows if row["outer_step"] == step} for step in rounds}
    xs = [next(iter(own[step].values()))[x] for step in rounds]
    trainers = _trainers(rows)
    nodes = [[own[step][trainer]["nodes"] if trainer in own[step] else 0.0 for step in rounds] for trainer in trainers]
    axes.stackplot(
        xs,
        nodes,
        step="mid",
        colors=[colour(trainer) for trainer in trainers],
        alpha=0.35,
        labels=[f"nodes of trainer {trainer}" for trainer in trainers],
    )
    living = [len(own[step]) for step in rounds]
    axes.step(xs, living, where="mid", color="black", lw=2, label="living trainers")
    axes.set_ylim(bottom=0, top=1.25 * max(*living, *map(sum, zip(*nodes, strict=True))))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Living trainers and their nodes")
    _axis(axes, x, "count")
    axes.legend(fontsize=8, ncols=2, loc="upper right")


Draw = Callable[[Axes, list[Row], str, str], None]

# File name -> what its panels show, and over what.
PLOTS: dict[str, list[tuple[Draw, str]]] = {
    "loss.png": [(draw_loss, "outer_step"), (draw_loss, "tokens")],
    "metric.png": [(draw_metric, "outer_step"), (draw_metric, "tokens")],
    "batch_sizes.png": [(draw_batches, "outer_step"), (draw_batches, "tokens")],
    "living_trainers.png": [(draw_living, "outer_step"), (draw_living, "tokens")],
    "loss_over_communications.png": [(draw_loss, "communications"), (draw_metric, "communications")],
    "overview.png": [
        (draw_metric, "tokens"),
        (draw_batches, "outer_step"),
        (draw_living, "outer_step"),
        (draw_metric, "communications"),
    ],
}


def draw(rows: list[Row], panels: list[tuple[Draw, str]], metric: str) -> Figure:
    """One figure with two panels per row."""
    lines = -(-len(panels) // 2)
    # Figures made without pyplot need no display, and nothing global has to be closed.
    figure = Figure(figsize=(11, 4.2 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (panel, x) in enumerate(panels, 1):
        panel(figure.add_subplot(lines, 2, number), rows, x, metric)
    return figure


def plot_run(report_dir: Path, metric: str) -> list[Path]:
    """Draw all plots of a run from its training_log.csv; nothing where it has no row yet."""
    rows = read_round_log(report_dir / "training_log.csv")
    if not rows:
        return []
    paths = []
    for name, panels in PLOTS.items():
        figure = draw(rows, panels, metric)
        write_atomically(report_dir / name, lambda path, figure=figure: figure.savefig(path, dpi=110))
        paths.append(report_dir / name)
    return paths
