"""SparseLoCo and DeMo against independent implementations of their papers."""

import numpy as np
import pytest
import torch

from fabrics.config_checks import CHECKS
from tests.support import oracles_sparse
from tests.support.helpers import train
from tests.support.synchronising import assert_equals_oracle, history_of, problem_of, trainer_of
from utils.config.reading import parse_config
from utils.config.schema import ConfigError

# SparseLoCo and DeMo

UNEVEN = {"INITIAL_BATCH_SIZE": 9, "max_requested_batch": 9, "max_batches": (64, 2, 64)}  # 3, 2 and 3 examples


def sparse_loco(**values) -> dict:
    return {"distributed_algo": "SparseLoCo", "synchronisation": values}


def demo(**values) -> dict:
    return {"distributed_algo": "DeMo", "synchronisation": values}


@pytest.mark.parametrize(
    ("nodes", "density", "chunk", "error_decay", "bits", "mean_over", "others"),
    [
        (2, 0.1, 48, 0.95, 32, "workers", {}),
        (3, 0.25, 100, 0.5, 2, "senders", UNEVEN),
        (1, 0.02, 4096, 1.0, 3, "senders", {}),
    ],
)
def test_sparse_loco(nodes, density, chunk, error_decay, bits, mean_over, others):
    values = {"density": density, "chunk": chunk, "error_decay": error_decay, "bits": bits, "mean_over": mean_over}
    assert_equals_oracle(
        lambda problem: oracles_sparse.sparse_loco(problem, lr=0.7, **values),
        nodes,
        inner_steps=2,
        **sparse_loco(**values),
        **others,
    )


@pytest.mark.parametrize(
    ("nodes", "chunk", "top_k", "decay", "others"),
    [
        (2, 64, 32, 0.999, {"gradient_clipping": None}),
        (3, 16, 1, 0.9, UNEVEN | {"gradient_clipping": 0.05, "weight_decay": 0.5}),
        (1, 8, 1, 0.5, {}),
    ],
)
def test_demo(nodes, chunk, top_k, decay, others):
    """Of no block all coefficients have been sent, after which those of a token without a gradient would be noise."""
    assert_equals_oracle(
        lambda problem: oracles_sparse.demo(problem, chunk, top_k, decay, lr=0.01),
        nodes,
        inner_steps=2,
        **demo(chunk=chunk, top_k=top_k, decay=decay),
        **others,
    )


@pytest.mark.parametrize("mean_over", ["workers", "senders"])
def test_sparse_loco_that_sends_everything_is_averaging_to_the_bit(mean_over):
    everything = sparse_loco(density=1.0, chunk=100, bits=32, mean_over=mean_over)
    common = {"nodes": 3, "inner_optimizer": "adamw", "learning_rate_for_outer_opt": 1.0} | UNEVEN
    found = history_of(trainer_of(**common, **everything), 2, 2).shared
    expected = history_of(trainer_of(**common, distributed_algo="LocalSGD"), 2, 2).shared
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_demo_that_sends_everything_is_the_sign_of_the_mean_gradient():
    values = {"gradient_clipping": None, "weight_decay": 0.0} | UNEVEN
    trainer = trainer_of(3, **demo(chunk=8, top_k=64), **values)
    problem = problem_of(trainer, 1, 1)
    gradient = problem.mean([problem.gradient(worker, 0, problem.start.copy()) for worker in range(3)])
    found = history_of(trainer, 1, 1).shared[0]
    np.testing.assert_allclose(found - problem.start, -0.01 * np.sign(gradient), rtol=0, atol=1e-12)
    for worker in trainer.workers.values():
        assert worker.state["momentum"].abs().max() < 1e-15


def test_what_sparse_methods_send_is_as_narrow_as_on_paper():
    sizes = [block.size for block in trainer_of().worker_group.first_model.blocks]
    chunks = sum(sizes) / 16  # 16 divides all

    def sent(**values) -> float:
        return {event.sent for event in train(trainer_of(3, **values), 1, 1)[0].events}.pop() / 2  # to two others

    # 4 of 16, each with a code of 2 bits and a place of 4, and a table of four numbers in float64.
    assert sent(**sparse_loco(density=0.25, chunk=16, bits=2)) == chunks * 4 * (2 + 4) / 8 + len(sizes) * 4 * 8
    assert sent(**sparse_loco(density=0.25, chunk=16, bits=32)) == chunks * 4 * (64 + 4) / 8
    # Blocks of 4 x 4 in matrices of 1536 numbers, and of 4 in 2 vectors of 16 and 2 matrices of 61 x 16: 61 is prime.
    expected = 1536 / 16 * (2 + 4 / 8) + (2 * 4 + 2 * 61 * 4) * (2 + 2 / 8)
    assert sent(**demo(chunk=4, top_k=1), communication_dtype="bfloat16") == expected


def test_what_bfloat16_loses_of_a_coefficient_stays_in_the_momentum():
    values = {"gradient_clipping": None, "communication_dtype": "bfloat16"}
    trainer = trainer_of(2, **demo(chunk=8, top_k=64), **values)
    problem = problem_of(trainer, 1, 1)
    train(trainer, 1, 1)
    for index, worker in trainer.workers.items():
        before = 0.01 * torch.from_numpy(problem.gradient(index, 0, problem.start.copy()))
        method = trainer.worker_group.method
        for each in method.matrices(trainer.worker_group.first_model.blocks):
            coefficients = each.coefficients(before)
            left = each.coefficients(worker.state["momentum"])
            torch.testing.assert_close(left, coefficients - coefficients.bfloat16(), rtol=0, atol=1e-15)
            assert left.abs().max() > 1e-8


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (sparse_loco(density=0), "synchronisation.density: must be above 0 and at most 1, got 0.0"),
        (sparse_loco(chunk=0), "synchronisation.chunk: must be from 1 to 2^31, got 0"),
        (sparse_loco(error_decay=1.1), "synchronisation.error_decay: must be from 0 to 1, got 1.1"),
        (sparse_loco(bits=9), "synchronisation.bits: must be from 1 to 8, or 32, got 9"),
        (sparse_loco(mean_over="all"), "synchronisation.mean_over: should be 'workers' or 'senders', got 'all'"),
        (
            sparse_loco() | {"communication_dtype": "bfloat16"},
            "communication_dtype: must be float32 with SparseLoCo, got bfloat16",
        ),
        (demo(top_k=0), "synchronisation.top_k: must be a positive integer, got 0"),
        (demo(chunk=8, top_k=65), "synchronisation.top_k: must be at most chunk x chunk, 64, got 65"),
        (demo(chunk=-1), "synchronisation.chunk: must be a positive integer, got -1"),
        (demo(decay=2), "synchronisation.decay: must be from 0 to 1, got 2.0"),
        (
            demo() | {"communication_dtype": "int8"},
            "communication_dtype: must be float32 or bfloat16 with DeMo, got int8",
        ),
    ],
)
def test_parameters_of_sparse_methods_that_make_no_sense_are_refused(values, line):
    with pytest.raises(ConfigError) as refused:
        parse_config({"max_tokens": 1} | values, (), CHECKS)
    assert refused.value.problems == [line]
