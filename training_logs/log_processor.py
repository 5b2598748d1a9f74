"""ClearML: a run's folder, shown in the dashboard while it grows.

    python -m training_logs.log_processor RUN_DIR [--mode auto|online|offline]

sends a finished run, or a gradient analysis. While a run goes on, the same program follows its folder from a process
of its own, so that nothing a server does, or does not do, reaches the training: it refuses, hangs or disappears, and
the run has a warning. What is reported is read from the run folder and from nowhere else.

ClearML's own reporting process is switched off: closing a task waits for it (reporter.wait_for_events, reporter.stop),
for seconds to five minutes with clearml 2.1.12 offline. With a thread in its place closing takes 0.02 s.
"""

import argparse
import json
import logging
import math
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from training_logs.plots import PLOTS, mode_switches, step_losses
from training_logs.run_data import Row, RunData, RunFolderError, read_run
from utils.config import Config, ConfigError

logger = logging.getLogger("adloco")

MODES = ("auto", "online", "offline", "off")
SESSION = "clearml"
# What the folder of a gradient analysis is known by.
ANALYSIS_SUMMARY = "gradient_analysis.json"
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
# How long the run waits for the last reports, and how long those may take when the run does not wait any more.
WAIT_SECONDS, LAST_SECONDS = 4.0, 600


def has_credentials() -> bool:
    """Whether ClearML's credentials are in the environment or in clearml.conf."""
    if os.environ.get("CLEARML_API_ACCESS_KEY") and os.environ.get("CLEARML_API_SECRET_KEY"):
        return True
    path = Path(os.environ.get("CLEARML_CONFIG_FILE") or "~/clearml.conf").expanduser()
    try:
        return "access_key" in path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def resolved_mode(mode: str) -> str:
    """online, offline or off.

    Raises:
        ConfigError: online is asked for and there are no credentials.
    """
    if mode == "online" and not has_credentials():
        raise ConfigError(
            "clearml: online needs credentials: run clearml-init, or set CLEARML_API_HOST, CLEARML_API_ACCESS_KEY and "
            "CLEARML_API_SECRET_KEY; auto and offline do without"
        )
    if mode == "auto":
        return "online" if has_credentials() else "offline"
    return mode


# The process that reports


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


def main(arguments: list[str] | None = None) -> int:
    """Send a run folder; 0, or 2 where it cannot be sent."""
    parser = argparse.ArgumentParser(
        prog="python -m training_logs.log_processor", description="Send a run folder to ClearML."
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--mode", choices=MODES[:3], default="auto", help="default: %(default)s")
    parser.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        mode = resolved_mode(options.mode)
        if (options.run / ANALYSIS_SUMMARY).exists():
            send_analysis(options.run, mode)
        else:
            process(options.run, mode, options.follow)
    except (ConfigError, RunFolderError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if mode == "offline":
        print(f"offline session: {options.run / SESSION}")
    return 0


# The run's side


class ClearMLProcess:
    """The reporting process of a run that goes on; nothing here waits for it but `close`, and that not for long.

    Args:
        folder: the run folder, with its configuration.
        mode: online or offline.
    """

    def __init__(self, folder: Path, mode: str):
        self._folder, self._mode = folder, mode
        (folder / SESSION).mkdir(exist_ok=True)
        self._log = folder / SESSION / "clearml.log"
        # Ctrl-C is for the run, which then ends this in order. A session of its own would keep it away as well, but a
        # low priority counts only among the processes of one session.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "training_logs.log_processor",
                    str(folder.resolve()),
                    "--mode",
                    mode,
                    "--follow",
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=Path(__file__).resolve().parent.parent,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        signal.signal(signal.SIGINT, handler)
        # Training's threads wait for each other: whatever takes the core of one stops all of them.
        psutil.Process(self._process.pid).nice(19)

    def close(self) -> tuple[str, bool]:
        """Let it send the rest, and wait a little; what to tell the user, and whether that is a warning."""
        again = f"python -m training_logs.log_processor {self._folder}"
        try:
            self._process.stdin.close()
            code = self._process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            return (
                f"ClearML is still sending and goes on in the background for {LAST_SECONDS // 60} minutes at most "
                f"({self._log}); {again} sends the run again"
            ), True
        except OSError as error:
            code = error
        if code != 0:
            return f"ClearML failed ({code}), see {self._log}; {again} sends the run", True
        if self._mode == "offline":
            return f"ClearML: offline session in {self._folder / SESSION}; with credentials: {again}", False
        return "ClearML: everything is in the dashboard", False


def start_clearml(config: Config, folder: Path) -> ClearMLProcess | None:
    """The reporting process that the config asks for; None: off."""
    mode = resolved_mode(config.clearml)
    return None if mode == "off" else ClearMLProcess(folder, mode)


if __name__ == "__main__":
    sys.exit(main())
