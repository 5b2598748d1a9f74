"""summary.json: the resources, results and origin of a run."""

import functools
import platform
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch

from algorithms.schedule.limits import RunCounters
from fabrics.pool.eval_tool import Evaluation
from fabrics.pool.round_scheduler import budget_of
from utils.config.schema import Config

if TYPE_CHECKING:
    from cluster import Cluster

_LIBRARIES = ("transformers", "tokenizers", "safetensors", "numpy")


@functools.cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}  # its build as well
    return found | {name: version(name) for name in _LIBRARIES}


def budget_record(config: Config, counters: RunCounters) -> dict | None:
    """Return the budget, what was used, and the difference in percent; None: the run has no budget."""
    budget = budget_of(config)
    if budget is None:
        return None
    used = counters.used(budget.unit)
    deviation = 100.0 * (used / budget.amount - 1.0)
    return {"unit": budget.unit, "amount": budget.amount, "used": used, "deviation_percent": round(deviation, 2)}


def run_summary(run: "Cluster", final: dict[int, Evaluation], status: str, recorded: dict) -> dict:
    """Return the summary as JSON values."""
    counters = run.counters
    config = run.config
    best = final[run.validation.best(final)] if final else None
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
        "examples": counters.examples,
        "tokens": counters.tokens,
        "communications": counters.communications,
        "bytes_communicated": counters.bytes_communicated,
        "bytes_synchronised": counters.bytes_synchronised,
        "bytes_merged": counters.bytes_merged,
        "bytes_redistributed": counters.bytes_redistributed,
        "budget": budget_record(config, counters),
        "left_out_workers": counters.left_out,
        "lost_messages": counters.lost_messages,
        "failed_nodes": sorted(run.pool.failed),
        "merges": run.merges,
        "initial_trainers": config.number_of_initial_trainers,
        "final_trainers": len(run.trainers),
        "alone_share": counters.rounds_alone / counters.outer_steps if counters.outer_steps else None,
        "training_seconds": counters.training_seconds,
        "evaluation_seconds": counters.evaluation_seconds,
        "tokens_per_second": counters.tokens / counters.training_seconds if counters.training_seconds else None,
        "parameters": run.parameter_count,
        "devices": [str(device) for _, device in sorted(of_groups.items())],
        "processes": run.processes.count,
        "max_batch": sorted({node.max_batch for node in run.nodes}),
        "model_type": config.model_type,
        "dataset": run.data.dataset,
        "data_source": run.data.source,
        "data_digest": run.data.content or run.data.fingerprint(),
        "documents": dict(run.data.documents),
        "skipped_documents": dict(run.data.skipped),
        "data_shares": run.data.shares and run.data.shares.records,
        "seed": config.training_seed,
        **recorded,
        "versions": _versions(),
    }
