"""A run folder read back: what plots, report and ClearML show comes from here, and so from its files alone.

Nothing here, in plots or in log_processor imports PyTorch: the process that reports to ClearML starts while training
does, and should not take its cores for seconds.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

Row = dict[str, float]


class RunFolderError(ValueError):
    """A folder is not that of a run, or what is in it cannot be read."""


@dataclass(frozen=True)
class MetricName:
    """What is to be known of a metric to show it. decimals: digits after the point."""

    name: str
    higher_is_better: bool
    decimals: int


@dataclass(frozen=True)
class MergeRecord:
    """One merge. weights: of every trainer that became the representative, itself included."""

    outer_step: int
    representative: int
    weights: Mapping[int, float]


@dataclass(frozen=True)
class RunData:
    """What a run folder says.

    Attributes:
        folder: where it is.
        config: the resolved configuration, as plain values.
        summary: summary.json; its status is running for a run that goes on, or that died.
        rounds: the rows of training_log.csv as numbers; an empty cell is NaN.
        merges: in order.
    """

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    rounds: list[Row]
    merges: list[MergeRecord]

    @property
    def report_dir(self) -> Path:
        """Where CSVs, summary, plots and report are."""
        return self.folder / self.config["model_training_report_dir"]

    @property
    def memory_dir(self) -> Path:
        """Where the memory report is."""
        return self.folder / self.config["memory_report_dir"]

    @property
    def metric(self) -> "MetricName":
        """How the run's models are judged."""
        return MetricName(*(self.summary[key] for key in ("metric", "metric_higher_is_better", "metric_decimals")))

    @cached_property
    def trainers(self) -> list[int]:
        """The ids of all trainers there were."""
        return sorted({int(row["trainer_id"]) for row in self.rounds})

    @cached_property
    def by_round(self) -> dict[int, list[Row]]:
        """The rows of every round, in the order of the rounds."""
        found: dict[int, list[Row]] = {}
        for row in self.rounds:
            found.setdefault(int(row["outer_step"]), []).append(row)
        return found

    @cached_property
    def steps(self) -> np.ndarray:
        """The rows of step_loss_log.csv: [rows, columns] in the file's order, float64."""
        return _numbers(self.report_dir / "step_loss_log.csv")

    @cached_property
    def memory(self) -> list[dict[str, str]]:
        """The rows of memory_log.csv as text; empty where memory was not measured."""
        return _rows(self.memory_dir / "memory_log.csv")

    def of(self, trainer: int) -> list[Row]:
        """One trainer's rows."""
        return [row for row in self.rounds if row["trainer_id"] == trainer]


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(_whole_lines(file)))


def _whole_lines(file: Iterable[str]) -> Iterator[str]:
    """The lines that were written to their end: a program that died, or writes just now, leaves half of one."""
    return (line for line in file if line.endswith("\n"))


def _numbers(path: Path) -> np.ndarray:
    columns = 7
    if not path.exists():
        return np.empty((0, columns))
    with path.open(encoding="utf-8") as file:
        columns = file.readline().count(",") + 1
        lines = list(_whole_lines(file))
    return np.loadtxt(lines, delimiter=",", ndmin=2) if lines else np.empty((0, columns))


def read_round_log(path: Path) -> list[Row]:
    """The rows of training_log.csv as numbers; an empty cell is NaN."""
    return [{name: float(value) if value else float("nan") for name, value in row.items()} for row in _rows(path)]


def _merges(path: Path) -> list[MergeRecord]:
    merges: dict[int, MergeRecord] = {}
    for row in _rows(path):
        step = int(row["outer_step"])
        merge = merges.setdefault(step, MergeRecord(step, int(row["representative"]), {}))
        merge.weights[int(row["trainer_id"])] = float(row["weight"])
    return list(merges.values())


def read_run(folder: Path) -> RunData:
    """Read a run folder; it may be that of a run that goes on, or that died.

    Raises:
        RunFolderError: it is none, or is damaged.
    """
    path = folder / "config.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        report_dir = folder / config["model_training_report_dir"]
        return RunData(
            folder=folder,
            config=config,
            summary=json.loads((report_dir / "summary.json").read_text(encoding="utf-8")),
            rounds=read_round_log(report_dir / "training_log.csv"),
            merges=_merges(report_dir / "merge_log.csv"),
        )
    except OSError as error:
        raise RunFolderError(f"{folder}: not a run folder: {error.filename}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{folder}: not a run folder, or damaged: {' '.join(str(error).split())}") from None
