"""Run run.py, and send one of its processes a signal in the fourth round: killed_in_round.py SIGNAL RANK [ARGUMENTS].

The other processes wait for it in a collective.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import run as program
from cluster import Cluster

ROUND = 4


def kill_in_round(name: str, rank: int) -> None:
    run_round = Cluster.run_round

    def killing(self, *arguments):
        if self.counters.outer_steps == ROUND - 1 and os.environ.get("RANK", "0") == str(rank):
            os.kill(os.getpid(), signal.Signals[name])
        return run_round(self, *arguments)

    Cluster.run_round = killing


if __name__ == "__main__":
    kill_in_round(sys.argv[1], int(sys.argv[2]))
    start = program.start_processes
    # The other processes run this program too.
    program.start_processes = lambda config, overrides, command: start(
        config, overrides, [__file__, *sys.argv[1:3], *command[1:]]
    )
    sys.exit(program.main(sys.argv[3:]))
