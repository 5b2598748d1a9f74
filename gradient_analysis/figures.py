"""Figures of a gradient analysis."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from scipy import stats

from gradient_analysis.gradients import BatchGradient
from training_logs.showing.styles import colour, make_figure


@dataclass(frozen=True)
class RunMarks:
    """The run's own values, which the figure of requests marks.

    Attributes:
        test: sampling_method; "norm_test, debias" with debias.
        eta: at the end of the run.
        batch: last requested batch in examples.
    """

    test: str
    eta: float
    theta: float
    nu: float
    batch: int


def deviations_figure(batches: Sequence[BatchGradient], found: Mapping[str, float], batch_size: int) -> Figure:
    """Draw a histogram of deviations with a normal distribution of equal moments, and one of cosines."""
    figure, (left, right) = make_figure(2)
    values = np.array([batch.deviation for batch in batches])
    left.hist(values, bins="auto", density=True, color=colour(0), alpha=0.45, label=f"{len(values)} batches")
    if found["standard_deviation"] > 0.0:
        xs = np.linspace(values.min(), values.max(), 300)
        density = stats.norm.pdf(xs, found["mean"], found["standard_deviation"])
        label = f"normal distribution (excess kurtosis of the deviations: {found['excess_kurtosis']:.2f})"
        left.plot(xs, density, color=colour(1), label=label)
    left.axvline(found["mean"], color="black", lw=3, alpha=0.3, label=f"mean {found['mean']:.4g}")
    left.axvline(found["median"], color="black", lw=1, ls="--", label=f"median {found['median']:.4g}")
    left.set_title(f"Deviation from the full gradient, batches of {batch_size}")
    left.set_xlabel("||g_B - F||")
    left.set_ylabel("density")
    cosines = np.array([batch.cosine for batch in batches])
    cosines = cosines[np.isfinite(cosines)]
    if len(cosines):
        right.hist(cosines, bins="auto", color=colour(4), alpha=0.6)
    right.set_title("Cosine to the full gradient")
    right.set_xlabel("cos(g_B, F)")
    right.set_ylabel("batches")
    for axes in (left, right):
        axes.grid(True, alpha=0.3)
    # Below the axes, because a histogram may fill any corner.
    left.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    return figure


def requests_figure(rows: Sequence[tuple[str, float, int]], sample: int, marks: RunMarks) -> Figure:
    """Draw the requests of each batch test over its parameter, with the run's own parameter and batch."""
    figure, panels = make_figure(3, 3, (15, 4.4))
    tests = (
        ("norm_test", "eta", marks.eta, ["norm_test", "norm_test, debias"]),
        ("inner_product_test", "theta", marks.theta, ["inner_product_test", "augmented_inner_product_test"]),
        ("orthogonality", "nu", marks.nu, ["augmented_inner_product_test"]),
    )
    for axes, (test, parameter, own, users) in zip(panels, tests, strict=True):
        shown = [row for row in rows if row[0].startswith(test)]
        for index, name in enumerate(dict.fromkeys(name for name, _, _ in shown)):
            points = [(value, request) for other, value, request in shown if other == name]
            used = " (the run's test)" if name == marks.test else ""
            axes.plot(*zip(*points, strict=True), ".-", color=colour(index), label=name.replace("_", " ") + used)
        label = f"the run's {parameter} at its end, {own:g}"
        if marks.test not in users:
            label = f"configured {parameter}, {own:g} (test not in use)"
        axes.axvline(own, color="black", lw=1, ls="--", label=label)
        axes.axhline(marks.batch, color="black", lw=1, ls=":", label=f"last requested batch, {marks.batch:,}")
        axes.axhline(sample, color="grey", lw=1, ls=":", label=f"sample, {sample:,}")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xlabel(parameter)
        axes.grid(True, alpha=0.3)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    panels[0].set_ylabel("requested batch, examples")
    panels[1].set_title("Requests of the batch tests at this point")
    return figure
