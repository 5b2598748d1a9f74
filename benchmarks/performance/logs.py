"""What logging costs, however long a run is: python benchmarks/performance/logs.py [--rounds N] [--workers M]
[--json FILE].

Pushes synthetic rounds through everything that a run writes (round log, step losses, merges, memory, warnings, text
log, summary) and through the ClearML reporter that follows it, then has plots and report drawn and an offline session
written, each by a process of its own, as a run does. Prints:

- seconds per 1000 rounds, for the first thousand, the last, and those between, of writing and of following;
- resident memory of the process after the first thousand rounds and at the end;
- size and rows of the logs;
- seconds and peak memory of drawing at the end, and of the offline session.

Seconds are those of a processor, so that other work on the machine does not count. Making the synthetic numbers is not
in them. Nothing is trained, and nothing is sent anywhere.
"""

import argparse
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from algorithms.batch.gradient_statistics import GradientStatistics
from algorithms.batch.switch_mode import ExecutionPlan
from algorithms.nodes.policies import MergePlan
from algorithms.synchronisation.method import Event
from fabrics.pool.eval_tool import METRICS, Evaluation
from fabrics.pool.run_counters import Totals
from fabrics.training.worker import WorkerRound
from training_logs.recording.recorder import RunRecorder
from training_logs.recording.records import ClusterRound, Merge, RoundReport
from training_logs.recording.run_folder import start_logging
from training_logs.showing.run_data import read_run
from training_logs.trackers.clearml_reporter import Reporter
from utils.config.schema import Config

_ROOT = Path(__file__).resolve().parents[2]
# Rounds between two looks of the reporter, and rounds of losses that are made beforehand and used again and again.
_LOOK, _POOL = 20, 20


class _Task:
    """Counts what it is told."""

    def __init__(self):
        self.points = 0

    def get_logger(self):
        return self

    def report_scalar(self, title, series, value, iteration):
        self.points += 1

    def report_text(self, text, print_console):
        pass

    def flush(self, wait_for_uploads):
        pass


class Run:
    """What a cluster would hand to its recorder.

    Args:
        trainers, workers: workers in all, shared evenly by the trainers, of which one is merged away early.
        steps: inner steps of a round.
    """

    def __init__(self, config: Config, rounds: int, trainers: int, workers: int, steps: int):
        self.config, self.metric, self.parameter_count = config, METRICS["causal_lm"], 10**6
        self.working = SimpleNamespace(compiled=False)
        self.devices, self.failed_nodes, self.merges = [torch.device("cpu")], set(), []
        self.data = SimpleNamespace(
            dataset="synthetic", source="synthetic", train=range(10**6), validation=range(100), class_names=(),
            documents={}, skipped={}, fallback_reason=None, shares=None,
        )  # fmt: skip
        self.nodes = [SimpleNamespace(max_batch=64) for _ in range(workers)]
        self.processes = SimpleNamespace(count=1, devices=self.devices, groups=(0,) * len(self.devices))
        self.trainers = dict.fromkeys(range(trainers))
        self.totals = Totals()
        self._rounds, self._steps, self._share = rounds, steps, workers // trainers
        generator = np.random.default_rng(0)
        self._noise = generator.normal(0.0, 0.3, (_POOL, workers, steps))
        self._rates = [1e-3] * steps
        self._events = (Event("synchronisation", steps, 10**7 / self._share, 10**7 / self._share),)

    def best(self, evaluations: dict[int, Evaluation]) -> int:
        return min(evaluations, key=lambda trainer: evaluations[trainer].loss)

    def _report(self, step: int, trainer: int, losses: np.ndarray) -> RoundReport:
        batch = 8 + 56 * step // self._rounds
        plan = ExecutionPlan((batch,) if step < self._rounds // 2 else (batch // 2, batch - batch // 2))
        statistics = GradientStatistics(8, 1.0 + 1.0 / step, 50.0 + step**0.5, 1.0, 1.0)
        workers = {
            index: WorkerRound(index, plan, own, self._rates, (), 1.0, 64) for index, own in enumerate(losses.tolist())
        }
        examples = batch * self._steps * self._share
        request = batch * self._share
        return RoundReport(
            trainer, request, request, workers, statistics, self._steps, examples, 64 * examples, self._events, 10.0
        )

    def round(self, step: int) -> ClusterRound:
        """The records of a round; the loss falls like one over the logarithm of the rounds."""
        level = 3.0 + 4.0 / math.log(step + 2)
        losses = (self._noise[step % _POOL] + level).reshape(-1, self._share, self._steps)
        reports = {trainer: self._report(step, trainer, losses[trainer]) for trainer in self.trainers}
        for report in reports.values():
            self.totals.count(report.communications, report.bytes_synchronised, report.left_out)
            self.totals.examples += report.examples
            self.totals.tokens += report.tokens
        self.totals.outer_steps, self.totals.training_seconds = step, 10.0 * step
        evaluations = {trainer: Evaluation(level, math.exp(level)) for trainer in self.trainers}
        merge = None
        if step == max(self._rounds // 10, 1) and len(self.trainers) > 1:
            gone = max(self.trainers)
            merge = Merge(step, MergePlan(0, {0: 0.5, gone: 0.5}))
            self.merges.append(merge)
            del self.trainers[gone]
        use = [("process", 10**9, 10**9, 10**9, 10**11)]
        return ClusterRound(step, step / self._rounds, reports, evaluations, merge, self.totals, [use, use])


def beside(*command: str) -> dict[str, float]:
    """Run one of our programs; its processor's seconds and its peak memory in MB.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    process = subprocess.Popen([sys.executable, "-m", *command], cwd=_ROOT, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return {"seconds": used.ru_utime + used.ru_stime, "peak_mb": used.ru_maxrss / 1000}


def resident_mb() -> float:
    return psutil.Process().memory_info().rss / 1e6


def push(folder: Path, rounds: int, trainers: int, workers: int, steps: int) -> dict:
    """Write a run of so many rounds; what it cost."""
    config = Config(number_of_outer_steps=rounds, clearml="off", memory_sample_seconds=None)
    run = Run(config, rounds, trainers, workers, steps)
    folder.mkdir()
    recorder = RunRecorder(config, folder, start_logging(is_main=False), time.perf_counter())
    logging.getLogger("adloco").handlers[0].close()
    recorder.on_start(run, {trainer: Evaluation(7.0, math.exp(7.0)) for trainer in run.trainers})
    task = _Task()
    reporter = Reporter(task, recorder.report_dir, read_run(folder, rows=False).metric)
    writing, following, memory = [], [], []
    for step in range(1, rounds + 1):
        if step % 1000 == 1:
            writing.append(0.0)
            following.append(0.0)
        result = run.round(step)
        started = time.process_time()
        recorder.on_round_start(step, (step - 1) / rounds, 0)
        recorder.on_round(run, result)
        recorder.warn(f"trainer 0: worker 3 is left out in round {step}: its loss is not finite")
        written = time.process_time()
        if step % _LOOK == 0:
            reporter.report(finished=False)
        writing[-1] += written - started
        following[-1] += time.process_time() - written
        if step % 1000 == 0 or step == rounds:
            memory.append(resident_mb())
    reporter.report(finished=True)
    final = {trainer: Evaluation(3.0, math.exp(3.0)) for trainer in run.trainers}
    recorder._drawing.draw = lambda: None  # by a process of its own, below
    recorder.finish(run, final, "completed", {})
    recorder.close()
    logs = {
        name: {"mb": path.stat().st_size / 1e6, "rows": sum(1 for _ in path.open("rb")) - 1}
        for name in ("training_log.csv", "exchange_log.csv", "node_log.csv", "step_loss_log.csv", "memory_log.csv")
        for path in folder.rglob(name)
    }
    return {
        "rounds": rounds, "trainers": trainers, "workers": workers, "steps": steps,
        "seconds_per_1000_rounds_writing": writing, "seconds_per_1000_rounds_following": following,
        "resident_mb": memory, "points_reported": task.points, "logs": logs,
        "drawing": beside("training_logs.training_monitoring", str(folder)),
        "session": beside("training_logs.log_processor", str(folder), "--mode", "offline"),
    }  # fmt: skip


def show(found: dict) -> None:
    rounds = f"{found['rounds']:,} rounds of {found['steps']} inner steps, {found['workers']} workers"
    print(f"{rounds}, {found['trainers']} trainers")
    for part in ("writing", "following"):
        seconds = found[f"seconds_per_1000_rounds_{part}"]
        between = f", between them {min(seconds):.2f} to {max(seconds):.2f}" if len(seconds) > 2 else ""
        print(f"{part}: {seconds[0]:.2f} s for the first 1000 rounds, {seconds[-1]:.2f} s for the last{between}")
    print(f"resident memory: {found['resident_mb'][0]:.0f} MB, at the end {found['resident_mb'][-1]:.0f} MB")
    for name, log in found["logs"].items():
        print(f"{name}: {log['rows']:,} rows, {log['mb']:.1f} MB")
    for part in ("drawing", "session"):
        print(f"{part}: {found[part]['seconds']:.1f} s, at most {found[part]['peak_mb']:.0f} MB")


def main() -> int:
    parser = argparse.ArgumentParser(description="What logging costs, however long a run is.")
    parser.add_argument("--rounds", type=int, default=50_000, help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--trainers", type=int, default=4, help="a divisor of the workers; default: %(default)s")
    parser.add_argument("--steps", type=int, default=200, help="inner steps of a round; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything that was measured")
    options = parser.parse_args()
    if options.workers % options.trainers:
        parser.error("--trainers must divide --workers")
    with tempfile.TemporaryDirectory() as folder:
        found = push(Path(folder) / "run", options.rounds, options.trainers, options.workers, options.steps)
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
