"""The record of a run: run folder, log file, progress bars, round log, summary and plots.

`RunRecorder` observes a run. CSVs and summary are complete up to the last finished round at any moment; plots are drawn
at the end, also when the run is interrupted or fails. What cannot be written (a full disk) is a warning and is written
later, if it can be; training goes on.

    python -m training_logs.training_monitoring RUN_DIR [RUN_DIR ...] [--output FOLDER]

draws plots and report of a run folder again, and several runs on common axes.
"""

import argparse
import dataclasses
import datetime
import logging
import logging.handlers
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from fabrics.eval_tool import Evaluation
from training_logs.append_log import AppendLog
from training_logs.comparison import compare
from training_logs.log_processor import ClearMLProcess, resolved_mode, start_clearml
from training_logs.memory_monitor import MemoryMonitor
from training_logs.plots import plot_run
from training_logs.records import ClusterRound, Observer, RunView
from training_logs.report import write_report
from training_logs.round_log import COLUMNS, accumulation_steps, round_line, round_row
from training_logs.run_data import RunFolderError, read_run
from training_logs.step_loss_logger import StepLossLogger
from utils.config import Config, ConfigError
from utils.config_reading import dump_config
from utils.utils import byte_size, nearest_existing_folder, write_json_atomically, write_text_atomically

logger = logging.getLogger("adloco")

_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


class _ConsoleHandler(logging.Handler):
    """Prints above the progress bars instead of through them."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record))


class _FileHandler(logging.FileHandler):
    """Says once, on the console, that the log file cannot be written."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failed:
            self._failed = True
            tqdm.write(f"warning: cannot write to {self.baseFilename}: {sys.exc_info()[1]}; training goes on")


def start_logging(is_main: bool = True) -> logging.handlers.MemoryHandler:
    """Log to the console, and keep the records until there is a run folder to put them in.

    is_main: whether this process is the one that speaks; others log nothing but errors.
    """
    disable_progress_bar()  # that of transformers: saving a model in one file has nothing to show
    root = logging.getLogger("adloco")
    root.setLevel(logging.INFO)
    root.propagate = False
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    console = _ConsoleHandler(logging.NOTSET if is_main else logging.ERROR)
    console.setFormatter(logging.Formatter("%(message)s"))
    kept = logging.handlers.MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
    root.addHandler(console)
    root.addHandler(kept)
    return kept


def check_logs(config: Config) -> None:
    """Raise ConfigError if run folder or dashboard could not be had later; nothing is written."""
    resolved_mode(config.clearml)
    folder = nearest_existing_folder(Path(config.log_dir))
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"log_dir: cannot write to {config.log_dir}: {folder} is not a writable folder")


def make_run_folder(config: Config, dataset: str) -> Path:
    """`log_dir/<Model>_<Dataset>_<Date>`, new; a second run within the same second gets a number.

    dataset: what is really trained on.
    """
    date = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    base = Path(config.log_dir) / f"{config.model_type}_{dataset}_{date}"
    for number in range(1, 1000):
        folder = base if number == 1 else base.with_name(f"{base.name}_{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"log_dir: cannot make {folder}: {error.strerror}") from None
        return folder
    raise ConfigError(f"log_dir: too many runs named {base}")


def _continue_log(path: Path, length: int) -> None:
    """Cut the log file where a checkpoint was written; what comes after it goes to a file beside it."""
    if path.exists() and path.stat().st_size > length:
        with path.open("rb") as file, path.with_name(f"{path.stem}_lost{path.suffix}").open("ab") as lost:
            file.seek(length)
            lost.write(file.read())
        os.truncate(path, length)


class RunRecorder(Observer):
    """Writes down everything about one run.

    Args:
        config: the resolved configuration; a copy goes into the folder.
        folder: the run folder, empty, or that of the run that is resumed.
        kept: the log records so far, from start_logging.
        started: time.perf_counter() at the start of the program, for wall_seconds.
        state: from state_dict, where a run is resumed; what was logged after it is dropped, or for the log file moved
            to `<log>_lost.log`.

    Raises:
        OSError: the folder cannot be written, or its logs do not fit the state.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        kept: logging.handlers.MemoryHandler,
        started: float,
        state: Mapping | None = None,
    ):
        self.config = config
        self.folder = folder
        self.report_dir = folder / config.model_training_report_dir
        self.report_dir.mkdir(parents=True, exist_ok=state is not None)
        self._started = started - (state["seconds"] if state else 0.0)
        self._log_path = folder / config.log_file
        logs = state["logs"] if state else {}
        self._rounds = AppendLog(self.report_dir / "training_log.csv", COLUMNS, logs.get("rounds"))
        merge_columns = ("outer_step", "representative", "trainer_id", "weight")
        self._merges = AppendLog(self.report_dir / "merge_log.csv", merge_columns, logs.get("merges"))
        self._steps = StepLossLogger(self.report_dir, logs.get("steps"))
        self._memory_state = logs.get("memory")
        if state:
            _continue_log(self._log_path, logs["text"])
        self._file = _FileHandler(self._log_path, encoding="utf-8")
        self._file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        kept.setTarget(self._file)
        kept.flush()
        logging.getLogger("adloco").removeHandler(kept)
        logging.getLogger("adloco").addHandler(self._file)
        write_text_atomically(folder / "config.yaml", dump_config(config))
        self._clearml: ClearMLProcess | None = None
        self._memory: MemoryMonitor | None = None
        self._initial_metric: float | None = state["initial_metric"] if state else None
        self._largest_request = state["largest_request"] if state else config.INITIAL_BATCH_SIZE
        self._last_accumulation_steps: int | None = state["last_accumulation_steps"] if state else None
        self._warnings: list[str] = list(state["warnings"]) if state else []
        self._placement: dict[int, list[int]] = {}
        # Drawing takes about two seconds; what it really took is known after the first time.
        self._drawing_seconds, self._last_drawing_seconds = 0.0, 2.0
        self._rounds_bar: tqdm | None = None
        self._steps_bar: tqdm | None = None

    def state_dict(self) -> dict:
        return {
            "logs": {
                "rounds": self._rounds.state_dict(),
                "merges": self._merges.state_dict(),
                "steps": self._steps.state_dict(),
                "memory": self._memory.state_dict(),
                "text": self._log_path.stat().st_size if self._log_path.exists() else 0,
            },
            "seconds": time.perf_counter() - self._started,
            "initial_metric": self._initial_metric,
            "largest_request": self._largest_request,
            "last_accumulation_steps": self._last_accumulation_steps,
            "warnings": self._warnings,
        }

    def _check(self, what: str, error: OSError | None) -> None:
        if error is not None:
            self.warn(f"{what} could not be written ({error.strerror}); training goes on")

    def _attempt(self, what: str, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            self._check(what, error)

    # Observer

    def warn(self, message: str) -> None:
        """Log a warning the first time it comes up, and keep it for the summary."""
        if message not in self._warnings:
            self._warnings.append(message)
            logger.warning("warning: %s", message)

    def on_start(self, run: RunView, initial: dict[int, Evaluation]) -> None:
        self._memory = MemoryMonitor(
            self.folder / self.config.memory_report_dir,
            run.devices,
            self.config.real_device_ids,
            self.config.memory_sample_seconds,
            self._memory_state,
        )
        self._check("memory_log.csv", self._memory.measure("before training", run.totals.outer_steps))
        if initial:
            self._initial_metric = sum(evaluation.metric for evaluation in initial.values()) / len(initial)
        self._save_summary(self._summary(run, {}, "running"))
        self._clearml = start_clearml(self.config, self.folder)
        data = run.data
        processes = run.processes.count
        logger.info(
            "%s with %s parameters on %s (%s training and %s validation examples); %d trainers on %d nodes (%s%s), "
            "max batch %s; %s before training %.*f",
            self.config.model_type,
            f"{run.parameter_count:,}",
            data.dataset,
            f"{len(data.train):,}",
            f"{len(data.validation):,}",
            len(run.trainers),
            len(run.nodes),
            ", ".join(dict.fromkeys(map(str, run.processes.devices))),
            f", {processes} processes" if processes > 1 else "",
            "/".join(str(size) for size in sorted({node.max_batch for node in run.nodes})),
            run.metric.name,
            run.metric.decimals,
            self._initial_metric,
        )
        if not initial:
            logger.info("resumed after round %d", run.totals.outer_steps)
        logger.info("run folder: %s", self.folder)

    def on_round_start(self, outer_step: int, planned: int | None, steps: int) -> None:
        if self._rounds_bar is None:
            self._rounds_bar = tqdm(
                total=planned, initial=outer_step - 1, desc="rounds", unit="round", disable=None, dynamic_ncols=True
            )
            self._steps_bar = tqdm(total=steps, unit="step", leave=False, disable=None, dynamic_ncols=True)
        self._steps_bar.reset(total=steps)
        self._steps_bar.set_description(f"inner steps of round {outer_step}")

    def on_step(self) -> None:
        self._steps_bar.update(1)

    def on_round(self, run: RunView, result: ClusterRound) -> None:
        reports = result.reports.values()
        self._largest_request = max(self._largest_request, *(report.requested_batch for report in reports))
        self._last_accumulation_steps = max(accumulation_steps(report) for report in reports)
        wall_seconds = time.perf_counter() - self._started
        rows = []
        for report in reports:
            max_batch = min(worker.max_batch for worker in report.workers.values())
            row = round_row(result, report, max_batch, wall_seconds)
            rows.append([row[column] for column in COLUMNS])
        self._check("training_log.csv", self._rounds.append(rows))
        self._log_placement(result)
        for report in reports:
            self._steps.log(result.outer_step, report)
            logger.info(round_line(result, report, run.metric))
        self._check("step_loss_log.csv", self._steps.flush())
        if result.merge is not None:
            plan = result.merge.plan
            rows = [(result.outer_step, plan.representative, *weight) for weight in plan.weights.items()]
            self._check("merge_log.csv", self._merges.append(rows))
            parts = ", ".join(f"trainer {trainer} ({share:.2f})" for trainer, share in plan.weights.items())
            logger.info("merge after round %d: %s become trainer %d", result.outer_step, parts, plan.representative)
        self._check("memory_log.csv", self._memory.measure("after a round", result.outer_step, result.memory[1:]))
        self._save_summary(self._summary(run, {}, "running"))
        if self.config.plot_every and result.outer_step % self.config.plot_every == 0:
            self._draw_if_cheap()
        self._rounds_bar.update(1)

    def _log_placement(self, result: ClusterRound) -> None:
        """Say which nodes worked for whom, where that has changed."""
        placement = {
            report.trainer: [worker.node for worker in report.workers.values()] for report in result.reports.values()
        }
        if placement != self._placement:
            self._placement = placement
            parts = "; ".join(
                f"trainer {trainer} on {'node' if len(nodes) == 1 else 'nodes'} {', '.join(map(str, nodes))}"
                for trainer, nodes in placement.items()
            )
            logger.info("round %d: %s", result.outer_step, parts)

    def _draw_if_cheap(self) -> None:
        """Draw plots and report on the way, as long as that is 2% of the run at most; the end draws in any case."""
        elapsed = time.perf_counter() - self._started
        if self._drawing_seconds + self._last_drawing_seconds <= 0.02 * elapsed:
            self._draw()

    def _draw(self) -> None:
        started = time.perf_counter()

        def draw() -> None:
            run = read_run(self.folder)
            plot_run(run)
            write_report(run)

        try:
            self._attempt("plots and report", draw)
        except RunFolderError as error:
            self.warn(f"plots and report could not be drawn: {error}")
        self._last_drawing_seconds = time.perf_counter() - started
        self._drawing_seconds += self._last_drawing_seconds

    # The end

    def finish(self, run: RunView, final: dict[int, Evaluation], status: str, models: Mapping[int, Path]) -> None:
        """Write plots and summary.

        Args:
            final: evaluations of the living trainers; empty where the run did not get that far.
            status: completed, interrupted or failed.
            models: where the living trainers' models were written; empty where they were not.
        """
        for bar in (self._steps_bar, self._rounds_bar):
            if bar is not None:
                bar.close()
        if self._memory is not None:
            self._check("memory_log.csv", self._memory.measure("end", run.totals.outer_steps))
            self._attempt("memory_summary.json", self._memory.close)
        summary = self._summary(run, final, status)
        if final:
            best = run.best(final)
            summary["best_trainer"] = best
            if models:
                summary["best_model"] = str(models[best].relative_to(self.folder))
            logger.info(
                "%s: %s %.*f before training, %.*f after %s tokens in %d rounds with %d communications (%s); %.0f s",
                status,
                run.metric.name,
                run.metric.decimals,
                summary["initial_metric"],
                run.metric.decimals,
                summary["final_metric"],
                f"{summary['tokens']:,}",
                summary["outer_steps"],
                summary["communications"],
                byte_size(summary["bytes_communicated"]),
                summary["wall_seconds"],
            )
            if models:
                logger.info("model: %s", models[best])
        else:
            where = f"; models: {next(iter(models.values())).parent}" if models else ""
            logger.info("%s after %d rounds%s", status, run.totals.outer_steps, where)
        self._save_summary(summary)
        self._draw()
        logger.info("report: %s", self.report_dir / "report.html")
        if self._clearml is not None:
            message, is_warning = self._clearml.close()
            logger.log(logging.WARNING if is_warning else logging.INFO, message)
            if is_warning:
                self._warnings.append(message)
                self._save_summary(summary)

    def _save_summary(self, summary: dict) -> None:
        self._attempt("summary.json", lambda: write_json_atomically(self.report_dir / "summary.json", summary))

    def close(self) -> None:
        """Let go of the log file."""
        logging.getLogger("adloco").removeHandler(self._file)
        self._file.close()

    def _summary(self, run: RunView, final: dict[int, Evaluation], status: str) -> dict:
        totals = run.totals
        return {
            "status": status,
            "metric": run.metric.name,
            "metric_higher_is_better": run.metric.higher_is_better,
            "metric_decimals": run.metric.decimals,
            "initial_metric": self._initial_metric,
            "final_metric": final[run.best(final)].metric if final else None,
            "final_loss": final[run.best(final)].loss if final else None,
            "final_metrics": {trainer: evaluation.metric for trainer, evaluation in final.items()},
            "final_classes": {
                name: dataclasses.asdict(scores)
                for name, scores in zip(run.data.class_names, final[run.best(final)].classes, strict=True)
            }
            if final
            else {},
            "outer_steps": totals.outer_steps,
            "examples": totals.examples,
            "tokens": totals.tokens,
            "communications": totals.communications,
            "bytes_communicated": totals.bytes_communicated,
            "left_out_workers": totals.left_out,
            "failed_nodes": sorted(run.failed_nodes),
            "merges": len(run.merges),
            "merge_history": [
                {
                    "outer_step": merge.outer_step,
                    "representative": merge.plan.representative,
                    "weights": merge.plan.weights,
                }
                for merge in run.merges
            ],
            "initial_trainers": self.config.number_of_initial_trainers,
            "final_trainers": len(run.trainers),
            "first_requested_batch": self.config.INITIAL_BATCH_SIZE,
            "largest_requested_batch": self._largest_request,
            "last_accumulation_steps": self._last_accumulation_steps,
            "wall_seconds": time.perf_counter() - self._started,
            "training_seconds": totals.training_seconds,
            "tokens_per_second": totals.tokens / totals.training_seconds if totals.training_seconds else None,
            "memory_peaks": self._memory.peaks if self._memory else {},
            "step_loss": {
                trainer: dataclasses.asdict(statistics) for trainer, statistics in self._steps.statistics().items()
            },
            "parameters": run.parameter_count,
            "devices": list(dict.fromkeys(map(str, run.processes.devices))),
            "processes": run.processes.count,
            "max_batch": sorted({node.max_batch for node in run.nodes}),
            "model_type": self.config.model_type,
            "dataset": run.data.dataset,
            "dataset_asked_for": self.config.dataset,
            "dataset_fallback_reason": run.data.fallback_reason,
            "data_source": run.data.source,
            "documents": dict(run.data.documents),
            "skipped_documents": dict(run.data.skipped),
            "seed": self.config.training_seed,
            "warnings": self._warnings,
            "versions": {"python": platform.python_version()} | {name: version(name) for name in _LIBRARIES},
        }


def main(arguments: list[str] | None = None) -> int:
    """Draw run folders again, and several side by side; 0, or 2 where a folder is none of a run."""
    parser = argparse.ArgumentParser(
        prog="python -m training_logs.training_monitoring",
        description="Draw plots and report of a run folder again; with several, also a comparison.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--output", type=Path, default=Path("comparison"), help="folder of the comparison")
    options = parser.parse_args(arguments)
    try:
        runs = [read_run(folder) for folder in options.runs]
        for run in runs:
            plot_run(run)
            print(write_report(run))
        if len(runs) > 1:
            print(compare(runs, options.output))
    except RunFolderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
