"""Rows of training_log.csv, exchange_log.csv and share_log.csv, and the lines about a run, a round and a text."""

import math
from collections.abc import Iterator

import numpy as np

from algorithms.batch.gradient_statistics import GradientStatistics
from algorithms.synchronisation.group import Event
from fabrics.data.examples import DataShares
from fabrics.models.continuations import Continuation
from fabrics.pool.eval_tool import Evaluation, Metric
from training_logs.recording.records import ClusterRound, RoundReport, RunView
from utils.text import byte_size

# examples, tokens, communications and bytes are totals of the run after the round;
# columns that begin with round_ are the trainer's own in this round.
COLUMNS = (
    "outer_step",
    "trainer_id",
    "nodes",
    "requested_batch",
    "effective_batch",
    "max_batch",
    "micro_batch",
    "accumulation_steps",
    "next_requested_batch",
    "inner_steps",
    "train_loss",
    "validation_loss",
    "validation_metric",
    "learning_rate",
    "examples",
    "tokens",
    "communications",
    "bytes_communicated",
    "bytes_synchronised",
    "bytes_merged",
    "bytes_redistributed",
    "round_examples",
    "round_tokens",
    "round_events",
    "round_bytes_synchronised",
    "largest_exchange_bytes",
    "gradient_sample_size",
    "gradient_squared_norm",
    "gradient_squared_norm_error",
    "gradient_variance",
    "gradient_variance_error",
    "inner_product_variance",
    "inner_product_variance_error",
    "orthogonal_variance",
    "left_out_workers",
    "seconds",
    "wall_seconds",
)


def start_line(run: RunView, initial_metric: float) -> str:
    """Describe model, data and nodes of a run in one line."""
    data = run.data
    metric = run.metric
    places = ", ".join(dict.fromkeys(map(str, run.processes.devices)))
    if run.processes.count > 1:
        places += f", {run.processes.count} processes"
    sizes = "/".join(str(size) for size in sorted({node.max_batch for node in run.nodes}))
    return (
        f"{run.config.model_type} with {run.parameter_count:,} parameters on {data.dataset} ({len(data.train):,} "
        f"training and {len(data.validation):,} validation examples); {len(run.trainers)} trainers on "
        f"{len(run.nodes)} nodes ({places}), max batch {sizes}; "
        f"{metric.name} before training {initial_metric:.{metric.decimals}f}"
    )


def accumulation_steps(report: RoundReport) -> int:
    """The largest number of micro-batches in a worker's inner step."""
    return max(worker.plan.accumulation_steps for worker in report.workers.values())


def _micro_batch(report: RoundReport) -> int:
    return max(max(worker.plan.micro_batches) for worker in report.workers.values())


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


def round_row(result: ClusterRound, report: RoundReport, max_batch: int, wall_seconds: float) -> dict:
    """Return a trainer's row of training_log.csv, by column; None is written as an empty cell.

    Args:
        max_batch: the largest micro-batch that every node of the trainer can run.
        wall_seconds: since the start of the program.
    """
    evaluation = result.evaluations.get(report.trainer)
    return {
        "outer_step": result.outer_step,
        "trainer_id": report.trainer,
        "nodes": len(report.workers),
        "requested_batch": report.requested_batch,
        "effective_batch": report.effective_batch,
        "max_batch": max_batch,
        "micro_batch": _micro_batch(report),
        "accumulation_steps": accumulation_steps(report),
        "next_requested_batch": report.next_requested_batch,
        "inner_steps": report.inner_steps,
        "train_loss": None if math.isnan(report.train_loss) else report.train_loss,
        "validation_loss": evaluation.loss if evaluation else None,
        "validation_metric": evaluation.metric if evaluation else None,
        "learning_rate": next(iter(report.workers.values())).learning_rates[-1],
        "examples": result.counters.examples,
        "tokens": result.counters.tokens,
        "communications": result.counters.communications,
        "bytes_communicated": result.counters.bytes_communicated,
        "bytes_synchronised": result.counters.bytes_synchronised,
        "bytes_merged": result.counters.bytes_merged,
        "bytes_redistributed": result.counters.bytes_redistributed,
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


def continuation_block(number: int, count: int, text: Continuation) -> str:
    """Show a generated text; line ends and unprintable characters are escaped."""
    return (
        f"continuation {number} of {count}, of a validation text\n"
        f"  prompt:    {text.prompt!r}\n  model:     {text.continuation!r}\n  reference: {text.reference!r}"
    )


def round_line(result: ClusterRound, report: RoundReport, metric: Metric) -> str:
    """Describe a trainer's round in one line."""
    evaluation = result.evaluations.get(report.trainer)
    nodes = "node" if len(report.workers) == 1 else "nodes"
    measured = f"{evaluation.metric:8.{metric.decimals}f}" if evaluation else f"{'-':>8}"
    return (
        f"round {result.outer_step:>3} ({int(100 * result.progress):>3}%) | trainer {report.trainer} | "
        f"loss {report.train_loss:6.3f} | {metric.name} {measured} | batch {report.requested_batch:>3} "
        f"({_micro_batch(report)} x {accumulation_steps(report)} on {len(report.workers)} {nodes}) | "
        f"{report.tokens / report.seconds:>7,.0f} tokens/s | "
        f"communications {result.counters.communications:>2} ({byte_size(result.counters.bytes_communicated)})"
    )


# Equal exchanges of a trainer's workers in a round. Bytes are those of each worker in one exchange, on average.
EXCHANGE_COLUMNS = (
    "outer_step",
    "trainer_id",
    "kind",
    "through",
    "count",
    "sent_bytes",
    "received_bytes",
    "behind",
    "first_step",
    "last_step",
)


def exchange_rows(result: ClusterRound) -> list[tuple]:
    """Return one row of exchange_log.csv per trainer and kind of exchange."""
    rows = []
    for report in result.reports.values():
        equal: dict[tuple, list[Event]] = {}
        for event in report.events:
            equal.setdefault((event.kind, event.through, event.behind), []).append(event)
        for (kind, through, behind), events in equal.items():
            sent = float(np.mean([event.sent for event in events]))
            received = float(np.mean([event.received for event in events]))
            steps = [event.step for event in events]
            place = (result.outer_step, report.trainer, kind, through)
            rows.append((*place, len(events), sent, received, behind, min(steps), max(steps)))
    return rows


SHARE_COLUMNS = ("outer_step", "trainer_id", "share", "validation_loss", "validation_metric")


def share_rows(result: ClusterRound) -> Iterator[tuple]:
    """Yield the evaluation of each trainer on each share of non-IID data."""
    for trainer, evaluation in result.evaluations.items():
        for share, own in enumerate(evaluation.shares):
            if own is not None:
                yield result.outer_step, trainer, share, own.loss, own.metric


def share_summary(shares: DataShares | None, best: Evaluation | None) -> dict | None:
    """Return the shares as JSON values, with the final metric of the best trainer where it was evaluated."""
    if shares is None:
        return None
    entries = [dict(entry) for entry in shares.record["shares"]]
    for entry, own in zip(entries, best.shares if best else (), strict=False):
        entry["final_metric"] = own and own.metric
    return {**shares.record, "shares": entries}


def placement_line(placement: dict[int, list[int]]) -> str:
    """Say which nodes work for which trainer."""
    parts = []
    for trainer, nodes in placement.items():
        word = "node" if len(nodes) == 1 else "nodes"
        parts.append(f"trainer {trainer} on {word} {', '.join(map(str, nodes))}")
    return "; ".join(parts)
