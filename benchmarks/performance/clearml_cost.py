"""What an offline ClearML session adds to a short run: python benchmarks/performance/clearml_cost.py [--pairs N]
[key=value ...].

Pairs of runs of two rounds, one with clearml=off and one with clearml=offline, in turn first and second. Prints the
seconds of each from start to end of the program, their difference and its median, and after how many more seconds the
session was complete. Before the next run the session is waited for.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, mode: str, overrides: list[str]) -> tuple[float, float]:
    """Seconds of a run, and from its end until its session is complete.

    Raises:
        subprocess.CalledProcessError: the run failed.
    """
    command = [sys.executable, "run.py", "number_of_outer_steps=2", f"clearml={mode}", f"log_dir={folder}", *overrides]
    started = time.perf_counter()
    subprocess.run(command, cwd=_ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ended = time.perf_counter()
    while mode == "offline" and not list(folder.glob("*/clearml/offline/*.zip")):
        time.sleep(0.05)
    return ended - started, time.perf_counter() - ended


def main() -> int:
    parser = argparse.ArgumentParser(description="What an offline ClearML session adds to a short run.")
    parser.add_argument("--pairs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all seconds")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder) / "warm", "off", options.overrides)  # what is tokenised once is there from now on
        for number in range(options.pairs):
            found, sessions = {}, 0.0
            for mode in ("off", "offline") if number % 2 else ("offline", "off"):
                found[mode], later = run(Path(folder) / f"{number}_{mode}", mode, options.overrides)
                sessions = max(sessions, later)
            pairs.append(found | {"session": sessions})
            difference = found["offline"] - found["off"]
            print(
                f"off {found['off']:.1f} s, offline {found['offline']:.1f} s: {difference:+.1f} s; "
                f"session complete {sessions:.1f} s later",
                flush=True,
            )
    differences = [pair["offline"] - pair["off"] for pair in pairs]
    print(f"median of {len(pairs)} pairs: {statistics.median(differences):+.2f} s")
    if options.json:
        options.json.write_text(json.dumps(pairs, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
