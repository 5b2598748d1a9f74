"""Which examples come when: subsets, walks through them, and what becomes of walks when trainers merge."""

import json
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabrics.data.sampler import DataCursor, Subsets


def cursors(trainers: int, examples: int, fraction: float | None = None) -> list[DataCursor]:
    subsets = Subsets(5, examples, trainers, fraction)
    return [DataCursor(subsets, trainer) for trainer in range(trainers)]


def drawn_by_hand(trainer: int, trainers: int, examples: int, fraction: float | None) -> list[int]:
    """A window of numpy's permutation, as it is documented."""
    permutation = np.random.default_rng([5, 1]).permutation(examples).tolist()
    start, end = trainer * examples // trainers, (trainer + 1) * examples // trainers
    size = end - start if fraction is None else round(fraction * examples)
    return sorted((permutation * 2)[start : start + size])


def walked(cursor: DataCursor, count: int) -> list[int]:
    examples = cursor.peek(0, count).tolist()
    cursor.advance([count])
    return examples


def reloaded(cursor: DataCursor) -> DataCursor:
    """What is continued from a checkpoint."""
    fresh = DataCursor(Subsets(0, 1), 0)
    fresh.load_state_dict(json.loads(json.dumps(cursor.state_dict())))
    return fresh


# Subsets


@pytest.mark.parametrize(("trainers", "examples"), [(4, 100), (3, 100), (1, 7), (7, 50), (130, 300)])
def test_default_subsets_are_a_random_partition(trainers, examples):
    subsets = [cursor.subset for cursor in cursors(trainers, examples)]
    assert sorted(np.concatenate(subsets).tolist()) == list(range(examples))
    if trainers > 1:
        assert subsets[0].tolist() != list(range(len(subsets[0])))


@given(st.integers(1, 6), st.integers(6, 60), st.none() | st.floats(0.2, 1.0), st.sets(st.integers(0, 5), min_size=1))
def test_subsets_are_windows_of_one_permutation(trainers, examples, fraction, chosen):
    subsets = Subsets(5, examples, trainers, fraction)
    chosen = {trainer % trainers for trainer in chosen}
    expected = set()
    for trainer in chosen:
        own = drawn_by_hand(trainer, trainers, examples, fraction)
        assert subsets.draw([trainer]).tolist() == own
        expected |= set(own)
    assert subsets.draw(chosen).tolist() == sorted(expected)
    assert subsets.size(chosen) == len(expected)


def test_a_trainer_without_data_is_an_error():
    with pytest.raises(ValueError, match="trainer 0 has no data"):
        DataCursor(Subsets(5, 3, 4), 0)


# Walks


def test_an_epoch_sees_every_example_once_and_the_next_in_another_order():
    cursor = DataCursor(Subsets(3, 30), 0)
    first, second = cursor.peek(0, 30).tolist(), cursor.peek(30, 30).tolist()
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second


def test_the_order_is_numpys_for_seed_trainer_generation_and_epoch():
    cursor = cursors(3, 40)[1]
    own = drawn_by_hand(1, 3, 40, None)
    for epoch in (0, 1):
        expected = np.random.default_rng([5, 2, 1, 0, epoch]).permutation(np.array(own))
        assert cursor.peek(epoch * len(own), len(own)).tolist() == expected.tolist()


@given(st.integers(1, 40), st.lists(st.integers(1, 25), min_size=1, max_size=12))
def test_the_order_is_a_function_of_the_position_alone(size, steps):
    walker, stream = DataCursor(Subsets(1, size), 0), []
    for step in steps:
        stream += walked(walker, step)
    fresh = DataCursor(Subsets(1, size), 0)
    assert fresh.peek(0, sum(steps)).tolist() == stream
    assert fresh.peek(steps[0], sum(steps[1:])).tolist() == stream[steps[0] :]
    assert reloaded(walker).peek(0, 7).tolist() == walker.peek(0, 7).tolist()


def test_the_order_differs_between_trainers_and_seeds():
    orders = {
        tuple(DataCursor(Subsets(seed, 30, 2, 1.0), trainer).peek(0, 30)) for seed in (1, 2) for trainer in (0, 1)
    }
    assert len(orders) == 4


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
    assert second != first.peek(0, 100).tolist()


def test_what_one_of_the_merged_has_seen_counts_as_seen():
    first, second = cursors(2, 40, 1.0)
    seen = {*walked(first, 15), *walked(second, 10)}
    assert 15 < len(seen) < 25
    first.unite([second])
    assert sorted(walked(first, 40 - len(seen))) == sorted(set(range(40)) - seen)
    assert sorted(walked(first, 40)) == list(range(40))


def test_a_merge_of_trainers_with_the_same_data_begins_a_new_order():
    first, second = cursors(2, 30, 1.0)
    before = first.peek(0, 30).tolist()
    first.unite([second])
    assert sorted(first.peek(0, 30).tolist()) == sorted(before)
    assert first.peek(0, 30).tolist() != before


def test_a_merge_costs_the_same_however_many_came_before(monkeypatch):
    first, *others = cursors(9, 900)
    drawn = []
    monkeypatch.setattr(Subsets, "mask", lambda *given, mask=Subsets.mask: drawn.append(1) or mask(*given))
    walked(first, 10)
    costs = []
    for other in others:
        drawn.clear()
        first.unite([other])
        walked(first, 10)
        costs.append(len(drawn))
    assert set(costs[1:]) == {costs[1]}


class SeenSoFar:
    """What a walk has seen in which epoch, by the definition: counted in sets, one example after the other."""

    def __init__(self, subset: set[int]):
        self.subset, self.epoch, self.seen = subset, 0, defaultdict(set)

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


@given(st.integers(2, 5), st.integers(5, 40), st.none() | st.floats(0.2, 1.0), events)
def test_nothing_is_seen_twice_in_an_epoch_whenever_trainers_merge(trainers, examples, fraction, events):
    """Also from a checkpoint at every moment, and with subsets that overlap."""
    walks = cursors(trainers, examples, fraction)
    living = [(cursor, SeenSoFar(set(cursor.subset.tolist()))) for cursor in walks]
    views = Counter()
    for chosen, count, merge in events:
        cursor, expected = living[chosen % len(living)]
        stream = cursor.peek(0, count).tolist()
        assert reloaded(cursor).peek(0, count).tolist() == stream
        assert cursor.peek(count // 2, count - count // 2).tolist() == stream[count // 2 :]
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
    if fraction is None:
        # At the end of an epoch that nobody was ahead of, everything has been seen equally often.
        assert {views[example] for example in range(examples)} == {expected.epoch}


@given(st.integers(2, 5), st.integers(10, 60), st.lists(st.floats(0, 1), min_size=10, max_size=10), st.integers(2, 3))
def test_one_epoch_in_all_is_every_example_once(trainers, examples, shares, merge_count):
    """Through merges of some and of merged ones at any moments, nobody ahead of its first epoch."""
    living, seen, left = cursors(trainers, examples), [], {}
    for cursor in living:
        left[cursor] = len(cursor)
    while len(living) > 1:
        for cursor in living:
            count = int(shares[len(seen) % 10] * left[cursor])
            seen += walked(cursor, count)
            left[cursor] -= count
        first, *others = living[:merge_count]
        first.unite(others)
        left[first] += sum(left[other] for other in others)
        living[:merge_count] = [first]
    seen += walked(living[0], examples - len(seen))
    assert sorted(seen) == list(range(examples))
