"""The look of plots: colours, lines and axes."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

# More marks on a line cannot be distinguished.
MARKS = 80
# Column of the round log that a plot can be drawn over: label of the axis.
OVER = {
    "outer_step": "round",
    "tokens": "training tokens, all trainers",
    "communications": "communications",
    "bytes_communicated": "bytes communicated",
    "wall_seconds": "seconds since the start, start-ups and evaluation included",
}


def make_figure(panels: int, columns: int = 2, size: tuple[float, float] | None = None) -> tuple[Figure, list[Axes]]:
    """Make a figure with empty panels. size: in inches; None: the usual size."""
    columns = min(columns, panels)
    lines = -(-panels // columns)
    # Figures made without pyplot need no display and need not be closed.
    figure = Figure(figsize=size or (5.5 * columns, 4.2 * lines), layout="constrained")
    return figure, [figure.add_subplot(lines, columns, number) for number in range(1, panels + 1)]


def colour(index: int) -> str:
    """Return the colour of a trainer, or of a run among several."""
    return f"C{index % 10}"


def literal(text: str) -> str:
    """Return a label that matplotlib shows as it is; $ would be mathematics, and a label that begins with _ hidden."""
    shown = text.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def draw_line(axes: Axes, xs: np.ndarray, ys: np.ndarray, **look) -> None:
    """Draw a line through the finite values; few values are marked."""
    finite = np.isfinite(ys)
    marker = "." if finite.sum() <= MARKS else None
    axes.plot(xs[finite], ys[finite], **({"marker": marker} | look))


def label_axes(axes: Axes, x: str, y_label: str, title: str) -> None:
    """Set title, labels, grid and ticks of a panel over a column of the round log."""
    axes.set_title(title)
    axes.set_xlabel(OVER[x])
    axes.set_ylabel(y_label)
    axes.grid(True, alpha=0.3)
    if x in ("tokens", "bytes_communicated"):
        axes.xaxis.set_major_formatter(EngFormatter(unit="B" if x == "bytes_communicated" else ""))
    elif x != "wall_seconds":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def decimal_logarithmic(axes: Axes) -> None:
    """Make the y axis, on which all is drawn, logarithmic, with plain numbers: 300, not 3e2; nothing if it is empty."""
    if not axes.dataLim.y1 > 0.0:
        return
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # Six labels a decade would overlap on more than two decades.
    subs = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if high <= 100.0 * low else (1.0, 3.0)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def binary_logarithmic(axes: Axes) -> None:
    """Make the y axis logarithmic to base 2, with plain numbers."""
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_locator(LogLocator(base=2, subs=(1.0, 1.5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
