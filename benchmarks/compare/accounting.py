"""The usage of a run, round by round, and its simulated time on other hardware and another network.

Simulated time: every node has a device of its own. An inner step with micro-batches b_1, b_2, ... takes the sum of
max(t_min, b_i * t_example); the statistics of a batch test are added to the first step of a round. With `node_speeds`
that is the time of the fastest node, and the others take proportionally longer. An exchange of exchange_log.csv takes
latency + bytes / bandwidth, with the bytes of one worker's link. Merges and redistributions take what the round log
counts.

An exchange that the method hides behind inner steps delays only the step that waits for it; all others are waited for
at once. With overlap those, too, travel while the next round computes (gradients that are averaged in every step hide
behind the step itself), and a metric counts from when its update has arrived. Merges and redistributions wait for
everything and hide behind nothing. Assumptions: a late update does not change the metric; sending does not slow down
computation.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked_dataclass

from algorithms.nodes.traffic import Link, merge_exchange
from algorithms.nodes.virtual_clock import Clocks, Sending, together
from algorithms.synchronisation.encodings.encoding import PLAIN
from training_logs.showing.comparison import best_per_round
from training_logs.showing.run_data import Row, Rows, RunData

# A pass with per-example statistics relative to one without (measured by benchmarks/performance/throughput.py).
PROBED_PASS = 1.4

# One number for all nodes, or one for each; further nodes start again with the first.
PerNode = float | Annotated[tuple[float, ...], Field(min_length=1)]


def _each(values: PerNode) -> tuple[float, ...]:
    return values if isinstance(values, tuple) else (values,)


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Hardware:
    """A device of one node.

    Attributes:
        t_min: seconds of the smallest forward and backward pass with update.
        t_example: seconds per example of a large pass.
        parameters: parameters of the simulated model; None: those of the run's model.
    """

    name: str
    t_min: float
    t_example: float
    parameters: float | None = None

    def pass_seconds(self, examples: float) -> float:
        """Return the seconds of a forward and backward pass."""
        return max(self.t_min, examples * self.t_example)


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Network:
    """The network between the nodes.

    Attributes:
        bits_per_second: of each node's link, in each direction.
        latency: seconds until all participants have begun and ended an exchange.
        server_bits_per_second: of the link of a parameter server; None: unlimited.
    """

    name: str
    bits_per_second: PerNode
    latency: PerNode
    server_bits_per_second: float | None = None

    def link(self, nodes: Iterable[int]) -> Link:
        """Return the slowest link of these nodes."""
        bits = _each(self.bits_per_second)
        latency = _each(self.latency)
        numbers = list(nodes)
        return Link(
            min(bits[number % len(bits)] for number in numbers),
            max(latency[number % len(latency)] for number in numbers),
        )

    def seconds(self, link_bytes: float) -> float:
        """Return the seconds of an exchange of all nodes that sends this many bytes through each link."""
        return Link(min(_each(self.bits_per_second)), max(_each(self.latency))).seconds(link_bytes)


@dataclass(frozen=True)
class Usage:
    """Totals of a run at the end of a round.

    Attributes:
        inner_steps: consecutive inner steps of one node.
        wall_seconds: training time on one thread of this machine, without evaluation.
    """

    outer_step: int
    tokens: int
    inner_steps: int
    communications: int
    bytes_communicated: int
    wall_seconds: float


def _gradient_bytes(workers: int, parameters: float) -> float:
    """Bytes that the workers send together to average one gradient."""
    return PLAIN.reduction_bytes(workers, int(parameters), torch.float32)


def usage(run: RunData, synchronous_workers: int | None = None) -> list[Usage]:
    """Return the totals of a run after every round.

    Args:
        synchronous_workers: count instead what this many workers send that average gradients at every inner step.
    """
    found = []
    steps = 0
    seconds = 0.0
    for rows in run.by_round.values():
        steps += int(rows[0]["inner_steps"])
        seconds += sum(row["seconds"] for row in rows)
        communications = int(rows[0]["communications"])
        sent = int(rows[0]["bytes_communicated"])
        if synchronous_workers:
            communications = steps
            sent = int(steps * _gradient_bytes(synchronous_workers, run.summary["parameters"]))
        found.append(Usage(int(rows[0]["outer_step"]), int(rows[0]["tokens"]), steps, communications, sent, seconds))
    return found


def _pass_seconds(row: Row, config: Mapping, hardware: Hardware, batch: float, parts: float) -> tuple[float, float]:
    """Seconds of an inner step with a batch in several micro-batches, and of the round's statistics."""
    micro_batch = batch / parts
    statistics = 0.0
    if config["statistics_estimator"] == "per_example" and not math.isnan(row["gradient_sample_size"]):
        sample = config["statistics_batch_size"]
        if batch > 1:
            statistics += (PROBED_PASS - 1.0) * parts * hardware.pass_seconds(micro_batch)
        if batch < sample:
            statistics += PROBED_PASS * hardware.pass_seconds(sample)
    return parts * hardware.pass_seconds(micro_batch), statistics


def _computing(
    run: RunData, row: Row, hardware: Hardware, workers: int, first: int, nodes: int
) -> dict[int, tuple[float, float]]:
    """Seconds of an inner step of each node of a trainer, and of its statistics.

    Args:
        workers: workers that share the batch.
        first: nodes of the trainers before this one.
        nodes: nodes of the run.
    """
    place = (int(row["outer_step"]), int(row["trainer_id"]))
    speeds = run.config.get("node_speeds")
    if speeds is None or len(run.nodes.get(place, ())) != workers:
        parts = row["accumulation_steps"]
        seconds = _pass_seconds(row, run.config, hardware, row["effective_batch"] / workers, parts)
        # With more trainers than nodes, nodes serve them in turn.
        return dict.fromkeys(sorted({number % nodes for number in range(first, first + workers)}), seconds)
    found = {}
    for worker in run.nodes[place]:
        parts = math.ceil(worker["examples"] / row["micro_batch"])
        step, statistics = _pass_seconds(row, run.config, hardware, worker["examples"], parts)
        slower = max(speeds) / worker["speed"]
        steps = worker["inner_steps"] / row["inner_steps"]
        found[int(worker["node"])] = (step * slower * steps, statistics * slower)
    return found


def _sendings(run: RunData, row: Row, parameters: float, synchronous_workers: int | None) -> list[Sending]:
    """Messages of the workers of a trainer in a round, for a model of this many parameters."""
    if synchronous_workers:
        each = _gradient_bytes(synchronous_workers, parameters) / synchronous_workers
        return [Sending(step, each, each, kind="gradient") for step in range(1, int(row["inner_steps"]) + 1)]
    whole_gradients = run.config["statistics_estimator"] == "across_workers"
    found: list[Sending] = []
    for exchange in (run.exchanges or {}).get((int(row["outer_step"]), int(row["trainer_id"])), ()):
        grows = exchange.kind != "monitor" and (exchange.kind != "statistics" or whole_gradients)
        scale = parameters / run.summary["parameters"] if grows else 1.0
        sent = scale * exchange.sent_bytes
        received = scale * exchange.received_bytes
        found += [
            Sending(step, sent, received, exchange.behind, exchange.through, exchange.kind) for step in exchange.steps
        ]
    return together(found)


def _overlapped(sendings: Sequence[Sending]) -> list[Sending]:
    """Hide the messages that are waited for at once behind the next round, and gradients behind their own step."""
    found = []
    for sending in sendings:
        if sending.behind:
            found.append(sending)
        elif sending.kind == "gradient":
            found.append(dataclasses.replace(sending, behind_step=True))
        else:
            found.append(dataclasses.replace(sending, behind=None))
    return found


def _new_nodes(rows: Rows, before: Mapping[int, int]) -> int:
    """Nodes that joined a trainer before a round, at least one.

    Args:
        before: nodes of each trainer in the round before.
    """
    came = (int(row["nodes"]) - before.get(int(row["trainer_id"]), 0) for row in rows)
    return max(1, sum(count for count in came if count > 0))


def simulated_seconds(
    run: RunData,
    hardware: Hardware,
    network: Network,
    synchronous_workers: int | None = None,
    overlap: bool = False,
) -> list[float]:
    """Return the seconds from the start until the messages of each round have arrived."""
    parameters = hardware.parameters or run.summary["parameters"]
    scale = parameters / run.summary["parameters"]
    nodes = run.config["nodes_per_gpu"] * len(run.summary["devices"])
    merges = {merge.outer_step: merge for merge in run.merges}
    before: dict[int, int] = {}
    moved = {"bytes_merged": 0.0, "bytes_redistributed": 0.0}
    clocks = Clocks(network, nodes)
    found = []
    for step, rows in run.by_round.items():
        new = {name: rows[0].get(name, moved[name]) - moved[name] for name in moved}
        moved = {name: moved[name] + new[name] for name in moved}
        if new["bytes_redistributed"]:
            clocks.together(network.seconds(scale * new["bytes_redistributed"] / _new_nodes(rows, before)))
        before = {int(row["trainer_id"]): int(row["nodes"]) for row in rows}
        taken = 0
        idle = set(range(nodes))
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
            others = len(merge.weights) - 1
            link = merge_exchange(others, before[merge.representative], scale * new["bytes_merged"]).link
            clocks.together(network.seconds(link))
        found.append(clocks.arrived if overlap else clocks.elapsed)
    return found


def metric_at(run: RunData) -> dict[int, float]:
    """Return the best validation metric of the living trainers in each evaluated round."""
    steps, values = best_per_round(run, "outer_step")
    return {int(step): value for step, value in zip(steps, values, strict=True)}
