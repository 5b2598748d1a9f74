"""ClearML: a run's folder, shown in the dashboard while it grows; what is reported is read from the folder alone.

ClearML's own reporting process is switched off: closing a task waits for it (reporter.wait_for_events, reporter.stop),
for seconds to five minutes with clearml 2.1.12 offline. With a thread in its place closing takes 0.02 s.
"""

import json
import math
import os
import select
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training_logs.clearml_modes import ANALYSIS_SUMMARY, LAST_SECONDS, SESSION
from training_logs.showing.plots import PLOTS
from training_logs.showing.run_data import Row, RunData, read_run
from training_logs.showing.series import mode_switches, step_losses

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


class Reporter:
    """Reports what is new in a run folder to a ClearML task.

    Args:
        task: a clearml.Task.
    """

    def __init__(self, task):
        self._task, self._logger = task, task.get_logger()
        self._rounds = 0
        self._steps: dict[int, float] = {}
        self._merges = 0

    def _scalar(self, title: str, series: str, value: float, iteration: float) -> None:
        if math.isfinite(value):
            self._logger.report_scalar(title, series, value=value, iteration=int(iteration))

    def report(self, run: RunData, finished: bool) -> None:
        """Everything that was not reported before; the inner steps of a round once the next one is there."""
        steps = run.by_round
        for step, rows in list(steps.items())[self._rounds :]:
            self._round(run, step, rows)
        self._rounds = len(steps)
        complete = max(steps, default=0) - (0 if finished else 1)
        lengths = {step: rows[0]["inner_steps"] for step, rows in steps.items()}
        last = sum(length for step, length in lengths.items() if step <= complete)
        for trainer in run.trainers:
            for number, loss in zip(*step_losses(run, trainer), strict=True):
                if self._steps.get(trainer, 0) < number <= last:
                    self._scalar("loss per inner step", f"trainer {trainer}", loss, number)
                    self._steps[trainer] = number
        for merge in run.merges[self._merges :]:
            parts = ", ".join(f"trainer {trainer} ({weight:.2f})" for trainer, weight in merge.weights.items())
            text = f"merge after round {merge.outer_step}: {parts} become trainer {merge.representative}"
            self._logger.report_text(text, print_console=False)
        self._merges = len(run.merges)

    def _round(self, run: RunData, step: int, rows: list[Row]) -> None:
        for row in rows:
            trainer = f"trainer {row['trainer_id']:.0f}"
            for column, title in TRAINER_SCALARS.items():
                self._scalar(title, trainer, row[column], step)
            self._scalar("tokens per second", trainer, row["round_tokens"] / row["seconds"], step)
        metrics = [row["validation_metric"] for row in rows if math.isfinite(row["validation_metric"])]
        if metrics:
            best = max(metrics) if run.metric.higher_is_better else min(metrics)
            self._scalar("run", f"best {run.metric.name}", best, step)
        self._scalar("run", "communications", rows[0]["communications"], step)
        self._scalar("run", "bytes communicated", rows[0]["bytes_communicated"], step)
        self._scalar("run", "living trainers", len(rows), step)
        self._scalar("run", "total batch", sum(row["effective_batch"] for row in rows), step)
        for trainer in run.trainers:
            for row in mode_switches(run, trainer):
                if row["outer_step"] == step:
                    text = f"trainer {trainer} begins to accumulate gradients in round {step}"
                    self._logger.report_text(text, print_console=False)

    def finish(self, run: RunData) -> None:
        """Plots, summary and the best model, which stays where it is and is registered by its place."""
        for name in PLOTS:
            path = run.report_dir / name
            if path.exists():
                self._logger.report_image("plots", path.stem, iteration=self._rounds, local_path=str(path))
        if run.summary:
            self._task.upload_artifact("summary", dict(run.summary))
        model = run.summary.get("best_model")
        if model:
            from clearml import OutputModel

            weights = (run.folder / model / "model.safetensors").resolve()
            registered = OutputModel(task=self._task, name=run.folder.name, framework="PyTorch")
            if self._task.is_offline():
                # clearml 2.1.12 asks its offline stand-in of a model for this, and forgot to give it.
                registered._get_base_model().locked = False
            registered.update_weights(register_uri=weights.as_uri())

    def close(self, run: RunData) -> None:
        """Give the task the run's status, when everything has arrived."""
        self._task.flush(wait_for_uploads=True)
        status = run.summary.get("status")
        if status == "completed":
            self._task.mark_completed()
        elif status == "failed":
            self._task.mark_failed()
        else:  # interrupted, or still running when its process died
            self._task.mark_stopped()
        self._task.close()


def start_task(folder: Path, config: Mapping[str, Any], mode: str):
    """A ClearML task for a folder, its configuration connected as hyper-parameters."""
    if mode == "offline":
        # The session belongs to the folder; clearml reads this when it is imported.
        os.environ["CLEARML_CACHE_DIR"] = str((folder / SESSION).resolve())
    from clearml import Task
    from clearml.config import ConfigWrapper

    ConfigWrapper.set_overrides({"sdk": {"development": {"report_use_subprocess": False}}})
    Task.set_offline(mode == "offline")
    task = Task.init(
        project_name=config.get("project_name") or "AdLoCo",
        task_name=config.get("task_name") or folder.name,
        reuse_last_task_id=False,
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


def process(folder: Path, mode: str, follow: bool) -> None:
    """Report a run folder; follow: until standard input ends."""
    run = read_run(folder)
    task = start_task(folder, run.config, mode)
    reporter, changed = Reporter(task), None
    while follow and not select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
        log = run.report_dir / "training_log.csv"
        stamp = log.stat().st_mtime_ns
        if stamp != changed:
            changed = stamp
            reporter.report(read_run(folder), finished=False)
    if follow:
        signal.alarm(LAST_SECONDS)  # a server that hangs now would keep this process for ever
    run = read_run(folder)
    reporter.report(run, finished=True)
    reporter.finish(run)
    reporter.close(run)
