"""Usage of a run after every round, and its simulated time on other hardware and another network.

Simulated time. Every node has its own device. An inner step with micro-batches b_1, b_2, ... takes the sum of
max(t_min, b_i * t_example). The statistics of a batch test are spread over the steps of their round. With `node_speeds`
this is the time of the fastest node, and the others take proportionally longer. An exchange of exchange_log.csv takes
latency + bytes / bandwidth, with the bytes of one worker's link. Merges and redistributions use the bytes of the round
log. An exchange that the method overlaps with inner steps delays only the step that waits for it. All others block.
"""

import math

import numpy as np
import torch
from pydantic import ConfigDict, NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass as checked_dataclass

from algorithms.nodes.traffic import Link
from algorithms.nodes.virtual_clock import Computing, RunClock
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


def _seconds(run: RunData, row: np.void, worker: np.void, hardware: Hardware) -> float:
    """Seconds in which a worker computes in a round, with the statistics of a batch test."""
    batch = worker["examples"]
    parts = math.ceil(batch / row["micro_batch"])
    one_step = parts * hardware.pass_seconds(batch / parts)
    seconds = worker["inner_steps"] * one_step
    if run.config["statistics_estimator"] == "per_example" and not math.isnan(row["gradient_sample_size"]):
        sample = run.config["statistics_batch_size"]
        if batch > 1:
            seconds += (PROBED_PASS - 1.0) * one_step
        if batch < sample:
            seconds += PROBED_PASS * hardware.pass_seconds(sample)
    speeds = run.config.get("node_speeds")
    return seconds * max(speeds) / worker["speed"] if speeds else seconds


def simulated_seconds(run: RunData, hardware: Hardware, network: Network) -> list[float]:
    """Return the seconds from the start to the arrival of the messages of each round."""
    nodes = run.config["nodes_per_gpu"] * len(run.summary["devices"])
    clock = RunClock(nodes, None, Link(network.bits_per_second, network.latency))
    merged = 0.0
    found = []
    for step, rows in run.by_round.items():
        computing = {}
        for row in rows:
            trainer = int(row["trainer_id"])
            workers = run.nodes[step, trainer]
            computing[trainer] = {
                int(worker["worker"]): Computing(int(worker["node"]), 0, _seconds(run, row, worker, hardware))
                for worker in workers
            }
        clock.begin_round(computing, float(rows[0]["link_bytes_redistributed"]))
        for row in rows:
            trainer = int(row["trainer_id"])
            clock.run(trainer, int(row["inner_steps"]), run.exchanges.get((step, trainer), ()))
        clock.end_round()
        if step in run.merges:
            clock.merge(float(rows[0]["link_bytes_merged"]) - merged)
        merged = float(rows[0]["link_bytes_merged"])
        found.append(clock.elapsed)
    return found
