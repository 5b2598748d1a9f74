"""A run folder read back: what plots, report and ClearML show comes from here, and so from its files alone.

Nothing in `showing` imports PyTorch: what reports or draws while training goes on should not take its cores for
seconds.
"""

import csv
import json
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from training_logs.showing.number_log import NumberLog, Rows
from utils.config.yaml_reading import yaml_value

# Numbers of steps in their trainer's run, their losses, and how many steps an entry is the mean of: of one length.
Curve = tuple[np.ndarray, np.ndarray, np.ndarray]


# Kinds of exchanges that are no synchronisation of a trainer's workers.
MOVES = ("merge", "redistribution")
_NODES = ("sources", "targets")


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
class ExchangeRecord:
    """Exchanges of a trainer's workers in a round that are alike; bytes are those of each worker in one of them.

    first_step, last_step: the inner steps after which the first and the last of them were. behind: how many more steps
    were made before anybody waited. sources, targets: nodes that sent and got them; none: the trainer's workers did.
    """

    kind: str
    through: str
    count: int
    sent_bytes: float
    received_bytes: float
    behind: int
    first_step: int
    last_step: int
    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()

    @property
    def steps(self) -> list[int]:
        """After which inner step each was, as if at even distances."""
        return np.linspace(self.first_step, self.last_step, self.count).round().astype(int).tolist()


@dataclass(frozen=True)
class RunData:
    """What a run folder says.

    Attributes:
        folder: where it is.
        config: the resolved configuration, as plain values.
        summary: summary.json; its status is running for a run that goes on, or that died.
        rounds: the rows of training_log.csv; an empty cell is NaN.
        merges: in order.
    """

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    rounds: Rows
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
        return sorted({int(trainer) for trainer in np.unique(self.rounds["trainer_id"])}) if self.rounds else []

    @cached_property
    def by_round(self) -> dict[int, Rows]:
        """The rows of every round, in the order of the rounds."""
        return self.rounds.by("outer_step") if self.rounds else {}

    @cached_property
    def by_trainer(self) -> dict[int, Rows]:
        """The rows of every trainer."""
        return {trainer: self.rounds.where(self.rounds["trainer_id"] == trainer) for trainer in self.trainers}

    def of(self, trainer: int) -> Rows:
        """One trainer's rows."""
        return self.by_trainer[trainer]

    @cached_property
    def exchanges(self) -> dict[tuple[int, int], list[ExchangeRecord]] | None:
        """What workers sent each other, by round and trainer; None in a run of before that was logged."""
        found = self._logged_exchanges
        if found is None:
            return None
        exchanges = {place: [each for each in records if each.kind not in MOVES] for place, records in found.items()}
        return {place: records for place, records in exchanges.items() if records}

    @cached_property
    def moves(self) -> dict[tuple[int, int], list[ExchangeRecord]]:
        """What was sent for a merge, or as nodes changed trainers, by round and by the trainer that got it.

        A run that was begun before that was logged has none of then: its bytes are in the round log alone.
        """
        found = self._logged_exchanges or {}
        moves = {place: [each for each in records if each.kind in MOVES] for place, records in found.items()}
        return {place: records for place, records in moves.items() if records}

    @cached_property
    def _logged_exchanges(self) -> dict[tuple[int, int], list[ExchangeRecord]] | None:
        return _exchanges(self.report_dir / "exchange_log.csv")

    @cached_property
    def nodes(self) -> dict[tuple[int, int], Rows]:
        """The rows of node_log.csv, one per worker, by round and trainer; empty in a run of before that was logged."""
        rows = self.node_rows
        by_round = rows.by("outer_step") if rows else {}
        return {
            (step, trainer): own for step, each in by_round.items() for trainer, own in each.by("trainer_id").items()
        }

    @cached_property
    def node_rows(self) -> Rows:
        """All of them, in the order of the rounds."""
        return NumberLog(self.report_dir / "node_log.csv").all()

    @cached_property
    def measured_node_rows(self) -> Rows:
        """The same by what was measured here, of a run whose node_log.csv is by given speeds; else empty."""
        given = self.config.get("node_speeds") is not None
        return NumberLog(self.report_dir / "node_log_measured.csv").all() if given else Rows({})

    @cached_property
    def share_rows(self) -> Rows:
        """The rows of share_log.csv; empty where nothing is evaluated by share."""
        return NumberLog(self.report_dir / "share_log.csv").all()

    @cached_property
    def step_losses(self) -> dict[int, Curve]:
        """Per trainer its losses over its inner steps, counted over all rounds: means over its workers."""
        return _step_losses(self)

    @cached_property
    def memory(self) -> dict[str, dict[str, np.ndarray]]:
        """Per device the columns seconds, allocated_bytes and peak_bytes of memory_log.csv; empty if not measured."""
        return _memory(self.memory_dir / "memory_log.csv")


def _step_losses(run: RunData) -> dict[int, Curve]:
    log = NumberLog(run.report_dir / "step_loss_log.csv")
    if not run.rounds:
        return {}
    rounds, first = np.unique(run.rounds["outer_step"].astype(int), return_index=True)
    before = np.zeros(rounds[-1] + 2)
    before[rounds + 1] = run.rounds["inner_steps"][first]
    before = np.cumsum(before)
    found: dict[int, list[np.ndarray]] = {}
    for piece in log.new():
        table = dict(zip(log.columns, piece.T, strict=True))
        # A worker that diverged has no loss to show, and a round that is not in the round log yet has no place.
        shown = np.isfinite(table["loss"]) & (table["outer_step"] < len(before) - 1)
        table = {name: column[shown] for name, column in table.items()}
        numbers = before[table["outer_step"].astype(int)] + table["inner_step"]
        steps = table.get("steps", np.ones(len(numbers)))
        entries = np.stack([numbers, table["loss"] * table["effective_batch"], table["effective_batch"], steps])
        for trainer in np.unique(table["trainer_id"]):
            found.setdefault(int(trainer), []).append(_added_up(entries[:, table["trainer_id"] == trainer]))
    curves = {}
    for trainer, parts in found.items():
        numbers, losses, weights, steps = _added_up(np.concatenate(parts, axis=1))
        curves[trainer] = (numbers, losses / weights, steps)
    return curves


def _added_up(entries: np.ndarray) -> np.ndarray:
    """One entry per number (first row), with the sums of the second and third row, and the largest of the fourth."""
    order = np.argsort(entries[0], kind="stable")
    entries = entries[:, order]
    starts = np.flatnonzero(np.diff(entries[0], prepend=np.nan) != 0)
    if not len(starts):
        return entries
    sums = np.add.reduceat(entries[1:3], starts, axis=1)
    return np.concatenate([entries[:1, starts], sums, np.maximum.reduceat(entries[3:], starts, axis=1)])


def _whole_rows(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a CSV of words and numbers; half a line at its end is left out."""
    with path.open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(line for line in file if line.endswith("\n"))


def _memory(path: Path) -> dict[str, dict[str, np.ndarray]]:
    columns = ("seconds", "allocated_bytes", "peak_bytes")
    found: dict[str, dict[str, array]] = {}
    if not path.exists():
        return {}
    for row in _whole_rows(path):
        device = found.setdefault(row["device"], {column: array("d") for column in columns})
        for column in columns:
            device[column].append(float(row[column]))
    return {name: {column: np.array(values) for column, values in device.items()} for name, device in found.items()}


def _exchanges(path: Path) -> dict[tuple[int, int], list[ExchangeRecord]] | None:
    if not path.exists():
        return None
    found: dict[tuple[int, int], list[ExchangeRecord]] = {}
    for row in _whole_rows(path):
        place = int(row.pop("outer_step")), int(row.pop("trainer_id"))
        values = {name: kind(row[name]) for name, kind in ExchangeRecord.__annotations__.items() if name not in _NODES}
        nodes = {name: tuple(map(int, (row.get(name) or "").split())) for name in _NODES}
        found.setdefault(place, []).append(ExchangeRecord(**values, **nodes))
    return found


def _merges(path: Path) -> list[MergeRecord]:
    merges: dict[int, MergeRecord] = {}
    for row in NumberLog(path).all():
        step = int(row["outer_step"])
        merge = merges.setdefault(step, MergeRecord(step, int(row["representative"]), {}))
        merge.weights[int(row["trainer_id"])] = row["weight"]
    return list(merges.values())


def read_run(folder: Path, rows: bool = True) -> RunData:
    """Read a run folder; it may be that of a run that goes on, or that died.

    Args:
        rows: read the rounds and merges; otherwise there are none.

    Raises:
        RunFolderError: it is none, or is damaged.
    """
    path = folder / "config.yaml"
    try:
        config = yaml_value(path.read_text(encoding="utf-8"))
        report_dir = folder / config["model_training_report_dir"]
        return RunData(
            folder=folder,
            config=config,
            summary=json.loads((report_dir / "summary.json").read_text(encoding="utf-8")),
            rounds=NumberLog(report_dir / "training_log.csv").all() if rows else Rows({}),
            merges=_merges(report_dir / "merge_log.csv") if rows else [],
        )
    except OSError as error:
        raise RunFolderError(f"{folder}: not a run folder: {error.filename}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{folder}: not a run folder, or damaged: {' '.join(str(error).split())}") from None
