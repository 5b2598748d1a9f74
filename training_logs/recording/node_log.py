"""Time of each node: rows of node_log.csv, by a virtual clock (`algorithms.nodes.virtual_clock`)."""

from collections.abc import Mapping
from pathlib import Path

from algorithms.nodes.traffic import Link
from algorithms.nodes.virtual_clock import RunClock
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
        if state:
            self._clock = self._new_clock(len(state["clock"]["clocks"]["ready"]))
            self._clock.load_state_dict(state["clock"])

    def _new_clock(self, nodes: int) -> RunClock:
        # Without given speeds the clock measures how nodes compute, and exchanges take no time.
        link = Link() if self._config.node_speeds is None else self._config.simulated_link
        return RunClock(nodes, self._config.node_speeds, link)

    def state_dict(self) -> dict:
        return {"log": self.csv.state_dict(), "clock": self._clock.state_dict()}

    def summary(self) -> dict[str, float | None]:
        """Return the simulated seconds of the run, and the shares of time in which nodes wait and are idle.

        The shares count from where a resume last changed the number of nodes.
        """
        if self._clock is None:
            return dict.fromkeys(("simulated_seconds", "waiting_share", "idle_share"))
        return {
            "simulated_seconds": self._clock.elapsed if self._config.node_speeds else None,
            "waiting_share": self._clock.clocks.waiting_share,
            "idle_share": self._clock.clocks.idle_share,
        }

    def log(self, nodes: int, result: ClusterRound) -> None:
        """Write a round of a run with `nodes` nodes.

        Raises:
            OSError: the rows could not be written, and wait for the next round.
        """
        clock = self._clock_of(nodes)
        marks = [self._mark(node) for node in range(nodes)]
        reports = result.reports.values()
        computing = {report.trainer: report.computing for report in reports}
        clock.begin_round(computing, result.counters.link_bytes_redistributed)
        rows = []
        # By node: its last row of the round, and where it begins.
        last: dict[int, tuple[dict, Mark]] = {}
        for report in reports:
            clock.run(report.trainer, report.inner_steps, report.events)
            for index, worker in report.workers.items():
                begin = marks[worker.node]
                marks[worker.node] = self._mark(worker.node)
                row = self._row(result.outer_step, report.trainer, index, worker)
                row |= _times(begin, marks[worker.node])
                rows.append(row)
                last[worker.node] = (row, begin)
        clock.end_round()
        if result.merge is not None:
            clock.merge(result.merge_exchange.link)
        for node, (row, begin) in last.items():  # with its wait for the other trainers, and the merge
            row |= _times(begin, self._mark(node))
        self.csv.append(rows)

    def _clock_of(self, nodes: int) -> RunClock:
        before = self._clock
        if before is None or len(before.clocks.spent) != nodes:
            self._clock = self._new_clock(nodes)
            if before is not None:  # the run was resumed with another number of nodes
                self._clock.load_state_dict(before.state_dict())
        return self._clock

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

    def _mark(self, node: int) -> Mark:
        clocks = self._clock.clocks
        before = self._clock.elapsed - clocks.elapsed  # on clocks of another number of nodes
        spent = clocks.spent[node]
        return before + clocks.ready(node), spent.busy, spent.waiting, spent.exchanging


def _times(begin: Mark, end: Mark) -> dict:
    begins, *spent_before = begin
    ends, *spent = end
    busy, waiting, exchanging = (now - before for now, before in zip(spent, spent_before, strict=True))
    return {"begins": begins, "busy": busy, "waiting": waiting, "exchanging": exchanging, "ends": ends}
