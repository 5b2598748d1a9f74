"""The program, killed as its fourth round begins: tests/support/killed_in_round.py RANK [arguments of run.py].

Only the process of that rank is killed; the others wait for it in a collective.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import run as program
from cluster import Cluster

ROUND = 4


def kill_in_round(rank: int) -> None:
    """Change `Cluster.run_round` of this process so that it happens."""
    run_round = Cluster.run_round
    rounds = []

    def counted(self, *arguments):
        rounds.append(1)
        if len(rounds) == ROUND and os.environ.get("RANK", "0") == str(rank):
            os.kill(os.getpid(), signal.SIGKILL)
        return run_round(self, *arguments)

    Cluster.run_round = counted


if __name__ == "__main__":
    kill_in_round(int(sys.argv[1]))
    start = program.start_processes
    # The others are this program too.
    program.start_processes = lambda config, overrides, command: start(
        config, overrides, [__file__, sys.argv[1], *command[1:]]
    )
    sys.exit(program.main(sys.argv[2:]))
