"""Send a run folder, or a gradient analysis, to ClearML.

    python -m training_logs.log_processor RUN_DIR [--mode auto|online|offline]

While a run goes on, the same program follows its folder from a process of its own. PyTorch is not imported: this
process starts while training does, and should not take its cores for seconds.
"""

import argparse
import sys
from pathlib import Path

from training_logs.clearml_modes import ANALYSIS_SUMMARY, SESSION, resolved_mode
from training_logs.showing.clearml_reporter import process, send_analysis
from training_logs.showing.run_data import RunFolderError
from utils.config import CLEARML_MODES, ConfigError


def main(arguments: list[str] | None = None) -> int:
    """Send a run folder; 0, or 2 where it cannot be sent."""
    parser = argparse.ArgumentParser(
        prog="python -m training_logs.log_processor", description="Send a run folder to ClearML."
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--mode", choices=CLEARML_MODES[:3], default="auto", help="default: %(default)s")
    parser.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        mode = resolved_mode(options.mode)
        if (options.run / ANALYSIS_SUMMARY).exists():
            send_analysis(options.run, mode)
        else:
            process(options.run, mode, options.follow)
    except (ConfigError, RunFolderError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if mode == "offline":
        print(f"offline session: {options.run / SESSION}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
