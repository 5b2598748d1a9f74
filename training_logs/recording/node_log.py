"""What became of every node's time: rows of node_log.csv, and of node_log_measured.csv, by virtual clocks.

A clock of its own for every node, as if each were a machine of its own, whatever the processes: nodes compute side by
side and wait for what their trainers' workers send each other (`algorithms.nodes.virtual_clock`). With `node_speeds` an
example takes 1 / speed seconds, and an exchange what the link that the configuration gives takes for it: the same times
in every run. Without, the inner steps of a node take what was measured, and exchanges no time; with given speeds a
second log is by that clock.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from algorithms.nodes.communication_rounds import Link, merged, redistributed
from algorithms.nodes.virtual_clock import Clocks, Uniform, together
from fabrics.training.worker import WorkerRound
from training_logs.recording.append_log import AppendLog
from training_logs.recording.records import ClusterRound, RoundReport
from utils.config.schema import Config

# examples: of an inner step. speed: in examples per second. seconds: measured, of all inner steps. The last five are
# the clock's; a row takes up where the node's last one ended, or where it began to have something to do again. Where a
# row stands for several rounds, the others are those of its last round.
COLUMNS = (
    "outer_step",
    "trainer_id",
    "worker",
    "node",
    "speed",
    "examples",
    "inner_steps",
    "seconds",
    "begins",
    "busy",
    "waiting",
    "exchanging",
    "ends",
)
# So many rows of one kind before they stand for twice as many rounds each.
ROWS = 30_000


class NodeLog:
    """Writes node_log.csv, one row per worker and round that it took part in, and with node_speeds as many rows of
    node_log_measured.csv; in rows that grow with the logarithm of the run.

    A node without a row in a round rested: it takes up when the others are done with that round, and has lost nothing.
    After ROWS rows a row stands for two rounds, after as many more for four, and so on, but for no longer than the
    trainers have the same nodes.

    Args:
        folder: receives them.
        config: the run's.
        state: from state_dict, to go on there.

    Raises:
        OSError: a file cannot be made, or not be continued.
    """

    def __init__(self, folder: Path, config: Config, state: Mapping | None = None):
        speeds, link = config.node_speeds, Link(config.link_bits_per_second or math.inf, config.link_latency_seconds)
        self._log = _ClockLog(folder / "node_log.csv", speeds, Uniform(link) if speeds else Uniform(), state)
        self._measured = None
        if speeds:
            path, before = folder / "node_log_measured.csv", state and state.get("measured")
            self._measured = _ClockLog(path, None, Uniform(), before)

    def state_dict(self) -> dict:
        """Where logs and clocks stand, as JSON values."""
        return self._log.state_dict() | {"measured": self._measured and self._measured.state_dict()}

    def summary(self) -> dict[str, float | None]:
        """Which part of all nodes' time they waited for others, and the run's seconds by a clock of given speeds."""
        return self._log.summary()

    def log(self, nodes: int, result: ClusterRound) -> OSError | None:
        """Write a round of a run with so many nodes; the error, if it could not be written and waits."""
        error = self._log.log(nodes, result)
        return (self._measured and self._measured.log(nodes, result)) or error

    def flush(self) -> OSError | None:
        """Write the rows that wait for further rounds, as there are none."""
        error = self._log.flush()
        return (self._measured and self._measured.flush()) or error


class _ClockLog:
    """One of the logs.

    Args:
        path: of the file.
        speeds: of all nodes; None: as measured.
        connection: what connects them.
        state: from state_dict, to go on there.
    """

    def __init__(self, path: Path, speeds: Sequence[float] | None, connection: Uniform, state: Mapping | None):
        self._log = AppendLog(path, COLUMNS, state and state["log"])
        self._speeds, self._connection = speeds, connection
        self._clocks: Clocks | None = None
        self._marks: dict[int, tuple[float, ...]] = {}  # by node: where its last row ended
        self._nodes: dict[int, list[int]] = {}  # of every trainer in the last round
        self._bytes = [0, 0]  # by the last round: redistributed and merged
        # Of a row: how many rounds it stands for, how many such rows there are, and the rounds that wait for it, of
        # which the last one's rows are here: first cells, node, and where it ends.
        self._rounds, self._rows, self._waited = 1, 0, 0
        self._waiting: list[tuple[tuple, int, tuple[float, ...]]] = []
        if state and state["clocks"]:
            self._clocks = Clocks(self._connection, len(state["clocks"]["ready"]))
            self._clocks.load_state_dict(state["clocks"])
            self._marks = {node: tuple(mark) for node, mark in state["marks"]}
            self._nodes, self._bytes = dict(state["nodes"]), list(state["bytes"])
            self._rounds, self._rows, self._waited, self._waiting = state.get("rows", (1, 0, 0, []))

    def state_dict(self) -> dict:
        """Where log and clocks stand, as JSON values."""
        return {
            "log": self._log.state_dict(),
            "clocks": self._clocks and self._clocks.state_dict(),
            "marks": list(self._marks.items()),
            "nodes": list(self._nodes.items()),
            "bytes": self._bytes,
            "rows": [self._rounds, self._rows, self._waited, self._waiting],
        }

    def summary(self) -> dict[str, float | None]:
        """Which part of all nodes' time they waited for others, and the run's seconds by a clock of given speeds."""
        clocks = self._clocks
        return {
            "simulated_seconds": clocks.elapsed if clocks is not None and self._speeds else None,
            "waiting_share": None if clocks is None else clocks.waiting_share,
        }

    def log(self, nodes: int, result: ClusterRound) -> OSError | None:
        """Write a round of a run with so many nodes; the error, if it could not be written and waits."""
        ended: list[tuple] = []
        if self._clocks is None or len(self._clocks.spent) != nodes:  # resumed on other nodes: they begin anew
            ended += self._end()
            self._clocks, self._marks = Clocks(self._connection, nodes), {}
        clocks, totals, reports = self._clocks, result.totals, result.reports.values()
        moved, given = totals.bytes_redistributed - self._bytes[0], totals.bytes_merged - self._bytes[1]
        self._bytes = [totals.bytes_redistributed, totals.bytes_merged]
        placed = {report.trainer: [worker.node for worker in report.workers.values()] for report in reports}
        idle = set(range(nodes)) - {node for own in placed.values() for node in own}
        if moved:
            came = sum(len({*own} - {*self._nodes.get(trainer, own)}) for trainer, own in placed.items())
            clocks.together(self._connection.each.seconds(redistributed(came, moved).link), idle)
        if placed != self._nodes:
            ended += self._end()
        self._nodes = placed
        rows: list[tuple[tuple, int]] = []  # its first cells, and its node
        ends: list[tuple[float, ...]] = []
        for report in reports:
            self._run(report)
            for index, worker in report.workers.items():
                rows.append(((result.outer_step, report.trainer, index, worker.node, *self._did(worker)), worker.node))
                ends.append(self._mark(worker.node))
        clocks.rest(idle)
        if len(placed) > 1:
            clocks.meet()
        if result.merge is not None:
            plan = result.merge.plan
            exchange = merged(len(plan.weights) - 1, len(placed[plan.representative]), given)
            clocks.together(self._connection.each.seconds(exchange.link), idle)
        last = {node: place for place, (_, node) in enumerate(rows)}
        for node, place in last.items():
            ends[place] = self._mark(node)
        self._waiting = [(*row, end) for row, end in zip(rows, ends, strict=True)]
        self._waited += 1
        if self._waited >= self._rounds:
            ended += self._end()
        self._marks |= {node: self._mark(node) for node in idle}
        return self._log.append(ended)

    def flush(self) -> OSError | None:
        """Write what waits."""
        return self._log.append(self._end())

    def _end(self) -> list[tuple]:
        """The rows that wait, whole."""
        written = []
        for cells, node, end in self._waiting:
            begin = self._marks.get(node, (0.0,) * len(end))
            spent = [after - before for before, after in zip(begin[1:], end[1:], strict=True)]
            written.append((*cells, begin[0], *spent, end[0]))
            self._marks[node] = tuple(end)
        self._waiting, self._waited = [], 0
        self._rows += len(written)
        if self._rows >= ROWS:
            self._rounds, self._rows = 2 * self._rounds, 0
        return written

    def _run(self, report: RoundReport) -> None:
        steps, workers = report.inner_steps, report.workers.values()
        computing = [
            worker.seconds if self._speeds is None else worker.examples / self._speeds[worker.node]
            for worker in workers
        ]
        self._clocks.round(
            report.trainer,
            [worker.node for worker in workers],
            steps,
            [seconds / steps for seconds in computing],
            [0.0] * len(computing),
            together(event.sending([*report.workers]) for event in report.events),
        )

    def _did(self, worker: WorkerRound) -> tuple:
        measured = worker.steady_examples / worker.steady_seconds if worker.steady_seconds else None
        speed = measured if self._speeds is None else self._speeds[worker.node]
        return speed, worker.plan.effective_batch, len(worker.learning_rates), worker.seconds

    def _mark(self, node: int) -> tuple[float, ...]:
        spent = self._clocks.spent[node]
        return self._clocks.ready(node), spent.busy, spent.waiting, spent.exchanging
