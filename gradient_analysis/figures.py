"""The pictures of a gradient analysis."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from scipy import stats

from gradient_analysis.gradients import BatchGradient
from gradient_analysis.laws import Distribution, PowerLaw
from training_logs.showing.styles import colour, make_figure

_FAMILIES = {"norm": "normal", "t": "Student's t"}


def deviations_figure(batches: Sequence[BatchGradient], found: Distribution, batch_size: int) -> Figure:
    """Histogram of deviations with the fitted distributions, and of cosines."""
    figure, (left, right) = make_figure(2)
    values = np.array([batch.deviation for batch in batches])
    left.hist(values, bins="auto", density=True, color=colour(0), alpha=0.45, label=f"{len(values)} batches")
    xs = np.linspace(values.min(), values.max(), 300)
    for index, fit in enumerate(found.fits, 1):
        density = getattr(stats, fit.name).pdf(xs, *fit.parameters)
        label = f"{_FAMILIES[fit.name]} (KS {fit.kolmogorov_smirnov:.3f}, p {fit.p_value:.2f})"
        left.plot(xs, density, color=colour(index), label=label)
    left.axvline(found.mean, color="black", lw=1, ls="--", label=f"mean {found.mean:.4g}")
    left.axvline(found.median, color="black", lw=1, ls=":", label=f"median {found.median:.4g}")
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
    # Below the data, not over it: a histogram may fill any corner.
    left.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    return figure


def law_figure(
    sizes: Sequence[int], measured: Sequence[float], predicted: Sequence[float], law: PowerLaw | None, sampling: str
) -> Figure:
    """Deviation against batch size: measured, predicted from the variance of single examples, and the fitted law."""
    figure, (axes,) = make_figure(1, 1, (7.5, 4.6))
    # A batch that is the whole sample has no deviation but that of rounding.
    positive = [(b, m, p) for b, m, p in zip(sizes, measured, predicted, strict=True) if m > 0 and p > 0]
    xs, ys, expected = np.array(positive).T if positive else np.empty((3, 0))
    axes.plot(xs, ys, "o", color=colour(0), label="measured (root mean square)")
    axes.plot(xs, expected, "-", color=colour(2), label="sqrt(V / b), for this sampling")
    if law is not None:
        label = f"fitted exponent {law.exponent:.3f} ± {law.error:.3f} (independent examples: -0.5)"
        axes.plot(xs, law.scale * xs**law.exponent, "--", color=colour(1), label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(f"Deviation against batch size, {sampling}")
    axes.set_xlabel("examples per batch")
    axes.set_ylabel("||g_B - F||")
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=8, loc="lower left")
    return figure


def layers_figure(variances: Mapping[str, float]) -> Figure:
    """Each parameter's share of the variance, in the model's order."""
    names, total = list(variances), sum(variances.values())
    shares = [100 * value / total if total else 0.0 for value in variances.values()]
    figure, (axes,) = make_figure(1, 1, (9, max(3.0, 0.24 * len(names) + 1.2)))
    axes.barh(range(len(names)), shares, color=colour(0))
    for place, share in enumerate(shares):
        axes.text(share, place, f" {share:.1f}", va="center", fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.08, y=0.01)
    axes.set_title("Share of the gradient variance by parameter")
    axes.set_xlabel("percent of V")
    axes.grid(True, axis="x", alpha=0.3)
    return figure


def requests_figure(rows: Sequence[tuple[str, float, int]], sample: int) -> Figure:
    """What the batch tests would request at this point, over their parameter."""
    figure, (left, right) = make_figure(2)
    tests = dict.fromkeys(test for test, _, _ in rows)
    for index, test in enumerate(tests):
        axes = left if test.startswith("norm_test") else right
        points = [(parameter, request) for name, parameter, request in rows if name == test]
        axes.plot(*zip(*points, strict=True), ".-", color=colour(index), label=test)
    for axes, name in ((left, "eta"), (right, "theta or nu")):
        axes.axhline(sample, color="grey", lw=1, ls=":", label=f"the sample, {sample}")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_title("What the batch tests would request here")
        axes.set_xlabel(name)
        axes.set_ylabel("examples")
        axes.grid(True, alpha=0.3)
        axes.legend(fontsize=8)
    return figure
