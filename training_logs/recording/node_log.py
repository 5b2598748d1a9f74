"""Time of each node: rows of node_log.csv, by a virtual clock (`fabrics.pool.run_clock`)."""

from collections.abc import Mapping
from pathlib import Path

from fabrics.pool.run_clock import RunClock
from fabrics.training.worker import WorkerRound
from training_logs.recording.csv_log import CsvLog
from training_logs.recording.records import ClusterRound
from utils.config.schema import Config

# Seconds at which a node is ready, and its seconds busy, waiting and exchanging until then.
Mark = tuple[float, float, float, float]


class NodeLog:
    """Writes node_log.csv, one row per worker and round.

    A node without a row in a round was idle.
    """

    def __init__(self, folder: Path, config: Config, state: Mapping | None = None):
        self.csv = CsvLog(folder / "node_log.csv", state and state["log"])
        self._config = config
        self._clock: RunClock | None = None
        # By node: the end of its last row.
        self._marks: list[Mark] = []
        if state and state["clock"]:
            self._marks = [tuple(mark) for mark in state["marks"]]
            self._clock = RunClock(config, len(self._marks))
            self._clock.load_state_dict(state["clock"])

    def state_dict(self) -> dict:
        return {
            "log": self.csv.state_dict(),
            "clock": self._clock and self._clock.state_dict(),
            "marks": self._marks,
        }

    def summary(self) -> dict[str, float | None]:
        """Return the simulated seconds of the run, and the shares of time in which nodes wait and are idle."""
        clocks = self._clock and self._clock.clocks
        return {
            "simulated_seconds": clocks.elapsed if clocks is not None and self._config.node_speeds else None,
            "waiting_share": None if clocks is None else clocks.waiting_share,
            "idle_share": None if clocks is None else clocks.idle_share,
        }

    def log(self, nodes: int, result: ClusterRound) -> None:
        """Write a round of a run with `nodes` nodes.

        Raises:
            OSError: the rows could not be written, and wait for the next round.
        """
        if len(self._marks) != nodes:  # the run begins, or was resumed with another number of nodes
            self._clock = RunClock(self._config, nodes)
            self._marks = [(0.0, 0.0, 0.0, 0.0)] * nodes
        clock = self._clock
        reports = result.reports.values()
        clock.begin_round({report.trainer: report.computing for report in reports}, result.counters.bytes_redistributed)
        rows = []
        # By node: its last row of the round, and where it begins.
        last: dict[int, tuple[dict, Mark]] = {}
        for report in reports:
            clock.run(report.trainer, report.inner_steps, report.events)
            for index, worker in report.workers.items():
                begin = self._marks[worker.node]
                row = self._row(result.outer_step, report.trainer, index, worker)
                row |= self._times(begin, worker.node)
                rows.append(row)
                last[worker.node] = (row, begin)
                self._marks[worker.node] = self._mark(worker.node)
        clock.end_round()
        if result.merge is not None:
            clock.merge(len(result.merge.weights) - 1, result.merge.representative, result.merge_bytes)
        for node, (row, begin) in last.items():  # with its wait for the other trainers, and the merge
            row |= self._times(begin, node)
        self._marks = [self._mark(node) for node in range(nodes)]
        self.csv.append(rows)

    def _row(self, outer_step: int, trainer: int, index: int, worker: WorkerRound) -> dict:
        """Return a row without the times of the clock.

        Speed is in examples per second, given or measured; examples are per inner step; seconds are measured.
        """
        speed = None
        if self._config.node_speeds is not None:
            speed = self._config.node_speeds[worker.node]
        elif worker.steady_seconds:
            speed = worker.steady_examples / worker.steady_seconds
        return {
            "outer_step": outer_step,
            "trainer_id": trainer,
            "worker": index,
            "node": worker.node,
            "speed": speed,
            "examples": worker.plan.effective_batch,
            "inner_steps": len(worker.learning_rates),
            "seconds": worker.seconds,
        }

    def _times(self, begin: Mark, node: int) -> dict:
        """Return the clock's times of a row that begins at a mark and ends now."""
        begins, *spent_before = begin
        ends, *spent = self._mark(node)
        busy, waiting, exchanging = (now - before for now, before in zip(spent, spent_before, strict=True))
        return {"begins": begins, "busy": busy, "waiting": waiting, "exchanging": exchanging, "ends": ends}

    def _mark(self, node: int) -> Mark:
        spent = self._clock.clocks.spent[node]
        return self._clock.clocks.ready(node), spent.busy, spent.waiting, spent.exchanging
