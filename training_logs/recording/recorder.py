"""The record of a run: run folder, log file, progress bars, round log, summary and plots.

`RunRecorder` observes a run. CSVs and summary are complete up to the last finished round at any moment; plots are drawn
at the end, also when the run is interrupted or fails. What cannot be written (a full disk) is a warning and is written
later, if it can be; training goes on.
"""

import dataclasses
import logging
import logging.handlers
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from fabrics.models.continuations import SAMPLING, Continuation
from fabrics.pool.eval_tool import Evaluation
from training_logs.recording.append_log import AppendLog
from training_logs.recording.drawing import Drawing
from training_logs.recording.exchange_log import COLUMNS as EXCHANGE_COLUMNS
from training_logs.recording.exchange_log import exchange_rows
from training_logs.recording.memory_monitor import MemoryMonitor
from training_logs.recording.node_log import NodeLog
from training_logs.recording.provenance import Invocations, Origin
from training_logs.recording.records import ClusterRound, Observer, RunView
from training_logs.recording.round_log import (
    COLUMNS,
    accumulation_steps,
    continuation_block,
    round_line,
    round_row,
    start_line,
)
from training_logs.recording.run_folder import FileHandler, continue_log, logger
from training_logs.recording.share_log import COLUMNS as SHARE_COLUMNS
from training_logs.recording.share_log import share_rows
from training_logs.recording.step_loss_logger import StepLossLogger
from training_logs.recording.summary import run_summary
from training_logs.recording.warnings import Warnings
from training_logs.trackers.clearml_process import ClearMLProcess, start_clearml
from utils.config.reading import dump_config
from utils.config.schema import Config
from utils.utils import budget_used, byte_size, write_json_atomically, write_text_atomically


class RunRecorder(Observer):
    """Writes down everything about one run.

    Args:
        config: the resolved configuration; a copy goes into the folder.
        folder: the run folder, empty, or that of the run that is resumed.
        kept: the log records so far, from start_logging.
        started: time.perf_counter() at the start of the program, for wall_seconds.
        state: from state_dict, where a run is resumed; what was logged after it is dropped, or for the log file moved
            to `<log>_lost.log`.
        origin: what this start or resume comes from; None: that is not recorded.

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
        origin: Origin | None = None,
    ):
        self.config = config
        self.folder = folder
        self.report_dir = folder / config.model_training_report_dir
        self.report_dir.mkdir(parents=True, exist_ok=state is not None)
        self._invocations = Invocations(
            folder, self.report_dir / "summary.json", origin, state.get("invocations") if state else None
        )
        self._started = started - (state["seconds"] if state else 0.0)
        self._log_path = folder / config.log_file
        logs = state["logs"] if state else {}
        self._rounds = AppendLog(self.report_dir / "training_log.csv", COLUMNS, logs.get("rounds"))
        merge_columns = ("outer_step", "representative", "trainer_id", "weight")
        self._merges = AppendLog(self.report_dir / "merge_log.csv", merge_columns, logs.get("merges"))
        self._exchanges = AppendLog(self.report_dir / "exchange_log.csv", EXCHANGE_COLUMNS, logs.get("exchanges"))
        # Empty but for its header where nothing is evaluated by share.
        self._shares = AppendLog(self.report_dir / "share_log.csv", SHARE_COLUMNS, logs.get("shares"))
        self._nodes = NodeLog(self.report_dir, config, logs.get("nodes"))
        self._steps = StepLossLogger(self.report_dir, logs.get("steps"))
        self._memory_state = logs.get("memory")
        if state:
            continue_log(self._log_path, logs["text"])
        self._file = FileHandler(self._log_path, encoding="utf-8")
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
        self._warnings, self._resumed = Warnings(state["warnings"] if state else None), state is not None
        self._placement: dict[int, list[int]] = {}
        self._drawing = Drawing(folder, state["drawing"] if state else None)
        self._rounds_bar: tqdm | None = None
        self._steps_bar: tqdm | None = None

    def state_dict(self) -> dict:
        return {
            "logs": {
                "rounds": self._rounds.state_dict(),
                "merges": self._merges.state_dict(),
                "exchanges": self._exchanges.state_dict(),
                "shares": self._shares.state_dict(),
                "nodes": self._nodes.state_dict(),
                "steps": self._steps.state_dict(),
                "memory": self._memory.state_dict(),
                "text": self._log_path.stat().st_size if self._log_path.exists() else 0,
            },
            "seconds": time.perf_counter() - self._started,
            "initial_metric": self._initial_metric,
            "largest_request": self._largest_request,
            "last_accumulation_steps": self._last_accumulation_steps,
            "warnings": self._warnings.state_dict(),
            "drawing": self._drawing.state_dict(),
            "invocations": list(self._invocations.entries),
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
        """Count a warning for the summary, and log it unless there were many of its kind.

        What a resumed run has to say before its first round it said when it was begun.
        """
        if self._warnings.add(message, once=self._resumed and self._rounds_bar is None):
            logger.warning("warning: %s", message)

    def on_start(self, run: RunView, initial: dict[int, Evaluation]) -> None:
        for warning in self._invocations.changed_plugins():
            self.warn(warning)
        self._attempt("changes.patch", lambda: self._invocations.begin(run.totals.outer_steps + 1))
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
        logger.info(start_line(run, self._initial_metric))
        if not initial:
            logger.info("resumed after round %d", run.totals.outer_steps)
        logger.info("run folder: %s", self.folder)

    def on_round_start(self, outer_step: int, progress: float, steps: int) -> None:
        if self._rounds_bar is None:
            shown = "{desc}: {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}]"
            self._rounds_bar = tqdm(total=1.0, initial=progress, bar_format=shown, disable=None, dynamic_ncols=True)
            self._steps_bar = tqdm(total=steps, unit=" steps", leave=False, disable=None, dynamic_ncols=True)
        self._rounds_bar.set_description(f"round {outer_step}")
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
            rows.append([row[column] for column in self._rounds.columns])
        self._steps.log(result.outer_step, reports)
        # Before the round: who reads along finds the steps and exchanges of every round that is there.
        self._check("step_loss_log.csv", self._steps.flush())
        exchanges = exchange_rows(result.outer_step, reports, result.moves)
        # A log that was begun before has no column for who sent.
        width = len(self._exchanges.columns)
        self._check("exchange_log.csv", self._exchanges.append(row[:width] for row in exchanges))
        self._check("share_log.csv", self._shares.append(share_rows(result)))
        self._check("node_log.csv", self._nodes.log(len(run.nodes), result))
        self._check("training_log.csv", self._rounds.append(rows))
        self._log_placement(result)
        for note in result.notes:
            logger.info("after round %d: %s", result.outer_step, note)
        for report in reports:
            logger.info(round_line(result, report, run.metric))
        if result.merge is not None:
            plan = result.merge.plan
            rows = [(result.outer_step, plan.representative, *weight) for weight in plan.weights.items()]
            self._check("merge_log.csv", self._merges.append(rows))
            parts = ", ".join(f"trainer {trainer} ({share:.2f})" for trainer, share in plan.weights.items())
            logger.info("merge after round %d: %s become trainer %d", result.outer_step, parts, plan.representative)
        self._check("memory_log.csv", self._memory.measure("after a round", result.outer_step, result.memory[1:]))
        self._save_summary(self._summary(run, {}, "running"))
        if self.config.plot_every and result.outer_step % self.config.plot_every == 0:
            self._draw(lambda: self._drawing.draw_if_cheap(time.perf_counter() - self._started))
        self._rounds_bar.update(result.progress - self._rounds_bar.n)

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

    def _draw(self, draw: Callable[[], str | None]) -> None:
        def drawn() -> None:
            try:
                problem = draw()
            except OSError:
                raise
            except Exception as error:  # memory, or whatever a plotting library raises: the run itself is done
                problem = f"{type(error).__name__}: {error}"
            if problem is not None:
                self.warn(f"plots and report could not be drawn: {problem}")

        self._attempt("plots and report", drawn)

    # The end

    def finish(
        self,
        run: RunView,
        final: dict[int, Evaluation],
        status: str,
        models: Mapping[int, Path],
        texts: Sequence[Continuation] = (),
    ) -> None:
        """Write the summary, and plots and report where they are asked for.

        Args:
            final: evaluations of the living trainers; empty where the run did not get that far.
            status: completed, interrupted or failed.
            models: where the living trainers' models were written; empty where they were not.
            texts: how the best model continues validation texts.
        """
        for bar in (self._steps_bar, self._rounds_bar):
            if bar is not None:
                bar.close()
        self._check("node_log.csv", self._nodes.flush())
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
            if summary["budget"]:
                logger.info("budget: %s", budget_used(summary["budget"]))
            if models:
                logger.info("model: %s", models[best])
        else:
            where = f"; models: {next(iter(models.values())).parent}" if models else ""
            logger.info("%s after %d rounds%s", status, run.totals.outer_steps, where)
        summary["continuations"] = [dataclasses.asdict(text) for text in texts]
        if texts:
            summary["continuation_sampling"] = SAMPLING | {"seed": self.config.training_seed}
        for number, text in enumerate(texts, 1):
            logger.info(continuation_block(number, len(texts), text))
        self._save_summary(summary)
        if self.config.plot_at_end:
            self._draw(self._drawing.draw)
            logger.info("report: %s", self.report_dir / "report.html")
        if self._clearml is not None:
            message, is_warning = self._clearml.close()
            logger.log(logging.WARNING if is_warning else logging.INFO, message)
            if is_warning:
                self._warnings.add(message)
        if self._warnings.summary() != summary["warnings"]:
            self._save_summary(summary | {"warnings": self._warnings.summary()})

    def _save_summary(self, summary: dict) -> None:
        self._attempt("summary.json", lambda: write_json_atomically(self.report_dir / "summary.json", summary))

    def close(self) -> None:
        """Let go of the log file."""
        logging.getLogger("adloco").removeHandler(self._file)
        self._file.close()

    def _summary(self, run: RunView, final: dict[int, Evaluation], status: str) -> dict:
        recorded = {
            "initial_metric": self._initial_metric,
            "largest_requested_batch": self._largest_request,
            "last_accumulation_steps": self._last_accumulation_steps,
            "wall_seconds": time.perf_counter() - self._started,
            **self._nodes.summary(),
            "memory_peaks": self._memory.peaks if self._memory else {},
            "step_loss": {
                trainer: dataclasses.asdict(statistics) for trainer, statistics in self._steps.statistics().items()
            },
            "warnings": self._warnings.summary(),
            "invocations": self._invocations.entries,
        }
        return run_summary(run, final, status, recorded)
