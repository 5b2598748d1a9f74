"""Switch mode: tables of numbers, and properties of all plans."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.batch.switch_mode import (
    SWITCH_MODES,
    ExecutionPlan,
    only_data_loader,
    only_gradient_accumulation,
    threshold_switch_mode,
)


@pytest.mark.parametrize(
    ("worker_batch", "threshold", "accumulation", "data_loader"),
    [
        (1, (1,), (1,), (1,)),
        (8, (8,), (8,), (8,)),
        (9, (8,), (5, 4), (8,)),
        (16, (8,), (8, 8), (8,)),
        (17, (6, 6, 5), (6, 6, 5), (8,)),
        (33, (7, 7, 7, 6, 6), (7, 7, 7, 6, 6), (8,)),
        (64, (8,) * 8, (8,) * 8, (8,)),
    ],
)
def test_plans_for_a_max_batch_of_8(worker_batch, threshold, accumulation, data_loader):
    assert threshold_switch_mode(worker_batch, 8).micro_batches == threshold
    assert only_gradient_accumulation(worker_batch, 8).micro_batches == accumulation
    assert only_data_loader(worker_batch, 8).micro_batches == data_loader


@pytest.mark.parametrize(("multiplier", "expected"), [(1, (5, 4)), (2, (8,)), (3, (8,))])
def test_the_multiplier_moves_the_threshold(multiplier, expected):
    assert threshold_switch_mode(9, 8, multiplier).micro_batches == expected


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 4))
def test_a_plan_fits_and_runs_exactly_what_is_requested_when_it_accumulates(worker_batch, max_batch, multiplier):
    for mode in SWITCH_MODES.values():
        plan = mode(worker_batch, max_batch, multiplier)
        assert 1 <= min(plan.micro_batches) <= max(plan.micro_batches) <= max_batch
        assert max(plan.micro_batches) - min(plan.micro_batches) <= 1
        if plan.accumulation_steps > 1:
            assert plan.effective_batch == worker_batch
            assert plan.accumulation_steps == -(-worker_batch // max_batch)
        else:
            assert plan.effective_batch == min(worker_batch, max_batch)


@pytest.mark.parametrize("sizes", [(), (4, 0), (-1,)])
def test_an_empty_plan_is_refused(sizes):
    with pytest.raises(ValueError, match="positive"):
        ExecutionPlan(sizes)
