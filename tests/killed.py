"""A program that kills a run again and again: tests/killed.py FOLDER CONFIG KILLS SEED; see test_resume.py.

Every attempt is the real entry point in a forked process, which is killed (SIGKILL) at a random moment: while it
probably loads, a little after a round has been logged, which is when models and checkpoint are written, or a little
after a checkpoint, which is when it trains. Then it is resumed; after the last kill it runs to its end.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# Everything that an attempt would import, so that it starts at once.
import cluster  # noqa: F401
import fabrics.dataset_loader  # noqa: F401
import run as program
import training_logs.recording.recorder  # noqa: F401


def attempt(arguments: list[str], output: Path) -> int:
    """Start the program; its process id."""
    child = os.fork()
    if child:
        return child
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os._exit(program.main(arguments))


def rounds_logged(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("logs/*/model_training_report/training_log.csv"))


def last_checkpoint(folder: Path) -> int:
    return max((int(path.name.removeprefix("round_")) for path in folder.glob("logs/*/checkpoints/round_*")), default=0)


def wait_for_more(measure, folder: Path, child: int) -> None:
    """Until there is more of something than there was, or the child has ended."""
    before = measure(folder)
    while not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        now = measure(folder)
        if now > before:
            return
        before = now  # a log that is cut when a run is resumed grows from there
        time.sleep(0.005)


def main(folder: Path, config: str, kills: int, seed: int) -> int:
    generator, done, from_scratch, rounds = random.Random(seed), 0, 0, []
    while True:
        runs = sorted((folder / "logs").glob("*"))
        resumable = bool(runs) and any((runs[0] / "checkpoints").glob("round_*"))
        if runs and not resumable:
            shutil.rmtree(runs[0])
        from_scratch += not resumable
        rounds.append(
            max((int(p.name[6:]) for p in (runs[0] / "checkpoints").glob("round_*")), default=0) if runs else 0
        )
        child = attempt(["--resume", str(runs[0])] if resumable else ["--config", config], folder / "output.txt")
        if done == kills:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            print(json.dumps({"status": status, "from_scratch": from_scratch, "rounds": rounds}))
            return status
        moment = generator.randrange(3)
        if moment == 0:
            time.sleep(generator.uniform(0.1, 1.5))
        else:
            wait_for_more(rounds_logged if moment == 1 else last_checkpoint, folder, child)
            time.sleep(generator.uniform(0.0, 0.3))
        if os.waitpid(child, os.WNOHANG)[0]:
            print("an attempt ended before it was killed: the run is too short")
            return 1
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        done += 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
