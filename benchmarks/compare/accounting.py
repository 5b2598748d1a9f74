"""What a run has used up, round by round, and how long it would have taken on other hardware and another network.

Simulated time: nodes work side by side, each on a device of its own. An inner step with micro-batches b_1, b_2, ...
takes the sum of max(t_min, b_i * t_example); the statistics of a batch test are added to the first of a round. Where
nodes are given speeds (`node_speeds`) that is the fastest's, and others take as many times as long. What
workers send each other is in the run's exchange_log.csv, and takes latency + bytes / bandwidth, with the bytes that go
through one worker's link; through a server it goes up and then down, and small groups are taken to be changing pairs.
Of runs that have no such log every trainer makes one synchronisation at the end of a round. So does a
merge, with the bytes of the node that makes the average, and a redistribution, with those of a node that gets a
trainer's state: both as the round log counts them, in runs whose log of exchanges has rows of them as well.

An exchange that hides behind inner steps is waited for after those; all others are at once. With overlap these too
travel while the next round computes, statistics included, and are waited for at its end, and a metric counts from when
the update behind it has arrived; gradients that are averaged in every step hide behind the step itself, their best
case. Merges and redistributions need the trainers as they are: they wait for what travels, and nothing hides them.
Assumed, not simulated: an update that comes a round late, as it would then, leaves the metric what it is; sending slows
no computation.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as checked_dataclass

from algorithms.batch.across_workers import MINIMUM_WORKERS, SKETCH_SIZE
from algorithms.nodes.communication_rounds import merged
from algorithms.nodes.virtual_clock import Clocks, Sending, together
from algorithms.synchronisation.encodings.encoding import COMMUNICATION_DTYPES, PLAIN
from benchmarks.compare.network import Network
from training_logs.showing.comparison import best_per_round
from training_logs.showing.number_log import Row, Rows
from training_logs.showing.run_data import RunData

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


def _compares_workers(run: RunData) -> bool:
    """Whether statistics are of whole gradients, which workers send each other."""
    within = run.config.get("statistics_within_island", False)  # a key that older runs lack
    return run.config["statistics_estimator"] == "across_workers" and not within


def _link_bytes(run: RunData, row: Row, parameters: float) -> float:
    """Bytes that one worker of a trainer sends in a round."""
    workers, whole = int(row["nodes"]), _compares_workers(run)
    encoding = COMMUNICATION_DTYPES[run.config["communication_dtype"]]
    sent = encoding.reduction_bytes(workers, int(parameters), torch.float32)
    if row["gradient_sample_size"] == row["gradient_sample_size"] and (whole or workers >= MINIMUM_WORKERS):
        sent += PLAIN.reduction_bytes(workers, int(parameters) if whole else SKETCH_SIZE, torch.float32)
    return sent / workers


def compute_seconds(row: Row, config: Mapping, hardware: Hardware, batch: float, parts: float) -> tuple[float, float]:
    """Of an inner step of a worker with such a batch in so many parts in a trainer's round, and of its statistics."""
    micro_batch = batch / parts
    statistics = 0.0
    if config["statistics_estimator"] == "per_example" and row["gradient_sample_size"] == row["gradient_sample_size"]:
        sample = config["statistics_batch_size"]
        if micro_batch * parts > 1:
            statistics += (PROBED_PASS - 1.0) * parts * hardware.pass_seconds(micro_batch)
        if micro_batch * parts < sample:
            statistics += PROBED_PASS * hardware.pass_seconds(sample)
    return parts * hardware.pass_seconds(micro_batch), statistics


def _computing(
    run: RunData, row: Row, hardware: Hardware, workers: int, first: int, nodes: int
) -> dict[int, tuple[float, float]]:
    """By node what its worker computes in an inner step of a trainer's round, and for its statistics.

    Nodes of given speeds have their own shares of the batch, and make as many inner steps as they made; the fastest is
    as fast as the hardware. Others are all alike.

    Args:
        workers: whose batch it is. first: nodes that trainers before this one have. nodes: of the run.
    """
    place, speeds = (int(row["outer_step"]), int(row["trainer_id"])), run.config.get("node_speeds")
    if speeds is None or len(run.nodes.get(place, ())) != workers:
        parts = row["accumulation_steps"]
        seconds = compute_seconds(row, run.config, hardware, row["effective_batch"] / workers, parts)
        # With more trainers than nodes, nodes serve them in turn.
        return dict.fromkeys(sorted({number % nodes for number in range(first, first + workers)}), seconds)
    found = {}
    for worker in run.nodes[place]:
        parts = math.ceil(worker["examples"] / row["micro_batch"])
        step, statistics = compute_seconds(row, run.config, hardware, worker["examples"], parts)
        slower = max(speeds) / worker["speed"]
        found[int(worker["node"])] = (
            step * slower * worker["inner_steps"] / row["inner_steps"],
            statistics * slower,
        )
    return found


def _sendings(run: RunData, row: Row, parameters: float, workers: int | None) -> list[Sending]:
    """What the workers of a trainer send in a round, as its log says; without one, of a model of so many parameters.

    workers: that average gradients at every step; None: those of the run.
    """
    steps = int(row["inner_steps"])
    if workers:
        each = PLAIN.reduction_bytes(workers, int(parameters), torch.float32) / workers
        return [Sending(step, each, each, kind="gradient") for step in range(1, steps + 1)]
    # A run that was begun before there was such a log has one from when it was resumed.
    if run.exchanges is None or (run.exchanges and row["outer_step"] < next(iter(run.exchanges))[0]):
        each = _link_bytes(run, row, parameters)
        return [Sending(steps, each, each)] if row["nodes"] > 1 else []
    found: list[Sending] = []
    whole = _compares_workers(run)
    for exchange in run.exchanges.get((int(row["outer_step"]), int(row["trainer_id"])), ()):
        grows = exchange.kind != "monitor" and (exchange.kind != "statistics" or whole)
        scale = parameters / run.summary["parameters"] if grows else 1.0
        sent, received = scale * exchange.sent_bytes, scale * exchange.received_bytes
        found += [
            Sending(step, sent, received, exchange.behind, exchange.through, exchange.kind) for step in exchange.steps
        ]
    return together(found)


def _overlapped(sendings: Sequence[Sending]) -> list[Sending]:
    """The same, with what all wait for at once behind the next round, or behind the very step that it is of."""
    return [
        sending
        if sending.behind
        else dataclasses.replace(sending, **({"behind_step": True} if sending.kind == "gradient" else {"behind": None}))
        for sending in sendings
    ]


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
    moved = dict.fromkeys(("bytes_merged", "bytes_redistributed"), 0.0)
    clocks, found = Clocks(network, nodes), []
    for step, rows in run.by_round.items():
        new = {name: rows[0].get(name, moved[name]) - moved[name] for name in moved}
        moved = {name: moved[name] + new[name] for name in moved}
        if new["bytes_redistributed"]:
            clocks.together(network.seconds(scale * new["bytes_redistributed"] / _new_nodes(rows, before)))
        before = {int(row["trainer_id"]): int(row["nodes"]) for row in rows}
        taken, idle = 0, set(range(nodes))
        for row in rows:
            workers = int(synchronous_workers or row["nodes"])
            computing = _computing(run, row, hardware, workers, taken, nodes)
            taken += workers
            idle -= computing.keys()
            sendings = _sendings(run, row, parameters, synchronous_workers)
            clocks.round(
                int(row["trainer_id"]),
                list(computing),
                int(row["inner_steps"]),
                *zip(*computing.values(), strict=True),
                _overlapped(sendings) if overlap else sendings,
            )
        clocks.rest(idle)
        if len(rows) > 1:
            clocks.meet()
        if step in merges:
            merge = merges[step]
            if run.rounds.has("bytes_merged"):
                others, nodes_there = len(merge.weights) - 1, before[merge.representative]
                link = merged(others, nodes_there, scale * new["bytes_merged"]).link
            else:  # an older log
                link = (len(merge.weights) - 1) * 4 * parameters
            clocks.together(network.seconds(link))
        found.append(clocks.arrived if overlap else clocks.elapsed)
    return found


def metric_at(run: RunData) -> dict[int, float]:
    """The best validation metric of the living trainers, by round; only the rounds that were evaluated."""
    steps, values = best_per_round(run, "outer_step")
    return {int(step): value for step, value in zip(steps, values, strict=True)}


def fit_step_cost(batches: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """t_min and t_example of measured passes: seconds per example of the largest batch, and the quickest pass."""
    largest = max(range(len(batches)), key=lambda index: batches[index])
    return min(seconds), seconds[largest] / batches[largest]
