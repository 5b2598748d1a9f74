"""Send a run folder, or a gradient analysis, to ClearML.

    python -m training_logs.log_processor RUN_DIR [--mode auto|online|offline] [--new]

A run that is sent again continues its task; `--new` makes a new one.
"""

import argparse
import json
import sys
from pathlib import Path

from training_logs.showing.run_data import RunData, RunFolderError, read_run
from training_logs.trackers.clearml import SESSION, ClearML, resolved_mode
from training_logs.trackers.tracker import Tracker, merge_line, report_end, round_scalars
from utils.config.schema import CLEARML_MODES, ConfigError

# The summary of a gradient analysis, by which its folder is known.
ANALYSIS_SUMMARY = "gradient_analysis.json"


def send_run(run: RunData, tracker: Tracker) -> None:
    """Report a whole run."""
    tracker.start(run.config)
    for step, rows in run.by_round.items():
        tracker.scalars(step, round_scalars(rows, run.metric.name, run.metric.higher_is_better))
    for merge in run.merges:
        tracker.text(merge_line(merge.outer_step, merge.representative, merge.weights))
    report_end(tracker, run.folder, run.report_dir, run.summary)
    tracker.close(run.summary["status"])


def send_analysis(folder: Path, tracker: Tracker) -> None:
    """Report figures and numbers of a gradient analysis."""
    tracker.start(json.loads((folder / ANALYSIS_SUMMARY).read_text(encoding="utf-8"))["config"])
    for path in sorted(folder.glob("*.png")):
        tracker.figure(path.stem, path)
    tracker.file("gradient analysis", folder / ANALYSIS_SUMMARY)
    tracker.close("completed")


def main(arguments: list[str] | None = None) -> int:
    """Return 0, or 2 if the folder cannot be sent."""
    parser = argparse.ArgumentParser(
        prog="python -m training_logs.log_processor", description="Send a run folder to ClearML."
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--mode", choices=CLEARML_MODES[:3], default="auto", help="default: %(default)s")
    parser.add_argument("--new", action="store_true", help="to a new task, though the folder already has one")
    options = parser.parse_args(arguments)
    try:
        mode = resolved_mode(options.mode)
        tracker = ClearML(options.run, mode, options.new)
        if (options.run / ANALYSIS_SUMMARY).exists():
            send_analysis(options.run, tracker)
        else:
            send_run(read_run(options.run), tracker)
    except (ConfigError, RunFolderError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if mode == "offline":
        print(f"offline session: {options.run / SESSION}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
