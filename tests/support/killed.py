"""Run a program that is killed: tests/support/killed.py FOLDER FILES MICROSECONDS SCRIPT [ARGUMENTS].

When SCRIPT has opened, renamed, removed or made FILES files and folders in FOLDER, the kernel kills it MICROSECONDS
later (SIGALRM without a handler). The number of files does not depend on the speed of the machine.
"""

import os
import runpy
import signal
import sys

_EVENTS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.rmtree"}


def main() -> None:
    folder, files, microseconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    del sys.argv[:4]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))

    def count(event: str, arguments: tuple) -> None:
        nonlocal files
        if event in _EVENTS and str(arguments[0]).startswith(folder):
            files -= 1
            if files == 0:
                signal.setitimer(signal.ITIMER_REAL, max(1, microseconds) / 1e6)

    sys.addaudithook(count)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
