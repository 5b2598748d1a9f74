"""Data order: subsets, walks through them, and merges of walks."""

import json
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabrics.data.sampler import DataCursor, Subsets
from tests.support.helpers import peek, subset_of


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


def reloaded(cursor: DataCursor) -> DataCursor:
    """The cursor of a resumed run."""
    fresh = DataCursor(cursor._data, [0])
    fresh.load_state_dict(json.loads(json.dumps(cursor.state_dict())))
    return fresh


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


@given(st.integers(1, 40), st.lists(st.integers(1, 25), min_size=1, max_size=12))
def test_the_order_is_a_function_of_the_position_alone(size, steps):
    walker, stream = DataCursor(Subsets(1, size), [0]), []
    for step in steps:
        stream += walked(walker, step)
    fresh = DataCursor(Subsets(1, size), [0])
    assert peek(fresh, 0, sum(steps)).tolist() == stream
    assert peek(fresh, steps[0], sum(steps[1:])).tolist() == stream[steps[0] :]
    assert peek(reloaded(walker), 0, 7).tolist() == peek(walker, 0, 7).tolist()


# Merges


def test_a_merge_at_half_an_epoch_walks_what_is_left_and_then_the_union():
    walks, seen = cursors(4, 100), []
    for cursor in walks:
        seen += walked(cursor, 12)
    first, *others = walks
    first.unite(others)
    assert len(first) == 100
    assert sorted(seen + walked(first, 52)) == list(range(100))
    second = walked(first, 100)
    assert sorted(second) == list(range(100))
    assert sorted(walked(first, 100)) == list(range(100))
    assert second != peek(first, 0, 100).tolist()


class SeenSoFar:
    """Oracle of a walk: the examples seen in each epoch, as sets."""

    def __init__(self, subset: set[int]):
        self.subset = subset
        self.epoch = 0
        self.seen = defaultdict(set)

    def see(self, example: int) -> None:
        assert example in self.subset - self.seen[self.epoch]
        self.seen[self.epoch].add(example)
        self._finish_epochs()

    def _finish_epochs(self) -> None:
        while self.seen[self.epoch] >= self.subset:
            self.epoch += 1

    def unite(self, others: list["SeenSoFar"]) -> None:
        everybody = [self, *others]
        seen = defaultdict(set)
        for one in everybody:
            for epoch, examples in one.seen.items():
                seen[epoch] |= examples
        self.seen = seen
        self.subset = set().union(*(one.subset for one in everybody))
        self.epoch = min(one.epoch for one in everybody)
        self._finish_epochs()


events = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 30), st.none() | st.integers(2, 3)), min_size=1, max_size=14
)


@given(st.integers(2, 5), st.integers(5, 40), events)
def test_nothing_is_seen_twice_in_an_epoch_whenever_trainers_merge(trainers, examples, events):
    """Also resumed at every moment."""
    walks = cursors(trainers, examples)
    living = [(cursor, SeenSoFar(set(subset_of(cursor).tolist()))) for cursor in walks]
    views = Counter()
    for chosen, count, merge in events:
        cursor, expected = living[chosen % len(living)]
        stream = peek(cursor, 0, count).tolist()
        assert peek(reloaded(cursor), 0, count).tolist() == stream
        assert peek(cursor, count // 2, count - count // 2).tolist() == stream[count // 2 :]
        for example in walked(cursor, count):
            expected.see(example)
            views[example] += 1
        if merge is not None and len(living) > 1:
            (cursor, expected), *others = living[:merge]
            cursor.unite([other for other, _ in others])
            expected.unite([other for _, other in others])
            living[:merge] = [(cursor, expected)]
    (cursor, expected), *others = living
    cursor.unite([other for other, _ in others])
    expected.unite([other for _, other in others])
    while any(seen for epoch, seen in expected.seen.items() if epoch >= expected.epoch):
        (example,) = walked(cursor, 1)
        expected.see(example)
        views[example] += 1
    # At the end of an epoch that no trainer was ahead of, every example has been seen equally often.
    assert {views[example] for example in range(examples)} == {expected.epoch}
