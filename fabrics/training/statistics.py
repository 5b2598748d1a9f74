"""Gradient statistics of a round: which ones it takes, and what they tell the batch test.

Hooks in the backward passes of each worker's first inner step, and of its probe batch, yield per-example statistics
(`algorithms.batch.per_example`). Workers that stand at the same parameters may also be compared: by their gradients, or
by small sketches of these.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from algorithms.batch.calc_batch import (
    BATCH_TESTS,
    NEED_INNER_PRODUCTS,
    BatchControl,
    BatchControlSettings,
    BatchTestParameters,
)
from algorithms.batch.gradient_statistics import (
    MINIMUM_WORKERS,
    SampleEstimate,
    across_workers_estimate,
    gradient_moments,
)
from algorithms.flat import SKETCH_SIZE
from algorithms.schedule.schedules import BatchSchedule, LearningRateSchedule, critical_batch, seesaw, token_thresholds
from algorithms.synchronisation import METHODS
from algorithms.synchronisation.encodings import PLAIN
from fabrics.training.optimizers import learning_rate_schedule
from utils.config.schema import Config

if TYPE_CHECKING:
    from fabrics.training.flat_model import FlatModel
    from fabrics.training.worker import WorkerRound
    from fabrics.training.worker_group import WorkerGroup


def batch_schedule(config: Config) -> BatchSchedule | None:
    """Return the schedule of the requested batch; None: a batch test sets it, or it stays."""
    given = config.batch_schedule
    if given == "seesaw":
        replaced = LearningRateSchedule(config.learning_rate_schedule, minimum_ratio=config.minimum_learning_rate_ratio)
        return seesaw(replaced, config.INITIAL_BATCH_SIZE)
    if given == "critical_batch":
        return critical_batch(config.INITIAL_BATCH_SIZE)
    if isinstance(given, str):
        return BatchSchedule(token_thresholds(given, config.max_tokens))
    return None if given is None else BatchSchedule(given)


def batch_control(config: Config) -> BatchControl:
    """Return the state machine of a trainer's requested batch."""
    parameters = BatchTestParameters(
        config.ETA, config.vartheta, config.nu, config.debias, config.batch_test_confidence
    )
    settings = BatchControlSettings(
        test=config.sampling_method,
        parameters=parameters,
        eta_at_end=config.ETA_at_end,
        first_round=config.batch_test_start,
        smoothing=config.statistics_smoothing,
        max_batch_growth=config.max_batch_growth,
        schedule=batch_schedule(config),
        frozen_from=0.0 if config.objective == "time" else learning_rate_schedule(config).decay_begins,
    )
    return BatchControl(settings, config.INITIAL_BATCH_SIZE)


@dataclass(frozen=True)
class Measurement:
    """The statistics that a round takes at its first inner step.

    Attributes:
        probed_parts: micro-batches that a probed step has at least; 0: no step is probed.
        compared: what each worker returns of its gradient, to be compared with the other workers'.
    """

    probed_parts: int = 0
    compared: Literal["nothing", "gradient", "sketch"] = "nothing"

    def sent_bytes(self, worker_count: int, model: "FlatModel") -> int:
        """Bytes that all workers together send for the comparison."""
        elements = {"nothing": 0, "gradient": model.parameter_count, "sketch": SKETCH_SIZE}[self.compared]
        return PLAIN.reduction_bytes(worker_count, elements, model.parameters.dtype)


def probes_examples(config: Config) -> bool:
    """Return whether the batch test takes per-example statistics."""
    return BATCH_TESTS[config.sampling_method] is not None and config.statistics_estimator == "per_example"


def measurement_of(config: Config, worker_count: int, measures: bool) -> Measurement:
    """Return the statistics of a round with this number of workers; measures: whether it takes any."""
    if not measures:
        return Measurement()
    if config.compares_devices:
        return Measurement(probed_parts=1)
    if config.compares_workers:
        return Measurement(compared="gradient" if worker_count > 1 else "nothing")
    # Workers that start from different parameters differ by more than noise.
    start_together = METHODS[config.distributed_algo]().keeps == "shared" and not config.message_loss
    return Measurement(
        probed_parts=2 if config.sampling_method in NEED_INNER_PRODUCTS else 1,
        compared="sketch" if start_together and worker_count >= MINIMUM_WORKERS else "nothing",
    )


def compare_workers(
    worker_group: "WorkerGroup",
    measurement: Measurement,
    records: Mapping[int, "WorkerRound"],
    vectors: Mapping[int, torch.Tensor | None],
) -> dict[int, "WorkerRound"]:
    """Compare the workers' gradients or sketches with their mean, and add the moments to the local records.

    Args:
        records: of the local workers, by number. Workers that are left out of the round are not compared.
        vectors: gradient or sketch of each local worker, flat, if the measurement asks for one.
    """
    if measurement.compared == "nothing":
        return dict(records)
    parameters = worker_group.shared["parameters"]
    like = parameters if measurement.compared == "gradient" else parameters.new_zeros(SKETCH_SIZE)
    incoming = worker_group.mean(like)
    present = [index for index, record in sorted(records.items()) if not record.left_out]
    for index in present:
        incoming.add(index, PLAIN.encode(vectors[index]))
    mean, _ = incoming.result()
    # A device that shares the model has a part of the gradient, but the whole sketch.
    total = worker_group.model.shard_group.sum if measurement.compared == "gradient" else None
    compared = dict(records)
    for index in present:
        moments = gradient_moments(vectors[index].to(mean.device), mean, total)
        compared[index] = dataclasses.replace(records[index], comparison=moments)
    return compared


def samples_for_test(
    config: Config, workers: Mapping[int, "WorkerRound"]
) -> tuple[list[SampleEstimate], SampleEstimate | None, str | None]:
    """Return the samples of the workers that are not left out, the estimate from their comparison, and a warning."""
    present = [worker for worker in workers.values() if not worker.left_out]
    moments = [worker.comparison for worker in present if worker.comparison is not None]
    if config.compares_workers:
        if len(moments) > 1:
            return [across_workers_estimate(moments, [worker.plan.effective_batch for worker in present])], None, None
        return [], None, "across_workers needs two workers: a trainer with one leaves its batch as it is"
    between = None
    if len(moments) >= MINIMUM_WORKERS:
        # A sketch is that of the worker's largest sample, or of its only example.
        batches = [max((sample.examples for sample in worker.samples), default=1) for worker in present]
        between = across_workers_estimate(moments, batches)
    samples = [sample for worker in present for sample in worker.samples]
    problem = None
    if not samples:
        estimator = config.statistics_estimator
        problem = f"{estimator} needs two examples of a step or of a probe batch in a worker, and no worker had them"
    return samples, between, problem
