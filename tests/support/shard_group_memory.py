"""A program that two processes run as a shard group: torchrun ... tests/support/shard_group_memory.py FOLDER; see
test_shard_group_memory.py.

The first device initialises models and sends the other its parts, and the max batch is measured. The main process
writes what came out.
"""

import sys
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import torch

from cluster import Cluster
from tests.support import matrix, shard_groups
from tests.support.helpers import TINY_ARCHITECTURE, make_config, tiny_data, tiny_llama
from utils.distributed.processes import LocalProcesses, Processes, join_processes

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
FREE = 40_000_000  # bytes


def measured(processes: Processes, free: int) -> int:
    """The max batch of a run whose last device has so many bytes, and others twice as many."""
    share = 1 if processes.shard_group.index == processes.shard_group.size - 1 else 2
    memory = psutil.virtual_memory()._replace(total=share * free, available=share * free)
    with patch("utils.max_batch_calculator.psutil.virtual_memory", lambda: memory):
        cluster = Cluster(make_config(**(RUN | {"max_batch_size": None})), tiny_data(), processes)
    (found,) = {node.max_batch for node in cluster.nodes}
    return found


def build_frozen(*arguments) -> torch.nn.Module:
    model = shard_groups.BUILD(*arguments)
    model.model.layers[0].requires_grad_(False)
    return model


INITIAL = {
    "untied": (shard_groups.double, {"model_config": TINY_ARCHITECTURE | {"tie_word_embeddings": False}}),
    "tied": (shard_groups.double, {}),
    "frozen": (shard_groups.build_bert, {"distributed_algo": "LocalSGD"}),
    "pretrained": (shard_groups.BUILD, {}),
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
        cluster = Cluster(config, shard_groups.data_of("classification" if name == "frozen" else ""), processes)
    return {"working": cluster.models.first.full_state_dict(), "trainers": matrix.state_of(cluster)["tensors"]}


def alone() -> LocalProcesses:
    return shard_groups.alone(NODES)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    processes = join_processes(make_config(nodes_per_gpu=NODES))
    processes.place([shard_groups.CPU], NODES, True, 2)
    found = {"initial": {name: initial(name, processes, folder) for name in INITIAL}}
    found["measured"] = [measured(processes, free) for free in (FREE, 2 * FREE)]
    if processes.is_main:
        torch.save(found, folder / "results.pt")
    processes.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
