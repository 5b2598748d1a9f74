"""The program behind tests/distributed/test_data_parallel.py, for two processes of torchrun."""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.distributed.tensor import DTensor

from benchmarks.performance.data_parallel import data_parallel_loop
from benchmarks.performance.throughput import OVERHEAD, BareLoop, make_data
from fabrics.config_checks import CHECKS
from utils.config.reading import parse_config
from utils.distributed.processes import join_processes

SMALL = {"sequence_length": 16, "nodes_per_gpu": 2, "model_config": {"preset": "demo", "vocab_size": 300}}
CPU = torch.device("cpu")


def main() -> None:
    """Train three steps with two processes and with one, and compare the parameters."""
    config, _ = parse_config(OVERHEAD | SMALL, checks=CHECKS)
    processes = join_processes(config)
    data = make_data(config)
    alone = BareLoop(config, data, CPU)
    before = [parameter.detach().clone() for parameter in alone.model.parameters()]
    alone.run(3)
    assert not torch.equal(before[0], next(alone.model.parameters()))
    for devices_per_node in (1, 2):
        loop = data_parallel_loop(dataclasses.replace(config, devices_per_node=devices_per_node), data, CPU)
        loop.run(3)
        for expected, found in zip(alone.model.parameters(), loop.model.parameters(), strict=True):
            assert isinstance(found, DTensor) is (devices_per_node == 2)
            whole = found.full_tensor() if isinstance(found, DTensor) else found
            torch.testing.assert_close(whole, expected, rtol=0, atol=1e-6)
    processes.close()


if __name__ == "__main__":
    main()
