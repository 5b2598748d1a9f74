"""Losses of inner steps in step_loss_log.csv, and their trend."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from training_logs.recording.csv_log import CsvLog
from training_logs.recording.records import RoundReport

COLUMNS = ("outer_step", "trainer_id", "worker", "inner_step", "loss", "effective_batch", "learning_rate")


@dataclass(frozen=True)
class LossStatistics:
    """Losses of one trainer's inner steps.

    Attributes:
        steps: number of inner steps.
        mean, deviation, minimum, maximum, last: of the losses, in nats per target.
        slope: of the least-squares line, in nats per inner step.
        trend: decreasing or increasing if the slope is more than two standard errors from zero, else flat.
    """

    steps: int
    mean: float
    deviation: float
    minimum: float
    maximum: float
    last: float
    slope: float
    trend: str


class RunningLine:
    """Mean, deviation and least-squares line of a growing series, in constant memory."""

    def __init__(self):
        self.count = 0
        self._x = 0.0
        self._y = 0.0
        self._xx = 0.0
        self._xy = 0.0
        self._yy = 0.0
        self._minimum = math.inf
        self._maximum = -math.inf
        self._last = math.nan

    def add(self, y: float) -> None:
        """Add the next point."""
        x = float(self.count)
        self.count += 1
        # Centred sums (Welford): a loss of 5 with a slope of 1e-6 would drown in plain sums of squares.
        dx = x - self._x
        dy = y - self._y
        self._x += dx / self.count
        self._y += dy / self.count
        self._xx += dx * (x - self._x)
        self._yy += dy * (y - self._y)
        self._xy += dx * (y - self._y)
        self._minimum = min(self._minimum, y)
        self._maximum = max(self._maximum, y)
        self._last = y

    def state_dict(self) -> dict:
        return dict(vars(self))

    def load_state_dict(self, state: dict) -> None:
        vars(self).update(state)

    def statistics(self) -> LossStatistics:
        """Describe the points so far, at least one."""
        slope = 0.0
        deviation = 0.0
        trend = "flat"
        if self.count > 1:
            slope = self._xy / self._xx
            deviation = math.sqrt(self._yy / (self.count - 1))
        if self.count > 2:
            residual = max(self._yy - slope * self._xy, 0.0) / (self.count - 2)
            if abs(slope) > 2.0 * math.sqrt(residual / self._xx):
                trend = "decreasing" if slope < 0 else "increasing"
        return LossStatistics(self.count, self._y, deviation, self._minimum, self._maximum, self._last, slope, trend)


class StepLossLogger:
    """Writes one row per inner step and worker, once per round.

    Args:
        folder: receives step_loss_log.csv.
        state: from state_dict, to continue.

    Raises:
        OSError: the file cannot be created or continued.
    """

    def __init__(self, folder: Path, state: dict | None = None):
        self._log = CsvLog(folder / "step_loss_log.csv", COLUMNS, state and state["log"])
        self._lines: dict[int, RunningLine] = {}
        for trainer, line in (state["lines"] if state else {}).items():
            self._lines[int(trainer)] = RunningLine()
            self._lines[int(trainer)].load_state_dict(line)

    def log(self, outer_step: int, reports: Iterable[RoundReport]) -> None:
        """Write the inner steps of a round.

        Raises:
            OSError: the rows could not be written, and wait for the next round.
        """
        rows = []
        for report in reports:
            by_step: dict[int, list[float]] = {}
            for index, worker in report.workers.items():
                batch = worker.plan.effective_batch
                # A worker whose node failed has learning rates, but no losses.
                for (step, loss), rate in zip(worker.losses_by_step, worker.learning_rates, strict=False):
                    rows.append((outer_step, report.trainer, index, step + 1, loss, batch, rate))
                    if not worker.left_out:
                        by_step.setdefault(step, []).append(loss)
            line = self._lines.setdefault(report.trainer, RunningLine())
            for _, losses in sorted(by_step.items()):
                line.add(sum(losses) / len(losses))
        self._log.append(rows)

    def state_dict(self) -> dict:
        lines = {str(trainer): line.state_dict() for trainer, line in self._lines.items()}
        return {"log": self._log.state_dict(), "lines": lines}

    def statistics(self) -> dict[int, LossStatistics]:
        """Describe each trainer's losses; the loss of a step is the mean over its workers."""
        return {trainer: line.statistics() for trainer, line in self._lines.items() if line.count}
