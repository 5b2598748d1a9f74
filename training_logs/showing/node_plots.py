"""Panels of what became of every node's time, what share of a batch it has, and how fast it is, from node_log.csv.

Of a run with node_speeds that is simulated time, and node_log_measured.csv has the time that was measured besides.
"""

from collections.abc import Iterator

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from training_logs.showing.number_log import Rows
from training_logs.showing.run_data import RunData
from training_logs.showing.series import thinned
from training_logs.showing.styles import axis, colour, legend, line_style

# Bars of all lanes together, about; the rounds of the panel that shows each; lanes and lines that can be told apart.
_BARS, _ROUNDS, _NAMED = 2000, 6, 12
_WAITING, _EXCHANGING = "#d9dee5", "#f0a830"
_LAST_ROUNDS = f"The same, of the last {_ROUNDS} rounds at most"


def _by_node(rows: Rows) -> dict[int, Rows]:
    return {int(node): rows.where(rows["node"] == node) for node in np.unique(rows["node"])} if rows else {}


def _stretches(rows: Rows, most: int, shortest: float) -> Iterator[tuple[int, np.ndarray]]:
    """A node's rows, joined to so many, about: its trainer, begin, and seconds busy, waiting and exchanging.

    None is joined over rounds in which the node was away for longer than `shortest`, in seconds.
    """
    away = np.flatnonzero(rows["begins"][1:] - rows["ends"][:-1] > shortest) + 1
    for there in np.split(np.arange(len(rows)), away):
        for places in np.array_split(there, min(len(there), -(-most * len(there) // len(rows)))):
            own = rows.where(places)
            spent = [own[name].sum() for name in ("busy", "waiting", "exchanging")]
            yield int(own["trainer_id"][0]), np.array([own["begins"][0], *spent])


def _draw_lanes(axes: Axes, run: RunData, rows: Rows, title: str, simulated: bool) -> None:
    nodes = _by_node(rows)
    axis(axes, "wall_seconds", "node", title)
    axes.set_xlabel("simulated seconds" if simulated else "measured seconds, as if nodes worked side by side")
    axes.set_axisbelow(True)
    axes.set_yticks(sorted(nodes)[:: -(-len(nodes) // _NAMED) or 1])
    if not nodes:
        axes.text(0.5, 0.5, "not recorded in this run", ha="center", transform=axes.transAxes)
        return
    first, last, most = rows["begins"].min(), rows["ends"].max(), max(_BARS // len(nodes), 10)
    for node, own in nodes.items():
        bars, colours = [], []
        for trainer, (begin, *spent) in _stretches(own, most, (last - first) / most):
            for seconds, filled in zip(spent, (colour(trainer), _WAITING, _EXCHANGING), strict=True):
                bars.append((begin, seconds))
                colours.append(filled)
                begin += seconds
        axes.broken_barh(bars, (node - 0.4, 0.8), facecolors=colours, linewidth=0)
    trainers = [Patch(color=colour(trainer), label=f"busy, trainer {trainer}") for trainer in run.trainers[:_NAMED]]
    waits = [Patch(color=_WAITING, label="waiting"), Patch(color=_EXCHANGING, label="exchanging")]
    axes.set_ylim(max(nodes) + 0.6, min(nodes) - 0.6 - 0.3 * (max(nodes) - min(nodes) + 1))
    axes.set_xlim(first, max(last, first + 1e-9))
    legend(axes, handles=trainers + waits, loc="upper left", ncols=3)


def _last(rows: Rows) -> Rows:
    return rows.where(rows["outer_step"] > rows["outer_step"].max() - _ROUNDS) if rows else rows


def draw_times(axes: Axes, run: RunData, x: str) -> None:
    """A lane per node over the time of the run: busy for which trainer, waiting for others, and exchanging."""
    _draw_lanes(axes, run, run.node_rows, "What nodes do with their time", has_both_times(run))


def draw_last_times(axes: Axes, run: RunData, x: str) -> None:
    """The same, of the last rounds."""
    _draw_lanes(axes, run, _last(run.node_rows), _LAST_ROUNDS, has_both_times(run))


def draw_measured_times(axes: Axes, run: RunData, x: str) -> None:
    """Lanes by what was measured, where `draw_times` has those of simulated time."""
    _draw_lanes(axes, run, run.measured_node_rows, "What nodes did with their time here", False)


def draw_last_measured_times(axes: Axes, run: RunData, x: str) -> None:
    """The same, of the last rounds."""
    _draw_lanes(axes, run, _last(run.measured_node_rows), _LAST_ROUNDS, False)


def has_both_times(run: RunData) -> bool:
    """Whether nodes have a simulated time besides the measured one."""
    return run.config.get("node_speeds") is not None


def broken(rounds: np.ndarray, values: np.ndarray, last: float) -> tuple[np.ndarray, np.ndarray]:
    """A line with a gap wherever a node was away for longer than a twentieth of the rounds, and than six."""
    away = np.flatnonzero(np.diff(rounds) > max(6, last / 20)) + 1
    return np.insert(rounds.astype(float), away, rounds[away - 1] + 1), np.insert(values.astype(float), away, np.nan)


def _draw_nodes(axes: Axes, run: RunData, column: str, title: str, label: str) -> None:
    nodes = _by_node(run.node_rows)
    for node, own in nodes.items():
        measured = np.isfinite(own[column])
        points = broken(*thinned(own["outer_step"][measured], own[column][measured]), run.node_rows["outer_step"].max())
        # Nodes of equal values lie on each other: each line is thinner than the one below it.
        width = 1.0 + 4.0 * (1 - node / max(len(nodes), 1))
        axes.plot(*points, line_style(points), lw=width, color=colour(node), label=f"node {node}")
    axis(axes, "outer_step", label, title)
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)
    if 0 < len(nodes) <= _NAMED:
        legend(axes, ncols=2)


def draw_node_shares(axes: Axes, run: RunData, x: str) -> None:
    """Examples of every node in an inner step."""
    _draw_nodes(axes, run, "examples", "Share of the batch", "examples per inner step")


def draw_node_speeds(axes: Axes, run: RunData, x: str) -> None:
    """Examples per second of every node, given or measured."""
    title = "Speed, as given" if has_both_times(run) else "Speed, as measured"
    _draw_nodes(axes, run, "speed", title, "examples per second")
