"""How each node spends its time: rows of node_log.csv, by a virtual clock.

Each node has its own clock, as if it were a machine of its own: nodes compute side by side and wait for the messages of
their trainers' workers (`algorithms.nodes.virtual_clock`). With `node_speeds` an example takes 1 / speed seconds and an
exchange takes the time of the configured link, so times are the same in every run. Without `node_speeds` inner steps
take their measured time, and exchanges no time.
"""

from collections.abc import Mapping
from pathlib import Path

from algorithms.nodes.traffic import Link, merge_exchange, redistribution_exchange
from algorithms.nodes.virtual_clock import Clocks
from fabrics.training.worker import WorkerRound
from training_logs.recording.csv_log import CsvLog
from training_logs.recording.records import ClusterRound, RoundReport
from utils.config.schema import Config

# Seconds at which a node is ready, and its seconds busy, waiting and exchanging until then.
Mark = tuple[float, float, float, float]


class NodeLog:
    """Writes node_log.csv, one row per worker and round.

    A node without a row in a round was idle.

    Args:
        folder: receives the file.
        config: of the run.
        state: from state_dict, to continue.

    Raises:
        OSError: the file cannot be created or continued.
    """

    def __init__(self, folder: Path, config: Config, state: Mapping | None = None):
        self.csv = CsvLog(folder / "node_log.csv", state and state["log"])
        self._speeds = config.node_speeds
        self._link = Link.parse(config.link) if self._speeds and config.link else Link()
        self._clocks: Clocks | None = None
        # By node: the end of its last row.
        self._marks: list[Mark] = []
        # By trainer: its nodes in the last round.
        self._nodes: dict[int, list[int]] = {}
        # The total after the last round.
        self._redistributed_bytes = 0
        if state and state["clocks"]:
            self._marks = [tuple(mark) for mark in state["marks"]]
            self._clocks = Clocks(self._link, len(self._marks))
            self._clocks.load_state_dict(state["clocks"])
            self._nodes = dict(state["nodes"])
            self._redistributed_bytes = state["redistributed_bytes"]

    def state_dict(self) -> dict:
        return {
            "log": self.csv.state_dict(),
            "clocks": self._clocks and self._clocks.state_dict(),
            "marks": self._marks,
            "nodes": list(self._nodes.items()),
            "redistributed_bytes": self._redistributed_bytes,
        }

    def summary(self) -> dict[str, float | None]:
        """Return the simulated seconds of the run, and the shares of time in which nodes wait and are idle."""
        clocks = self._clocks
        return {
            "simulated_seconds": clocks.elapsed if clocks is not None and self._speeds else None,
            "waiting_share": None if clocks is None else clocks.waiting_share,
            "idle_share": None if clocks is None else clocks.idle_share,
        }

    def log(self, nodes: int, result: ClusterRound) -> None:
        """Write a round of a run with `nodes` nodes.

        Raises:
            OSError: the rows could not be written, and wait for the next round.
        """
        if len(self._marks) != nodes:  # the run begins, or was resumed with another number of nodes
            self._clocks = Clocks(self._link, nodes)
            self._marks = [(0.0, 0.0, 0.0, 0.0)] * nodes
        reports = result.reports.values()
        placed = {report.trainer: [worker.node for worker in report.workers.values()] for report in reports}
        idle = set(range(nodes)) - {node for own in placed.values() for node in own}
        self._move_nodes(result.counters.bytes_redistributed, placed, idle)
        rows = []
        # By node: its last row of the round, and where it begins.
        last: dict[int, tuple[dict, Mark]] = {}
        for report in reports:
            self._run(report)
            for index, worker in report.workers.items():
                begin = self._marks[worker.node]
                row = self._row(result.outer_step, report.trainer, index, worker)
                row |= self._times(begin, worker.node)
                rows.append(row)
                last[worker.node] = (row, begin)
                self._marks[worker.node] = self._mark(worker.node)
        self._clocks.skip(idle)
        if len(placed) > 1:
            self._clocks.barrier()
        self._merge(result, placed, idle)
        for node, (row, begin) in last.items():  # with its wait for the other trainers, and the merge
            row |= self._times(begin, node)
        self._marks = [self._mark(node) for node in range(nodes)]
        self.csv.append(rows)

    def _move_nodes(self, total_bytes: int, placed: dict[int, list[int]], idle: set[int]) -> None:
        moved = total_bytes - self._redistributed_bytes
        if moved:
            came = sum(len({*own} - {*self._nodes.get(trainer, own)}) for trainer, own in placed.items())
            self._clocks.exchange_all(redistribution_exchange(came, moved).link, idle)
        self._redistributed_bytes = total_bytes
        self._nodes = placed

    def _merge(self, result: ClusterRound, placed: dict[int, list[int]], idle: set[int]) -> None:
        if result.merge is not None:
            plan = result.merge.plan
            exchange = merge_exchange(len(plan.weights) - 1, len(placed[plan.representative]), result.merge_bytes)
            self._clocks.exchange_all(exchange.link, idle)

    def _run(self, report: RoundReport) -> None:
        computing = [
            worker.seconds if self._speeds is None else worker.examples / self._speeds[worker.node]
            for worker in report.workers.values()
        ]
        self._clocks.round(
            report.trainer,
            {index: worker.node for index, worker in report.workers.items()},
            report.inner_steps,
            [seconds / report.inner_steps for seconds in computing],
            report.events,
        )

    def _row(self, outer_step: int, trainer: int, index: int, worker: WorkerRound) -> dict:
        """Return a row without the times of the clock.

        Speed is in examples per second, given or measured; examples are per inner step; seconds are measured.
        """
        speed = None
        if self._speeds is not None:
            speed = self._speeds[worker.node]
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
        spent = self._clocks.spent[node]
        return self._clocks.ready(node), spent.busy, spent.waiting, spent.exchanging
