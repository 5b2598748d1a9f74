"""A program that several processes run as shard groups: torchrun ... tests/support/shard_groups.py scenarios FOLDER;
see
test_shard_groups.py.

Every scenario is a small run through growing batches and a merge. The main process writes what came out to FOLDER,
where what the run goes on from is that was stopped on one device.
"""

import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import yaml
from torch.distributed.fsdp import FSDPModule

from algorithms.batch.switch_mode import ExecutionPlan
from cluster import Cluster
from fabrics.data.examples import TaskData
from fabrics.models import initialisation
from fabrics.models.attention import needs_no_mask
from fabrics.sharding.sharded_model import ShardedModel
from fabrics.training.forward_backward import accumulate_gradients
from tests.support import matrix
from tests.support.helpers import (
    CPU,
    TINY_ARCHITECTURE,
    Recorder,
    make_config,
    separable_texts,
    tiny_bert,
    tiny_data,
    tiny_llama,
    use_torch_norms,
)
from utils.checkpoint.checkpoint import Checkpoints
from utils.config.schema import Config
from utils.distributed.processes import LocalProcesses, Processes, join_processes, meet
from utils.distributed.shard_groups import _return_freed_memory

_RUN = {
    "model_config": TINY_ARCHITECTURE,
    "number_of_outer_steps": 3,
    "number_of_inner_steps_between_outers": 2,
    "number_of_initial_trainers": 2,
    "merge_frequency": 2,
    "INITIAL_BATCH_SIZE": 3,  # two workers of two examples: in shard groups of four there is nothing to do for some
    "ETA": 0.3,
    "max_batch_size": 2,
    "statistics_batch_size": 3,
    "max_requested_batch": 24,
    "batch_test_confidence": 1.0,
    "eval_batch_size": 7,  # three batches
    "deterministic": True,
    "cpu_threads": 1,
    "gradient_clipping": 0.5,
}
_INNER_PRODUCTS = {
    "sampling_method": "augmented_inner_product_test",
    "statistics_batch_size": 5,
    "batch_test_confidence": 0.0,
}
SCENARIOS = {
    "norm test": {},
    "float32": {},
    "untied": {"model_config": TINY_ARCHITECTURE | {"tie_word_embeddings": False}, "statistics_batch_size": 2},
    "inner product test": _INNER_PRODUCTS,
    "across workers": {"statistics_estimator": "across_workers", "INITIAL_BATCH_SIZE": 4},
    "sketches": {"number_of_initial_trainers": 1},
    "recomputed": _INNER_PRODUCTS | {"activation_checkpointing": True},
    "on the host": {"offload": ["outer_state", "idle_moments"]},
    "classification": {
        "distributed_algo": "LocalSGD",
        "learning_rate_for_inner_opt": 0.1,
        "statistics_batch_size": 2,
        "max_batch_size": 4,
    },
    "autocast": {"autocast": "bfloat16", "activation_checkpointing": True, "sampling_method": "none"},
    "compiled": {
        "compile_model": True,
        "model_config": TINY_ARCHITECTURE | {"num_hidden_layers": 2},
        "activation_checkpointing": True,
        "INITIAL_BATCH_SIZE": 8,
        "max_batch_size": 6,
        "statistics_batch_size": 2,
    },
    "autocast compiled": {
        "autocast": "bfloat16",
        "compile_model": True,
        "model_config": TINY_ARCHITECTURE | {"num_hidden_layers": 2},
        "sampling_method": "none",
        "INITIAL_BATCH_SIZE": 4,
        "batch_schedule": [[0.0, 4], [0.3, 8], [0.6, 12]],
        "max_batch_size": 6,
    },
    "int8": {"communication_dtype": "int8", "sampling_method": "none"},
}
# Of configs/fsdp_norm.yaml, what makes it small.
SMALL_RECIPE = {
    "model_config": TINY_ARCHITECTURE,
    "max_tokens": None,
    "number_of_outer_steps": 4,
    "sequence_length": 9,
    "warmup_tokens": 0,
    "autocast": None,
    "ETA": 0.5,
    "INITIAL_BATCH_SIZE": 6,
    "max_requested_batch": 80,
    "max_batch_size": 8,
    "save_weights_every": None,
    "devices_per_node": 1,  # what is said of processes says it here
}
# What is about what workers are to each other has four nodes; others have two, which are together from the merge on.
OF_FOUR_NODES = ("across workers", "sketches", "int8")
ROUNDED = ("float32", "autocast", "autocast compiled", "int8")  # others are in float64
GRAPHS = {"compiled": 1, "autocast compiled": 2}  # that layers share; of their attention and their MLP
METHODS = [name for name in matrix.METHODS if matrix.METHODS[name]().capabilities.shards]
STOPPED_AFTER = 1  # which round
# Processes, how many of them are a shard group, and what these shard groups run: one, two, and one with devices that
# lack rows.
PARTS = (
    (2, 2, tuple(SCENARIOS)),
    (4, 2, ("norm test", "float32", "across workers", "sketches", "on the host", "int8")),
    (4, 4, ("norm test", "float32", "classification")),
)
RESUMED = ("norm test",)  # that go on with shard groups of another size
WRITTEN = ("norm test", "classification")  # whose models are


def double(*arguments) -> torch.nn.Module:
    return use_torch_norms(BUILD(*arguments).double())


def build_bert(*arguments) -> torch.nn.Module:
    """With an odd vocabulary, two classes, texts of several lengths, and embeddings and a layer that stay."""
    with torch.random.fork_rng():
        model = tiny_bert(seed=arguments[4])
    for part in (model.bert.embeddings, model.bert.encoder.layer[0]):
        part.requires_grad_(False)
    return model


BUILD = initialisation.build_model


@contextlib.contextmanager
def front_end(processes: Processes) -> Iterator[list]:
    """On shard groups PyTorch's compiler makes graphs, which are counted, and no code of them, which takes long."""
    made, compile_model = [], torch.compile

    def backend(graph, inputs):
        made.append(graph)
        return graph

    def compiled(called, **keywords):
        return called if processes.shard_group.size == 1 else compile_model(called, backend=backend, **keywords)

    with patch("torch.compile", compiled):
        yield made
    torch.compiler.reset()


def data_of(name: str) -> TaskData:
    if name != "classification":
        return tiny_data()
    train, validation = separable_texts(96, seed=1), separable_texts(16, seed=2)
    return TaskData("classification", "random", "random tokens", train, validation, class_names=("low", "high"))


class _Stopping(Recorder):
    """Remembers the state after a round, as a checkpoint has it."""

    def on_round(self, cluster, result):
        super().on_round(cluster, result)
        if result.outer_step == STOPPED_AFTER:
            self.state = matrix.state_of(cluster)


def recipe() -> dict:
    """The values of configs/fsdp_norm.yaml, in small."""
    path = Path(__file__).resolve().parents[2] / "configs" / "fsdp_norm.yaml"
    return yaml.safe_load(path.read_text()) | SMALL_RECIPE


def run_scenario(name: str, processes: Processes, state: dict | None = None, folder: Path | None = None) -> dict:
    """Train, from a state if there is one; what came out. folder: where to write the models."""
    config = make_config(**(_RUN | SCENARIOS[name] if name in SCENARIOS else recipe()))
    build = {"classification": build_bert}.get(name, BUILD if name in ROUNDED else double)
    with patch("fabrics.models.initialisation.build_model", build), front_end(processes) as graphs:
        cluster = Cluster(config, data_of(name), processes)
        if state is not None:
            matrix.resume(cluster, state)
        recorder = _Stopping() if name in RESUMED else Recorder()
        final = cluster.train(recorder)
        if folder is not None:
            with patch("fabrics.models.export._LARGE_BYTES", 1):
                assert cluster.save_models(folder, recorder)
                if processes.shard_group.size > 1:
                    for error in (OSError, RuntimeError, MemoryError):
                        with patch("torch.from_file", side_effect=error):
                            assert cluster.save_models(folder / "full", recorder) == {}
                        assert re.search(rf"could not be written .*: {error.__name__}", recorder.warnings.pop())
    reports = [report for result in recorder.rounds for report in result.reports.values()]
    statistics = [report.statistics for report in reports if report.statistics is not None]
    evaluations = [e for result in recorder.rounds for e in result.evaluations.values()] + list(final.values())
    return {
        "tensors": matrix.state_of(cluster)["tensors"],
        "stopped": getattr(recorder, "state", None),
        "losses": [evaluation.loss for evaluation in evaluations],
        "recalls": [scores.recall for evaluation in evaluations for scores in evaluation.classes],
        "train_losses": [report.train_loss for report in reports],
        "statistics": [[s.variance, s.squared_norm, s.squared_norm_error, s.variance_error] for s in statistics],
        "inner": [[s.inner_product_variance, s.overlap] for s in statistics],
        "requests": [report.requested_batch for report in reports],
        "bytes": [
            cluster.counters.bytes_synchronised,
            cluster.counters.bytes_merged,
            cluster.counters.bytes_redistributed,
        ],
        "merges": len(cluster.merges),
        "warnings": recorder.warnings,
        "graphs": len(graphs),
        "unmasked": needs_no_mask(cluster.models.first.module, {"input_ids": torch.zeros(2, 9)}),
    }


class _Following(matrix.Following):
    stopped_after = None


def run_method(name: str, processes: Processes) -> dict:
    """A run in which two trainers merge after a round, with a synchronisation method, in float64.

    What is sent in round 2 arrives.
    """
    config = matrix.merging(name, number_of_outer_steps=3, number_of_initial_trainers=2, merge_count=2)
    found = matrix.run(config, processes, _Following())
    return {
        "tensors": found["states"]["final"]["tensors"],
        "losses": found["losses"],
        "train_losses": found["train_losses"],
        "requests": found["requests"],
        "events": found["events"],
    }


MICRO_BATCHES = ((8,), (5, 4, 1))


def model_of_devices() -> torch.nn.Module:
    return use_torch_norms(tiny_llama(tied=True))


def devices_statistics(processes: Processes) -> list[dict]:
    """What the gradients of a shard group's devices say of a step of these micro-batches."""
    working, found = ShardedModel(model_of_devices(), CPU, processes.shard_group), []
    working.compares_devices = True
    for micro_batches in MICRO_BATCHES:
        plan = ExecutionPlan(micro_batches)
        working.gradient.zero_()
        _, probes = accumulate_gradients(working, tiny_data().train, plan, np.arange(plan.effective_batch), True)
        found.append(dataclasses.asdict(working.estimate(probes, plan.effective_batch)))
    return found


def model_with_gaps() -> torch.nn.Module:
    return tiny_bert(seed=0).double()


def some_places(size: int) -> torch.Tensor:
    return torch.arange(size - 1, -1, -3)


def numbers_of_parts(processes: Processes) -> dict:
    """What methods ask about flat tensors that are in parts; `here` of every process."""
    working = ShardedModel(model_with_gaps(), CPU, processes.shard_group)
    flat = working.parameters.detach()
    llama = ShardedModel(tiny_llama(dtype=torch.float32), CPU, processes.shard_group, torch.bfloat16)
    for part in llama.module.modules():
        if isinstance(part, FSDPModule):
            part.unshard()
    return {
        "gathered as": {name: str(parameter.dtype) for name, parameter in llama.module.named_parameters()},
        "size": working.whole_size,
        "sketch": working.sketch(flat, 3, 250, 5),
        "distance": working.distance(flat, -flat).item(),
        "here": processes.gather(flat[working.local_places(some_places(working.whole_size))]),
    }


def nodes_of(name: str) -> int:
    return 4 if name in OF_FOUR_NODES else 2


def alone(nodes: int = 4) -> LocalProcesses:
    return LocalProcesses([CPU], nodes)


def methods(processes: Processes) -> dict[str, dict]:
    with matrix.ready():
        build = initialisation.build_model
        with patch("fabrics.models.initialisation.build_model", lambda *arguments: build(*arguments).double()):
            return {name: run_method(name, processes) for name in METHODS}


MODEL_OF_30M = {
    "preset": "demo",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "vocab_size": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}


def memory_config(devices_per_node: int = 1) -> Config:
    """Of a run of one node, with micro-batches of four sequences of 64 tokens."""
    batches = dict.fromkeys(("max_batch_size", "INITIAL_BATCH_SIZE", "max_requested_batch", "statistics_batch_size"), 4)
    return make_config(
        model_config=MODEL_OF_30M,
        number_of_initial_trainers=1,
        number_of_outer_steps=1,
        number_of_inner_steps_between_outers=1,
        cpu_threads=1,
        nodes_per_gpu=1,
        devices_per_node=devices_per_node,
        sequence_length=64,
        eval_batch_size=4,
        **batches,
    )


def memory(folder: Path) -> None:
    """What each process of a run of 30M parameters needs at most, beyond what it has before, to FOLDER.

    Without a checkpoint, and with one. Of what is freed nothing is kept for later, as on shard groups.
    """
    _return_freed_memory()
    torch.set_num_threads(1)
    processes = meet()
    size = processes.count
    processes.place([CPU], 1, True, size)
    data, before = tiny_data(train=16, validation=4, length=64), resident_peak()
    cluster = Cluster(memory_config(), data, processes)
    cluster.train(Recorder())
    assert cluster.parameter_count == 29_893_120
    trained = processes.gather(resident_peak() - before)
    checkpoints = Checkpoints(folder, 1, None, processes, print)
    checkpoints.save(1, cluster.tensors(), {}, {})
    peaks = processes.gather(resident_peak() - before)
    if processes.is_main:
        (folder / f"peaks_{size}.json").write_text(json.dumps([trained, peaks]))
    processes.close()


def resident_peak() -> int:
    """In bytes, of this process."""
    return 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    processes = join_processes(make_config(nodes_per_gpu=4))
    results, stopped = {}, torch.load(folder / "stopped.pt", weights_only=True)
    for number, (count, size, names) in enumerate(PARTS):
        if count != processes.count:
            continue
        found, resumed = {}, {}
        for nodes in (2, 4):
            processes.place([CPU], nodes, True, size)
            for name in (name for name in names if nodes_of(name) == nodes):
                models = folder / f"models_{number}" / name if name in WRITTEN else None
                found[name] = run_scenario(name, processes, folder=models)
                if name in RESUMED:
                    resumed[name] = run_scenario(name, processes, stopped[name])
        found["resumed"] = resumed
        found["methods"] = methods(processes) if (count, size) == (4, 2) else {}
        found["recipe"] = run_scenario("recipe", processes) if count == 2 else None
        found["parts"] = numbers_of_parts(processes)
        found["devices"] = devices_statistics(processes)
        results[number] = found
    if processes.is_main:
        torch.save(results, folder / "results.pt")
    processes.close()


if __name__ == "__main__":
    {"scenarios": main, "memory": memory}[sys.argv[1]](Path(sys.argv[2]))
