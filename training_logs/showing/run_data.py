"""A run folder read back: plots, report and trackers show what is in its files. PyTorch is not imported.

A table is a NumPy structured array with a float64 field per column: `rows["tokens"]` is a column, `rows[3]` a row, and
`rows[rows["trainer_id"] == 0]` the rows of one trainer.
"""

import contextlib
import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from algorithms.nodes.policies import Merge
from algorithms.nodes.traffic import Event
from utils.config.reading import yaml_value
from utils.files import REPORT_FOLDER

Table = np.ndarray


class RunFolderError(ValueError):
    """A folder is not a run folder, or its files are damaged."""


_DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, yaml.YAMLError)


@contextlib.contextmanager
def damage_reported(folder: Path) -> Iterator[None]:
    """Raise a RunFolderError in place of the errors that damaged or foreign files of a run folder cause."""
    try:
        yield
    except _DAMAGE as error:
        if isinstance(error, RunFolderError):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise RunFolderError(f"{folder}: not a run folder, or damaged: {reason}") from error


def _whole_lines(path: Path) -> Iterator[str]:
    """Return the lines of a file without half a last line; a missing file has none."""
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            yield from (line for line in file if line.endswith("\n"))


def read_table(path: Path) -> Table:
    """Read a CSV of numbers; an empty cell is NaN, half a last line is ignored, a missing file has no rows."""
    rows = csv.reader(_whole_lines(path))
    columns = [(name, float) for name in next(rows, [])]
    # One row after the other: the texts of a long log would take fifteen times its memory.
    return np.fromiter((tuple(float(cell or "nan") for cell in row) for row in rows), dtype=columns)


def split(rows: Table, column: str) -> dict[int, Table]:
    """Split a table that is sorted by a column into the rows of each value."""
    if not len(rows):
        return {}
    starts = np.flatnonzero(np.diff(rows[column])) + 1
    return {int(part[column][0]): part for part in np.split(rows, starts)}


@dataclass(frozen=True)
class MetricName:
    """The validation metric. decimals: digits after the point."""

    name: str
    higher_is_better: bool
    decimals: int

    def best(self, values: Iterable[float]) -> float:
        return max(values) if self.higher_is_better else min(values)


@dataclass(frozen=True)
class RunData:
    """The content of a run folder.

    Attributes:
        summary: summary.json. Its status is running if the run still trains, or was killed.
        rounds: training_log.csv.
        merges: merge_log.csv, by round.
    """

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    rounds: Table
    merges: dict[int, Merge]

    @property
    def name(self) -> str:
        """The name of the folder, also of one that is given as `.`."""
        return self.folder.resolve().name

    @property
    def report_dir(self) -> Path:
        """The folder of CSVs, summary, plots and report."""
        return self.folder / REPORT_FOLDER

    @property
    def metric(self) -> MetricName:
        """The validation metric."""
        summary = self.summary
        return MetricName(summary["metric"], summary["metric_higher_is_better"], summary["metric_decimals"])

    @cached_property
    def by_round(self) -> dict[int, Table]:
        """The rows of each round, in order."""
        return split(self.rounds, "outer_step")

    @cached_property
    def by_trainer(self) -> dict[int, Table]:
        """The rows of each trainer."""
        numbers = np.unique(self.rounds["trainer_id"]) if len(self.rounds) else ()
        return {int(trainer): self.rounds[self.rounds["trainer_id"] == trainer] for trainer in numbers}

    def best_metrics(self, x: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a column of the round log and the best validation metric of the living trainers, by evaluated round.

        A round's metric is measured before its merge, so the merge is not counted yet. After a merge in the last round
        the final metric is one more point. Rounds with one worker do not communicate. Of several points with the same
        value of the column, such as the tokens before and after that merge, the last counts. Seconds are those after
        the start-ups.
        """
        bytes_before = 0.0
        spent_in_all = 0.0  # after the round's merge
        found = {}
        for step, rows in self.by_round.items():
            spent_in_all = float(rows[x][0]) - (self._startup_seconds(step) if x == "wall_seconds" else 0.0)
            spent = spent_in_all
            if x == "communications" and step in self.merges:
                spent -= 1
            elif x == "bytes_communicated":
                spent -= float(rows["bytes_merged"][0]) - bytes_before
            bytes_before = float(rows["bytes_merged"][0])
            metrics = rows["validation_metric"][np.isfinite(rows["validation_metric"])]
            if len(metrics):
                found[spent] = float(self.metric.best(metrics))
        final = self.summary.get("final_metric")
        if final is not None and max(self.by_round, default=0) in self.merges:
            found[spent_in_all] = final
        return np.array(list(found)), np.array(list(found.values()))

    def _startup_seconds(self, step: int) -> float:
        """Seconds of the start-ups before a round; of all in a folder whose invocations do not have them."""
        of_run = self.summary.get("startup_seconds") or 0.0
        invocations = self.summary.get("invocations", ())
        before = [entry.get("startup_seconds", of_run) for entry in invocations if entry["first_round"] <= step]
        return before[-1] if before else of_run

    @cached_property
    def exchanges(self) -> dict[tuple[int, int], list[Event]]:
        """exchange_log.csv: messages between workers, by round and trainer; equal ones as if at even distances."""
        found: dict[tuple[int, int], list[Event]] = {}
        for row in csv.DictReader(_whole_lines(self.report_dir / "exchange_log.csv")):
            steps = np.linspace(int(row["first_step"]), int(row["last_step"]), int(row["count"])).round().astype(int)
            sent = float(row["sent_bytes"])
            received = float(row["received_bytes"])
            senders = tuple(map(int, row["by"].split())) or None
            found.setdefault((int(row["outer_step"]), int(row["trainer_id"])), []).extend(
                Event(row["kind"], step, sent, received, int(row["behind"]), row["through"], senders)
                for step in steps.tolist()
            )
        return found

    @cached_property
    def node_rows(self) -> Table:
        """node_log.csv."""
        return read_table(self.report_dir / "node_log.csv")

    @cached_property
    def nodes(self) -> dict[tuple[int, int], Table]:
        """Rows of node_log.csv, one per worker, by round and trainer."""
        return {
            (step, trainer): own
            for step, rows in split(self.node_rows, "outer_step").items()
            for trainer, own in split(rows, "trainer_id").items()
        }

    @cached_property
    def step_losses(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Per trainer the numbers of its inner steps, counted over all rounds, and their mean losses over workers."""
        log = read_table(self.report_dir / "step_loss_log.csv")
        if not len(self.rounds) or not len(log):
            return {}
        rounds = list(self.by_round)
        steps_before = np.cumsum([0, *(rows["inner_steps"][0] for rows in self.by_round.values())])
        # A worker that diverged has no loss to show. A round that is not in the round log yet has no place.
        log = log[np.isfinite(log["loss"]) & (log["outer_step"] <= rounds[-1])]
        curves = {}
        for trainer in np.unique(log["trainer_id"]):
            own = log[log["trainer_id"] == trainer]
            numbers = steps_before[np.searchsorted(rounds, own["outer_step"])] + own["inner_step"]
            steps, place = np.unique(numbers, return_inverse=True)
            weights = own["effective_batch"]
            curves[int(trainer)] = (steps, np.bincount(place, weights * own["loss"]) / np.bincount(place, weights))
        return curves


def _merges(path: Path) -> dict[int, Merge]:
    merges: dict[int, Merge] = {}
    for row in read_table(path):
        merge = merges.setdefault(int(row["outer_step"]), Merge(int(row["representative"]), {}))
        merge.weights[int(row["trainer_id"])] = float(row["weight"])
    return merges


def read_run(folder: Path) -> RunData:
    """Read a run folder, also of a run that still trains, or was killed.

    Raises:
        RunFolderError: it is not a run folder, or is damaged.
    """
    report_dir = folder / REPORT_FOLDER
    try:
        with damage_reported(folder):
            config = yaml_value((folder / "config.yaml").read_text(encoding="utf-8"))
            if not isinstance(config, dict) or "distributed_algo" not in config:
                raise ValueError("config.yaml is not the configuration of a run")
            summary = json.loads((report_dir / "summary.json").read_text(encoding="utf-8"))
            if not isinstance(summary, dict) or "status" not in summary:
                raise ValueError("summary.json is not the summary of a run")
            rounds = read_table(report_dir / "training_log.csv")
            return RunData(folder, config, summary, rounds, _merges(report_dir / "merge_log.csv"))
    except OSError as error:
        raise RunFolderError(f"{folder}: not a run folder: {error.filename}: {error.strerror}") from None
