"""ClearML: a run's folder, shown in the dashboard while it grows; what is reported is read from the folder alone.

Every row is read once and nothing of it is kept, so that looking again costs nothing however long the run is. A point
of a long run is a mean over several rounds, or inner steps.

ClearML's own reporting process is switched off: closing a task waits for it (reporter.wait_for_events, reporter.stop),
for seconds to five minutes with clearml 2.1.12 offline. With a thread in its place closing takes 0.02 s.
"""

import fcntl
import json
import math
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from training_logs.showing.number_log import NumberLog, Rows
from training_logs.showing.run_data import MetricName, RunData, read_run
from training_logs.trackers.clearml_modes import ANALYSIS_SUMMARY, LAST_SECONDS, SESSION
from utils.utils import write_json_atomically

# Column of the round log -> title in the dashboard, one series per trainer.
TRAINER_SCALARS = {
    "train_loss": "training loss",
    "validation_loss": "validation loss",
    "validation_metric": "validation metric",
    "requested_batch": "requested batch",
    "effective_batch": "effective batch",
    "micro_batch": "micro-batch",
    "accumulation_steps": "accumulation steps",
    "gradient_variance": "gradient variance",
    "gradient_squared_norm": "gradient squared norm",
    "nodes": "nodes",
}
_POLL_SECONDS = 0.5
# More points than a dashboard shows only cost its server time: after so many, a point is the mean over twice as much.
POINTS = 1000
# Points on their way to the server, which are in memory.
_MOST_WAITING = 10_000

Key = tuple[str, str]


class GrowingMeans:
    """Means over stretches that get twice as long whenever so many of a length have been handed out.

    Args:
        points: of a length.
    """

    def __init__(self, points: int = POINTS):
        self._limit, self._points = points, 0
        self._length, self._held = 1, 0
        self._sums: dict[Key, list[float]] = {}

    def add(self, values: Mapping[Key, float], weight: int = 1) -> dict[Key, float]:
        """Take the next values, which are means themselves over `weight`; the means, where a stretch is full."""
        for key, value in values.items():
            if math.isfinite(value):
                entry = self._sums.setdefault(key, [0.0, 0.0])
                entry[0] += value * weight
                entry[1] += weight
        self._held += weight
        return self.rest() if self._held >= self._length else {}

    def rest(self) -> dict[Key, float]:
        """The means of a stretch as far as it goes; the next one begins."""
        means = {key: total / weight for key, (total, weight) in self._sums.items()}
        self._sums.clear()
        self._held = 0
        self._points += 1
        if self._points == self._limit:
            self._length, self._points = 2 * self._length, 0
        return means


class LogByRound:
    """Hands out a log round by round: what is new of it, and of a round all at once.

    A round is whole when the next one has begun, or when a look finds nothing new.

    Args:
        path: a CSV with the column outer_step.
    """

    def __init__(self, path: Path):
        self._log, self._open = NumberLog(path), None

    def new(self, finished: bool) -> Iterator[Rows]:
        """The rounds that are whole; finished: the last one is, too."""
        grown = False
        for piece in self._log.new():
            grown = grown or len(piece) > 0
            rows = piece if self._open is None else np.concatenate([self._open, piece])
            ends = np.flatnonzero(np.diff(rows[:, self._log.columns.index("outer_step")])) + 1
            for start, end in zip([0, *ends[:-1]], ends, strict=False):
                yield self._rows(rows[start:end])
            self._open = rows[ends[-1] :] if len(ends) else rows
        if self._open is not None and len(self._open) and (finished or not grown):
            rows, self._open = self._open, None
            yield self._rows(rows)

    def _rows(self, rows: np.ndarray) -> Rows:
        return Rows(dict(zip(self._log.columns, rows.T, strict=True)))


class Reporter:
    """Reports what is new in a run's logs to a ClearML task.

    Args:
        task: a clearml.Task.
        report_dir: where the logs are.
        metric: how the run's models are judged.
        sent: from state_dict: what the task has already, from before the run was resumed; it is read and not sent.
    """

    def __init__(self, task, report_dir: Path, metric: MetricName, sent: Mapping[str, int] | None = None):
        self._task, self._logger = task, task.get_logger()
        self._metric = metric
        self._logs = {name: LogByRound(report_dir / f"{name}_log.csv") for name in ("training", "merge", "step_loss")}
        self._sent: dict[str, int] = dict.fromkeys(self._logs, 0) | dict(sent or {})
        self._known = dict(self._sent)
        # Inner steps of a trainer before a round, by the round's number.
        self._before = [0]
        self._early: list[Rows] = []
        self._means, self._step_means = GrowingMeans(), {}
        self._last_round, self._last_steps = 0, {}
        self._accumulates: dict[int, bool] = {}
        self._waiting = 0

    def state_dict(self) -> dict[str, int]:
        """By log the last round that was reported."""
        return dict(self._sent)

    def flush(self) -> None:
        """Wait until everything that was reported has arrived."""
        self._task.flush(wait_for_uploads=True)
        self._waiting = 0

    def report(self, finished: bool) -> bool:
        """Everything that was not reported before; whether there was anything."""
        before = dict(self._sent)
        for rows in self._logs["training"].new(finished):
            self._round(rows)
        for rows in self._logs["merge"].new(finished):
            self._merge(rows)
        early, self._early = self._early, []
        for rows in [*early, *self._logs["step_loss"].new(finished)]:
            # The steps of a round are written before the round is, which says how many there are.
            if int(rows["outer_step"][0]) + 1 < len(self._before):
                self._steps(rows)
            else:
                self._early.append(rows)
        if finished:
            self._send("training", self._last_round, self._last_round, self._means.rest())
            for trainer, means in self._step_means.items():
                step, number = self._last_steps[trainer]
                self._send("step_loss", step, number, means.rest())
        return self._sent != before

    def _send(self, log: str, step: int, iteration: int, scalars: Mapping[Key, float]) -> None:
        self._sent[log] = max(self._sent[log], step)
        if step > self._known[log]:
            for (title, series), value in scalars.items():
                self._logger.report_scalar(title, series, value=value, iteration=iteration)
            self._waiting += len(scalars)
            if self._waiting > _MOST_WAITING:
                self.flush()

    def _say(self, log: str, step: int, text: str) -> None:
        if step > self._known[log]:
            self._logger.report_text(text, print_console=False)

    def _round(self, rows: Rows) -> None:
        first = rows[0]
        step = self._last_round = int(first["outer_step"])
        self._before += [self._before[-1]] * (step + 2 - len(self._before))
        self._before[step + 1] = self._before[step] + int(first["inner_steps"])
        scalars = {}
        for row in rows:
            trainer = int(row["trainer_id"])
            for column, title in TRAINER_SCALARS.items():
                scalars[title, f"trainer {trainer}"] = row[column]
            scalars["tokens per second", f"trainer {trainer}"] = row["round_tokens"] / row["seconds"]
            accumulates = row["accumulation_steps"] > 1
            if accumulates and not self._accumulates.get(trainer):
                self._say("training", step, f"trainer {trainer} begins to accumulate gradients in round {step}")
            self._accumulates[trainer] = accumulates
        metrics = rows["validation_metric"][np.isfinite(rows["validation_metric"])]
        if len(metrics):
            best = metrics.max() if self._metric.higher_is_better else metrics.min()
            scalars["run", f"best {self._metric.name}"] = float(best)
        scalars["run", "living trainers"] = len(rows)
        scalars["run", "total batch"] = float(rows["effective_batch"].sum())
        means = self._means.add(scalars)
        if means:
            means["run", "communications"] = first["communications"]
            means["run", "bytes communicated"] = first["bytes_communicated"]
            self._send("training", step, step, means)

    def _merge(self, rows: Rows) -> None:
        step, representative = int(rows[0]["outer_step"]), int(rows[0]["representative"])
        parts = ", ".join(f"trainer {row['trainer_id']:.0f} ({row['weight']:.2f})" for row in rows)
        self._say("merge", step, f"merge after round {step}: {parts} become trainer {representative}")
        self._sent["merge"] = max(self._sent["merge"], step)

    def _steps(self, rows: Rows) -> None:
        step = int(rows["outer_step"][0])
        rows = rows.where(np.isfinite(rows["loss"]))  # a worker that diverged has no loss to show
        for trainer in np.unique(rows["trainer_id"]).astype(int).tolist():
            own = rows.where(rows["trainer_id"] == trainer)
            numbers, place = np.unique(own["inner_step"], return_inverse=True)
            weights = own["effective_batch"]
            losses = np.bincount(place, own["loss"] * weights) / np.bincount(place, weights)
            means = self._step_means.setdefault(trainer, GrowingMeans())
            key, before = ("loss per inner step", f"trainer {trainer}"), 0
            for number, loss in zip(numbers.astype(int).tolist(), losses.tolist(), strict=True):
                iteration = self._before[step] + number
                self._send("step_loss", step, iteration, means.add({key: loss}, number - before))
                before, self._last_steps[trainer] = number, (step, iteration)

    def finish(self, run: RunData) -> None:
        """Plots, summary and the best model, which stays where it is and is registered by its place."""
        from training_logs.showing.plots import plots_of

        for name in plots_of(run):
            path = run.report_dir / name
            if path.exists():
                self._logger.report_image("plots", path.stem, iteration=self._last_round, local_path=str(path))
        if run.summary:
            self._task.upload_artifact("summary", dict(run.summary))
        self._origin(run)
        for text in run.summary.get("continuations", ()):
            parts = (f"{name}: {text[name]}" for name in ("prompt", "continuation", "reference"))
            self._logger.report_text("\n".join(parts), print_console=False)
        model = run.summary.get("best_model")
        if model:
            from clearml import OutputModel

            weights = (run.folder / model / "model.safetensors").resolve()
            registered = OutputModel(task=self._task, name=run.folder.name, framework="PyTorch")
            if self._task.is_offline():
                # clearml 2.1.12 asks its offline stand-in of a model for this, and forgot to give it.
                registered._get_base_model().locked = False
            registered.update_weights(register_uri=weights.as_uri())

    def _origin(self, run: RunData) -> None:
        """What the run can be traced to: among the hyper-parameters, and the differences as artifacts."""
        for number, invocation in enumerate(run.summary.get("invocations", ()), 1):
            self._task.connect(dict(invocation), name=f"invocation {number}")
            path = run.folder / (invocation["patch"] or "")
            if path.is_file():
                self._task.upload_artifact(path.name, path)

    def close(self, run: RunData) -> None:
        """Give the task the run's status, when everything has arrived."""
        self.flush()
        status = run.summary.get("status")
        if status == "completed":
            self._task.mark_completed()
        elif status == "failed":
            self._task.mark_failed()
        else:  # interrupted, or still running when its process died
            self._task.mark_stopped()
        self._task.close()


def start_task(folder: Path, config: Mapping[str, Any], mode: str, known: str | None = None):
    """A ClearML task for a folder, its configuration connected as hyper-parameters.

    Args:
        known: the id of a task that is to be continued; where the server does not have it any more there is a new one.
    """
    if mode == "offline":
        # The session belongs to the folder; clearml reads this when it is imported.
        os.environ["CLEARML_CACHE_DIR"] = str((folder / SESSION).resolve())
    from clearml import Task
    from clearml.config import ConfigWrapper

    # clearml kills a process whose task is not in progress, as one that is continued is not at first.
    ConfigWrapper.set_overrides({"sdk": {"development": {"report_use_subprocess": False, "support_stopping": False}}})
    Task.set_offline(mode == "offline")
    task = Task.init(
        project_name=config.get("project_name") or "AdLoCo",
        task_name=config.get("task_name") or folder.name,
        reuse_last_task_id=known or False,
        continue_last_task=0 if known else False,  # 0: iterations go on as they are, not behind the last one
        auto_connect_arg_parser=False,
        auto_connect_frameworks=False,
        auto_resource_monitoring=False,
        auto_connect_streams=False,
    )
    task.connect(dict(config), name="config")
    return task


def send_analysis(folder: Path, mode: str) -> None:
    """Figures and numbers of a gradient analysis."""
    summary = json.loads((folder / ANALYSIS_SUMMARY).read_text(encoding="utf-8"))
    task = start_task(folder, summary["config"], mode)
    for path in sorted(folder.glob("*.png")):
        task.get_logger().report_image("gradient analysis", path.stem, iteration=0, local_path=str(path))
    task.upload_artifact("gradient analysis", summary)
    task.close()


def send_run(folder: Path, mode: str, follow: bool = False, anew: bool = False) -> None:
    """Report a run folder.

    Online the folder remembers its task and what it was told, so that a resumed run goes on in the same task and no
    point is sent twice; what was sent of rounds that are trained again stays as it was. An offline session is of the
    whole run, and takes the place of the one before.

    Args:
        follow: until standard input ends.
        anew: as a new task, with everything.
    """
    ended = threading.Event()
    if follow:
        threading.Thread(target=_wait_for_the_end, args=(ended,), daemon=True).start()
    session = folder / SESSION
    session.mkdir(exist_ok=True)
    with (session / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the process of a run that was killed may still be sending
        run = read_run(folder, rows=False)
        if mode == "offline":
            _write_session(run)
        else:
            _send_online(run, follow, anew, ended)


def _wait_for_the_end(ended: threading.Event) -> None:
    sys.stdin.read()
    signal.alarm(LAST_SECONDS)  # a server that hangs now would keep this process for ever
    ended.set()


def _write_session(run: RunData) -> None:
    sessions = run.folder / SESSION / "offline"
    before = list(sessions.glob("*"))
    task = start_task(run.folder, run.config, "offline")
    reporter = Reporter(task, run.report_dir, run.metric)
    reporter.report(finished=True)
    reporter.finish(run)
    reporter.close(run)
    for path in before:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _send_online(run: RunData, follow: bool, anew: bool, ended: threading.Event) -> None:
    place, known = run.folder / SESSION / "task.json", None
    if place.exists() and not anew:
        known = json.loads(place.read_text(encoding="utf-8"))
    task = start_task(run.folder, run.config, "online", known and known["task"])
    sent = known["sent"] if known and known["task"] == task.id else None
    reporter = Reporter(task, run.report_dir, run.metric, sent)

    def arrived() -> None:
        reporter.flush()
        write_json_atomically(place, {"task": task.id, "sent": reporter.state_dict()})

    arrived()
    while follow and not ended.wait(_POLL_SECONDS):
        if reporter.report(finished=False):
            arrived()
    run = read_run(run.folder, rows=False)
    reporter.report(finished=True)
    arrived()
    reporter.finish(run)
    reporter.close(run)
