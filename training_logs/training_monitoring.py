"""The record of a run: run folder, log file, progress bars, round log, summary, plots and models.

`RunRecorder` observes a run. CSVs and summary are complete up to the last finished round at any moment; plots and
models are written at the end, also when the run is interrupted or fails.

    python -m training_logs.training_monitoring RUN_DIR [RUN_DIR ...] [--output FOLDER]

draws plots and report of a run folder again, and several runs on common axes.
"""

import argparse
import csv
import dataclasses
import datetime
import logging
import logging.handlers
import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path

from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from fabrics.eval_tool import Evaluation
from training_logs.comparison import compare
from training_logs.log_processor import ClearMLProcess, resolved_mode, start_clearml
from training_logs.memory_monitor import MemoryMonitor
from training_logs.plots import plot_run
from training_logs.records import ClusterRound, RunView
from training_logs.report import write_report
from training_logs.round_log import COLUMNS, accumulation_steps, round_line, round_row
from training_logs.run_data import RunFolderError, read_run
from training_logs.step_loss_logger import StepLossLogger
from utils.config import Config, ConfigError, dump_config
from utils.utils import byte_size, nearest_existing_folder, write_json_atomically, write_text_atomically

logger = logging.getLogger("adloco")

_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


class _ConsoleHandler(logging.StreamHandler):
    """Prints above the progress bars instead of through them."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record))


def start_logging() -> logging.handlers.MemoryHandler:
    """Log to the console, and keep the records until there is a run folder to put them in."""
    disable_progress_bar()  # that of transformers: saving a model in one file has nothing to show
    root = logging.getLogger("adloco")
    root.setLevel(logging.INFO)
    root.propagate = False
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    console = _ConsoleHandler()
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


class RunRecorder:
    """Writes down everything about one run.

    Args:
        config: the resolved configuration; a copy goes into the folder.
        folder: the run folder, empty.
        kept: the log records so far, from start_logging.
        started: time.perf_counter() at the start of the program, for wall_seconds.
    """

    def __init__(self, config: Config, folder: Path, kept: logging.handlers.MemoryHandler, started: float):
        self.config = config
        self.folder = folder
        self.report_dir = folder / config.model_training_report_dir
        self.report_dir.mkdir(parents=True)
        self._models_dir = folder / config.model_weights_dir
        self._started = started
        self._file = logging.FileHandler(folder / config.log_file, encoding="utf-8")
        self._file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        kept.setTarget(self._file)
        kept.flush()
        logging.getLogger("adloco").removeHandler(kept)
        logging.getLogger("adloco").addHandler(self._file)
        write_text_atomically(folder / "config.yaml", dump_config(config))
        self._clearml: ClearMLProcess | None = None
        self._round_log = self.report_dir / "training_log.csv"
        with self._round_log.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(COLUMNS)
        self._merge_log = self.report_dir / "merge_log.csv"
        with self._merge_log.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(("outer_step", "representative", "trainer_id", "weight"))
        self._steps = StepLossLogger(self.report_dir)
        self._memory: MemoryMonitor | None = None
        self._initial: dict[int, Evaluation] = {}
        self._largest_request = config.INITIAL_BATCH_SIZE
        self._last_accumulation_steps: int | None = None
        self._warnings: list[str] = []
        # Drawing takes about two seconds; what it really took is known after the first time.
        self._drawing_seconds, self._last_drawing_seconds = 0.0, 2.0
        self._rounds_bar: tqdm | None = None
        self._steps_bar: tqdm | None = None

    # Observer

    def warn(self, message: str) -> None:
        """Log a warning the first time it comes up, and keep it for the summary."""
        if message not in self._warnings:
            self._warnings.append(message)
            logger.warning("warning: %s", message)

    def on_start(self, run: RunView, initial: dict[int, Evaluation]) -> None:
        self._initial = initial
        self._memory = MemoryMonitor(
            self.folder / self.config.memory_report_dir,
            run.devices,
            self.config.real_device_ids,
            self.config.memory_sample_seconds,
        )
        self._memory.measure("before training", 0)
        self._write_summary(self._summary(run, {}, "running"))
        self._clearml = start_clearml(self.config, self.folder)
        data = run.data
        logger.info(
            "%s with %s parameters on %s (%s training and %s validation examples); %d trainers on %d nodes (%s), "
            "max batch %s; %s before training %.*f",
            self.config.model_type,
            f"{run.parameter_count:,}",
            data.dataset,
            f"{len(data.train):,}",
            f"{len(data.validation):,}",
            len(run.trainers),
            len(run.nodes),
            ", ".join(str(device) for device in run.devices),
            "/".join(str(size) for size in sorted({node.max_batch for node in run.nodes})),
            run.metric.name,
            run.metric.decimals,
            self._initial_metric,
        )
        logger.info("run folder: %s", self.folder)

    @property
    def _initial_metric(self) -> float:
        return sum(evaluation.metric for evaluation in self._initial.values()) / len(self._initial)

    def on_round_start(self, outer_step: int, planned: int | None, steps: int) -> None:
        if self._rounds_bar is None:
            self._rounds_bar = tqdm(total=planned, desc="rounds", unit="round", disable=None, dynamic_ncols=True)
            self._steps_bar = tqdm(total=steps, unit="step", leave=False, disable=None, dynamic_ncols=True)
        self._steps_bar.reset(total=steps)
        self._steps_bar.set_description(f"inner steps of round {outer_step}")

    def on_step(self) -> None:
        self._steps_bar.update(1)

    def on_round(self, run: RunView, result: ClusterRound) -> None:
        reports = result.reports.values()
        self._largest_request = max(self._largest_request, *(report.requested_batch for report in reports))
        self._last_accumulation_steps = max(accumulation_steps(report) for report in reports)
        with self._round_log.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            wall_seconds = time.perf_counter() - self._started
            for report in reports:
                max_batch = min(run.nodes[worker.node].max_batch for worker in report.workers.values())
                writer.writerow(round_row(result, report, max_batch, wall_seconds))
        for report in reports:
            self._steps.log(result.outer_step, report)
            logger.info(round_line(result, report, run.metric))
        self._steps.flush()
        if result.merge is not None:
            plan = result.merge.plan
            with self._merge_log.open("a", newline="", encoding="utf-8") as file:
                rows = [(result.outer_step, plan.representative, *weight) for weight in plan.weights.items()]
                csv.writer(file).writerows(rows)
            parts = ", ".join(f"trainer {trainer} ({share:.2f})" for trainer, share in plan.weights.items())
            logger.info("merge after round %d: %s become trainer %d", result.outer_step, parts, plan.representative)
        self._memory.measure("after a round", result.outer_step)
        self._write_summary(self._summary(run, {}, "running"))
        config = self.config
        if config.plot_every and result.outer_step % config.plot_every == 0:
            self._draw_if_cheap()
        if config.save_weights_every and result.outer_step % config.save_weights_every == 0:
            run.save_models(self._models_dir / f"round_{result.outer_step:05d}")
        self._rounds_bar.update(1)

    def _draw_if_cheap(self) -> None:
        """Draw plots and report on the way, as long as that is 2% of the run at most; the end draws in any case."""
        elapsed = time.perf_counter() - self._started
        if self._drawing_seconds + self._last_drawing_seconds <= 0.02 * elapsed:
            self._draw()

    def _draw(self) -> None:
        started = time.perf_counter()
        run = read_run(self.folder)
        plot_run(run)
        write_report(run)
        self._last_drawing_seconds = time.perf_counter() - started
        self._drawing_seconds += self._last_drawing_seconds

    # The end

    def finish(self, run: RunView, final: dict[int, Evaluation], status: str) -> Path:
        """Write models, plots and summary; the path of the summary.

        Args:
            final: evaluations of the living trainers; empty where the run did not get that far.
            status: completed, interrupted or failed.
        """
        for bar in (self._steps_bar, self._rounds_bar):
            if bar is not None:
                bar.close()
        models = run.save_models(self._models_dir)
        if self._memory is not None:
            self._memory.measure("end", run.totals.outer_steps)
            self._memory.close()
        summary = self._summary(run, final, status)
        if final:
            best = run.best(final)
            summary["best_trainer"] = best
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
            logger.info("model: %s", models[best])
        else:
            logger.info("%s after %d rounds; models: %s", status, run.totals.outer_steps, self._models_dir)
        path = self._write_summary(summary)
        self._draw()
        logger.info("report: %s", self.report_dir / "report.html")
        if self._clearml is not None:
            message, is_warning = self._clearml.close()
            logger.log(logging.WARNING if is_warning else logging.INFO, message)
            if is_warning:
                self._warnings.append(message)
                self._write_summary(summary)
        return path

    def _write_summary(self, summary: dict) -> Path:
        path = self.report_dir / "summary.json"
        write_json_atomically(path, summary)
        return path

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
            "initial_metric": self._initial_metric if self._initial else None,
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
            "devices": [str(device) for device in run.devices],
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
