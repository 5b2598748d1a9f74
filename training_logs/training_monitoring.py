"""Draw plots and report of run folders again, and several runs on common axes:

python -m training_logs.training_monitoring RUN_DIR [RUN_DIR ...] [--output FOLDER]
"""

import argparse
import signal
import sys
from pathlib import Path

from training_logs.showing.comparison import compare
from training_logs.showing.plots import plot_run
from training_logs.showing.report import write_report
from training_logs.showing.run_data import RunFolderError, read_run


def draw(folder: Path) -> Path:
    """Draw plots and report of a run folder; return the path of the report.

    Raises:
        RunFolderError: it is not a run folder, or is damaged.
    """
    run = read_run(folder)
    plot_run(run)
    return write_report(run)


def main(arguments: list[str] | None = None) -> int:
    """Return 0, or 2 if a folder is not a run folder."""
    parser = argparse.ArgumentParser(
        prog="python -m training_logs.training_monitoring",
        description="Draw plots and report of a run folder again; with several, also a comparison.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--output", type=Path, default=Path("comparison"), help="folder of the comparison")
    options = parser.parse_args(arguments)
    try:
        for folder in options.runs:
            print(draw(folder))
        if len(options.runs) > 1:
            print(compare([read_run(folder) for folder in options.runs], options.output))
    except RunFolderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an exit removes half-written files
    sys.exit(main())
