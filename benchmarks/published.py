"""Compare this project's clock with published compute utilisations: python benchmarks/published.py [--json FILE].

Compute utilisation is the share of the time in which the workers compute. The published tables give the smallest link
with which an idealised worker reaches a utilisation. Links are the 50 of a logarithmic grid from 0.1 to 1000 Gbit/s.
Here `Clocks`, which simulates runs, and `Link`, with which `--plan` estimates sending, answer the same question. The
tables are printed in Markdown. docs/results/published.md has them, with what the two assumptions below rest on.
"""

import argparse
import bisect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from algorithms.flat import Block
from algorithms.nodes.traffic import Event, Link
from algorithms.nodes.virtual_clock import Clocks
from algorithms.synchronisation.sparse_loco import SparseLoCo
from utils.files import path_argument, write_json_atomically

BITS = 12.0  # on the link, per parameter of an exchange in 16 bits
BACKWARD = 2 / 3  # share of an inner step during which gradients become known, from the last layer to the first
GRID = [10 ** (-1 + 4 * point / 49) for point in range(50)]  # Gbit/s
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class Case:
    """A published setting.

    Attributes:
        step_seconds: of one inner step.
        inner_steps: between exchanges of the same parameters.
        fragments: that are exchanged one after the other; each has every n-th layer.
        delay: inner steps that a message may travel before the worker waits for it.
        published: Gbit/s that the targets need.
    """

    parameters: float
    layers: int
    step_seconds: float
    inner_steps: int
    published: str
    fragments: int = 1
    delay: int = 0
    bits: float = BITS


def events(case: Case, overlap: bool) -> Iterator[Event]:
    """Yield the messages of a round, one per layer.

    overlap: a layer is sent as soon as the backward pass has its gradient; otherwise after the inner step.
    """
    layer_bytes = case.parameters * case.bits / 8 / case.layers
    for fragment in range(case.fragments):
        end = case.inner_steps * (fragment + 1) / case.fragments
        for layer in range(fragment, case.layers, case.fragments):
            early = BACKWARD * layer / case.layers if overlap else 0.0
            yield Event("synchronisation", end - early, layer_bytes, layer_bytes, behind=early + case.delay)


def utilisation(case: Case, link: Link, overlap: bool = True) -> float:
    """The share of computing in two rounds, after two that fill the link."""
    messages = list(events(case, overlap))
    clocks = Clocks(link, nodes=1)
    elapsed = []
    for _ in range(4):
        clocks.round(0, {0: 0}, case.inner_steps, [case.step_seconds], messages)
        elapsed.append(clocks.elapsed)
    return 2 * case.inner_steps * case.step_seconds / (elapsed[3] - elapsed[1])


def needed_point(case: Case, target: float, overlap: bool = True) -> int:
    """The first point of the grid whose link reaches the target; 50: none does."""
    return bisect.bisect_left(GRID, target - 1e-9, key=lambda rate: utilisation(case, Link(1e9 * rate), overlap))


def published_point(rate: str) -> int:
    if rate == "1000+":
        return len(GRID)
    return min(range(len(GRID)), key=lambda point: abs(GRID[point] / float(rate) - 1))


def scaling_laws() -> dict[str, Case]:
    """DiLoCo scaling laws (arXiv 2503.09799). The layers are those of Llama 3 and DeepSeek-V3, and 48 for 10B."""
    tables = {
        (10, 48, 0.8): (
            "104.8 / 184.2 / 222.3 / 222.3 / 390.7",
            "16.0 / 49.4 / 86.8 / 152.6 / 222.3",
            "3.0 / 11.0 / 23.3 / 41.0 / 126.5",
            "1.4 / 6.2 / 13.3 / 23.3 / 86.8",
            "0.5 / 2.0 / 4.3 / 9.1 / 41.0",
        ),
        (405, 126, 26.0): (
            "126.5 / 222.3 / 268.3 / 323.8 / 323.8",
            "19.3 / 72.0 / 126.5 / 184.2 / 268.3",
            "3.6 / 13.3 / 28.1 / 59.6 / 184.2",
            "2.0 / 7.5 / 16.0 / 33.9 / 126.5",
            "0.7 / 3.0 / 6.2 / 13.3 / 59.6",
        ),
        (671, 61, 20.0): (
            "323.8 / 569.0 / 686.6 / 686.6 / 1000+",
            "49.4 / 152.6 / 268.3 / 390.7 / 686.6",
            "7.5 / 33.9 / 72.0 / 126.5 / 390.7",
            "4.3 / 16.0 / 41.0 / 72.0 / 268.3",
            "1.7 / 6.2 / 13.3 / 28.1 / 126.5",
        ),
    }
    found = {}
    for (billions, layers, seconds), rows in tables.items():
        for steps, published in zip((1, 10, 50, 100, 300), rows, strict=True):
            method = "data-parallel" if steps == 1 else f"DiLoCo, H = {steps}"
            found[f"{billions}B, {method}"] = Case(1e9 * billions, layers, seconds, steps, published)
    return found


def streaming() -> dict[str, Case]:
    """Streaming DiLoCo (arXiv 2501.18512, Table 4): H = 100, fragments of three layers, overlap with one inner step."""
    tables = {
        (1, 24, 0.1): (
            "86.8 / 152.6 / 184.2 / 222.3 / 569.0",
            "1.4 / 6.2 / 13.3 / 23.3 / 86.8",
            "1.4 / 5.2 / 9.1 / 16.0 / 28.1",
            "1.4 / 4.3 / 6.2 / 9.1 / 11.0",
            "0.4 / 0.9 / 1.7 / 2.0 / 3.0",
        ),
        (10, 48, 0.8): (
            "104.8 / 222.3 / 222.3 / 268.3 / 471.5",
            "1.7 / 7.5 / 16.0 / 33.9 / 104.8",
            "1.7 / 5.2 / 9.1 / 13.3 / 19.3",
            "1.7 / 3.6 / 5.2 / 6.2 / 7.5",
            "0.4 / 0.9 / 1.4 / 1.4 / 1.7",
        ),
        (100, 108, 4.9): (
            "184.2 / 323.8 / 390.7 / 390.7 / 471.5",
            "3.0 / 11.0 / 23.3 / 49.4 / 184.2",
            "2.4 / 6.2 / 9.1 / 11.0 / 19.3",
            "1.7 / 3.6 / 4.3 / 5.2 / 5.2",
            "0.5 / 0.9 / 1.1 / 1.1 / 1.4",
        ),
    }
    found = {}
    for (billions, layers, seconds), published in tables.items():
        size = (1e9 * billions, layers, seconds)
        parts = layers // 3
        found |= {
            f"{billions}B, data-parallel": Case(*size, 1, published[0]),
            f"{billions}B, DiLoCo": Case(*size, 100, published[1]),
            f"{billions}B, Streaming": Case(*size, 100, published[2], parts),
            f"{billions}B, Streaming, overlap": Case(*size, 100, published[3], parts, delay=1),
            f"{billions}B, Streaming, overlap, 4 bits": Case(*size, 100, published[4], parts, 1, BITS / 4),
        }
    return found


# Name: inner steps of a round, its minutes of computing and of communication, and the published utilisation in percent.
REAL_RUNS = {
    "INTELLECT-1": (100, 38.0, 8.3, 82.1),
    "SparseLoCo 8B": (30, 4.5, 0.2, 95.7),
    "Covenant-72B": (30, 20.0, 70 / 60, 94.5),
}


def compare(cases: dict[str, Case]) -> list[dict]:
    """Return one row per case; steps: points of the grid by which the clock is above the published link."""
    rows = []
    for name, case in cases.items():
        points = [published_point(rate) for rate in case.published.split(" / ")]
        found = [needed_point(case, target) for target in TARGETS]
        without = [needed_point(case, target, overlap=False) for target in TARGETS]
        rows.append(
            {
                "setting": name,
                "published": case.published,
                "this clock": " / ".join(f"{GRID[point]:.1f}" for point in found),
                "grid steps": [ours - theirs for ours, theirs in zip(found, points, strict=True)],
                "without overlap": [ours - theirs for ours, theirs in zip(without, points, strict=True)],
            }
        )
    return rows


def compare_runs() -> list[dict]:
    """Return one row per real run; the latency of its link is the measured time of communication.

    So only the sum of the two times is compared; `covenant` derives the time of the messages.
    """
    rows = []
    for name, (steps, computing, communication, published) in REAL_RUNS.items():
        case = Case(1.0, 1, 60 * computing / steps, steps, "")
        found = 100 * utilisation(case, Link(latency=60 * communication), overlap=False)
        rows.append({"run": name, "published": published, "this clock": round(found, 2)})
    return rows


def covenant() -> list[dict]:
    """Return rows for Covenant-72B from the bytes of SparseLoCo's messages and the published links of a worker."""
    steps, computing, _, _ = REAL_RUNS["Covenant-72B"]
    workers = 20
    parameters = 72e9
    blocks = [Block("all", 0, (int(parameters),))]
    sent = SparseLoCo().capabilities.bytes_per_round(workers, 0.0, 0.0, blocks, torch.float32) / workers
    rows = []
    for exchange, messages, rate in (
        ("a message sent to a store", 1, 110e6),
        ("the others' messages received from it", workers - 1, 500e6),
        ("a message sent to each other worker, as `--plan` counts", workers - 1, 110e6),
    ):
        bits = 8 * sent * messages / (workers - 1)
        case = Case(parameters, 1, 60 * computing / steps, steps, "", bits=bits / parameters)
        row = {"exchange": exchange, "Gbit": round(bits / 1e9, 2), "Mb/s": round(rate / 1e6)}
        found = 100 * utilisation(case, Link(rate), overlap=False)
        rows.append(row | {"seconds": round(Link(rate).seconds(bits / 8), 1), "this clock": round(found, 2)})
    return rows


def table(rows: list[dict]) -> str:
    """A Markdown table, and how many entries of compared cases agree."""
    lines = [f"| {' | '.join(rows[0])} |", f"| {' | '.join('---' for _ in rows[0])} |"]
    for row in rows:
        cells = [" / ".join(map(str, cell)) if isinstance(cell, list) else str(cell) for cell in row.values()]
        lines.append(f"| {' | '.join(cells)} |")
    for key in ("grid steps", "without overlap"):
        steps = [abs(step) for row in rows for step in row.get(key, ())]
        if steps:
            near = sum(step <= 1 for step in steps)
            lines += ["", f"{key}: {steps.count(0)} of {len(steps)} entries equal, {near} within one step."]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=path_argument, metavar="FILE", help="also write the tables to this file")
    options = parser.parse_args(arguments)
    tables = {"scaling_laws": compare(scaling_laws()), "streaming": compare(streaming())}
    tables |= {"real_runs": compare_runs(), "covenant": covenant()}
    print(*map(table, tables.values()), sep="\n\n")
    if options.json:
        write_json_atomically(options.json, tables)


if __name__ == "__main__":
    main()
