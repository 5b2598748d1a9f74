"""The best recorded plan for links, nodes and a time: python -m benchmarks.compare.which_method.

Draws docs/results/which_method.png from the recorded runs of docs/results. Without a budget of seconds a run's
trajectory does not depend on its link: over another link the time differs, and the perplexity does not. Only ends of
runs count, where the learning rate has decayed: a plan is open to a time if its runs end within it.
"""

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from algorithms.nodes.traffic import Link
from benchmarks.compare.accounting import gradient_bytes
from benchmarks.compare.results import Results, simulated_axis
from benchmarks.compare.spec import ROOT, ComparisonSpec
from training_logs.showing.styles import make_figure
from utils.config.schema import Config

RESULTS = ROOT / "docs" / "results"
# Comparisons with the same model, corpus and nodes, over at least three links.
COMPARISONS = ("equal_time", "headline", "node_counts")
RATES = {"1M": 1e6, "10M": 1e7, "100M": 1e8, "1G": 1e9, "10G": 1e10, "100G": 1e11}
LATENCIES = {"0.1 ms": 1e-4, "1 ms": 1e-3, "10 ms": 1e-2, "100 ms": 1e-1}
TIMES = (40.0, 60.0, 200.0)
NODES = {2: "2 nodes; two workers of DiLoCo: one seed", 4: "4 nodes", 8: "8 nodes or more; DiLoCo: four workers"}
COLOURS = {"synchronous": "tab:blue", "DiLoCo": "tab:orange", "one worker": "tab:green", "AdLoCo-J": "tab:purple"}
# A lead of less than this is drawn pale: means over one to three seeds differ by as much.
CLEAR_LEAD = 0.03
# A run may exceed the time by this share.
TOLERANCE = 0.01
# A family whose best runs end before this share of the time was not planned for it, and the cell is hatched.
PLANNED = 2 / 3


@dataclass(frozen=True)
class Plan:
    """A method with its batch, tokens and communications, of which runs were recorded.

    Attributes:
        perplexity: mean over seeds of the ends of the runs.
        batch: examples of the first inner step.
        steps: inner steps.
        workers: their number, each on a node of its own.
        computing: seconds of the inner steps.
        exchanges: number of exchanges, which all block.
        link_bytes: bytes through the link of a node, in all.
    """

    family: str
    name: str
    perplexity: float
    batch: float
    steps: float
    workers: int
    computing: float
    exchanges: int = 0
    link_bytes: float = 0.0

    def seconds(self, link: Link, nodes: int) -> float:
        """Seconds over a link, with more nodes than workers, of which some are idle, or with a divisor of the workers.

        Workers that share a node compute one after the other and send their mean.
        """
        share = max(1, self.workers // nodes)
        seconds = share * self.computing
        if nodes > 1 and self.exchanges:
            senders = self.workers / share
            sent = self.link_bytes * (1 - 1 / senders) / (1 - 1 / self.workers)
            seconds += self.exchanges * link.latency + 8 * sent / link.bits_per_second
        return seconds


def retimed(times: Sequence[tuple[Link, float]], exchanges: int | None = None) -> tuple[float, int, float]:
    """Return computing, exchanges and link bytes of a run from its seconds over several links.

    Args:
        exchanges: None: unknown, which needs three links.

    Raises:
        ValueError: its exchanges do not all block, so that its time is not linear in them.
    """
    seconds = np.array([each for _, each in times])
    terms = np.array([[1.0, 8.0 / link.bits_per_second, link.latency] for link, _ in times])
    solved = terms
    rest = seconds
    if exchanges is not None:
        solved = terms[:, :2]
        rest = seconds - exchanges * terms[:, 2]
    scale = solved.max(axis=0)
    found = np.linalg.lstsq(solved / scale, rest, rcond=None)[0] / scale
    if len(times) < len(found) or not np.allclose(solved @ found, rest, rtol=1e-3):
        raise ValueError("the exchanges of this run do not all block")
    computing, link_bytes, *counted = found.tolist()
    return computing, exchanges if exchanges is not None else max(0, round(counted[0])), max(0.0, link_bytes)


def family_of(name: str) -> str | None:
    """Return the family of a recorded method; None: it is not in the map."""
    if name.startswith("AdLoCo-J"):
        return "AdLoCo-J"
    if "trainers" in name or "Muon" in name:  # Muon is not tuned
        return None
    return next((family for family in COLOURS if family in name), None)


def recorded_plans(results: Results) -> Iterator[Plan]:
    """Yield the plans of a comparison; synchronous ones also for other numbers of workers.

    Synchronous training makes the steps of one worker with the same batch, so that each of these plans has the runs of
    the other.
    """
    comparison = ComparisonSpec.model_validate(results.raw["comparison"], extra="ignore")
    hardware = comparison.hardware[0]
    for method in comparison.methods:
        runs = results.runs[method.name]
        family = family_of(method.name)
        if not runs or family is None:
            continue
        perplexity = statistics.fmean(run["final_metric"] for run in runs)
        batch = runs[0]["first_batch"]
        steps = runs[0]["curves"]["inner_steps"][-1]
        settings = comparison.common | method.overrides
        workers = settings.get("nodes_per_gpu", Config().nodes_per_gpu)
        if settings.get("distributed_algo") == "Synchronous":
            for count in (1, *NODES):
                seconds = steps * hardware.pass_seconds(math.ceil(batch / count))
                sent = steps * gradient_bytes(count, results.raw["parameters"]) / count
                family = "synchronous" if count > 1 else "one worker"
                yield Plan(
                    family, method.name, perplexity, batch, steps, count, seconds, steps if count > 1 else 0, sent
                )
        else:
            ends = {
                network: [run["curves"][simulated_axis(hardware.name, network.name)][-1] for run in runs]
                for network in comparison.networks
            }
            times = [(Link(each.bits_per_second, each.latency), statistics.fmean(ends[each])) for each in ends]
            exchanges = round(runs[0]["curves"]["communications"][-1])
            if family == "AdLoCo-J":  # nodes also exchange with joining workers, which over two links cannot be counted
                if len(times) < 3:
                    continue
                exchanges = None
            yield Plan(family, method.name, perplexity, batch, steps, workers, *retimed(times, exchanges))


def open_plans(plans: Iterable[Plan], link: Link, nodes: int, seconds: float) -> list[Plan]:
    """Return the plans whose runs end within a time.

    Left out are plans with joining workers on fewer nodes than workers, and those that cannot share nodes evenly.
    """
    found = []
    for plan in plans:
        shares = plan.workers % nodes == 0 and plan.family != "AdLoCo-J"
        if (nodes >= plan.workers or shares) and plan.seconds(link, nodes) <= (1.0 + TOLERANCE) * seconds:
            found.append(plan)
    return found


def best_plans(plans: Iterable[Plan], link: Link, nodes: int, seconds: float) -> list[Plan]:
    """Return the best plan of each family whose runs end within a time, the lowest perplexity first."""
    possible = open_plans(plans, link, nodes, seconds)
    best: dict[str, Plan] = {}
    for plan in sorted(possible, key=lambda plan: (plan.perplexity, plan.seconds(link, nodes))):
        best.setdefault(plan.family, plan)
    return list(best.values())


def figure_of(plans: Sequence[Plan]) -> Figure:
    """Draw a panel for every time and number of nodes; a cell is a link."""
    figure, panels = make_figure(len(TIMES) * len(NODES), len(NODES), (5.2 * len(NODES), 3.1 * len(TIMES) + 0.6))
    cases = [(seconds, nodes) for seconds in TIMES for nodes in NODES]
    for (seconds, nodes), axes in zip(cases, panels, strict=True):
        _draw(axes, plans, nodes, seconds)
        axes.set_title(f"{seconds:g} s, {NODES[nodes]}", fontsize=11)
    for axes in panels[-len(NODES) :]:
        axes.set_xlabel("link, bits per second")
    for axes in panels[:: len(NODES)]:
        axes.set_ylabel("latency")
    handles = [Patch(color=colour, label=family) for family, colour in COLOURS.items()]
    handles += [
        Patch(facecolor="0.7", label=f"pale: a lead of less than {CLEAR_LEAD:.0%}", alpha=0.4),
        Patch(
            facecolor="0.7", edgecolor="white", hatch="///", label="hatched: a rival has no run planned for the time"
        ),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _draw(axes: Axes, plans: Sequence[Plan], nodes: int, seconds: float) -> None:
    for x, rate in enumerate(RATES.values()):
        for y, latency in enumerate(LATENCIES.values()):
            link = Link(rate, latency)
            best, *rivals = best_plans(plans, link, nodes, seconds)
            ahead = rivals[0].perplexity / best.perplexity - 1.0 if rivals else 1.0
            unplanned = any(rival.seconds(link, nodes) < PLANNED * seconds for rival in rivals)
            alpha = 0.75 if ahead >= CLEAR_LEAD else 0.3
            colour = COLOURS[best.family]
            cell = Rectangle((x, y), 1, 1, facecolor=colour, alpha=alpha, edgecolor="white", lw=0)
            cell.set_hatch("///" if unplanned else None)
            axes.add_patch(cell)
            text = f"{best.perplexity:.1f}\n" + (f"-{100 * ahead:.0f}%" if rivals else "only")
            axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=9)
    axes.set_xlim(0, len(RATES))
    axes.set_ylim(0, len(LATENCIES))
    axes.set_xticks(np.arange(len(RATES)) + 0.5, RATES)
    axes.set_yticks(np.arange(len(LATENCIES)) + 0.5, LATENCIES)
    axes.tick_params(length=0)


def all_plans() -> list[Plan]:
    """Return the plans of the recorded comparisons."""
    plans = []
    for name in COMPARISONS:
        raw = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        plans += recorded_plans(Results(raw))
    return plans


if __name__ == "__main__":
    figure_of(all_plans()).savefig(RESULTS / "which_method.png", dpi=100)
