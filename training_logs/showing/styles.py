"""The look of plots: colours, lines, axes and legends, and how many points a line has."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

# More points than pixels only cost time.
POINTS = 500
# More marks on a line cannot be told apart.
MARKS = 80
# Column of the round log that a plot can be drawn over: label of the axis.
OVER = {
    "outer_step": "round",
    "tokens": "training tokens, all trainers",
    "communications": "communications",
    "bytes_communicated": "bytes communicated",
    "wall_seconds": "seconds since the start",
}
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


def make_figure(panels: int, columns: int = 2, size: tuple[float, float] | None = None) -> tuple[Figure, list[Axes]]:
    """Make a figure with empty panels; size: in inches, if the usual one does not fit."""
    lines = -(-panels // columns)
    # Figures made without pyplot need no display and need not be closed.
    figure = Figure(figsize=size or (5.5 * columns, 4.2 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(lines, columns, number) for number in range(1, panels + 1)]


def colour(index: int) -> str:
    """Return the colour of a trainer, or of a run among several."""
    return _COLOURS[index % len(_COLOURS)]


def line_style(points: Sequence[np.ndarray]) -> str:
    """Return the style of a line; few points are marked."""
    return ".-" if len(points[0]) <= MARKS else "-"


def thinned(xs: np.ndarray, ys: np.ndarray, points: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Reduce a line to at most `points` points, which are means over equal stretches."""
    if len(xs) <= points:
        return xs, ys
    place = np.arange(len(xs)) * points // len(xs)
    counts = np.bincount(place)
    return np.bincount(place, xs) / counts, np.bincount(place, ys) / counts


def axis(axes: Axes, x: str, y_label: str, title: str) -> None:
    """Set title, labels, grid and ticks of a panel over a column of the round log."""
    axes.set_title(title)
    axes.set_xlabel(OVER[x])
    axes.set_ylabel(y_label)
    axes.grid(True, alpha=0.3)
    if x in ("tokens", "bytes_communicated"):
        axes.xaxis.set_major_formatter(EngFormatter(unit="B" if x == "bytes_communicated" else ""))
    elif x != "wall_seconds":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def plain_logarithmic(axes: Axes) -> None:
    """Make the y axis logarithmic, with plain numbers: 300, not 3e2."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def binary_logarithmic(axes: Axes) -> None:
    """Make the y axis logarithmic to base 2, with plain numbers."""
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def legend(axes: Axes, **where) -> None:
    """Show names where they cover least."""
    axes.legend(fontsize=8, **({"loc": "best"} | where))
