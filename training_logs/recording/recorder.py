"""The record of a run: run folder, log file, progress bars, CSVs, summary, plots and tracker.

`RunRecorder` observes a run. CSVs and summary are complete up to the last finished round at any moment. Plots are drawn
at the end, also if the run is interrupted or fails. A file that cannot be written (a full disk) is a warning; its rows
are written later, if they can be. Training continues.
"""

import functools
import logging
import logging.handlers
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from fabrics.pool.eval_tool import Evaluation
from fabrics.pool.round_scheduler import budget_of
from training_logs.recording import round_log
from training_logs.recording.csv_log import CsvLog
from training_logs.recording.memory_monitor import Use, memory_rows, memory_use
from training_logs.recording.node_log import NodeLog
from training_logs.recording.provenance import Invocations, Origin
from training_logs.recording.records import ClusterRound, Observer
from training_logs.recording.run_folder import FileHandler, logger
from training_logs.trackers.clearml import resolved_mode
from training_logs.trackers.tracker import TrackerProcess, send_folder
from utils.config.reading import dump_config
from utils.config.schema import Config
from utils.files import LOG_FILE, MEMORY_FOLDER, REPORT_FOLDER, write_json_atomically, write_text_atomically
from utils.progress import progress_bar
from utils.text import budget_used, counted

if TYPE_CHECKING:
    from cluster import Cluster

# Different warnings that the summary counts; in a long run a bad node may give one in every round.
MOST_WARNINGS = 500
# The round log comes last: a reader finds the steps and exchanges of each of its rounds.
# Columns are named for tables that may stay without rows.
TABLES = {
    "step_loss_log.csv": (),
    "exchange_log.csv": round_log.EXCHANGE_COLUMNS,
    "merge_log.csv": round_log.MERGE_COLUMNS,
    "training_log.csv": (),
}


class RunRecorder(Observer):
    """Records one run.

    Args:
        config: the resolved configuration; a copy goes into the folder.
        folder: the run folder, empty, or that of the resumed run.
        kept: log records so far, from start_logging.
        state: from state_dict, if a run is resumed. Later rows are dropped; the log file goes on.

    Raises:
        ConfigError: ClearML has no credentials, and the configuration insists on its server.
        OSError: the folder cannot be written, or its logs do not fit the state.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        kept: logging.handlers.MemoryHandler,
        started: float,
        state: Mapping | None,
        origin: Origin,
    ):
        self.config = config
        self.folder = folder
        self.report_dir = folder / REPORT_FOLDER
        self.report_dir.mkdir(parents=True, exist_ok=state is not None)
        entries = state["invocations"] if state else None
        self._invocations = Invocations(folder, origin, entries)
        self._started = started - (state["seconds"] if state else 0.0)
        self._program_started = started
        self._startup_seconds: float = state["startup_seconds"] if state else 0.0
        logs = state["logs"] if state else {}
        self._tables = {
            name: CsvLog(self.report_dir / name, logs.get(name), columns) for name, columns in TABLES.items()
        }
        self._nodes = NodeLog(self.report_dir, config, logs.get("nodes"))
        self._log_path = folder / LOG_FILE
        self._file = FileHandler(self._log_path, encoding="utf-8")
        self._file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        kept.setTarget(self._file)
        kept.flush()
        logger.removeHandler(kept)
        logger.addHandler(self._file)
        write_text_atomically(folder / "config.yaml", dump_config(config))
        self._initial_metric: float | None = state["initial_metric"] if state else None
        self._largest_request: int = state["largest_request"] if state else config.INITIAL_BATCH_SIZE
        # How often each warning came.
        self._warnings: dict[str, int] = dict(state["warnings"]) if state else {}
        self._logged_warnings: set[str] = set()
        self._placement: dict[int, list[int]] = {}
        self._clearml = resolved_mode(config.clearml) if "clearml" in config.trackers else "off"
        self._trackers: dict[str, TrackerProcess] = {}
        self._rounds_bar: tqdm | None = None
        self._steps_bar: tqdm | None = None
        self._memory = self._memory_log(logs.get("memory"))

    def _memory_log(self, state: Mapping | None) -> CsvLog:
        path = self.folder / MEMORY_FOLDER / "memory_log.csv"
        path.parent.mkdir(exist_ok=True)
        try:
            return CsvLog(path, state)
        except OSError as error:  # a log that is no result must not keep a run from being resumed
            self.warn(f"memory_log.csv begins anew: {error}")
            return CsvLog(path)

    def state_dict(self) -> dict:
        return {
            "logs": {name: table.state_dict() for name, table in self._tables.items()}
            | {"nodes": self._nodes.state_dict(), "memory": self._memory.state_dict()},
            "seconds": time.perf_counter() - self._started,
            "startup_seconds": self._startup_seconds,
            "initial_metric": self._initial_metric,
            "largest_request": self._largest_request,
            "warnings": dict(self._warnings),
            "invocations": list(self._invocations.entries),
        }

    def _attempt(self, what: str, write: Callable[..., object], *arguments) -> None:
        try:
            write(*arguments)
        except OSError as error:
            self.warn(f"{what} could not be written ({error.strerror}); training continues")

    # Observer

    def note(self, message: str) -> None:
        logger.info("%s", message)

    def warn(self, message: str) -> None:
        """Log a warning, once, and count it for the summary."""
        if message not in self._logged_warnings:
            self._logged_warnings.add(message)
            logger.warning("warning: %s", message)
        if message not in self._warnings and len(self._warnings) >= MOST_WARNINGS:
            message = "further warnings, which are in the log"
        if message not in self._warnings:
            self._warnings[message] = 1
        elif self._rounds_bar is not None:  # a resumed run repeats the warnings of its start
            self._warnings[message] += 1

    def on_start(self, run: "Cluster", initial: dict[int, Evaluation]) -> None:
        for warning in self._invocations.changed_plugins():
            self.warn(warning)
        outer_steps = run.counters.outer_steps
        self._attempt("changes.patch", self._invocations.begin, outer_steps + 1)
        self._log_memory("before training", outer_steps, [memory_use(run.model.device)])
        if initial:
            self._initial_metric = sum(evaluation.metric for evaluation in initial.values()) / len(initial)
        evaluating = run.counters.evaluation_seconds if initial else 0.0
        self._startup_seconds += time.perf_counter() - self._program_started - evaluating
        self._invocations.entries[-1]["startup_seconds"] = self._startup_seconds
        self._save_summary(self._summary(run, {}, "running"))
        for name in dict.fromkeys(self.config.trackers):
            if name == "clearml" and self._clearml != "online":
                continue  # an offline session is written after the run
            try:
                self._trackers[name] = TrackerProcess(name, self.folder, "online", follow=True)
            except OSError as error:
                self.warn(f"{name} could not be started: {error}")
        logger.info(round_log.start_line(run, self._initial_metric))
        if not initial:
            rest = ", the last: nothing is left to train" if run.finished else ""
            logger.info("resumed after round %d%s", outer_steps, rest)
        logger.info("run folder: %s", self.folder)
        if run.model.compiled:
            logger.info("the first inner steps also compile the model: minutes for a large one")

    def on_round_start(self, outer_step: int, progress: float, steps: int) -> None:
        if self._rounds_bar is None:
            shown = "{desc}: {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}]"
            self._rounds_bar = progress_bar(total=1.0, initial=progress, bar_format=shown, dynamic_ncols=True)
            self._steps_bar = progress_bar(total=steps, unit=" steps", leave=False, dynamic_ncols=True)
        self._rounds_bar.set_description(f"round {outer_step}")
        self._steps_bar.reset(total=steps)
        self._steps_bar.set_description(f"inner steps of round {outer_step}")

    def on_step(self) -> None:
        self._steps_bar.update(1)

    def on_round(self, run: "Cluster", result: ClusterRound) -> None:
        requests = (report.requested_batch for report in result.reports.values())
        self._largest_request = max(self._largest_request, *requests)
        self._write_logs(run, result)
        self._log_round(run, result)
        self._save_summary(self._summary(run, {}, "running"))
        self._rounds_bar.update(result.progress - self._rounds_bar.n)

    def _write_logs(self, run: "Cluster", result: ClusterRound) -> None:
        wall_seconds = time.perf_counter() - self._started
        self._log_memory("after a round", result.outer_step, result.memory)
        self._attempt("node_log.csv", self._nodes.log, len(run.nodes), result)
        rows = {
            "step_loss_log.csv": round_log.step_rows(result),
            "exchange_log.csv": round_log.exchange_rows(result),
            "merge_log.csv": round_log.merge_rows(result),
            "training_log.csv": round_log.round_rows(result, wall_seconds),
        }
        for name, table in self._tables.items():
            self._attempt(name, table.append, rows[name])

    def _log_memory(self, stage: str, outer_step: int, processes: Sequence[Sequence[Use]]) -> None:
        seconds = time.perf_counter() - self._started
        rows = memory_rows(stage, outer_step, seconds, processes)
        self._attempt("memory_log.csv", self._memory.append, rows)

    def _log_round(self, run: "Cluster", result: ClusterRound) -> None:
        placement = {
            report.trainer: [worker.node for worker in report.workers.values()] for report in result.reports.values()
        }
        if placement != self._placement:
            self._placement = placement
            line = round_log.placement_line(result, len(run.nodes), self.config.smallest_worker_batch)
            logger.info(line)
        for report in result.reports.values():
            logger.info(round_log.round_line(result, report, run.metric))
        if result.merge is not None:
            logger.info(round_log.merged_line(result, run.metric))

    # The end

    def finish(
        self,
        run: "Cluster",
        final: dict[int, Evaluation],
        status: str,
        models: Mapping[int, Path],
        error: str | None = None,
    ) -> None:
        """Write the summary, draw plots and report, and finish the trackers.

        Args:
            final: evaluations of the living trainers; empty if the run did not finish.
            models: folders of the living trainers' models; empty if they were not written.
            error: why the run failed.
        """
        for bar in (self._steps_bar, self._rounds_bar):
            if bar is not None:
                bar.close()
        self._log_memory("end", run.counters.outer_steps, [memory_use(run.model.device)])
        for log in (*self._tables.values(), self._nodes.csv):  # no further round would write rows that still wait
            self._attempt(log.path.name, log.append, [])
        summary = self._summary(run, final, status)
        if error is not None:
            summary["error"] = error
        if final:
            summary["best_trainer"] = run.validation.best(final)
            if models:
                summary["best_model"] = str(models[summary["best_trainer"]].relative_to(self.folder))
        self._log_end(run, summary, models)
        self._save_summary(summary)
        if self.config.plot_at_end:
            self._draw()
        self._finish_trackers()
        if self._warning_entries() != summary["warnings"]:
            self._save_summary(summary | {"warnings": self._warning_entries()})

    def _log_end(self, run: "Cluster", summary: dict, models: Mapping[int, Path]) -> None:
        status = summary["status"]
        if "best_trainer" not in summary:
            where = f"; models: {next(iter(models.values())).parent}" if models else ""
            logger.info("%s after %s%s", status, counted(run.counters.outer_steps, "round"), where)
            return
        logger.info(round_log.end_line(summary))
        if len(run.nodes) > 1:
            logger.info(round_log.nodes_line(summary))
        if summary["budget"]:
            logger.info("budget: %s", budget_used(summary["budget"]))
        if models:
            logger.info("model: %s", models[summary["best_trainer"]])

    def _draw(self) -> None:
        # Imported here: a run should not wait for a plotting library before it trains.
        from training_logs.training_monitoring import draw

        try:
            report = draw(self.folder)
        except Exception as error:  # a full disk, memory, or any error of a plotting library: the run is done
            self.warn(f"plots and report could not be drawn: {type(error).__name__}: {error}")
        else:
            logger.info("report: %s", report)

    def _finish_trackers(self) -> None:
        for tracker in self._trackers.values():
            tracker.end()
        problems = {name: tracker.finish() for name, tracker in self._trackers.items()}
        if self._clearml == "offline":
            problems["clearml"] = send_folder("clearml", self.folder, "offline")
        for name, problem in problems.items():
            if problem is not None:
                self.warn(problem)
            elif name == "clearml" and self._clearml == "online":
                logger.info("clearml: everything is in the dashboard")
            else:
                logger.info("%s: in %s", name, self.folder / name)

    def _save_summary(self, summary: dict) -> None:
        self._attempt("summary.json", write_json_atomically, self.report_dir / "summary.json", summary)

    def close(self) -> None:
        """Close the log file."""
        logger.removeHandler(self._file)
        self._file.close()

    def _warning_entries(self) -> list[dict]:
        return [{"message": message, "count": count} for message, count in self._warnings.items()]

    def _summary(self, run: "Cluster", final: dict[int, Evaluation], status: str) -> dict:
        """Return the resources, results and origin of the run as JSON values."""
        counters = run.counters
        best = final[run.validation.best(final)] if final else None
        budget = None
        if (limit := budget_of(self.config)) is not None:
            used = counters.used(limit.unit)
            percent = round(100.0 * (used / limit.amount - 1.0), 2)
            budget = {"unit": limit.unit, "amount": limit.amount, "used": used, "deviation_percent": percent}
        # Several processes may each call their GPU cuda:0.
        of_groups = dict(zip(run.processes.groups, run.processes.devices, strict=True))
        return {
            "status": status,
            "metric": run.metric.name,
            "metric_higher_is_better": run.metric.higher_is_better,
            "metric_decimals": run.metric.decimals,
            "final_metric": best.metric if best else None,
            "final_loss": best.loss if best else None,
            "outer_steps": counters.outer_steps,
            **counters.usage(),
            "budget": budget,
            "left_out_workers": counters.left_out,
            "lost_messages": counters.lost_messages,
            "nodes": len(run.nodes),
            "merges": run.merges,
            "initial_trainers": self.config.number_of_initial_trainers,
            "final_trainers": len(run.trainers),
            "alone_share": counters.rounds_alone / counters.outer_steps if counters.outer_steps else None,
            "training_seconds": counters.training_seconds,
            "evaluation_seconds": counters.evaluation_seconds,
            "tokens_per_second": counters.tokens / counters.training_seconds if counters.training_seconds else None,
            "parameters": run.parameter_count,
            "devices": [str(device) for _, device in sorted(of_groups.items())],
            "processes": run.processes.count,
            "max_batch": sorted({node.max_batch for node in run.nodes}),
            "model_type": self.config.model_type,
            "dataset": run.data.dataset,
            "data_source": run.data.source,
            "data_digest": run.data.content or run.data.fingerprint(),
            "documents": dict(run.data.documents),
            "skipped_documents": dict(run.data.skipped),
            "data_shares": run.data.shares,
            "seed": self.config.training_seed,
            "initial_metric": self._initial_metric,
            "largest_requested_batch": self._largest_request,
            "wall_seconds": time.perf_counter() - self._started,
            "startup_seconds": self._startup_seconds,
            **self._nodes.summary(),
            "warnings": self._warning_entries(),
            "invocations": self._invocations.entries,
            "versions": _versions(),
        }


@functools.cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}  # its build as well
    return found | {name: version(name) for name in ("transformers", "tokenizers", "safetensors", "numpy")}
