"""Whether predictions of communications hold: python benchmarks/performance/prediction.py RUN_DIR... | --make FOLDER
[--seeds 1 2].

Every run is fitted up to several shares of its rounds, and the communications that its end is predicted to need are
held against those it had. `--make` makes the runs of docs/theory.md first, as far as they are not in the folder: four
settings on python_docs and one on source code of the standard library, each with every seed, about ten seconds of one
core a run. Last come how many intervals held the truth, how wide they are and how far predictions are off.
"""

import argparse
import statistics
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.compare.runs import made_run
from training_logs.showing.prediction import NoLawError, fit, measured
from training_logs.showing.run_data import RunData, RunFolderError, read_run

SHARES = (0.25, 1 / 3, 0.5, 2 / 3, 0.8)
_PACKAGES = ("asyncio", "email", "http", "multiprocessing", "unittest")
_SOURCES = ",".join(f"{sysconfig.get_path('stdlib')}/{package}/*.py" for package in _PACKAGES)
_COMMON = (
    "max_tokens=200000",
    "model_config.hidden_size=32", "model_config.intermediate_size=88", "number_of_inner_steps_between_outers=5",
    "warmup_steps=25",
)  # fmt: skip
SETTINGS = {
    "default": (),
    "constant": ("ETA=1.4", "ETA_at_end=null", "batch_test_confidence=0"),
    "sure": ("batch_test_confidence=0", "statistics_smoothing=0.8"),
    "code": ("dataset=text", f"text_files=[{_SOURCES}]", "text_documents=blank_lines", "ETA=1.6", "ETA_at_end=1.0"),
    "long": ("number_of_inner_steps_between_outers=8", "ETA=1.5", "ETA_at_end=null", "number_of_initial_trainers=1",
             "INITIAL_BATCH_SIZE=8"),
}  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One prediction and what came out: communications of the whole run, and those by then; share: of its rounds."""

    run: str
    share: float
    value: float
    low: float
    high: float
    true: float
    before: float

    @property
    def held(self) -> bool:
        return self.low <= self.true <= self.high

    @property
    def error(self) -> float:
        """Of the prediction, relative to what came out."""
        return self.value / self.true - 1.0

    @property
    def width(self) -> float:
        """Of the interval, relative to what came out."""
        return (self.high - self.low) / self.true


def checks(run: RunData, name: str, shares=SHARES) -> list[Check]:
    """Of all shares of a run that a law can be fitted to."""
    _, examples, communications = measured(run)
    found = []
    for share in shares:
        try:
            law = fit(run, share)
        except NoLawError as error:
            print(f"{name:12} from {share:.2f}: {error}")
            continue
        end = law.communications(examples[-1])
        found.append(Check(name, share, end.value, end.low, end.high, communications[-1], law.done[2][-1]))
    return found


def summary(found: list[Check]) -> str:
    """Coverage, errors and widths in a sentence."""
    errors = sorted(abs(check.error) for check in found)
    return (
        f"{sum(check.held for check in found)} of {len(found)} intervals held; error {statistics.mean(errors):.0%} on "
        f"average, {statistics.median(errors):.0%} in the median, {errors[-1]:.0%} at worst; "
        f"width {statistics.median(check.width for check in found):.0%} in the median"
    )


def made_runs(folder: Path, seeds: list[int]) -> list[Path]:
    """The runs of docs/theory.md."""
    return [
        made_run(folder / f"{name}_{seed}", "configs/constant_rate.yaml", (*_COMMON, *own, f"training_seed={seed}"))
        for seed in seeds
        for name, own in SETTINGS.items()
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Hold predictions of communications against the ends of runs.")
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN_DIR")
    parser.add_argument(
        "--make", type=Path, metavar="FOLDER", help="make the runs of docs/theory.md in it, and use them"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of runs to make; default: 1")
    options = parser.parse_args(arguments)
    if not options.runs and not options.make:
        parser.error("give run folders, or --make")
    runs = options.runs + (made_runs(options.make, options.seeds) if options.make else [])
    found: list[Check] = []
    for folder in runs:
        try:
            run = read_run(folder)
        except RunFolderError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        found += checks(run, folder.resolve().parent.name)
    for check in found:
        print(
            f"{check.run:12} from {check.share:.2f}: {check.before:.0f}, then {check.value:.1f} predicted "
            f"({check.low:.1f} to {check.high:.1f}), {check.true:.0f} measured{'' if check.held else ': outside'}"
        )
    for share in sorted({check.share for check in found}):
        print(f"from {share:.2f}: {summary([check for check in found if check.share == share])}")
    if found:
        print(f"all: {summary(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
