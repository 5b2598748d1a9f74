"""The rows of a round in training_log.csv and other CSVs, and the lines of the log about a run, a round and a text."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from algorithms.batch.gradient_statistics import GradientStatistics
from algorithms.nodes.traffic import Event
from fabrics.pool.eval_tool import Metric
from training_logs.recording.records import ClusterRound, RoundReport
from utils.text import byte_size, counted, merge_line

if TYPE_CHECKING:
    from cluster import Cluster

# Rows


def round_rows(result: ClusterRound, wall_seconds: float) -> list[dict]:
    """Return one row of training_log.csv per trainer.

    Examples, tokens, communications and bytes are totals of the run after the round; columns that begin with round_ are
    the trainer's own in this round.

    wall_seconds: since the start of the program.
    """
    counters = result.counters
    rows = []
    for report in result.reports.values():
        evaluation = result.evaluations.get(report.trainer)
        row = {
            "outer_step": result.outer_step,
            "trainer_id": report.trainer,
            "nodes": len(report.workers),
            "requested_batch": report.requested_batch,
            "effective_batch": report.effective_batch,
            "max_batch": min(worker.max_batch for worker in report.workers.values()),
            "micro_batch": report.micro_batch,
            "accumulation_steps": report.accumulation_steps,
            "next_requested_batch": report.next_requested_batch,
            "inner_steps": report.inner_steps,
            "train_loss": None if math.isnan(report.train_loss) else report.train_loss,
            "validation_loss": evaluation.loss if evaluation else None,
            "validation_metric": evaluation.metric if evaluation else None,
            "learning_rate": next(iter(report.workers.values())).learning_rates[-1],
            **counters.usage(),
            "round_examples": report.examples,
            "round_tokens": report.tokens,
            "round_events": len(report.events),
            "round_bytes_synchronised": report.bytes_synchronised,
            "largest_exchange_bytes": report.largest_exchange,
            **_statistics_columns(report.statistics),
            "left_out_workers": report.left_out,
            "seconds": report.seconds,
            "wall_seconds": round(wall_seconds, 3),
        }
        rows.append(row)
    return rows


# Column of the round log: attribute of GradientStatistics.
_STATISTICS = {
    "gradient_sample_size": "examples",
    "gradient_squared_norm": "squared_norm",
    "gradient_squared_norm_error": "squared_norm_error",
    "gradient_variance": "variance",
    "gradient_variance_error": "variance_error",
    "inner_product_variance": "inner_product_variance",
    "inner_product_variance_error": "inner_product_variance_error",
    "orthogonal_variance": "orthogonal_variance",
}


def _statistics_columns(statistics: GradientStatistics | None) -> dict[str, float | None]:
    columns = dict.fromkeys(_STATISTICS)
    if statistics is not None:
        for column, name in _STATISTICS.items():
            value = getattr(statistics, name)
            columns[column] = value if math.isfinite(value) else None
    return columns


def step_rows(result: ClusterRound) -> list[dict]:
    """Return one row of step_loss_log.csv per inner step and worker."""
    rows = []
    for report in result.reports.values():
        for index, worker in report.workers.items():
            # A worker that was left out at a stop has learning rates for later steps, but no losses.
            for (step, loss), rate in zip(worker.losses_by_step, worker.learning_rates, strict=False):
                rows.append(
                    {
                        "outer_step": result.outer_step,
                        "trainer_id": report.trainer,
                        "worker": index,
                        "inner_step": step + 1,
                        "loss": loss,
                        "effective_batch": worker.plan.effective_batch,
                        "learning_rate": rate,
                    }
                )
    return rows


EXCHANGE_COLUMNS = (
    "outer_step",
    "trainer_id",
    "kind",
    "through",
    "by",
    "count",
    "sent_bytes",
    "received_bytes",
    "behind",
    "first_step",
    "last_step",
)


def exchange_rows(result: ClusterRound) -> list[dict]:
    """Return one row of exchange_log.csv per trainer, kind of exchange and senders."""
    rows = []
    for report in result.reports.values():
        equal: dict[tuple, list[Event]] = {}
        for event in report.events:
            equal.setdefault((event.kind, event.through, event.by, event.behind), []).append(event)
        for (kind, through, by, behind), events in equal.items():
            row = (
                result.outer_step,
                report.trainer,
                kind,
                through,
                None if by is None else " ".join(map(str, by)),
                len(events),
                float(np.mean([event.sent for event in events])),
                float(np.mean([event.received for event in events])),
                behind,
                min(event.step for event in events),
                max(event.step for event in events),
            )
            rows.append(dict(zip(EXCHANGE_COLUMNS, row, strict=True)))
    return rows


MERGE_COLUMNS = ("outer_step", "representative", "trainer_id", "weight")


def merge_rows(result: ClusterRound) -> list[dict]:
    """Return one row of merge_log.csv per trainer that became the representative."""
    if result.merge is None:
        return []
    plan = result.merge
    return [
        dict(zip(MERGE_COLUMNS, (result.outer_step, plan.representative, *item), strict=True))
        for item in plan.weights.items()
    ]


# Lines


def start_line(run: "Cluster", initial_metric: float) -> str:
    """Describe model, data and nodes of a run."""
    data = run.data
    metric = run.metric
    places = ", ".join(dict.fromkeys(map(str, run.processes.devices)))
    if run.processes.count > 1:
        places += f", {run.processes.count} processes"
    sizes = "/".join(str(size) for size in sorted({node.max_batch for node in run.nodes}))
    return (
        f"{run.config.model_type} with {run.parameter_count:,} parameters on {data.dataset} ({len(data.train):,} "
        f"training and {len(data.validation):,} validation examples); {counted(len(run.trainers), 'trainer')} on "
        f"{counted(len(run.nodes), 'node')} ({places}), max batch {sizes}; "
        f"{metric.name} before training {initial_metric:.{metric.decimals}f}"
    )


def round_line(result: ClusterRound, report: RoundReport, metric: Metric) -> str:
    """Describe a trainer's round."""
    evaluation = result.evaluations.get(report.trainer)
    measured = f"{metric.name} {evaluation.metric:8.{metric.decimals}f} | " if evaluation else ""
    # A merge comes after the round, and has a line of its own.
    communications = result.counters.communications - (result.merge is not None)
    sent = byte_size(result.counters.bytes_communicated - result.merge_exchange.sent)
    return (
        f"round {result.outer_step:>3} ({int(100 * result.progress):>3}%) | trainer {report.trainer} | "
        f"loss {report.train_loss:6.3f} | {measured}batch {report.requested_batch:>3} "
        f"({report.micro_batch} x {report.accumulation_steps} on {counted(len(report.workers), 'node')}) | "
        f"{report.tokens / report.seconds:>7,.0f} tokens/s | communications {communications:>2} ({sent})"
    )


def merged_line(result: ClusterRound, metric: Metric) -> str:
    """Describe the merge after a round."""
    plan = result.merge
    line = merge_line(result.outer_step, plan.representative, plan.weights)
    if result.merged is not None:
        line += f" | {metric.name} {result.merged.metric:.{metric.decimals}f}"
    sent = byte_size(result.counters.bytes_communicated)
    return f"{line} | communications {result.counters.communications} ({sent})"


def end_line(summary: Mapping) -> str:
    """Describe the result, cost and time of a completed run."""
    decimals = summary["metric_decimals"]
    return (
        f"{summary['status']}: {summary['metric']} {summary['initial_metric']:.{decimals}f} before training, "
        f"{summary['final_metric']:.{decimals}f} after {summary['tokens']:,} tokens in "
        f"{counted(summary['outer_steps'], 'round')} with {counted(summary['communications'], 'communication')} "
        f"({byte_size(summary['bytes_communicated'])}). {summary['wall_seconds']:.1f} s: "
        f"start-up {summary['startup_seconds']:.1f} s, training {summary['training_seconds']:.1f} s, "
        f"evaluation {summary['evaluation_seconds']:.1f} s, checkpoints, models and logs the rest"
    )


def nodes_line(summary: Mapping) -> str:
    """Describe how much of the time nodes had no work, or waited, and how often one worker worked alone."""
    line = f"nodes: idle {summary['idle_share']:.1%} of the time, waiting {summary['waiting_share']:.1%} of the rest"
    if summary["alone_share"]:
        line += f"; one worker alone in {summary['alone_share']:.0%} of the rounds"
    return line


def placement_line(result: ClusterRound, nodes: int, smallest_worker_batch: int | None) -> str:
    """List the nodes of every trainer, and say why others are idle; `nodes` is the number of all nodes."""
    parts = []
    idle = nodes
    too_small = smallest_worker_batch is not None
    for report in result.reports.values():
        own = [str(worker.node) for worker in report.workers.values()]
        parts.append(f"trainer {report.trainer} on {'node' if len(own) == 1 else 'nodes'} {', '.join(own)}")
        idle -= len(own)
        too_small = too_small and report.requested_batch < smallest_worker_batch * (len(own) + 1)
    line = f"round {result.outer_step}: {'; '.join(parts)}"
    if idle > 0 and too_small:
        line += f" ({counted(idle, 'node')} idle: each worker needs {smallest_worker_batch} examples)"
    return line
