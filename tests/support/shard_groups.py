"""The program behind test_shard_groups.py: torchrun ... tests/support/shard_groups.py scenarios|memory FOLDER.

Its processes are shard groups, in which they train small runs. The main process writes the results to FOLDER.
"""

import dataclasses
import json
import re
import sys
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
from fabrics.training.inner_loop import accumulate_gradients
from tests.support import matrix
from tests.support.helpers import (
    CPU,
    TINY_ARCHITECTURE,
    LocalProcesses,
    Recorder,
    in_one_type,
    make_config,
    separable_texts,
    tiny_bert,
    tiny_data,
    tiny_llama,
)
from utils.checkpoint.checkpoint import Checkpoints
from utils.config.schema import Config
from utils.distributed.processes import Processes, join_processes, meet
from utils.distributed.shard_groups import _return_freed_memory

_RUN = {
    "model_config": TINY_ARCHITECTURE,
    "number_of_outer_steps": 3,
    "number_of_inner_steps_between_outers": 2,
    "number_of_initial_trainers": 2,
    "merge_frequency": 2,
    "INITIAL_BATCH_SIZE": 3,  # two workers with two examples: in shard groups of four some devices have none
    "ETA": 0.45,
    "max_batch_size": 2,
    "statistics_batch_size": 3,
    "max_requested_batch": 12,
    "batch_test_confidence": 1.0,
    "eval_batch_size": 7,  # three batches
    "deterministic": True,
    "cpu_threads": 1,
    "gradient_clipping": 0.5,
}

SCENARIOS = {
    "norm test": {},
    "float32": {},
    "uneven rows": {
        "model_config": TINY_ARCHITECTURE | {"tie_word_embeddings": False, "vocab_size": 301},
        "statistics_batch_size": 2,
        "distributed_algo": "StreamingDiLoCo",
        "synchronisation": {"fragments": 2, "delay": 0},
    },
    "across workers": {"statistics_estimator": "across_workers", "INITIAL_BATCH_SIZE": 4},
    "sketches": {"number_of_initial_trainers": 1},
    "recomputed": {
        "activation_checkpointing": True,
        "sampling_method": "augmented_inner_product_test",
        "statistics_batch_size": 5,
        "batch_test_confidence": 0.0,
    },
    "classification": {
        "distributed_algo": "LocalSGD",
        "learning_rate_for_inner_opt": 0.1,
        "statistics_batch_size": 2,
        "max_batch_size": 4,
    },
    # More examples: the rounding of their gradients averages out.
    "autocast": {"autocast": "bfloat16", "activation_checkpointing": True, "ETA": 0.3, "max_requested_batch": 24},
    "int8": {"communication_dtype": "int8", "sampling_method": "none"},
}
# The others have two nodes, which a trainer has together after the merge.
OF_FOUR_NODES = ("across workers", "sketches", "int8")
ROUNDED = ("float32", "autocast", "int8")  # the others are in float64
METHODS = [name for name in matrix.METHODS if matrix.METHODS[name]().capabilities.shards]
STOPPED_AFTER = 1  # round
# Processes, the size of their shard groups, and scenarios: one shard group, two, and a larger one.
PARTS = (
    (2, 2, ("float32", "recomputed", "autocast")),
    (4, 2, ("norm test", "across workers", "sketches", "int8")),
    (4, 4, ("uneven rows", "classification")),
)
ONE_GROUP = (0, 2)  # parts
RESUMED = "norm test"  # the scenario that is resumed with shard groups of another size
WRITTEN = ("norm test", "classification")  # scenarios whose models are written

BUILD = initialisation.build_model


def double(*arguments) -> torch.nn.Module:
    return in_one_type(BUILD(*arguments).double())


def build_bert(*arguments) -> torch.nn.Module:
    """A classifier with an odd vocabulary and frozen embeddings and layer."""
    with torch.random.fork_rng():
        model = tiny_bert(seed=arguments[4])
    for part in (model.bert.embeddings, model.bert.encoder.layer[0]):
        part.requires_grad_(False)
    return model


def data_of(name: str) -> TaskData:
    if name != "classification":
        return tiny_data()
    train, validation = separable_texts(96, seed=1), separable_texts(16, seed=2)
    return TaskData("classification", "random", "random tokens", train, validation, class_names=("low", "high"))


def recipe() -> dict:
    """The values of configs/fsdp_norm.yaml, in small."""
    path = Path(__file__).resolve().parents[2] / "configs" / "fsdp_norm.yaml"
    return yaml.safe_load(path.read_text()) | {
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
        "devices_per_node": 1,  # the processes are shard groups already
    }


def run_scenario(name: str, processes: Processes, state: dict | None = None, folder: Path | None = None) -> dict:
    """Train, and return the results.

    Args:
        state: where to resume.
        folder: where to write the models.
    """
    config = make_config(**(_RUN | SCENARIOS[name] if name in SCENARIOS else recipe()))
    build = build_bert if name == "classification" else BUILD if name in ROUNDED else double
    with patch("fabrics.models.initialisation.build_model", build):
        cluster = Cluster(config, data_of(name), processes)
        if state is not None:
            matrix.resume(cluster, state)
        recorder = matrix.Following(STOPPED_AFTER) if name == RESUMED else Recorder()
        final = cluster.train(recorder)
        if folder is not None:
            assert cluster.save_models(folder, recorder)
    reports = [report for result in recorder.rounds for report in result.reports.values()]
    statistics = [report.statistics for report in reports if report.statistics is not None]
    evaluations = [e for result in recorder.rounds for e in result.evaluations.values()] + list(final.values())
    counters = cluster.counters
    return {
        "tensors": matrix.state_of(cluster)["tensors"],
        "stopped": getattr(recorder, "state", None),
        "losses": [evaluation.loss for evaluation in evaluations],
        "accuracies": [evaluation.metric for evaluation in evaluations if cluster.metric.name == "accuracy"],
        "train_losses": [report.train_loss for report in reports],
        "statistics": [[s.variance, s.squared_norm, s.squared_norm_error, s.variance_error] for s in statistics],
        "inner": [[s.inner_product_variance, s.overlap] for s in statistics],
        "requests": [report.requested_batch for report in reports],
        "bytes": [counters.bytes_synchronised, counters.bytes_merged, counters.bytes_redistributed],
        "merges": cluster.merges,
        "warnings": recorder.warnings,
        "unmasked": needs_no_mask(cluster.model.module, {"input_ids": torch.zeros(2, 9)}),
    }


def run_method(name: str, processes: Processes) -> dict:
    """A run with a synchronisation method in float64 in which two trainers merge after a round."""
    config = matrix.merging(name, number_of_outer_steps=3, number_of_initial_trainers=2, merge_count=2)
    found = matrix.run(config, processes, matrix.Following(None))
    kept = {what: found[what] for what in ("losses", "train_losses", "requests", "events")}
    return kept | {"tensors": found["states"]["final"]["tensors"]}


def methods(processes: Processes) -> dict[str, dict]:
    with matrix.ready():
        build = initialisation.build_model
        with patch("fabrics.models.initialisation.build_model", lambda *arguments: build(*arguments).double()):
            return {name: run_method(name, processes) for name in METHODS}


MICRO_BATCHES = ((8,), (5, 4, 1))


def model_of_devices() -> torch.nn.Module:
    return in_one_type(tiny_llama(tied=True))


def devices_statistics(processes: Processes) -> list[dict]:
    """Statistics of a step of these micro-batches from the gradients of a shard group's devices."""
    model = ShardedModel(model_of_devices(), CPU, processes.shard_group)
    model.compares_devices = True
    found = []
    for micro_batches in MICRO_BATCHES:
        plan = ExecutionPlan(micro_batches)
        model.gradient.zero_()
        _, probes = accumulate_gradients(model, tiny_data().train, plan, np.arange(plan.effective_batch), True)
        found.append(dataclasses.asdict(model.estimate(probes, plan.effective_batch)))
    return found


def gathered_types(processes: Processes) -> dict[str, str]:
    """Return the types of gathered parameters with autocast."""
    llama = ShardedModel(tiny_llama(dtype=torch.float32), CPU, processes.shard_group, torch.bfloat16)
    for part in llama.module.modules():
        if isinstance(part, FSDPModule):
            part.unshard()
    return {name: str(parameter.dtype) for name, parameter in llama.module.named_parameters()}


def nodes_of(name: str) -> int:
    return 4 if name in OF_FOUR_NODES else 2


def alone(nodes: int = 4) -> LocalProcesses:
    return LocalProcesses([CPU], nodes)


# The start of a run

_START = {
    "nodes_per_gpu": 2,
    "number_of_initial_trainers": 1,
    "number_of_outer_steps": 1,
    "number_of_inner_steps_between_outers": 2,
    "INITIAL_BATCH_SIZE": 8,  # four examples for each of two workers
    "max_requested_batch": 8,
    "max_batch_size": 8,
    "switch_mode": "only_gradient_accumulation",
    "cpu_threads": 1,
    "deterministic": True,
    "model_config": TINY_ARCHITECTURE | {"num_hidden_layers": 2},
}
FREE_BYTES = 40_000_000


def measured_max_batch(processes: Processes, free: int) -> int:
    """The max batch of a run whose last device has n free bytes, and the others 2 n."""
    size = processes.shard_group.size
    free *= 1 if processes.shard_group.index == size - 1 else 2
    with patch("fabrics.pool.max_batch.host_memory", lambda: (free, 0)):
        cluster = Cluster(make_config(**(_START | {"max_batch_size": None})), tiny_data(), processes)
    (found,) = {node.max_batch for node in cluster.nodes}
    return found


def build_frozen(*arguments) -> torch.nn.Module:
    model = BUILD(*arguments)
    model.model.layers[0].requires_grad_(False)
    return model


INITIAL = {
    "untied": (double, {"model_config": TINY_ARCHITECTURE | {"tie_word_embeddings": False}}),
    "tied": (double, {}),
    "frozen": (build_bert, {"distributed_algo": "LocalSGD"}),
    "pretrained": (BUILD, {}),
    "pretrained, frozen": (build_frozen, {}),
}


def write_pretrained(folder: Path) -> None:
    """Write tied weights in bfloat16, in several files."""
    model = tiny_llama(dtype=torch.bfloat16, tied=True, vocab_size=300)
    model.save_pretrained(folder / "pretrained", max_shard_size="4KB")
    assert len(list(folder.glob("pretrained/*.safetensors"))) > 1


def initial_tensors(name: str, processes: Processes, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors that two trainers and the working model start with; the folder has the pretrained weights."""
    build, values = INITIAL[name]
    if name.startswith("pretrained"):
        values = values | {"model_config": {"name": str(folder / "pretrained"), "pretrained": True}}
    config = make_config(**(_START | {"number_of_initial_trainers": 2} | values))
    with patch("fabrics.models.initialisation.build_model", build):
        cluster = Cluster(config, data_of("classification" if name == "frozen" else ""), processes)
    return {"model": cluster.model.full_state_dict(), "trainers": matrix.state_of(cluster)["tensors"]}


# Memory

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
    """A run of one node, with micro-batches of four sequences of 64 tokens."""
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


def _peak_bytes() -> int:
    return 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def memory(folder: Path) -> None:
    """Write the peak memory of each process of a run of 30M parameters, without and with a checkpoint."""
    _return_freed_memory()  # as shard groups do
    torch.set_num_threads(1)
    processes = meet()
    size = processes.count
    processes.place([CPU], 1, True, size)
    data = tiny_data(train=16, validation=4, length=64)
    before = _peak_bytes()
    cluster = Cluster(memory_config(), data, processes)
    cluster.train(Recorder())
    assert cluster.parameter_count == 29_893_120
    trained = processes.gather(_peak_bytes() - before)
    Checkpoints(folder, None, processes, print).save(1, cluster.tensors(), {}, {})
    saved = processes.gather(_peak_bytes() - before)
    if processes.is_main:
        (folder / f"peaks_{size}.json").write_text(json.dumps([trained, saved]))
    processes.close()


def scenarios(folder: Path) -> None:
    torch.set_num_threads(1)
    processes = join_processes(make_config(nodes_per_gpu=4))
    stopped = torch.load(folder / "stopped.pt", weights_only=True)
    results: dict = {}
    for number, (count, size, names) in enumerate(PARTS):
        if count != processes.count:
            continue
        found = {}
        for nodes in (2, 4):
            processes.place([CPU], nodes, True, size)
            processes.shard_group.meet_all()  # as on GPUs, where nothing may have been gathered before
            for name in (name for name in names if nodes_of(name) == nodes):
                models = folder / "models" / name if name in WRITTEN else None
                found[name] = run_scenario(name, processes, folder=models)
                if name == RESUMED:
                    found["resumed"] = run_scenario(name, processes, stopped)
        if number in ONE_GROUP:
            found["gathered types"] = gathered_types(processes)
            found["devices"] = devices_statistics(processes)
        else:
            found["methods"] = methods(processes)
        if count == 2:
            found["recipe"] = run_scenario("recipe", processes)
            processes.place([CPU], 2, True, size)
            found["initial"] = {name: initial_tensors(name, processes, folder) for name in INITIAL}
            found["max batches"] = [measured_max_batch(processes, free) for free in (FREE_BYTES, 2 * FREE_BYTES)]
        results[number] = found
    if processes.is_main:
        torch.save(results, folder / "results.pt")
    processes.close()


if __name__ == "__main__":
    {"scenarios": scenarios, "memory": memory}[sys.argv[1]](Path(sys.argv[2]))
