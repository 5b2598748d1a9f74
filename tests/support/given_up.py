"""The program as a signal finds it in its fourth round: tests/support/given_up.py RANK SIGNAL [arguments of run.py].

The process of that rank, and no other, gets it; the other processes have done their steps by then, or wait for it in
the mean. With SIGTERM, for which the configuration has no patience, it waits until the round is given up; with SIGKILL
that is all.
"""

import os
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import run as program
from fabrics.pool.checkpoint_policy import Keeper
from utils.distributed.signals import StopRequest


def give_up_in_round_4(rank: int, number: int) -> None:
    """Change the classes of this process so that it happens."""
    rounds, steps, given_up = [], [], threading.Event()
    look, grant, on_step = StopRequest._look, Keeper.grant, Keeper.on_step

    def look_and_tell(self):
        look(self)
        if self.given_up:
            given_up.set()

    def count_rounds(self, wishes):
        grant(self, wishes)
        rounds.append(1)
        steps.clear()

    def be_interrupted(self):
        steps.append(1)
        if (len(rounds), len(steps)) == (3, 2) and os.environ.get("RANK", "0") == str(rank):
            os.kill(os.getpid(), number)
            given_up.wait()
        on_step(self)

    StopRequest._look, Keeper.grant, Keeper.on_step = look_and_tell, count_rounds, be_interrupted


if __name__ == "__main__":
    give_up_in_round_4(int(sys.argv[1]), signal.Signals[sys.argv[2]])
    start = program.start_processes
    # The others are this program too.
    program.start_processes = lambda config, overrides, command: start(
        config, overrides, [__file__, *sys.argv[1:3], *command[1:]]
    )
    sys.exit(program.main(sys.argv[3:]))
