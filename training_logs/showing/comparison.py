"""Several runs on common axes, and the differences of their configurations."""

import html
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from training_logs.showing.report import headline, page, picture, table
from training_logs.showing.run_data import RunData, RunFolderError
from training_logs.showing.styles import (
    OVER,
    axis,
    colour,
    legend,
    line_style,
    make_figure,
    plain_logarithmic,
    thinned,
)
from utils.files import write_atomically, write_text_atomically

# Keys without influence on results.
_PLACES = ("log_dir", "cache_dir")


def best_per_round(run: RunData, x: str) -> tuple[list[float], list[float]]:
    """Return a column of the round log, and the best validation metric of the living trainers after every round."""
    best = max if run.metric.higher_is_better else min
    xs, values = [], []
    for rows in run.by_round.values():
        metrics = rows["validation_metric"]
        metrics = metrics[np.isfinite(metrics)]
        if len(metrics):
            xs.append(float(rows[x][0]))
            values.append(float(best(metrics)))
    return xs, values


def differences(runs: Sequence[RunData]) -> dict[str, list]:
    """Return the keys whose values differ between the runs, with the values."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in _PLACES)
    values = {key: [run.config.get(key) for run in runs] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def _names(runs: Sequence[RunData]) -> list[str]:
    names = [run.folder.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def draw_comparison(runs: Sequence[RunData]):
    """Draw the best metric over each column that a plot can be drawn over."""
    figure, axes = make_figure(len(OVER))
    for place, x in zip(axes, OVER, strict=True):
        for index, (run, name) in enumerate(zip(runs, _names(runs), strict=True)):
            points = thinned(*map(np.array, best_per_round(run, x)))
            place.plot(*points, line_style(points), color=colour(index), label=name)
        metric = runs[0].metric.name
        if metric == "perplexity":
            plain_logarithmic(place)
        axis(place, x, metric, f"Best {metric} of the living trainers")
        if place is axes[0]:
            legend(place)
    return figure


def compare(runs: Sequence[RunData], output: Path) -> Path:
    """Write comparison.png and comparison.html into a folder; return the path of the page.

    Raises:
        RunFolderError: the runs have different metrics, or one has no round.
    """
    for run in runs:
        if run.metric.name != runs[0].metric.name:
            raise RunFolderError(
                f"{run.folder}: its metric is {run.metric.name}, that of {runs[0].folder} {runs[0].metric.name}"
            )
        if not run.rounds:
            raise RunFolderError(f"{run.folder}: has no round yet")
    names = _names(runs)
    image = output / "comparison.png"
    write_atomically(image, lambda path: draw_comparison(runs).savefig(path, dpi=110))
    numbers = [headline(run) for run in runs]
    body = [
        "<h1>Comparison</h1>",
        f"<p class=dim>{html.escape(', '.join(names))}</p>",
        picture(image),
        "<h2>Numbers</h2>",
        table(("", *names), [(key, *(found[key] for found in numbers)) for key in numbers[0]]),
        "<h2>What differs in the configurations</h2>",
        table(("key", *names), [(key, *map(str, values)) for key, values in differences(runs).items()]),
    ]
    path = output / "comparison.html"
    write_text_atomically(path, page("Comparison", "".join(body)))
    return path
