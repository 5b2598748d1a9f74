"""The program behind test_distributed.py: torchrun ... tests/support/spmd.py FOLDER.

It trains small runs in all its processes, and the main process writes the results to FOLDER.
"""

import contextlib
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from algorithms.schedule.limits import RoundSchedule
from cluster import Cluster
from fabrics.data.examples import PackedSequences, TaskData
from fabrics.models import initialisation
from tests.support import matrix
from tests.support.helpers import (
    TINY_ARCHITECTURE,
    Recorder,
    Stack,
    build_light,
    make_config,
    make_trainer,
    random_sequences,
    tiny_data,
)
from utils.config.schema import Config
from utils.distributed.processes import Processes, join_processes
from utils.distributed.reductions import Transport

INNER_STEPS = 3
_RUN = {
    "deterministic": True,
    "number_of_inner_steps_between_outers": INNER_STEPS,
    "number_of_outer_steps": 5,
    "merge_frequency": 1,
    "ETA": 0.3,
    "max_batch_size": 4,
    "max_requested_batch": 24,
    "cpu_threads": 1,
}
_SPEEDS = {"node_speeds": [1.0, 0.25, 0.5, 1.0]}
_TWO_TRAINERS = {"number_of_initial_trainers": 2}
SCENARIOS = {
    "in order": {},
    "more trainers than nodes": {
        "number_of_initial_trainers": 6,
        "INITIAL_BATCH_SIZE": 2,
        "number_of_outer_steps": 6,
    },
    "across workers": _TWO_TRAINERS | {"statistics_estimator": "across_workers"},
    "workers join": _TWO_TRAINERS | {"smallest_worker_batch": 4},
    "speeds in a changing pool": _TWO_TRAINERS
    | _SPEEDS
    | {"balance": "steps", "node_schedule": [[0, 3], [0.4, 4]], "participants": 0.6, "message_loss": 0.4}
    | {"data_split_over": "workers"},
    "the most of the time": {"number_of_initial_trainers": 1, "objective": "time", "time_budget": 400.0}
    | {"node_speeds": [2.0] * 4, "link": "20kb/s,1s", "smallest_worker_batch": 4},
    "int8": {"communication_dtype": "int8"},
    "Synchronous": {"distributed_algo": "Synchronous"},
    "all-reduce": {"deterministic": False},
}
# Not run by four processes: they place no work that the others do not.
OF_TWO = ("across workers", "workers join")
# In these, processes exchange more than one mean per trainer and round, or less.
UNCOUNTED = ("speeds in a changing pool", "all-reduce")


@contextlib.contextmanager
def counted_wire() -> Iterator[SimpleNamespace]:
    """Count what this process sends while the context lasts.

    Attributes:
        calls: number of calls by name.
        sent: bytes sent to other processes.
        copied: bytes of state that other processes sent to this one.
    """
    wire = SimpleNamespace(calls=Counter(), sent=0.0, copied=0)
    exchange = Transport.exchange
    copy = Transport.copy
    all_reduce = Transport.all_reduce
    gather = dist.all_gather_object

    def counted_exchange(transport, sent, received):
        wire.calls["exchange"] += 1
        wire.sent += sum(tensor.nbytes for _, tensor in sent)
        return exchange(transport, sent, received)

    def counted_copy(transport, tensors, source, takers):
        calls = wire.calls.copy()
        copy(transport, tensors, source, takers)
        wire.calls = calls  # its exchanges are no mean's
        if transport.rank in takers:
            wire.copied += sum(tensor.nbytes for tensor in tensors)

    def counted_all_reduce(transport, tensor):
        wire.calls["all_reduce"] += 1
        wire.sent += 2 * (len(transport.ranks) - 1) / len(transport.ranks) * tensor.nbytes  # a ring
        return all_reduce(transport, tensor)

    def counted_gather(*arguments, **keywords):
        wire.calls["gather"] += 1
        return gather(*arguments, **keywords)

    with (
        patch.object(Transport, "exchange", counted_exchange),
        patch.object(Transport, "copy", counted_copy),
        patch.object(Transport, "all_reduce", counted_all_reduce),
        patch.object(dist, "all_gather_object", counted_gather),
    ):
        yield wire


class _Counting(Recorder):
    """Remembers the calls of each round, evaluation and merge included."""

    def __init__(self, wire: SimpleNamespace):
        super().__init__()
        self.wire = wire
        self.by_round: list[dict] = []

    def on_round_start(self, outer_step, progress, steps):
        self.wire.calls.clear()  # redistribution belongs to no round

    def on_round(self, cluster, result):
        super().on_round(cluster, result)
        self.by_round.append(dict(self.wire.calls))


def _data(config: Config) -> TaskData:
    data = tiny_data()
    if config.splits_data:
        data = dataclasses.replace(data, shares=[{"examples": size} for size in (40, 12, 28, 16)])
    return data


def _build(name: str):
    if name == "in order":  # a Llama once: what comes out elsewhere does not depend on the model
        return initialisation.build_model
    return (lambda *arguments: build_light(*arguments).double()) if name == "all-reduce" else build_light


def run_scenario(name: str, processes: Processes | None = None) -> dict:
    """Train a scenario, and return its results as numbers and tensors."""
    config = make_config(model_config=TINY_ARCHITECTURE, **_RUN | SCENARIOS[name])
    processes = processes or join_processes(config)
    with (
        patch.object(initialisation, "build_model", _build(name)),
        counted_wire() as wire,
    ):
        cluster = Cluster(config, _data(config), processes)
        recorder = _Counting(wire)
        final = cluster.train(recorder)
    reports = [report for result in recorder.rounds for report in result.reports.values()]
    counters = cluster.counters
    return {
        "parameters": {t.id: t.worker_group.parameters_for(cluster.nodes[0]) for t in cluster.trainers.values()},
        "losses": {trainer: evaluation.loss for trainer, evaluation in final.items()},
        "requests": [report.requested_batch for report in reports],
        "train_losses": [report.train_loss for report in reports],
        "workers": [len(report.workers) for report in reports],
        "variances": [report.statistics and report.statistics.variance for report in reports],
        "bytes": [counters.bytes_synchronised, counters.bytes_merged, counters.bytes_redistributed],
        "left_out": counters.left_out,
        "lost": counters.lost_messages,
        "merges": cluster.merges,
        "warnings": recorder.warnings,
        "placement": [
            {report.trainer: [w.node for w in report.workers.values()] for report in result.reports.values()}
            for result in recorder.rounds
        ],
        "calls": recorder.by_round,
    }


def bytes_of_a_method(name: str, processes: Processes) -> dict:
    """Train with one worker in every process; return the bytes that were sent, and those that the events say."""
    nodes = [processes._owners.index(rank) for rank in range(processes.count)]
    examples = PackedSequences(random_sequences(64))
    torch.manual_seed(0)
    trainer = make_trainer(Stack(), matrix.config_of(name), examples, nodes, processes=processes)
    events, schedule = [], RoundSchedule(matrix.INNER_STEPS, 0.0, 0.0)
    with counted_wire() as wire:
        for _ in range(3):
            split = trainer.split_work()
            parts = processes.gather(trainer.train_round(split, schedule, lambda: None))
            events += trainer.conclude_round(split, schedule, parts).events
    return {
        "sent": sum(processes.gather(wire.sent)),
        "counted": sum(event.sent for event in events) * len(nodes),
        "events": len(events),
    }


def merging(name: str, processes: Processes) -> dict:
    """A run with a method in which trainers merge and a worker is lost, and the bytes of state that moved."""
    two = processes.count == 2
    with counted_wire() as wire, matrix.losing():
        run = matrix.run(matrix.merging(name), processes, resumes=two)
    run["copied"] = sum(processes.gather(wire.copied))
    # With more than two processes a server has no process: what goes through it goes to all.
    run["wire"] = bytes_of_a_method(name, processes) if two else None
    return run


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    processes = join_processes(make_config())
    results = {}
    two = processes.count == 2
    for name, values in SCENARIOS.items():
        if name in OF_TWO and not two:
            continue
        processes._in_order = values.get("deterministic", True)
        results[name] = run_scenario(name, processes)
        results[name]["calls"] = processes.gather(results[name]["calls"])
    processes._in_order = True
    with matrix.ready():
        names = matrix.NAMES if two else matrix.POOL_OF_FOUR
        results["methods"] = {name: merging(name, processes) for name in names}
        results["pools"] = {
            name: matrix.run(matrix.pool(name), processes, resumes=two and name in matrix.POOL_OF_FOUR)
            for name in names
        }
    if processes.is_main:
        torch.save(results, folder / "results.pt")
        (folder / "owners.json").write_text(json.dumps(processes._owners))
    processes.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
