"""The loss of every inner step of every worker, in `step_loss_log.csv`."""

import csv
from pathlib import Path

from training_logs.records import RoundReport

COLUMNS = (
    "outer_step",
    "trainer_id",
    "worker",
    "node",
    "inner_step",
    "loss",
    "effective_batch",
    "learning_rate",
)


class StepLossLogger:
    """Appends a round's step losses in one write; `effective_batch` is that of the worker."""

    def __init__(self, folder: Path):
        self.path = folder / "step_loss_log.csv"
        with self.path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(COLUMNS)

    def log(self, outer_step: int, report: RoundReport) -> None:
        """Write the steps of one trainer's round."""
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            for index, worker in report.workers.items():
                steps = zip(worker.losses, worker.learning_rates, strict=True)
                for step, (loss, learning_rate) in enumerate(steps, 1):
                    writer.writerow(
                        (
                            outer_step,
                            report.trainer,
                            index,
                            worker.node,
                            step,
                            loss,
                            worker.plan.effective_batch,
                            learning_rate,
                        )
                    )
