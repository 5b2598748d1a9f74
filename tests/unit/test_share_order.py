"""The order of examples in non-IID shares, through changing workers, merges and resumes."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.nodes.balance import slice_offsets
from fabrics.data.examples import PackedSequences
from fabrics.data.sampler import DataCursor, Shares, next_of_several, shares_of_workers, tokens_ahead
from tests.support.helpers import (
    make_config,
    make_trainer,
    padded,
    random_sequences,
    reloaded,
    subset_of,
    tiny_llama,
    train,
)


def read(cursor: DataCursor, batches: list[int], steps: int) -> list[list[int]]:
    """Return the examples of every worker in a round of inner steps, and advance."""
    found = {}
    for reading in cursor.readings(len(batches)):
        own = [batches[worker] for worker in reading.workers]
        for worker, firsts in zip(reading.workers, slice_offsets(own, [range(steps)] * len(own)), strict=True):
            found[worker] = [example for first in firsts for example in reading.places(first, batches[worker]).tolist()]
    cursor.advance([steps * batch for batch in batches])
    return [found[worker] for worker in range(len(batches))]


@pytest.mark.parametrize(
    ("shares", "workers", "expected"),
    [
        ([0, 1, 2, 3], 4, [(0,), (1,), (2,), (3,)]),
        ([0, 1, 2, 3], 1, [(0, 1, 2, 3)]),
        ([4, 5, 6, 7, 9], 2, [(4, 6, 9), (5, 7)]),
        ([2, 5], 4, [(2,), (5,), (2,), (5,)]),
        ([2, 5], 3, [(2,), (5,), (2,)]),
    ],
)
def test_workers_divide_the_shares_of_their_trainer(shares, workers, expected):
    assert shares_of_workers(shares, workers) == expected


def test_trainers_begin_with_consecutive_shares():
    assert [list(Shares(1, (1,) * 5).first(trainer, 2)) for trainer in range(2)] == [[0, 1], [2, 3, 4]]
    assert [list(Shares(1, (1,) * 4).first(trainer, 4)) for trainer in range(4)] == [[0], [1], [2], [3]]


def test_the_share_with_the_least_progress_comes_next():
    which, places = next_of_several([0, 0], [2, 4], 8)
    # Halves of the first at 1/2, 1, 3/2; quarters of the second at 1/4, 1/2, 3/4, 1, 5/4.
    assert which.tolist() == [1, 0, 1, 1, 0, 1, 1, 0]
    assert places.tolist() == [0, 0, 1, 2, 1, 3, 4, 2]
    # One that is an epoch behind catches up first.
    assert next_of_several([0, 4], [2, 4], 4)[0].tolist() == [0, 0, 1, 0]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), min_size=1, max_size=6), st.integers(1, 60))
def test_shares_are_read_in_the_order_of_their_progress(walks, count):
    """Against a search for every example."""
    positions = [position for position, _ in walks]
    sizes = [size for _, size in walks]
    which, places = next_of_several(positions, sizes, count)
    for share, place in zip(which.tolist(), places.tolist(), strict=True):
        assert share == min(range(len(walks)), key=lambda walk: ((positions[walk] + 1) / sizes[walk], walk))
        assert place == positions[share]
        positions[share] += 1


def test_the_order_is_numpys_for_seed_share_and_epoch():
    cursor = DataCursor(Shares(5, (3, 6)), [1], True)
    for epoch in (0, 1):
        expected = np.random.default_rng([5, 3, 1, epoch]).permutation(np.arange(3, 9))
        assert cursor.readings(1)[0].places(6 * epoch, 6).tolist() == expected.tolist()


def test_workers_that_read_the_same_shares_take_consecutive_slices():
    cursor = DataCursor(Shares(5, (8, 12)), [0, 1], False)
    ((upcoming, workers, size),) = cursor.readings(3)
    assert (workers, size) == ((0, 1, 2), 20)
    steps = upcoming(0, 18).reshape(3, 6)
    one, two, three = read(cursor, [2, 3, 1], 3)
    assert [one, two, three] == [steps[:, part].ravel().tolist() for part in (slice(2), slice(2, 5), slice(5, 6))]
    assert len({*one, *two, *three}) == 18
    rest = {example for worker in read(cursor, [1, 1], 1) for example in worker}
    assert {*one, *two, *three} | rest == set(range(20))


@pytest.mark.parametrize("by_worker", [True, False])
def test_tokens_ahead_are_those_that_are_read(by_worker):
    texts = padded([[1] * length for length in range(1, 25)])
    cursor, batches = DataCursor(Shares(1, (6, 10, 8)), [0, 1, 2], by_worker), [2, 1, 3]
    expected = tokens_ahead(cursor.readings(3), [2 * batch for batch in batches], texts)
    assert expected == sum(texts.tokens(part) for part in read(cursor, batches, 2))


rounds = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 3), st.booleans()),
    min_size=1,
    max_size=10,
)


@given(st.lists(st.integers(1, 9), min_size=4, max_size=7), st.booleans(), rounds)
def test_nothing_is_seen_twice_in_an_epoch_of_a_share(sizes, by_worker, events):
    """Also through merges, and resumed at every moment."""
    shares = Shares(3, tuple(sizes))
    living = [DataCursor(shares, shares.first(trainer, 4), by_worker) for trainer in range(4)]
    seen = Counter()
    for chosen, batches, steps, merges in events:
        cursor = living[chosen % len(living)]
        again = reloaded(cursor)
        parts = read(cursor, batches, steps)
        assert read(again, batches, steps) == parts
        assert again.state_dict() == cursor.state_dict()
        seen.update(example for part in parts for example in part)
        if merges and len(living) > 1:
            other = living.pop()
            living[0].unite([other])
        for share, size in enumerate(sizes):
            counts = [seen[example] for example in shares.draw([share])]
            assert max(counts) - min(counts) <= 1
            assert sum(counts) == sum(cursor.positions.get(share, 0) for cursor in living)
            assert size == len(counts)
    assert sorted(np.concatenate([subset_of(cursor) for cursor in living])) == list(range(sum(sizes)))


# Trainers


def test_workers_of_a_trainer_train_on_their_shares():
    examples = PackedSequences(random_sequences(40))
    trainer = make_trainer(tiny_llama(), make_config(INITIAL_BATCH_SIZE=6, max_requested_batch=6), examples, 3)
    trainer.cursor = DataCursor(Shares(1, (10, 14, 16)), [0, 1, 2], True)
    trained = []
    batch_of = examples.batch

    def recorded(indices, device):
        trained.append(np.asarray(indices).tolist())
        return batch_of(indices, device)

    examples.batch = recorded
    train(trainer, 2)
    shares = [{np.searchsorted([10, 24], index, side="right") for index in batch} for batch in trained]
    assert all(len(own) == 1 for own in shares)
    # Two rounds of three inner steps, and of a batch that is larger for statistics, which is of the share as well.
    assert Counter(next(iter(own)) for own in shares) == {0: 8, 1: 8, 2: 8}
    assert trainer.cursor.positions == {0: 12, 1: 12, 2: 12}
