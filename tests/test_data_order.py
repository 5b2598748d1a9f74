"""Which examples come when: subsets and walks through them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabrics.data_order import DataCursor, draw_subset


@pytest.mark.parametrize(("trainers", "examples"), [(4, 100), (3, 100), (1, 7), (7, 50)])
def test_default_subsets_are_a_random_partition(trainers, examples):
    subsets = [draw_subset(5, trainer, trainers, examples, None) for trainer in range(trainers)]
    assert sorted(np.concatenate(subsets).tolist()) == list(range(examples))
    if trainers > 1:
        assert subsets[0].tolist() != list(range(len(subsets[0])))


@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
def test_a_fraction_of_the_data_for_every_trainer(fraction):
    subsets = [draw_subset(5, trainer, 4, 100, fraction) for trainer in range(4)]
    for subset in subsets:
        assert len(np.unique(subset)) == len(subset) == round(100 * fraction)
    assert subsets[0].tolist() != subsets[1].tolist() or fraction == 1.0


def test_an_epoch_sees_every_example_once_and_the_next_in_another_order():
    cursor = DataCursor(3, 0, np.arange(20, 50))
    first, second = cursor.peek(0, 30).tolist(), cursor.peek(30, 30).tolist()
    assert sorted(first) == sorted(second) == list(range(20, 50))
    assert first != second


@given(st.integers(1, 40), st.lists(st.integers(1, 25), min_size=1, max_size=12))
def test_the_order_is_a_function_of_the_position_alone(size, steps):
    walker, stream = DataCursor(1, 2, np.arange(size)), []
    for step in steps:
        stream.extend(walker.peek(0, step).tolist())
        walker.advance(step)
    fresh = DataCursor(1, 2, np.arange(size))
    assert fresh.peek(0, sum(steps)).tolist() == stream
    assert fresh.peek(steps[0], sum(steps[1:])).tolist() == stream[steps[0] :]
    fresh.load_state_dict(walker.state_dict(), walker.subset)
    assert fresh.peek(0, 7).tolist() == walker.peek(0, 7).tolist()


def test_the_order_differs_between_trainers_and_seeds():
    orders = {tuple(DataCursor(seed, trainer, np.arange(30)).peek(0, 30)) for seed in (1, 2) for trainer in (0, 1)}
    assert len(orders) == 4


def test_a_merged_cursor_walks_the_union():
    cursor = DataCursor(1, 0, np.arange(10))
    before = cursor.peek(0, 10).tolist()
    cursor.advance(4)
    cursor.unite([DataCursor(1, 1, np.arange(5, 20)), DataCursor(1, 2, np.arange(30, 32))])
    assert sorted(cursor.peek(0, 22).tolist()) == [*range(20), 30, 31]
    assert [index for index in cursor.peek(0, 22) if index < 10] != before


def test_a_merge_of_trainers_with_the_same_data_begins_a_new_order():
    cursor = DataCursor(1, 0, np.arange(30))
    before = cursor.peek(0, 30).tolist()
    cursor.unite([DataCursor(1, 1, np.arange(30))])
    assert sorted(cursor.peek(0, 30).tolist()) == sorted(before)
    assert cursor.peek(0, 30).tolist() != before
