"""What a run has used up, round by round, and how long it would have taken on other hardware and another network.

Simulated time: nodes work side by side, each on a device of its own. An inner step with micro-batches b_1, b_2, ...
takes the sum of max(t_min, b_i * t_example); the statistics of a batch test are added to it. A synchronisation takes
latency + bytes / bandwidth, with the bytes that go through one worker's link. So does a merge, with those of the node
that makes the average, and a redistribution, with those of a node that gets a trainer's state.

Without overlap a round ends when what it sends has arrived. With overlap a trainer begins the next round at once and
its synchronisation, statistics included, travels meanwhile: that round takes max(compute, transfer), so that one
transfer of a node is under way at a time, and a metric counts from when the update behind it has arrived. Merges and
redistributions need the trainers as they are: they wait for what travels, and nothing hides them. Workers that average
gradients at every step are given their best case: their round takes max(compute, all its transfers). Assumed, not
simulated: an update that comes a round late, as it would then, leaves the metric what it is; sending slows no
computation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as checked_dataclass

from algorithms.across_workers import MINIMUM_WORKERS, SKETCH_SIZE
from algorithms.exchanges import Link, merged
from training_logs.showing.comparison import best_per_round
from training_logs.showing.number_log import Row, Rows
from training_logs.showing.run_data import RunData
from utils.compression import COMMUNICATION_DTYPES, PLAIN

# A pass with the per-example statistics against one without: design of the probe, measured by throughput.py.
PROBED_PASS = 1.4


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Hardware:
    """A device that a node has for itself. t_min: seconds of the smallest backward pass and update; t_example: seconds
    that an example adds once it counts; parameters: of the model there, None: of the run's own."""

    name: str
    t_min: float | None = None
    t_example: float | None = None
    parameters: float | None = None

    def pass_seconds(self, examples: float) -> float:
        """Of a forward and backward pass over so many examples."""
        return max(self.t_min, examples * self.t_example)


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Network:
    """What connects the nodes. latency: seconds until all workers have begun and ended a synchronisation."""

    name: str
    bits_per_second: float
    latency: float

    def seconds(self, link_bytes: float) -> float:
        """Of a synchronisation that sends so many bytes through each link."""
        return Link(self.bits_per_second, self.latency).seconds(link_bytes)


@dataclass(frozen=True)
class Usage:
    """What a run has used at the end of a round.

    inner_steps: one after the other, of one node. wall_seconds: of training on one thread here, evaluation excluded.
    """

    outer_step: int
    tokens: int
    inner_steps: int
    communications: int
    bytes_communicated: int
    wall_seconds: float


def synchronous_bytes(run: RunData, workers: int) -> int:
    """Bytes that so many workers send together to average one gradient of the run's model."""
    return PLAIN.reduction_bytes(workers, run.summary["parameters"], torch.float32)


def usage(run: RunData, synchronous_workers: int | None = None) -> list[Usage]:
    """Totals of the whole run after every round.

    Args:
        synchronous_workers: count instead what so many workers would send that average gradients at every inner step.
    """
    found, steps, seconds = [], 0, 0.0
    for rows in run.by_round.values():
        steps += int(rows[0]["inner_steps"])
        seconds += sum(row["seconds"] for row in rows)
        communications, sent = int(rows[0]["communications"]), int(rows[0]["bytes_communicated"])
        if synchronous_workers:
            communications, sent = steps, steps * synchronous_bytes(run, synchronous_workers)
        found.append(Usage(int(rows[0]["outer_step"]), int(rows[0]["tokens"]), steps, communications, sent, seconds))
    return found


def _link_bytes(run: RunData, row: Row, parameters: float) -> float:
    """Bytes that one worker of a trainer sends in a round."""
    workers, whole = int(row["nodes"]), run.config["statistics_estimator"] == "across_workers"
    encoding = COMMUNICATION_DTYPES[run.config["communication_dtype"]]
    sent = encoding.reduction_bytes(workers, int(parameters), torch.float32)
    if row["gradient_sample_size"] == row["gradient_sample_size"] and (whole or workers >= MINIMUM_WORKERS):
        sent += PLAIN.reduction_bytes(workers, int(parameters) if whole else SKETCH_SIZE, torch.float32)
    return sent / workers


def _compute_seconds(row: Row, config: Mapping, hardware: Hardware, workers: int) -> float:
    """A trainer's round on `workers` nodes: all inner steps of one of them, and its statistics."""
    parts = row["accumulation_steps"]
    micro_batch = row["effective_batch"] / workers / parts
    seconds = row["inner_steps"] * parts * hardware.pass_seconds(micro_batch)
    if config["statistics_estimator"] == "per_example" and row["gradient_sample_size"] == row["gradient_sample_size"]:
        sample = config["statistics_batch_size"]
        if micro_batch * parts > 1:
            seconds += (PROBED_PASS - 1.0) * parts * hardware.pass_seconds(micro_batch)
        if micro_batch * parts < sample:
            seconds += PROBED_PASS * hardware.pass_seconds(sample)
    return seconds


def _new_nodes(rows: Rows, before: Mapping[int, int]) -> int:
    """Nodes that came to a trainer before a round, at least one. before: nodes of every trainer in the last one."""
    came = (int(row["nodes"]) - before.get(int(row["trainer_id"]), 0) for row in rows)
    return max(1, sum(count for count in came if count > 0))


def simulated_seconds(
    run: RunData,
    hardware: Hardware,
    network: Network,
    synchronous_workers: int | None = None,
    overlap: bool = False,
) -> list[float]:
    """Seconds since the start until what every round sends has arrived."""
    parameters = hardware.parameters or run.summary["parameters"]
    nodes = run.config["nodes_per_gpu"] * len(run.summary["devices"])
    scale = parameters / run.summary["parameters"]
    merges = {merge.outer_step: merge for merge in run.merges}
    before: dict[int, int] = {}
    sent = dict.fromkeys(("bytes_merged", "bytes_redistributed"), 0.0)
    travelling = [0.0] * nodes  # what the nodes sent at the end of the round before, with overlap
    elapsed, found = 0.0, []
    for step, rows in run.by_round.items():
        new = {name: rows[0].get(name, sent[name]) - sent[name] for name in sent}
        sent = {name: sent[name] + new[name] for name in sent}
        if new["bytes_redistributed"]:
            link = scale * new["bytes_redistributed"] / _new_nodes(rows, before)
            elapsed += max(travelling) + network.seconds(link)
            travelling = [0.0] * nodes
        before = {int(row["trainer_id"]): int(row["nodes"]) for row in rows}
        computes, transfers = [0.0] * nodes, [0.0] * nodes
        for index, row in enumerate(rows):
            workers = int(synchronous_workers or row["nodes"])
            compute, transfer = _compute_seconds(row, run.config, hardware, workers), 0.0
            if synchronous_workers:
                link = PLAIN.reduction_bytes(workers, int(parameters), torch.float32) / workers
                averaging = row["inner_steps"] * network.seconds(link)
                compute = max(compute, averaging) if overlap else compute + averaging
            elif workers > 1:
                transfer = network.seconds(_link_bytes(run, row, parameters))
            computes[index % nodes] += compute  # with more trainers than nodes, nodes serve them in turn
            transfers[index % nodes] += transfer
        if overlap:
            elapsed += max(map(max, computes, travelling))
            travelling = transfers
        else:
            elapsed += max(map(sum, zip(computes, transfers, strict=True)))
        if step in merges:
            merge = merges[step]
            if run.rounds.has("bytes_merged"):
                others, nodes_there = len(merge.weights) - 1, before[merge.representative]
                link = merged(others, nodes_there, scale * new["bytes_merged"]).link
            else:  # an older log
                link = (len(merge.weights) - 1) * 4 * parameters
            elapsed += max(travelling) + network.seconds(link)
            travelling = [0.0] * nodes
        found.append(elapsed + max(travelling))
    return found


def metric_at(run: RunData) -> dict[int, float]:
    """The best validation metric of the living trainers, by round; only the rounds that were evaluated."""
    steps, values = best_per_round(run, "outer_step")
    return {int(step): value for step, value in zip(steps, values, strict=True)}


def fit_step_cost(batches: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """t_min and t_example of measured passes: seconds per example of the largest batch, and the quickest pass."""
    largest = max(range(len(batches)), key=lambda index: batches[index])
    return min(seconds), seconds[largest] / batches[largest]
