"""The batch test of a trainer, as a configuration asks for it, and what its workers' records of a round say for it."""

from collections.abc import Mapping, Sequence

from algorithms.batch.across_workers import MINIMUM_WORKERS, across_workers_estimate
from algorithms.batch.batch_control import BatchControl, BatchControlSettings
from algorithms.batch.gradient_statistics import SampleEstimate
from fabrics.training.learning_rates import learning_rate_schedule
from fabrics.training.worker import Node, TrainingError, WorkerRound
from utils.config.schema import Config

# So often may every worker of a trainer diverge, with half the inner learning rate each time, before the run stops.
MAX_HALVINGS = 3


def batch_control(config: Config) -> BatchControl:
    """The control of a trainer's requested batch that the configuration asks for."""
    settings = BatchControlSettings(
        test=config.sampling_method,
        eta=config.ETA,
        eta_at_end=config.ETA_at_end,
        theta=config.vartheta,
        nu=config.nu,
        debias=config.debias,
        first_round=config.batch_test_start,
        smoothing=config.statistics_smoothing,
        confidence=config.batch_test_confidence,
        largest_growth=config.max_batch_growth,
        schedule=config.batch_schedule,
        frozen_from=learning_rate_schedule(config).decay_begins,
    )
    return BatchControl(settings, config.INITIAL_BATCH_SIZE)


def worker_warnings(workers: Mapping[int, WorkerRound], nodes: Sequence[Node]) -> list[str]:
    """What the workers' records have to be warned of; nodes: theirs, as the round began."""
    left_out = [
        f"worker {index} is left out of the average: {worker.left_out}"
        for index, worker in workers.items()
        if worker.left_out
    ]
    smaller = [
        f"node {worker.node} ran out of memory; its max batch is {worker.max_batch} from now on, "
        f"and worker {index} ran the same examples in smaller parts"
        for index, worker in workers.items()
        if worker.max_batch < nodes[index].max_batch
    ]
    return left_out + smaller


def batch_samples(
    workers: Mapping[int, WorkerRound], config: Config
) -> tuple[list[SampleEstimate], SampleEstimate | None, str | None]:
    """The samples of a round with a batch test, what products between workers say, and what to warn of."""
    present = [worker for worker in workers.values() if not worker.left_out]
    moments = [worker.moments for worker in present if worker.moments is not None]
    if not config.compares_workers:
        between = None
        if len(moments) >= MINIMUM_WORKERS:
            # The sketches are of the largest samples.
            batches = [max(sample.examples for sample in worker.statistics) for worker in present]
            between = across_workers_estimate(moments, batches)
        samples = [sample for worker in present for sample in worker.statistics]
        problem = None
        if config.compares_devices and present and not samples:
            problem = "across_devices needs two examples of a step in a worker, and no worker had them"
        return samples, between, problem
    if len(moments) > 1:
        return [across_workers_estimate(moments, [worker.plan.effective_batch for worker in present])], None, None
    problem = "across_workers needs two workers: a trainer with one leaves its batch as it is" if present else None
    return [], None, problem


def halving(trainer: int, place: str, halvings: int) -> str:
    """What to warn of when a trainer's inner learning rate is halved, as all its workers diverged.

    Args:
        place: in the run. halvings: before this one.

    Raises:
        TrainingError: it was halved too often.
    """
    if halvings == MAX_HALVINGS:
        raise TrainingError(
            f"trainer {trainer}: the loss or the parameters of every worker became NaN or infinite in {place}, "
            f"after its inner learning rate was halved {MAX_HALVINGS} times; "
            f"lower learning_rate_for_inner_opt or set gradient_clipping"
        )
    return (
        f"all workers diverged; the parameters stay as they were before, and the inner learning rate is "
        f"{0.5 ** (halvings + 1)} of what it was at first"
    )
