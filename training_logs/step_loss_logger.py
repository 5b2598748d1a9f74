"""The loss of every inner step of every worker, in `step_loss_log.csv`, and its trend."""

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from training_logs.records import RoundReport

COLUMNS = (
    "outer_step",
    "trainer_id",
    "worker",
    "node",
    "inner_step",
    "loss",
    "effective_batch",
    "learning_rate",
)


@dataclass(frozen=True)
class LossStatistics:
    """The losses of one trainer's inner steps.

    slope: of the least-squares line, in nats per inner step. trend: decreasing or increasing where the slope is more
    than two of its standard errors away from zero, else flat.
    """

    steps: int
    mean: float
    deviation: float
    minimum: float
    maximum: float
    last: float
    slope: float
    trend: str


class _RunningLine:
    """Sums from which mean, deviation and least-squares line follow, whatever the number of points."""

    def __init__(self):
        self._count, self._x, self._y, self._xx, self._xy, self._yy = 0, 0.0, 0.0, 0.0, 0.0, 0.0
        self._minimum, self._maximum, self._last = math.inf, -math.inf, math.nan

    def add(self, y: float) -> None:
        """The next point."""
        x = float(self._count)
        self._count += 1
        # Centred sums (Welford): a loss of 5 with a slope of 1e-6 would drown in plain sums of squares.
        dx, dy = x - self._x, y - self._y
        self._x += dx / self._count
        self._y += dy / self._count
        self._xx += dx * (x - self._x)
        self._yy += dy * (y - self._y)
        self._xy += dx * (y - self._y)
        self._minimum, self._maximum, self._last = min(self._minimum, y), max(self._maximum, y), y

    def statistics(self) -> LossStatistics:
        """Of all points so far, at least one."""
        slope = self._xy / self._xx if self._count > 1 else 0.0
        trend = "flat"
        if self._count > 2:
            rest = max(self._yy - slope * self._xy, 0.0) / (self._count - 2)
            if abs(slope) > 2.0 * math.sqrt(rest / self._xx):
                trend = "decreasing" if slope < 0 else "increasing"
        deviation = math.sqrt(self._yy / (self._count - 1)) if self._count > 1 else 0.0
        return LossStatistics(self._count, self._y, deviation, self._minimum, self._maximum, self._last, slope, trend)


class StepLossLogger:
    """Collects step losses and appends them in one write per round; `effective_batch` is that of the worker."""

    def __init__(self, folder: Path):
        self.path = folder / "step_loss_log.csv"
        self._buffer: list[tuple] = []
        self._lines: dict[int, _RunningLine] = {}
        with self.path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(COLUMNS)

    def log(self, outer_step: int, report: RoundReport) -> None:
        """Take the steps of one trainer's round."""
        for index, worker in report.workers.items():
            steps = zip(worker.losses, worker.learning_rates, strict=True)
            for step, (loss, learning_rate) in enumerate(steps, 1):
                self._buffer.append(
                    (
                        outer_step,
                        report.trainer,
                        index,
                        worker.node,
                        step,
                        loss,
                        worker.plan.effective_batch,
                        learning_rate,
                    )
                )
        line = self._lines.setdefault(report.trainer, _RunningLine())
        for losses in zip(*(worker.losses for worker in report.workers.values()), strict=True):
            line.add(sum(losses) / len(losses))

    def flush(self) -> None:
        """Write what was collected."""
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(self._buffer)
        self._buffer.clear()

    def statistics(self) -> dict[int, LossStatistics]:
        """Per trainer, over its inner steps so far; the loss of a step is the mean over its workers."""
        return {trainer: line.statistics() for trainer, line in self._lines.items()}
