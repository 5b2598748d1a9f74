"""How each node spends its time: rows of node_log.csv, by a virtual clock.

Each node has its own clock, as if it were a machine of its own: nodes compute side by side and wait for the messages of
their trainers' workers (`algorithms.nodes.virtual_clock`). With `node_speeds` an example takes 1 / speed seconds and an
exchange takes the time of the configured link, so times are the same in every run. Without `node_speeds` inner steps
take their measured time, and exchanges no time.
"""

from collections.abc import Mapping
from pathlib import Path

from algorithms.nodes.traffic import Link, merge_exchange, redistribution_exchange
from algorithms.nodes.virtual_clock import Clocks, joined_sendings
from fabrics.training.worker import WorkerRound
from training_logs.recording.csv_log import CsvLog
from training_logs.recording.records import ClusterRound, RoundReport
from utils.config.schema import Config

# examples: per inner step. speed: examples per second. seconds: measured, of all inner steps. The last five are the
# clock's, in seconds; a row begins where the node's last row ended, or where the node has work again.
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
        self._log = CsvLog(folder / "node_log.csv", COLUMNS, state and state["log"])
        self._speeds = config.node_speeds
        self._link = Link.parse(config.link) if self._speeds and config.link else Link()
        self._clocks: Clocks | None = None
        # By node: seconds at which its last row ended, and its seconds busy, waiting and exchanging until then.
        self._marks: dict[int, tuple[float, ...]] = {}
        # By trainer: its nodes in the last round.
        self._nodes: dict[int, list[int]] = {}
        # Totals after the last round.
        self._redistributed_bytes = 0
        self._merged_bytes = 0
        if state and state["clocks"]:
            self._clocks = Clocks(self._link, len(state["clocks"]["ready"]))
            self._clocks.load_state_dict(state["clocks"])
            self._marks = {node: tuple(mark) for node, mark in state["marks"]}
            self._nodes = dict(state["nodes"])
            self._redistributed_bytes = state["redistributed_bytes"]
            self._merged_bytes = state["merged_bytes"]

    def state_dict(self) -> dict:
        return {
            "log": self._log.state_dict(),
            "clocks": self._clocks and self._clocks.state_dict(),
            "marks": list(self._marks.items()),
            "nodes": list(self._nodes.items()),
            "redistributed_bytes": self._redistributed_bytes,
            "merged_bytes": self._merged_bytes,
        }

    def summary(self) -> dict[str, float | None]:
        """Return the simulated seconds of the run, and the share of all nodes' time that they waited."""
        return {
            "simulated_seconds": self._clocks.elapsed if self._clocks is not None and self._speeds else None,
            "waiting_share": None if self._clocks is None else self._clocks.waiting_share,
        }

    def log(self, nodes: int, result: ClusterRound) -> None:
        """Write a round of a run with `nodes` nodes.

        Raises:
            OSError: the rows could not be written, and wait for the next round.
        """
        if self._clocks is None or len(self._clocks.spent) != nodes:
            # The run begins, or was resumed with another number of nodes.
            self._clocks = Clocks(self._link, nodes)
            self._marks = {}
        clocks = self._clocks
        reports = result.reports.values()
        placed = {report.trainer: [worker.node for worker in report.workers.values()] for report in reports}
        idle = set(range(nodes)) - {node for own in placed.values() for node in own}
        self._move_nodes(result.counters.bytes_redistributed, placed, idle)
        workers = []
        ends = []
        for report in reports:
            self._run(report)
            for index, worker in report.workers.items():
                workers.append((report.trainer, index, worker))
                ends.append(self._mark(worker.node))
        clocks.skip(idle)
        if len(placed) > 1:
            clocks.barrier()
        self._merge(result, placed, idle)
        # The last row of a node includes its wait for the other trainers, and the merge.
        for place in {worker.node: place for place, (_, _, worker) in enumerate(workers)}.values():
            ends[place] = self._mark(workers[place][2].node)
        rows = []
        for (trainer, index, worker), end in zip(workers, ends, strict=True):
            begin = self._marks.get(worker.node, (0.0,) * len(end))
            spent = [after - before for before, after in zip(begin[1:], end[1:], strict=True)]
            rows.append((result.outer_step, trainer, index, *self._work(worker), begin[0], *spent, end[0]))
            self._marks[worker.node] = end
        for node in idle:
            self._marks[node] = self._mark(node)
        self._log.append(rows)

    def _move_nodes(self, total_bytes: int, placed: dict[int, list[int]], idle: set[int]) -> None:
        moved = total_bytes - self._redistributed_bytes
        if moved:
            came = sum(len({*own} - {*self._nodes.get(trainer, own)}) for trainer, own in placed.items())
            self._clocks.exchange_all(redistribution_exchange(came, moved).link, idle)
        self._redistributed_bytes = total_bytes
        self._nodes = placed

    def _merge(self, result: ClusterRound, placed: dict[int, list[int]], idle: set[int]) -> None:
        total_bytes = result.counters.bytes_merged
        if result.merge is not None:
            plan = result.merge.plan
            sent = total_bytes - self._merged_bytes
            exchange = merge_exchange(len(plan.weights) - 1, len(placed[plan.representative]), sent)
            self._clocks.exchange_all(exchange.link, idle)
        self._merged_bytes = total_bytes

    def _run(self, report: RoundReport) -> None:
        workers = report.workers.values()
        computing = [
            worker.seconds if self._speeds is None else worker.examples / self._speeds[worker.node]
            for worker in workers
        ]
        self._clocks.round(
            report.trainer,
            [worker.node for worker in workers],
            report.inner_steps,
            [seconds / report.inner_steps for seconds in computing],
            [0.0] * len(computing),
            joined_sendings(event.sending([*report.workers]) for event in report.events),
        )

    def _work(self, worker: WorkerRound) -> tuple:
        if self._speeds is not None:
            speed = self._speeds[worker.node]
        else:
            speed = worker.steady_examples / worker.steady_seconds if worker.steady_seconds else None
        return worker.node, speed, worker.plan.effective_batch, len(worker.learning_rates), worker.seconds

    def _mark(self, node: int) -> tuple[float, ...]:
        spent = self._clocks.spent[node]
        return self._clocks.ready(node), spent.busy, spent.waiting, spent.exchanging
