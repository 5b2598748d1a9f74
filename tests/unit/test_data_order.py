"""Data order: subsets, walks through them, and merges of walks."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabrics.data.sampler import DataCursor, Subsets
from tests.support.helpers import peek, reloaded, subset_of


def cursors(trainers: int, examples: int) -> list[DataCursor]:
    subsets = Subsets(5, examples, trainers)
    return [DataCursor(subsets, [trainer]) for trainer in range(trainers)]


def drawn_by_hand(trainer: int, trainers: int, examples: int) -> list[int]:
    """The trainer's part of the documented permutation."""
    permutation = np.random.default_rng([5, 1]).permutation(examples).tolist()
    return sorted(permutation[trainer * examples // trainers : (trainer + 1) * examples // trainers])


def walked(cursor: DataCursor, count: int) -> list[int]:
    examples = peek(cursor, 0, count).tolist()
    cursor.advance([count])
    return examples


# Subsets


@pytest.mark.parametrize(("trainers", "examples"), [(4, 100), (3, 100), (1, 7), (7, 50), (130, 300)])
def test_subsets_are_parts_of_one_random_permutation(trainers, examples):
    subsets = Subsets(5, examples, trainers)
    drawn = [subsets.draw([trainer]).tolist() for trainer in range(trainers)]
    assert drawn == [drawn_by_hand(trainer, trainers, examples) for trainer in range(trainers)]
    assert sorted(np.concatenate(drawn)) == list(range(examples))
    assert [subsets.size([trainer]) for trainer in range(trainers)] == [len(own) for own in drawn]
    assert subsets.draw([0, trainers - 1]).tolist() == sorted({*drawn[0], *drawn[-1]})


# Walks


def test_the_order_is_numpys_for_seed_trainer_generation_and_epoch():
    cursor = cursors(3, 40)[1]
    own = drawn_by_hand(1, 3, 40)
    for epoch in (0, 1):
        expected = np.random.default_rng([5, 2, 1, 0, epoch]).permutation(np.array(own))
        assert peek(cursor, epoch * len(own), len(own)).tolist() == expected.tolist()


# Merges


events = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 30), st.none() | st.integers(2, 3)), min_size=1, max_size=14
)


@given(st.integers(2, 5), st.integers(5, 40), events)
def test_nothing_is_seen_twice_in_an_epoch_whenever_trainers_merge(trainers, examples, events):
    """Also resumed at every moment."""
    living = cursors(trainers, examples)
    views = Counter()

    def read(cursor, count):
        own = subset_of(cursor).tolist()
        for example in walked(cursor, count):
            assert views[example] == min(views[other] for other in own)
            views[example] += 1

    for chosen, count, merge in events:
        cursor = living[chosen % len(living)]
        stream = peek(cursor, 0, count).tolist()
        assert peek(reloaded(cursor), 0, count).tolist() == stream
        assert peek(cursor, count // 2, count - count // 2).tolist() == stream[count // 2 :]
        read(cursor, count)
        if merge is not None:
            living[0].unite(living[1:merge])
            del living[1:merge]
    living[0].unite(living[1:])
    most = max(views.values(), default=0)
    read(living[0], most * examples - views.total())
    # At the end of an epoch that no trainer was ahead of, every example has been seen equally often.
    assert {views[example] for example in range(examples)} == {most}
