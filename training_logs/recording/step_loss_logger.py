"""The loss of every inner step of every worker, in `step_loss_log.csv`, and its trend."""

import math
from dataclasses import dataclass
from pathlib import Path

from training_logs.recording.append_log import AppendLog
from training_logs.recording.records import RoundReport

COLUMNS = (
    "outer_step",
    "trainer_id",
    "worker",
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

    @property
    def points(self) -> int:
        """How many there are."""
        return self._count

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

    def state_dict(self) -> dict:
        return dict(vars(self))

    def load_state_dict(self, state: dict) -> None:
        vars(self).update(state)

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
    """Collects step losses and appends them in one write per round; `effective_batch` is that of the worker.

    Args:
        folder: receives step_loss_log.csv.
        state: from state_dict, to go on there.

    Raises:
        OSError: the file cannot be made, or not be continued.
    """

    def __init__(self, folder: Path, state: dict | None = None):
        self._log = AppendLog(folder / "step_loss_log.csv", COLUMNS, state and state["log"])
        self._buffer: list[tuple] = []
        self._lines: dict[int, _RunningLine] = {}
        for trainer, line in (state["lines"] if state else {}).items():
            self._lines[int(trainer)] = _RunningLine()
            self._lines[int(trainer)].load_state_dict(line)

    @property
    def path(self) -> Path:
        """The log."""
        return self._log.path

    def log(self, outer_step: int, report: RoundReport) -> None:
        """Take the steps of one trainer's round; the trend is that of the workers in the mean."""
        for index, worker in report.workers.items():
            # A worker whose node failed has learning rates, but no losses.
            for step, (loss, learning_rate) in enumerate(zip(worker.losses, worker.learning_rates, strict=False), 1):
                self._buffer.append(
                    (outer_step, report.trainer, index, step, loss, worker.plan.effective_batch, learning_rate)
                )
        line = self._lines.setdefault(report.trainer, _RunningLine())
        present = [worker.losses for worker in report.workers.values() if not worker.left_out]
        for losses in zip(*present, strict=True):
            line.add(sum(losses) / len(losses))

    def flush(self) -> OSError | None:
        """Write what was collected; the error, if it could not be written and waits."""
        error = self._log.append(self._buffer)
        self._buffer.clear()
        return error

    def state_dict(self) -> dict:
        """Where log and trends stand, as JSON values."""
        return {
            "log": self._log.state_dict(),
            "lines": {str(trainer): line.state_dict() for trainer, line in self._lines.items()},
        }

    def statistics(self) -> dict[int, LossStatistics]:
        """Per trainer, over its inner steps so far; the loss of a step is the mean over its workers."""
        return {trainer: line.statistics() for trainer, line in self._lines.items() if line.points}
