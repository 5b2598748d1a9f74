"""Kill a run of tests/support/matrix.py: python -m tests.support.matrix_killed METHOD FOLDER TIME.

The process starts the run, or resumes it from its files, and kills itself in the second inner step after round
KILLED_AFTER[TIME], when that round's checkpoint is complete.
"""

import dataclasses
import os
import signal
import sys
from pathlib import Path

import torch

from cluster import Cluster
from tests.support import matrix
from tests.support.helpers import Recorder
from tests.support.programs import Programs, wait_until
from utils.checkpoint.checkpoint import newest_checkpoint
from utils.files import CHECKPOINTS_FOLDER

# Rounds: before the last merge, and while messages are on their way.
KILLED_AFTER = (1, matrix.STOPPED_AFTER)


class _Killing(Recorder):
    def __init__(self, rounds: int, folder: Path):
        super().__init__()
        self._rounds = rounds
        self._checkpoint = folder / CHECKPOINTS_FOLDER / f"round_{rounds:05d}"
        self._left = 0

    def on_round_start(self, outer_step, progress, steps):
        self._left = 2 if outer_step - 1 == self._rounds else 0

    def on_step(self):
        super().on_step()
        self._left -= 1
        if self._left == 0:
            wait_until(self._checkpoint.exists, f"the checkpoint of round {self._rounds}")
            os.kill(os.getpid(), signal.SIGKILL)


def _continue(name: str, folder: Path, time: int) -> Cluster:
    """Start the run, or resume one that was killed `time` times, to the next kill or to its end."""
    cluster = Cluster(dataclasses.replace(matrix.merging(name), checkpoint_every_minutes=1e-9), matrix.data())
    if time:
        cluster.resume(newest_checkpoint(folder / CHECKPOINTS_FOLDER, cluster.processes))
    assert cluster.counters.outer_steps == (0, *KILLED_AFTER)[time]
    with matrix.losing():
        cluster.train(Recorder() if time == len(KILLED_AFTER) else _Killing(KILLED_AFTER[time], folder), folder)
    return cluster


def resumed(programs: Programs, name: str, folder: Path) -> dict:
    """Return the final state of a run that was killed twice, and each time resumed in another process."""
    for time in range(len(KILLED_AFTER)):
        programs.run("-m", "tests.support.matrix_killed", name, folder, time, status=-signal.SIGKILL)
    return matrix.state_of(_continue(name, folder, len(KILLED_AFTER)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with matrix.ready():
        _continue(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
