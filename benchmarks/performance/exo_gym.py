"""Measure rounds of DiLoCo beside those of EXO Gym, with four nodes on one device and the same model and data:

    PYTHONPATH=GYM python benchmarks/performance/exo_gym.py [--repeats N] [key=value ...]

GYM is a checkout of https://github.com/exo-explore/gym; its code is not part of this project. EXO Gym has a process per
node. The nodes of this project are in one process. So the CPU time of all processes is compared as well: on a CPU whose
cores are all busy the speeds have the ratio of the CPU times.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

from benchmarks.performance.throughput import OVERHEAD, BareLoop, interleaved, make_data, tokens_per_second, whole_round
from cluster import Cluster
from fabrics.config_checks import CHECKS
from fabrics.training.optimizers import inner_optimizer_of
from utils.config.reading import parse_config
from utils.config.schema import Config

NODES = 4
FOUR_NODES = OVERHEAD | {
    "nodes_per_gpu": NODES,
    "INITIAL_BATCH_SIZE": 4 * NODES,
    "sequence_length": 64,
    "model_config": {"preset": "demo", "vocab_size": 512},
    "smallest_worker_batch": None,
    "deterministic": False,
}
_ROUNDS = 4  # measured of each call of EXO Gym, after a first one

if importlib.util.find_spec("exogym"):
    from exogym import trainer as exogym_trainer
    from exogym.strategy.diloco import DiLoCoStrategy
    from exogym.strategy.optim import OptimSpec

    # Its own function names the loopback interface as macOS does. The processes that it starts import this module.
    exogym_trainer.init_process_group_portsafe = torch.distributed.init_process_group

    class TimedDiLoCo(DiLoCoStrategy):
        """EXO Gym's DiLoCo; every node writes the wall and CPU time after each outer step to a file of its own."""

        def step(self) -> None:
            super().step()
            if self.local_step % self.H == 1 and self.local_step > 1:  # it has counted this step
                if self.rank == 0 and torch.cuda.is_available():
                    torch.cuda.synchronize()
                with Path(self.folder, f"{self.rank}.txt").open("a") as file:
                    file.write(f"{time.perf_counter()} {time.process_time()}\n")


class Losses(nn.Module):
    """The bare loop's model as EXO Gym takes it: from tokens to the mean loss."""

    def __init__(self, loop: BareLoop):
        super().__init__()
        self.model = loop.model
        self.loop = loop

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.loop.loss(ids)


def exo_gym_rounds(config: Config, device: torch.device) -> tuple[list[float], ...]:
    """Return the wall seconds and the CPU seconds of some rounds of EXO Gym.

    Raises:
        SystemExit: EXO Gym cannot be imported.
    """
    if not importlib.util.find_spec("exogym"):
        sys.exit("EXO Gym cannot be imported; name its checkout in PYTHONPATH")
    os.environ["OMP_NUM_THREADS"] = "1"  # of its processes
    uncompiled = dataclasses.replace(config, compile_model=False)  # as EXO Gym's own examples are
    loop = BareLoop(uncompiled, make_data(config), torch.device("cpu"))  # EXO Gym moves its model
    sequences = list(loop.tokens)
    inner_steps = config.number_of_inner_steps_between_outers
    optimizer = {
        "lr": config.learning_rate_for_inner_opt,
        "betas": inner_optimizer_of(config).betas,
        "weight_decay": config.weight_decay,
        "fused": True,
    }
    del loop.tokens, loop.optimizer
    with tempfile.TemporaryDirectory() as folder:
        strategy = TimedDiLoCo(
            OptimSpec(torch.optim.AdamW, **optimizer), H=inner_steps, max_norm=config.gradient_clipping, folder=folder
        )
        batch = config.INITIAL_BATCH_SIZE // NODES
        exogym_trainer.Trainer(Losses(loop), sequences, sequences, device=device.type).fit(
            num_epochs=1,
            strategy=strategy,
            num_nodes=NODES,
            max_steps=(_ROUNDS + 1) * inner_steps + 1,
            batch_size=batch,
            minibatch_size=batch,
            val_size=0,
            disable_logging=True,
        )
        texts = [(Path(folder) / f"{rank}.txt").read_text().split() for rank in range(NODES)]
    wall = [float(value) for value in texts[0][::2]]
    cpu = [sum(float(text[2 * number + 1]) for text in texts) for number in range(len(wall))]
    return tuple([after - before for before, after in itertools.pairwise(times)] for times in (wall, cpu))


def speeds(config: Config, repeats: int) -> dict:
    """Return tokens per second by name, in wall and in CPU time, medians; the programs take turns."""
    cluster = Cluster(config, make_data(config))
    device = cluster.model.device
    wall: dict[str, list[float]] = {"EXO Gym": [], "this project": []}
    cpu: dict[str, list[float]] = {"EXO Gym": [], "this project": []}
    for _ in range(repeats):
        wall_seconds, cpu_seconds = exo_gym_rounds(config, device)
        wall["EXO Gym"] += wall_seconds
        cpu["EXO Gym"] += cpu_seconds
        for found, clock in ((wall, time.perf_counter), (cpu, time.process_time)):
            times = interleaved({"": lambda: whole_round(cluster)}, device, _ROUNDS, clock)
            found["this project"] += times[""]
    return {
        "parameters": cluster.parameter_count,
        "tokens_per_second": tokens_per_second(config, wall),
        "tokens_per_cpu_second": tokens_per_second(config, cpu),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure DiLoCo beside EXO Gym.")
    parser.add_argument("--repeats", type=int, default=1, help="calls of EXO Gym; default: %(default)s")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration values")
    options = parser.parse_intermixed_args()
    config, _ = parse_config(FOUR_NODES, options.overrides, CHECKS)
    torch.set_num_threads(1)
    print(json.dumps(speeds(config, options.repeats)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
