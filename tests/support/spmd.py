"""A program that several processes run: torchrun ... tests/support/spmd.py FOLDER; see test_distributed.py.

Every scenario is a small training run through growing batches, merges and redistribution. The main process writes what
came out, and how many collectives every process called, to FOLDER.
"""

import dataclasses
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.distributed as dist

from algorithms.schedule.limits import RoundSchedule
from cluster import Cluster
from fabrics.data.dataset_loader import DATASETS, Dataset, load_data
from fabrics.data.examples import DataShares, PackedSequences, TaskData
from fabrics.data.language_modelling import task_data
from fabrics.data.token_store import TokenisedPart, TokenisedSet
from fabrics.models import initialisation
from fabrics.pool import validation
from fabrics.training.inner_loop import InnerLoop
from fabrics.training.worker import NodeFailedError
from tests.support import matrix
from tests.support.helpers import (
    TINY_ARCHITECTURE,
    Recorder,
    build_light,
    make_config,
    make_trainer,
    random_sequences,
    tiny_data,
)
from trainers import Trained
from utils.config.schema import Config
from utils.distributed.process_group import join_processes
from utils.distributed.processes import Processes
from utils.distributed.reductions import ALL_GATHER

INNER_STEPS = 3
SPEEDS = [1.0, 0.25, 0.5, 1.0]
_RUN = {
    "number_of_inner_steps_between_outers": INNER_STEPS,
    "number_of_outer_steps": 5,
    "merge_frequency": 1,
    "ETA": 0.3,
    "max_batch_size": 4,
    "max_requested_batch": 24,
    "eval_batch_size": 3,  # six batches
    "cpu_threads": 1,
}
# Name -> configuration, and whether in float64.
SCENARIOS = {
    "in order": (_RUN | {"deterministic": True}, False),
    "more trainers than nodes": (
        _RUN
        | {"deterministic": True, "number_of_initial_trainers": 6, "INITIAL_BATCH_SIZE": 2, "number_of_outer_steps": 6},
        False,
    ),
    "across workers": (
        _RUN | {"deterministic": True, "number_of_initial_trainers": 2, "statistics_estimator": "across_workers"},
        False,
    ),
    "workers join": (
        _RUN | {"deterministic": True, "number_of_initial_trainers": 2, "smallest_worker_batch": 4},
        False,
    ),
    "shares of workers": (_RUN | {"deterministic": True, "data_split_over": "workers"}, False),
    "shares by speed": (
        _RUN | {"deterministic": True, "number_of_initial_trainers": 2, "node_speeds": SPEEDS, "balance": "batch"},
        False,
    ),
    "steps by speed": (
        _RUN | {"deterministic": True, "number_of_initial_trainers": 2, "node_speeds": SPEEDS, "balance": "steps"},
        False,
    ),
    "speeds in a pool that changes": (
        _RUN
        | {"deterministic": True, "number_of_initial_trainers": 2, "node_speeds": SPEEDS, "balance": "steps"}
        | {"node_schedule": [[0, 3], [0.4, 4]], "participants": 0.6, "message_loss": 0.3, "data_split_over": "workers"},
        False,
    ),
    "clusters in a pool that changes": (
        _RUN
        | {"deterministic": True, "number_of_initial_trainers": 2, "data_split": "clusters", "weigh_shares": True}
        | {"data_split_over": "workers", "data_shares": 4, "sequence_length": 9}
        | {"node_schedule": [[0, 3], [0.4, 4]], "message_loss": 0.5},
        False,
    ),
    "bfloat16": (_RUN | {"deterministic": True, "communication_dtype": "bfloat16"}, False),
    "int8": (_RUN | {"communication_dtype": "int8"}, False),
    "a node fails": (_RUN | {"deterministic": True, "number_of_initial_trainers": 2}, False),
    "LocalSGD": (_RUN | {"deterministic": True, "distributed_algo": "LocalSGD"}, False),
    "Synchronous": (_RUN | {"deterministic": True, "distributed_algo": "Synchronous"}, False),
    "all-reduce": (_RUN | {"deterministic": False}, False),
    "all-reduce in float64": (_RUN | {"deterministic": False}, True),
}
IN_ORDER_REDUCTION = ("all_reduce", "all_to_all_single", ALL_GATHER)
# What a merge calls besides.
MOVES = ("broadcast", "new_group", "send", "recv")
COLLECTIVES = (*IN_ORDER_REDUCTION, *MOVES, "all_gather_object")


class _Counting(Recorder):
    """Counts the collectives of every round, its evaluation and merge included."""

    def __init__(self):
        super().__init__()
        self.counts: Counter = Counter()
        self.by_round: list[dict] = []
        self.batches, self.evaluated = 0, []
        self.received = 0  # bytes of state that came from other processes
        self.originals = {name: getattr(dist, name) for name in COLLECTIVES}
        self.evaluate = validation.begin_batches

    def __enter__(self):
        for name, original in self.originals.items():
            setattr(dist, name, self._counted(name, original))
        validation.begin_batches = self._evaluate
        return self

    def _evaluate(self, module, examples, batch_size, device, batches):
        self.batches += len(batches)
        return self.evaluate(module, examples, batch_size, device, batches)

    def __exit__(self, *exception):
        for name, original in self.originals.items():
            setattr(dist, name, original)
        validation.begin_batches = self.evaluate

    def _counted(self, name, original):
        def call(*arguments, **keywords):
            self.counts[name] += 1
            if name == "broadcast" and arguments[1] != dist.get_rank():
                self.received += arguments[0].nbytes
            return original(*arguments, **keywords)

        return call

    def on_round_start(self, outer_step, progress, steps):
        # What distributing the nodes took is not the round's.
        self.counts.clear()
        self.batches = 0

    def on_round(self, cluster, result):
        super().on_round(cluster, result)
        self.by_round.append(dict(self.counts))
        self.evaluated.append(self.batches)
        self.batches = 0


class _Moved(matrix.Following):
    """Counts the bytes of state that come from other processes."""

    def __init__(self):
        super().__init__()
        self.received, self._broadcast = 0, dist.broadcast

    def __enter__(self):
        dist.broadcast = self._counted
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        dist.broadcast = self._broadcast

    def _counted(self, tensor, source, *arguments, **keywords):
        self.received += tensor.nbytes if source != dist.get_rank() else 0
        return self._broadcast(tensor, source, *arguments, **keywords)


def clustered(config: Config, processes: Processes) -> TaskData:
    """Documents of six kinds, with words of their own in the main, in clusters that every process finds by itself."""
    tokenizer, generator = tiny_data().tokenizer, np.random.default_rng(7)
    words, lengths = np.arange(len(tokenizer)), generator.integers(20, 60, size=90)
    weights = [np.where(words % 6 == number % 6, 20.0, 1.0) for number in range(len(lengths))]
    tokens = [
        generator.choice(words, size=length, p=own / own.sum()) for length, own in zip(lengths, weights, strict=True)
    ]
    offsets, hashes = np.cumsum([0, *lengths]), np.arange(len(lengths), dtype=np.uint64)
    whole = TokenisedPart(np.concatenate(tokens).astype(np.uint16), offsets, hashes)
    metadata = {"skipped": {}, "tokenizer": {"name": "tiny"}}
    with tempfile.TemporaryDirectory() as folder:  # what one process keeps there no other sees

        def load(config: Config) -> TaskData:
            documents = TokenisedSet(Path(folder), metadata, tokenizer, whole, whole.first(20))
            return task_data(config, "kinds", "six kinds of documents", documents)

        DATASETS["kinds"] = Dataset("causal_lm", load)
        try:
            return load_data(dataclasses.replace(config, dataset="kinds"), processes)
        finally:
            del DATASETS["kinds"]


def run_scenario(name: str, processes=None) -> dict:
    """Train; what came out, as numbers and tensors."""
    values, double = SCENARIOS[name]
    config = make_config(model_config=TINY_ARCHITECTURE, **values)
    build, step = initialisation.build_model, InnerLoop._step

    def build_double(*arguments):
        return build_light(*arguments).double()

    def fail_at_node_1(self, probe):
        if self.worker.node.id == 1 and self._assignment.place.round == 2:
            raise NodeFailedError("pulled out")
        return step(self, probe)

    if name != "in order":  # a Llama once: what comes out elsewhere does not depend on the model
        initialisation.build_model = build_double if double else build_light
    if name == "a node fails":
        InnerLoop._step = fail_at_node_1
    try:
        if processes is None:
            processes = join_processes(config)
        data = clustered(config, processes) if config.data_split == "clusters" else tiny_data()
        if config.splits_data and data.shares is None:
            data = dataclasses.replace(data, shares=DataShares((40, 12, 28, 16), (), {}))
        cluster = Cluster(config, data, processes)
        with _Counting() as recorder:
            final = cluster.train(recorder)
    finally:
        initialisation.build_model, InnerLoop._step = build, step
    trainer_bytes = next(iter(cluster.trainers.values())).worker_group.parameter_bytes
    reports = [report for result in recorder.rounds for report in result.reports.values()]
    return {
        "parameters": {t.id: t.parameters_for(cluster.nodes[0]) for t in cluster.trainers.values()},
        "losses": {trainer: evaluation.loss for trainer, evaluation in final.items()},
        "requests": [report.requested_batch for report in reports],
        "train_losses": [report.train_loss for report in reports],
        "workers": [len(report.workers) for report in reports],
        "variances": [report.statistics and report.statistics.variance for report in reports],
        "bytes": [
            *(cluster.counters.bytes_synchronised, cluster.counters.bytes_merged, cluster.counters.bytes_redistributed)
        ],
        # Flat tensors have gaps between parameters, which are sent and not counted.
        "flat_bytes": [cluster.models[cluster.devices[0]].parameters.nbytes, trainer_bytes],
        "received": recorder.received,
        "left_out": cluster.counters.left_out,
        "merges": len(cluster.merges),
        "placement": [
            {report.trainer: [w.node for w in report.workers.values()] for report in result.reports.values()}
            for result in recorder.rounds
        ],
        "collectives": recorder.by_round,
        "evaluated": recorder.evaluated,
        "warnings": recorder.warnings,
        "shares": data.shares and (data.shares.sizes, data.shares.digest),
        "lost": cluster.counters.lost_messages,
    }


def churn(processes, redistributions: int = 40) -> dict:
    """Two trainers whose nodes change each time: how many groups there are at most, and descriptors more than before.

    What is given to new nodes is checked on the way.
    """
    nodes, most = range(len(processes.devices)), 0
    cuts, descriptors = [1, 2, 3], None
    for step in range(redistributions):
        first, second = nodes[: cuts[step % 3]], nodes[cuts[step % 3] :]
        for trainer in (first, second):
            processes.workers(trainer)
        held = [torch.full((5,), float(step)), torch.tensor(0.5)] if processes.owns(first[0]) else None
        takers = [first[0], *second]
        taken = processes.provide(held, first[:1], takers, lambda: [torch.empty(5), torch.empty(())])
        assert (taken is None) != any(map(processes.owns, takers))
        assert taken is None or [tensor.tolist() for tensor in taken] == [[step] * 5, 0.5]
        processes.keep([first, second])
        most = max(most, len(processes._groups))
        if step == 3:
            descriptors = len(os.listdir("/dev/fd"))
    assert processes.sharing(0) == processes.count  # one CPU
    return {"groups": most, "descriptors": len(os.listdir("/dev/fd")) - descriptors}


class _Wire:
    """Counts the bytes that leave this process for others, as the collectives are made for many of them."""

    def __init__(self):
        self.sent, self.calls = 0.0, 0
        self._originals = {name: getattr(dist, name) for name in (*IN_ORDER_REDUCTION, "broadcast")}

    def __enter__(self):
        for name, original in self._originals.items():
            setattr(dist, name, self._counted(name, original))
        return self

    def __exit__(self, *exception):
        for name, original in self._originals.items():
            setattr(dist, name, original)

    def _counted(self, name, original):
        def call(*arguments, **keywords):
            tensor, ranks, here = arguments[0], dist.get_world_size(keywords.get("group")), dist.get_rank()
            self.calls += 1
            if name == "all_reduce":  # a ring
                self.sent += 2 * (ranks - 1) / ranks * tensor.nbytes
            elif name == ALL_GATHER:
                self.sent += (ranks - 1) * arguments[1].nbytes
            elif name == "all_to_all_single":
                _, sent, _, sizes = arguments
                place = dist.get_group_rank(keywords["group"], here)
                self.sent += sent.nbytes - sizes[place] * sent.element_size()
            elif arguments[1] == here:
                self.sent += (ranks - 1) * tensor.nbytes
            return original(*arguments, **keywords)

        return call


def wired(name: str, processes) -> dict:
    """A trainer with a worker in every process, whose parameters nobody asks for: bytes sent, and bytes of events."""
    nodes = [processes._owners.index(rank) for rank in range(processes.count)]
    examples = PackedSequences(random_sequences(64))
    torch.manual_seed(0)
    trainer = make_trainer(matrix.Bigrams(), matrix.config_of(name), examples, nodes, processes=processes)
    with _Wire() as wire:
        events, schedule = [], RoundSchedule(matrix.INNER_STEPS, 0.0, 0.0)
        for _ in range(3):
            trained = trainer.train_round(schedule, lambda: None)
            events += trainer.conclude_round(schedule, Trained.joined(processes.gather(trained)), 0, 1.0).events
    return {
        "sent": sum(processes.gather(wire.sent)),
        "counted": sum(event.sent for event in events) * len(nodes),
        "events": len(events),
    }


def methods(processes) -> dict:
    """Every synchronisation method: a run in which trainers merge and a worker is lost, and what crosses the wire."""
    found = {}
    with matrix.ready():
        for name in matrix.NAMES:
            try:
                recorder = _Moved()
                with matrix.losing():
                    run = matrix.run(matrix.merging(name), processes, recorder, resumes=processes.count == 2)
                received = sum(processes.gather(recorder.received))
                # With more of them a server has no process: what goes through it goes to everybody.
                wire = wired(name, processes) if processes.count == 2 else None
                found[name] = run | {"received": received, "wire": wire}
            except Exception as error:
                raise RuntimeError(f"with {name}: {error}") from error
    return found


def pools(processes) -> dict:
    """Runs in which nodes come and go, workers rest and messages are lost."""
    two = processes.count == 2
    names = matrix.NAMES if two else matrix.POOL_OF_FOUR
    with matrix.ready():
        return {name: matrix.run(matrix.pool(name), processes, resumes=two) for name in names}


def all_lost(processes=None) -> list[float]:
    """What is evaluated of a method whose workers have copies, first after a round in which all of them diverge."""
    with matrix.losing(lambda place: place.round == 2):
        recorder = Recorder()
        one = {"number_of_initial_trainers": 1, "number_of_outer_steps": 4, "eval_every": 3}
        one["synchronisation"] = {"threshold": 1e9}  # never
        Cluster(matrix.config_of("FDA", **one), matrix.data(), processes).train(recorder)
    return [evaluation.loss for result in recorder.rounds for evaluation in result.evaluations.values()]


def delivered(processes) -> list[dict[int, list]]:
    """What comes to every process of messages between four workers, by who owns them."""
    found = []
    for takers, absent in matrix.DELIVERIES:
        workers = processes.workers(range(4))
        came = matrix.delivered(workers, takers, absent)
        found.append(processes.gather({worker: message.tolist() for worker, message in came.items()}))
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    processes, results = None, {}
    for name, (values, _) in SCENARIOS.items():
        if processes is None:
            processes = join_processes(make_config(**values))
        processes._in_order = values.get("deterministic", True)
        result = run_scenario(name, processes)
        for what in ("collectives", "evaluated", "received"):
            result[what] = processes.gather(result[what])
        results[name] = result
    results["churn"] = processes.gather(churn(processes))
    processes._in_order = True
    results["methods"], results["delivered"] = methods(processes), delivered(processes)
    results["pools"] = pools(processes)
    with matrix.ready():
        results["all lost"] = all_lost(processes)
    if processes.is_main:
        torch.save(results, folder / "results.pt")
        (folder / "owners.json").write_text(json.dumps(processes._owners))
    processes.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
