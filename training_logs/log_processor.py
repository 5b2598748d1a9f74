"""Send a run folder, or a gradient analysis, to ClearML.

    python -m training_logs.log_processor RUN_DIR [--mode auto|online|offline] [--new]

While a run goes on, the same program follows its folder from a process of its own. PyTorch is not imported: this
process starts while training does, and should not take its cores for seconds.
"""

import argparse
import sys
from pathlib import Path

from training_logs.showing.run_data import RunFolderError
from training_logs.trackers.clearml_modes import ANALYSIS_SUMMARY, SESSION, resolved_mode
from training_logs.trackers.clearml_reporter import send_analysis, send_run
from utils.config.schema import CLEARML_MODES, ConfigError


def main(arguments: list[str] | None = None) -> int:
    """Send a run folder; 0, or 2 where it cannot be sent."""
    parser = argparse.ArgumentParser(
        prog="python -m training_logs.log_processor", description="Send a run folder to ClearML."
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--mode", choices=CLEARML_MODES[:3], default="auto", help="default: %(default)s")
    parser.add_argument(
        "--new", action="store_true", help="to a new task, though the run has one that lacks only what was not sent yet"
    )
    parser.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        mode = resolved_mode(options.mode)
        if (options.run / ANALYSIS_SUMMARY).exists():
            send_analysis(options.run, mode)
        else:
            send_run(options.run, mode, options.follow, options.new)
    except (ConfigError, RunFolderError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if mode == "offline":
        print(f"offline session: {options.run / SESSION}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
