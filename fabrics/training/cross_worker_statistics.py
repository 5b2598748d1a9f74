"""What the gradients of a trainer's workers say beside each other, where a batch test asks for it."""

import dataclasses
from collections.abc import Mapping

import torch

from algorithms.batch.across_workers import SKETCH_SIZE, GradientMoments, gradient_moments
from algorithms.synchronisation.encodings.encoding import PLAIN
from fabrics.training.statistics_plan import Measures
from fabrics.training.worker import WorkerRound
from fabrics.training.worker_group import WorkerGroup


def with_moments(
    worker_group: WorkerGroup,
    measured: Measures,
    records: Mapping[int, WorkerRound],
    vectors: Mapping[int, torch.Tensor | None],
    parameters: torch.Tensor,
) -> dict[int, WorkerRound]:
    """The records of local workers with the moments of what each hands back; nothing of one that is left out.

    Args:
        measured: what the round measures. vectors: what each hands back. parameters: flat, of the trainer.
    """
    if measured.compared == "nothing":
        return dict(records)
    like = parameters if measured.compared == "gradient" else parameters.new_zeros(SKETCH_SIZE)
    given = {index: None if records[index].left_out else vector for index, vector in vectors.items()}
    moments = compared_vectors(worker_group, given, like)
    return {index: dataclasses.replace(record, moments=moments.get(index)) for index, record in records.items()}


def compared_vectors(
    worker_group: WorkerGroup, vectors: Mapping[int, torch.Tensor | None], like: torch.Tensor
) -> dict[int, GradientMoments]:
    """What each vector of a local worker says beside the mean over all workers'; None is left out.

    Args:
        vectors: flat, by worker of this process; of those that rest none.
        like: shape, type and device of the mean.
    """

    incoming = worker_group.mean(like)
    for index in sorted(vectors):
        if vectors[index] is not None:
            incoming.add(index, PLAIN.encode(vectors[index]))
    mean, _ = incoming.result()
    working = worker_group.first_working
    total = working.shard_group.sum if like.shape == working.parameters.shape else None
    return {
        index: gradient_moments(vector.to(mean.device), mean, total)
        for index, vector in vectors.items()
        if vector is not None
    }
