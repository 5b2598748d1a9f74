"""How many communications a run would need for more examples.

    python -m training_logs.prediction RUN_DIR [--examples N] [--share 0.33]

prints the laws and a prediction; with a share below 1 only the beginning of the run is fitted, and the prediction of
its end is held against what was measured.
"""

import argparse
import sys
from pathlib import Path

from training_logs.showing.prediction import NoLawError, fit, measured, sentences
from training_logs.showing.run_data import RunFolderError, read_run


def main(arguments: list[str] | None = None) -> int:
    """Print the fit; the exit status."""
    parser = argparse.ArgumentParser(description="Predict the communications of a run for more examples.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument(
        "--examples", type=float, nargs="+", help="in all (default: 2, 4 and 10 times those of the run)"
    )
    parser.add_argument("--share", type=float, default=1.0, help="share of the run to fit, from its beginning")
    options = parser.parse_args(arguments)
    if not 0.0 < options.share <= 1.0:
        parser.error("--share must be above 0 and at most 1")
    try:
        run = read_run(options.run)
        found = fit(run, options.share)
    except RunFolderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except NoLawError as error:
        print(f"error: {options.run}: {error}", file=sys.stderr)
        return 2
    _, examples, communications = measured(run)
    wanted = options.examples or ([examples[-1]] if options.share < 1.0 else [k * examples[-1] for k in (2, 4, 10)])
    print("\n".join(sentences(found, wanted)))
    if options.share < 1.0:
        value = found.communications(examples[-1])
        print(
            f"measured at {examples[-1]:,.0f} examples: {communications[-1]:.0f} communications; "
            f"error {value.value / communications[-1] - 1.0:+.1%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
