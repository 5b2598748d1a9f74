"""What the gradients of a trainer's workers say beside each other, where a batch test asks for it."""

import dataclasses
from collections.abc import Mapping

import torch

from algorithms.batch.across_workers import SKETCH_SIZE, GradientMoments, gradient_moments
from algorithms.synchronisation.encodings.encoding import PLAIN
from fabrics.training.statistics_plan import Measures
from fabrics.training.worker import Worker, WorkerRound
from fabrics.training.worker_group import Workforce


def with_moments(
    workforce: Workforce,
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
    moments = compared_vectors(workforce, given, like)
    return {index: dataclasses.replace(record, moments=moments.get(index)) for index, record in records.items()}


def compared_vectors(
    workforce: Workforce, vectors: Mapping[int, torch.Tensor | None], like: torch.Tensor
) -> dict[int, GradientMoments]:
    """What each vector of a local worker says beside the mean over all workers'; None is left out.

    Args:
        vectors: flat, by worker of this process; of those that rest none.
        like: shape, type and device of the mean.
    """

    def vector_of(index: int, _: Worker) -> torch.Tensor | None:
        return None if (vector := vectors.get(index)) is None else PLAIN.encode(vector)

    mean, _ = workforce.mean(vector_of, like)
    working = workforce.first_working
    total = working.island.sum if like.shape == working.parameters.shape else None
    return {
        index: gradient_moments(vector.to(mean.device), mean, total)
        for index, vector in vectors.items()
        if vector is not None
    }
