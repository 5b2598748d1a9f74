"""A program that two processes run as an island: torchrun ... tests/support/island_memory.py FOLDER; see
test_island_memory.py.

Models are made tensor by tensor, devices run out of memory in the middle of passes, and the max batch is measured. The
main process writes what came out.
"""

import sys
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import torch

from cluster import Cluster
from fabrics.sharding.model_layers import layers_of
from tests.support import islands, matrix
from tests.support.helpers import TINY_ARCHITECTURE, Recorder, make_config, tiny_data, tiny_llama
from utils.distributed.process_group import join_processes
from utils.distributed.processes import LocalProcesses, Processes

NODES = 2
RUN = {
    "nodes_per_gpu": NODES,
    "model_config": TINY_ARCHITECTURE | {"num_hidden_layers": 2},
    "number_of_initial_trainers": 1,
    "number_of_outer_steps": 1,
    "number_of_inner_steps_between_outers": 2,
    "INITIAL_BATCH_SIZE": 8,  # four examples for each of two workers
    "max_requested_batch": 8,
    "max_batch_size": 8,
    "switch_mode": "only_gradient_accumulation",
    "cpu_threads": 1,
    "deterministic": True,
}
SMALL = 2  # examples for which a node has memory
FREE = 40_000_000  # bytes
# Where a device notices that it has no memory, and whether all steps are probed or none.
SCENARIOS = {
    "forward": {"sampling_method": "none"},
    "backward": {"sampling_method": "none"},
    "probed backward": {"activation_checkpointing": True},
    "compiled backward": {"sampling_method": "none", "compile_model": True},
    "probed within the island, backward": {
        "statistics_estimator": "across_workers",
        "statistics_within_island": True,
    },
}


def _limit(cluster: Cluster, where: str, rows: int) -> None:
    """Let the second layer of a pass run out of memory with more rows than these, as long as it trains.

    In a backward pass the other's gradients have been reduced by then.
    """

    def full(*arguments):
        raise torch.OutOfMemoryError("injected")

    def forward(module, arguments, keywords):
        hidden = arguments[0] if arguments else keywords["hidden_states"]
        if module.training and len(hidden) > rows:
            full() if where == "forward" else hidden.register_hook(full)

    first, second = layers_of(cluster.working.first.module)
    (second if where == "forward" else first).register_forward_pre_hook(forward, with_kwargs=True)


def run_scenario(name: str, processes: Processes, limited: bool = True) -> dict:
    """Train while the last device of an island has too little memory; limited: or with what it has memory for."""
    config = make_config(**(RUN | SCENARIOS[name] | ({} if limited else {"max_batch_size": SMALL})))
    with patch("fabrics.models.initialisation.build_model", islands.double), islands.front_end(processes):
        cluster, recorder = Cluster(config, tiny_data(), processes), Recorder()
        island = cluster.working.first.island
        if limited and island.index == island.size - 1:
            _limit(cluster, name, SMALL // island.size)
        cluster.train(recorder)
    return {
        "tensors": matrix.state_of(cluster)["tensors"],
        "max_batches": [node.max_batch for node in cluster.nodes],
        "warnings": recorder.warnings,
    }


def measured(processes: Processes, free: int) -> int:
    """The max batch of a run whose last device has so many bytes, and others twice as many."""
    share = 1 if processes.island.index == processes.island.size - 1 else 2
    memory = psutil.virtual_memory()._replace(total=share * free, available=share * free)
    with patch("utils.max_batch_calculator.psutil.virtual_memory", lambda: memory):
        cluster = Cluster(make_config(**(RUN | {"max_batch_size": None})), tiny_data(), processes)
    (found,) = {node.max_batch for node in cluster.nodes}
    return found


def build_frozen(*arguments) -> torch.nn.Module:
    model = islands.BUILD(*arguments)
    model.model.layers[0].requires_grad_(False)
    return model


INITIAL = {
    "untied": (islands.double, {"model_config": TINY_ARCHITECTURE | {"tie_word_embeddings": False}}),
    "tied": (islands.double, {}),
    "frozen": (islands.build_bert, {"distributed_algo": "LocalSGD"}),
    "pretrained": (islands.BUILD, {}),
    "pretrained, frozen, to float64": (build_frozen, {"parameter_dtype": "float64"}),
}


def write_pretrained(folder: Path) -> Path:
    """Tied weights in bfloat16, in several files."""
    model = tiny_llama(dtype=torch.bfloat16, tied=True, vocab_size=300)
    model.save_pretrained(folder / "pretrained", max_shard_size="4KB")
    assert len(list(folder.glob("pretrained/*.safetensors"))) > 1
    return folder


def initial(name: str, processes: Processes, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """What two trainers and the working model begin with. folder: with pretrained weights."""
    build, values = INITIAL[name]
    if name.startswith("pretrained"):
        values = values | {"model_config": {"name": str(folder / "pretrained"), "pretrained": True}}
    config = make_config(**(RUN | {"number_of_initial_trainers": 2} | values))
    with patch("fabrics.models.initialisation.build_model", build):
        cluster = Cluster(config, islands.data_of("classification" if name == "frozen" else ""), processes)
    return {"working": cluster.working.first.state(), "trainers": matrix.state_of(cluster)["tensors"]}


def alone() -> LocalProcesses:
    return islands.alone(NODES)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    processes = join_processes(make_config(nodes_per_gpu=NODES))
    processes.place([islands.CPU], NODES, True, 2)
    # Every tensor of these small models is made by itself.
    with patch.multiple("fabrics.sharding.deferred_init", SMALL=256, KEPT_BYTES=0):
        found = {name: [run_scenario(name, processes, limited) for limited in (True, False)] for name in SCENARIOS}
        found["initial"] = {name: initial(name, processes, folder) for name in INITIAL}
    found["measured"] = [measured(processes, free) for free in (FREE, 2 * FREE)]
    if processes.is_main:
        torch.save(found, folder / "results.pt")
    processes.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
