"""Usage of a run after every round, and its simulated time on other hardware and another network.

Simulated time. Every node has its own device. An inner step with micro-batches b_1, b_2, ... takes the sum of
max(t_min, b_i * t_example). The statistics of a batch test are added to the first step of a round. With `node_speeds`
this is the time of the fastest node, and the others take proportionally longer. An exchange of exchange_log.csv takes
latency + bytes / bandwidth, with the bytes of one worker's link. Merges and redistributions use the bytes of the round
log. An exchange that the method overlaps with inner steps delays only the step that waits for it. All others block.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from pydantic import ConfigDict, NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass as checked_dataclass

from algorithms.nodes.traffic import Link, merge_exchange, redistribution_exchange
from algorithms.nodes.virtual_clock import Clocks
from algorithms.synchronisation.encodings import PLAIN
from training_logs.showing.run_data import RunData

# Time of a pass with per-example statistics relative to a plain one (benchmarks/performance/throughput.py measures it).
PROBED_PASS = 1.4


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Hardware:
    """A device of one node; docs/comparing.md describes the keys."""

    name: str
    t_min: NonNegativeFloat
    t_example: PositiveFloat

    def pass_seconds(self, examples: float) -> float:
        return max(self.t_min, examples * self.t_example)


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Network:
    """The network between the nodes; latency: seconds until all participants have begun and ended an exchange."""

    name: str
    bits_per_second: PositiveFloat
    latency: NonNegativeFloat


def gradient_bytes(workers: int, parameters: float) -> float:
    """Bytes that all workers together send to average one gradient."""
    return PLAIN.reduction_bytes(workers, int(parameters), torch.float32)


def usage(run: RunData) -> dict[str, np.ndarray]:
    """Return the totals of a run after every round, by column of the round log; inner steps are those of one node."""
    columns = ("outer_step", "tokens", "inner_steps", "communications", "bytes_communicated")
    totals = {name: np.array([rows[name][0] for rows in run.by_round.values()]) for name in columns}
    totals["inner_steps"] = totals["inner_steps"].cumsum()
    return totals


# Simulated time


class _Computing(NamedTuple):
    """Seconds of one node in a round: per inner step, and of the statistics."""

    step: float
    statistics: float


def _pass_seconds(row: np.void, config: Mapping, hardware: Hardware, batch: float, parts: float) -> _Computing:
    """Seconds of an inner step with a batch in several micro-batches, and of the round's statistics."""
    micro_batch = batch / parts
    statistics = 0.0
    if config["statistics_estimator"] == "per_example" and not math.isnan(row["gradient_sample_size"]):
        sample = config["statistics_batch_size"]
        if batch > 1:
            statistics += (PROBED_PASS - 1.0) * parts * hardware.pass_seconds(micro_batch)
        if batch < sample:
            statistics += PROBED_PASS * hardware.pass_seconds(sample)
    return _Computing(parts * hardware.pass_seconds(micro_batch), statistics)


def _computing(
    run: RunData, row: np.void, hardware: Hardware, workers: int, first: int, nodes: int
) -> dict[int, _Computing]:
    """Seconds of each node of a trainer in a round; first: number of nodes of the trainers before this one."""
    place = (int(row["outer_step"]), int(row["trainer_id"]))
    speeds = run.config.get("node_speeds")
    if speeds is None or len(run.nodes.get(place, ())) != workers:
        seconds = _pass_seconds(row, run.config, hardware, row["effective_batch"] / workers, row["accumulation_steps"])
        # With more trainers than nodes, nodes serve them in turn.
        return dict.fromkeys(sorted({number % nodes for number in range(first, first + workers)}), seconds)
    found = {}
    for worker in run.nodes[place]:
        parts = math.ceil(worker["examples"] / row["micro_batch"])
        seconds = _pass_seconds(row, run.config, hardware, worker["examples"], parts)
        slower = max(speeds) / worker["speed"]
        steps = worker["inner_steps"] / row["inner_steps"]
        found[int(worker["node"])] = _Computing(seconds.step * slower * steps, seconds.statistics * slower)
    return found


def _nodes(run: RunData, row: np.void) -> set[int]:
    """The nodes of a trainer in a round; as many numbers where the node log is missing."""
    logged = run.nodes.get((int(row["outer_step"]), int(row["trainer_id"])))
    return set(range(int(row["nodes"]))) if logged is None else set(logged["node"].astype(int).tolist())


def simulated_seconds(run: RunData, hardware: Hardware, network: Network) -> list[float]:
    """Return the seconds from the start to the arrival of the messages of each round."""
    nodes = run.config["nodes_per_gpu"] * len(run.summary["devices"])
    clocks = Clocks(Link(network.bits_per_second, network.latency), nodes)
    nodes_before: dict[int, set[int]] = {}
    bytes_before = {"bytes_merged": 0.0, "bytes_redistributed": 0.0}
    found = []
    for step, rows in run.by_round.items():
        totals = {name: float(rows[0][name]) for name in bytes_before}
        merged_bytes = totals["bytes_merged"] - bytes_before["bytes_merged"]
        redistributed_bytes = totals["bytes_redistributed"] - bytes_before["bytes_redistributed"]
        bytes_before = totals
        nodes_now = {int(row["trainer_id"]): _nodes(run, row) for row in rows}
        if redistributed_bytes:
            came = sum(len(own - nodes_before.get(trainer, own)) for trainer, own in nodes_now.items())
            clocks.exchange_all(redistribution_exchange(came, redistributed_bytes).link)
        nodes_before = nodes_now
        taken = 0
        idle = set(range(nodes))
        for row in rows:
            workers = int(row["nodes"])
            computing = _computing(run, row, hardware, workers, taken, nodes)
            taken += workers
            idle -= computing.keys()
            clocks.round(
                trainer=int(row["trainer_id"]),
                nodes=dict(enumerate(computing)),
                steps=int(row["inner_steps"]),
                step_seconds=[seconds.step for seconds in computing.values()],
                events=run.exchanges.get((step, int(row["trainer_id"])), ()),
                first_seconds=[seconds.statistics for seconds in computing.values()],
            )
        clocks.skip(idle)
        if len(rows) > 1:
            clocks.barrier()
        if step in run.merges:
            merge = run.merges[step]
            others = len(merge.weights) - 1
            link_bytes = merge_exchange(others, len(nodes_now[merge.representative]), merged_bytes).link
            clocks.exchange_all(link_bytes)
        found.append(clocks.elapsed)
    return found
