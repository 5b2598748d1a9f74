"""Programs beside a run: they read its folder, take what processor time it leaves, and it does not wait for them."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import psutil

NICENESS = 19
_ROOT = Path(__file__).resolve().parents[2]


def start(module: str, *arguments: str, output: IO[bytes], waits: bool = False) -> subprocess.Popen:
    """Start a module of ours as a program that outlives this one.

    Args:
        output: what it prints goes there.
        waits: it gets a standard input that ends when this process closes it, or ends.

    Raises:
        OSError: it cannot be started.
    """
    # Ctrl-C and the end of the terminal are for the run. A session of its own would keep them away as well, but a low
    # priority counts only among the processes of one session.
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE if waits else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=_ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    # Training's threads wait for each other: whatever takes the core of one stops all of them.
    psutil.Process(process.pid).nice(NICENESS)
    return process
