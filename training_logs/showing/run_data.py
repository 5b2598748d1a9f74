"""A run folder read back. Plots, report and trackers show what is in its files, and import no PyTorch."""

import csv
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from utils.config.yaml_reading import yaml_value
from utils.run_layout import MEMORY_FOLDER, REPORT_FOLDER

Row = dict[str, float]


class RunFolderError(ValueError):
    """A folder is not a run folder, or its files cannot be read."""


class Rows(Sequence):
    """A table of numbers, held by column: rows[3] is a row, rows["tokens"] a column.

    Args:
        columns: float64 arrays of one length.
    """

    def __init__(self, columns: Mapping[str, np.ndarray]):
        self._columns = dict(columns)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Rows":
        """Make a table of rows with equal keys."""
        return cls({name: np.array([row[name] for row in rows], dtype=float) for name in (rows[0] if rows else ())})

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), ()))

    def __getitem__(self, which):
        if isinstance(which, str):
            return self._columns[which]
        if isinstance(which, slice):
            return self.where(which)
        return {name: float(column[which]) for name, column in self._columns.items()}

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def where(self, chosen: np.ndarray | slice) -> "Rows":
        """Return the rows at which a mask is true, or at given places."""
        return Rows({name: column[chosen] for name, column in self._columns.items()})

    def by(self, column: str) -> dict[int, "Rows"]:
        """Split consecutive rows with the same value in a column that is sorted."""
        if not self:
            return {}
        values = self[column]
        starts = [0, *np.flatnonzero(np.diff(values)) + 1, len(values)]
        return {int(values[a]): self.where(slice(a, b)) for a, b in itertools.pairwise(starts)}


def read_rows(path: Path) -> Rows:
    """Read a CSV of numbers; an empty cell is NaN, half a last line is ignored, a missing file has no rows.

    Raises:
        ValueError: a cell is not a number.
    """
    rows = list(_whole_rows(path))
    if not rows:
        return Rows({})
    columns = list(zip(*rows[1:], strict=True)) or [()] * len(rows[0])
    numbers = {
        name: np.array([float(cell or "nan") for cell in column]) for name, column in zip(rows[0], columns, strict=True)
    }
    return Rows(numbers)


def _whole_rows(path: Path) -> Iterator[list[str]]:
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            yield from csv.reader(line for line in file if line.endswith("\n"))


@dataclass(frozen=True)
class MetricName:
    """The validation metric. decimals: digits after the point."""

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
class ExchangeRecord:
    """Equal exchanges of a trainer's workers in a round.

    Attributes:
        count: number of exchanges.
        sent_bytes, received_bytes: of each worker, in one exchange.
        behind: inner steps that workers make before they wait for it.
        first_step, last_step: the inner steps after the first and the last exchange.
    """

    kind: str
    through: str
    count: int
    sent_bytes: float
    received_bytes: float
    behind: int
    first_step: int
    last_step: int

    @property
    def steps(self) -> list[int]:
        """The inner step before each exchange, as if at even distances."""
        return np.linspace(self.first_step, self.last_step, self.count).round().astype(int).tolist()


@dataclass(frozen=True)
class RunData:
    """The content of a run folder.

    Attributes:
        folder: the run folder.
        config: the resolved configuration, as plain values.
        summary: summary.json. Its status is running if the run continues, or died.
        rounds: training_log.csv.
        merges: in order.
    """

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    rounds: Rows
    merges: list[MergeRecord]

    @property
    def report_dir(self) -> Path:
        """The folder of CSVs, summary, plots and report."""
        return self.folder / REPORT_FOLDER

    @property
    def memory_dir(self) -> Path:
        """The folder of the memory report."""
        return self.folder / MEMORY_FOLDER

    @property
    def metric(self) -> MetricName:
        """The validation metric."""
        return MetricName(*(self.summary[key] for key in ("metric", "metric_higher_is_better", "metric_decimals")))

    @cached_property
    def trainers(self) -> list[int]:
        """The ids of all trainers."""
        return sorted({int(trainer) for trainer in self.rounds["trainer_id"]}) if self.rounds else []

    @cached_property
    def by_round(self) -> dict[int, Rows]:
        """Rows by round, in order."""
        return self.rounds.by("outer_step")

    @cached_property
    def by_trainer(self) -> dict[int, Rows]:
        """Rows by trainer."""
        return {trainer: self.rounds.where(self.rounds["trainer_id"] == trainer) for trainer in self.trainers}

    def of(self, trainer: int) -> Rows:
        """Return one trainer's rows."""
        return self.by_trainer[trainer]

    @cached_property
    def exchanges(self) -> dict[tuple[int, int], list[ExchangeRecord]] | None:
        """Exchanges between workers, by round and trainer; None without exchange_log.csv."""
        if not (self.report_dir / "exchange_log.csv").exists():
            return None
        header, *rows = list(_whole_rows(self.report_dir / "exchange_log.csv")) or [[]]
        found: dict[tuple[int, int], list[ExchangeRecord]] = {}
        for values in rows:
            row = dict(zip(header, values, strict=False))
            record = ExchangeRecord(
                kind=row["kind"],
                through=row["through"],
                count=int(row["count"]),
                sent_bytes=float(row["sent_bytes"]),
                received_bytes=float(row["received_bytes"]),
                behind=int(row["behind"]),
                first_step=int(row["first_step"]),
                last_step=int(row["last_step"]),
            )
            found.setdefault((int(row["outer_step"]), int(row["trainer_id"])), []).append(record)
        return found

    @cached_property
    def node_rows(self) -> Rows:
        """node_log.csv."""
        return read_rows(self.report_dir / "node_log.csv")

    @cached_property
    def nodes(self) -> dict[tuple[int, int], Rows]:
        """Rows of node_log.csv, one per worker, by round and trainer."""
        return {
            (step, trainer): own
            for step, rows in self.node_rows.by("outer_step").items()
            for trainer, own in rows.by("trainer_id").items()
        }

    @cached_property
    def share_rows(self) -> Rows:
        """share_log.csv; empty if shares of non-IID data are not evaluated."""
        return read_rows(self.report_dir / "share_log.csv")

    @cached_property
    def step_losses(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """By trainer the numbers of its inner steps, counted over all rounds, and their mean losses over workers."""
        log = read_rows(self.report_dir / "step_loss_log.csv")
        if not self.rounds or not log:
            return {}
        before = np.zeros(max(self.by_round) + 2)
        for step, rows in self.by_round.items():
            before[step + 1] = rows["inner_steps"][0]
        before = np.cumsum(before)
        # A worker that diverged has no loss to show. A round that is not in the round log yet has no place.
        log = log.where(np.isfinite(log["loss"]) & (log["outer_step"] < len(before) - 1))
        numbers = before[log["outer_step"].astype(int)] + log["inner_step"]
        curves = {}
        for trainer in np.unique(log["trainer_id"]):
            own = log["trainer_id"] == trainer
            steps, place = np.unique(numbers[own], return_inverse=True)
            weights = log["effective_batch"][own]
            curves[int(trainer)] = (steps, np.bincount(place, weights * log["loss"][own]) / np.bincount(place, weights))
        return curves

    @cached_property
    def memory(self) -> dict[str, dict[str, np.ndarray]]:
        """By device the columns seconds, allocated_bytes and peak_bytes of memory_log.csv."""
        header, *rows = list(_whole_rows(self.memory_dir / "memory_log.csv")) or [[]]
        found: dict[str, dict[str, list[float]]] = {}
        for values in rows:
            row = dict(zip(header, values, strict=True))
            device = found.setdefault(row["device"], {"seconds": [], "allocated_bytes": [], "peak_bytes": []})
            for column, numbers in device.items():
                numbers.append(float(row[column]))
        return {
            device: {column: np.array(numbers) for column, numbers in columns.items()}
            for device, columns in found.items()
        }


def _merges(path: Path) -> list[MergeRecord]:
    merges: dict[int, MergeRecord] = {}
    for row in read_rows(path):
        step = int(row["outer_step"])
        merge = merges.setdefault(step, MergeRecord(step, int(row["representative"]), {}))
        merge.weights[int(row["trainer_id"])] = row["weight"]
    return list(merges.values())


def read_run(folder: Path) -> RunData:
    """Read a run folder, also of a run that continues, or that died.

    Raises:
        RunFolderError: it is not a run folder, or is damaged.
    """
    try:
        config = yaml_value((folder / "config.yaml").read_text(encoding="utf-8"))
        if not isinstance(config, dict) or "distributed_algo" not in config:
            raise ValueError("config.yaml is not the configuration of a run")
        report_dir = folder / REPORT_FOLDER
        return RunData(
            folder=folder,
            config=config,
            summary=json.loads((report_dir / "summary.json").read_text(encoding="utf-8")),
            rounds=read_rows(report_dir / "training_log.csv"),
            merges=_merges(report_dir / "merge_log.csv"),
        )
    except OSError as error:
        raise RunFolderError(f"{folder}: not a run folder: {error.filename}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{folder}: not a run folder, or damaged: {' '.join(str(error).split())}") from None
