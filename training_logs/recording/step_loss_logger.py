"""The losses of inner steps in `step_loss_log.csv`, and their trend."""

import math
from collections.abc import Iterable
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
    "steps",
)
# So many rows of one kind before they stand for more steps each.
ROWS = 100_000


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


def _rates_by_turn(report: RoundReport) -> dict[int, float]:
    """The learning rate of every inner step that somebody made, from 0: of the first of those that made most."""
    found: dict[int, float] = {}
    for worker in sorted(report.workers.values(), key=lambda worker: -len(worker.learning_rates)):
        turns = range(len(worker.learning_rates)) if worker.turns is None else worker.turns
        found = dict(zip(turns, worker.learning_rates, strict=True)) | found
    return found


class StepLossLogger:
    """Writes step losses, in one write per round, in rows that grow with the logarithm of the run.

    At first there is a row for every inner step of every worker. After ROWS rows a row is the mean over all workers,
    weighted by their examples, after as many more over two steps of the round, then four, eight, and so on, at most
    over the whole round. In such a row `worker` is empty, `effective_batch` that of the trainer, `inner_step` and
    `learning_rate` those of the last of its steps, of which there are `steps`.

    Args:
        folder: receives step_loss_log.csv.
        state: from state_dict, to go on there.

    Raises:
        OSError: the file cannot be made, or not be continued.
    """

    def __init__(self, folder: Path, state: dict | None = None):
        self._log = AppendLog(folder / "step_loss_log.csv", COLUMNS, state and state["log"])
        self._buffer: list[tuple] = []
        # Steps of a row, 0: of one worker; and how many such rows there are.
        self._steps, self._rows = (state["steps"], state["rows"]) if state else (0, 0)
        self._lines: dict[int, _RunningLine] = {}
        for trainer, line in (state["lines"] if state else {}).items():
            self._lines[int(trainer)] = _RunningLine()
            self._lines[int(trainer)].load_state_dict(line)

    @property
    def path(self) -> Path:
        """The log."""
        return self._log.path

    def log(self, outer_step: int, reports: Iterable[RoundReport]) -> None:
        """Take the steps of a round; the trend is that of the workers in the mean."""
        for report in reports:
            if self._steps == 0:
                self._log_workers(outer_step, report)
            else:
                self._log_means(outer_step, report)
            line = self._lines.setdefault(report.trainer, _RunningLine())
            by_turn: dict[int, list[float]] = {}
            for worker in report.workers.values():
                for turn, loss in () if worker.left_out else worker.losses_by_turn:
                    by_turn.setdefault(turn, []).append(loss)
            for _, losses in sorted(by_turn.items()):
                line.add(sum(losses) / len(losses))
        self._rows += len(self._buffer)
        if self._rows >= ROWS:
            self._steps, self._rows = max(2 * self._steps, 1), 0

    def _log_workers(self, outer_step: int, report: RoundReport) -> None:
        for index, worker in report.workers.items():
            # A worker whose node failed has learning rates, but no losses.
            batch = worker.plan.effective_batch
            for (turn, loss), learning_rate in zip(worker.losses_by_turn, worker.learning_rates, strict=False):
                self._buffer.append((outer_step, report.trainer, index, turn + 1, loss, batch, learning_rate, 1))

    def _log_means(self, outer_step: int, report: RoundReport) -> None:
        sums: dict[int, list[float]] = {}
        for worker in report.workers.values():
            batch = worker.plan.effective_batch
            for step, loss in worker.losses_by_turn:
                if math.isfinite(loss):
                    entry = sums.setdefault(step // self._steps, [0.0, 0.0])
                    entry[0] += batch * loss
                    entry[1] += batch
        rates = _rates_by_turn(report)
        for place, (total, weight) in sorted(sums.items()):
            last = min((place + 1) * self._steps, report.inner_steps)
            steps = last - place * self._steps
            rate = next(rates[turn] for turn in reversed(range(last)) if turn in rates)
            self._buffer.append(
                (outer_step, report.trainer, None, last, total / weight, report.effective_batch, rate, steps)
            )

    def flush(self) -> OSError | None:
        """Write what was collected; the error, if it could not be written and waits."""
        error = self._log.append(self._buffer)
        self._buffer.clear()
        return error

    def state_dict(self) -> dict:
        """Where log and trends stand, as JSON values."""
        return {
            "log": self._log.state_dict(),
            "steps": self._steps,
            "rows": self._rows,
            "lines": {str(trainer): line.state_dict() for trainer, line in self._lines.items()},
        }

    def statistics(self) -> dict[int, LossStatistics]:
        """Per trainer, over its inner steps so far; the loss of a step is the mean over its workers."""
        return {trainer: line.statistics() for trainer, line in self._lines.items() if line.points}
