"""step_loss_log.csv: the loss of every inner step of every worker."""

from collections.abc import Iterable

from training_logs.recording.records import RoundReport


def step_rows(outer_step: int, reports: Iterable[RoundReport]) -> list[dict]:
    """Return one row per inner step and worker of a round."""
    rows = []
    for report in reports:
        for index, worker in report.workers.items():
            # A worker whose node failed has learning rates, but no losses.
            for (step, loss), rate in zip(worker.losses_by_step, worker.learning_rates, strict=False):
                rows.append(
                    {
                        "outer_step": outer_step,
                        "trainer_id": report.trainer,
                        "worker": index,
                        "inner_step": step + 1,
                        "loss": loss,
                        "effective_batch": worker.plan.effective_batch,
                        "learning_rate": rate,
                    }
                )
    return rows
