"""What is said about a run as it begins, and about a round of a trainer: a row of training_log.csv, and a line."""

import math

from algorithms.batch.gradient_statistics import GradientStatistics
from fabrics.models.continuations import Continuation
from fabrics.pool.eval_tool import Metric
from training_logs.recording.records import ClusterRound, RoundReport, RunView
from utils.utils import byte_size

# examples, tokens, communications and bytes are totals of the whole run at the end of the round;
# the columns with round_ are the trainer's own in this round.
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
    """What a run trains on what."""
    data, metric, processes = run.data, run.metric, run.processes.count
    places = ", ".join(dict.fromkeys(map(str, run.processes.devices)))
    sizes = "/".join(str(size) for size in sorted({node.max_batch for node in run.nodes}))
    return (
        f"{run.config.model_type} with {run.parameter_count:,} parameters on {data.dataset} ({len(data.train):,} "
        f"training and {len(data.validation):,} validation examples); {len(run.trainers)} trainers on "
        f"{len(run.nodes)} nodes ({places}{f', {processes} processes' if processes > 1 else ''}), max batch {sizes}; "
        f"{metric.name} before training {initial_metric:.{metric.decimals}f}"
    )


def accumulation_steps(report: RoundReport) -> int:
    """The most micro-batches of an inner step of a worker."""
    return max(worker.plan.accumulation_steps for worker in report.workers.values())


def _micro_batch(report: RoundReport) -> int:
    return max(max(worker.plan.micro_batches) for worker in report.workers.values())


def _statistics_columns(statistics: GradientStatistics | None) -> dict[str, float | None]:
    """What the batch test saw; empty where there was none, and where a number is not known."""
    values = {
        "gradient_sample_size": "examples",
        "gradient_squared_norm": "squared_norm",
        "gradient_squared_norm_error": "squared_norm_error",
        "gradient_variance": "variance",
        "gradient_variance_error": "variance_error",
        "inner_product_variance": "inner_product_variance",
        "inner_product_variance_error": "inner_product_variance_error",
        "orthogonal_variance": "orthogonal_variance",
    }
    found = {column: math.nan if statistics is None else getattr(statistics, name) for column, name in values.items()}
    return {column: value if math.isfinite(value) else None for column, value in found.items()}


def round_row(result: ClusterRound, report: RoundReport, max_batch: int, wall_seconds: float) -> dict:
    """One row of the round log; what was not measured is left empty.

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
        "examples": result.totals.examples,
        "tokens": result.totals.tokens,
        "communications": result.totals.communications,
        "bytes_communicated": result.totals.bytes_communicated,
        "bytes_synchronised": result.totals.bytes_synchronised,
        "bytes_merged": result.totals.bytes_merged,
        "bytes_redistributed": result.totals.bytes_redistributed,
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
    """What the model says, for people: quoted, with line ends and everything else that is not printable as escapes."""
    return (
        f"continuation {number} of {count}, of a validation text\n"
        f"  prompt:    {text.prompt!r}\n  model:     {text.continuation!r}\n  reference: {text.reference!r}"
    )


def round_line(result: ClusterRound, report: RoundReport, metric: Metric) -> str:
    """One readable line about one trainer's round."""
    evaluation = result.evaluations.get(report.trainer)
    nodes = "node" if len(report.workers) == 1 else "nodes"
    measured = f"{evaluation.metric:8.{metric.decimals}f}" if evaluation else f"{'-':>8}"
    return (
        f"round {result.outer_step:>3} ({int(100 * result.progress):>3}%) | trainer {report.trainer} | "
        f"loss {report.train_loss:6.3f} | {metric.name} {measured} | batch {report.requested_batch:>3} "
        f"({_micro_batch(report)} x {accumulation_steps(report)} on {len(report.workers)} {nodes}) | "
        f"{report.tokens / report.seconds:>7,.0f} tokens/s | "
        f"communications {result.totals.communications:>2} ({byte_size(result.totals.bytes_communicated)})"
    )
