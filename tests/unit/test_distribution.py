"""The distribution of nodes, and the bytes sent when it changes: numbers computed by hand, and invariants."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.nodes.distribution import (
    HandOver,
    StateBytes,
    distribute_nodes,
    hand_overs,
    node_counts,
)
from algorithms.nodes.traffic import merge_bytes, redistribution_bytes


@pytest.mark.parametrize(
    ("requests", "nodes", "expected"),
    [
        ({0: 1, 1: 1, 2: 1, 3: 1}, 4, {0: (0,), 1: (1,), 2: (2,), 3: (3,)}),
        ({0: 30, 1: 10}, 4, {0: (0, 1, 2), 1: (3,)}),
        ({0: 10, 1: 30}, 4, {0: (3,), 1: (0, 1, 2)}),  # the larger trainer first
        ({0: 8, 1: 8}, 4, {0: (0, 1), 1: (2, 3)}),
        ({0: 8, 1: 8}, 5, {0: (0, 1, 2), 1: (3, 4)}),  # the odd node to the smaller id
        ({0: 1000, 1: 1, 2: 1}, 4, {0: (0, 1), 1: (2,), 2: (3,)}),  # at least one each
        ({4: 7}, 3, {4: (0, 1, 2)}),
        ({0: 5, 1: 9}, 1, {0: (0,), 1: (0,)}),  # one node serves both trainers in turn
        ({0: 1, 1: 2, 2: 3, 3: 4, 5: 5}, 2, {0: (0,), 1: (1,), 2: (0,), 3: (1,), 5: (0,)}),
    ],
)
def test_first_distribution_of_nodes(requests, nodes, expected):
    assert distribute_nodes(requests, range(nodes)) == expected


# Changes


REQUESTS = st.dictionaries(st.integers(0, 50), st.integers(1, 1000), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("requests", "present", "expected"),
    [
        # 54 / 3 = 18 is not more than 1.25 * 30 / 2 = 18.75: nothing moves
        ({0: 30, 1: 54}, {0: (0, 1), 1: (2, 3)}, {0: (0, 1), 1: (2, 3)}),
        ({0: 30, 1: 57}, {0: (0, 1), 1: (2, 3)}, {0: (0,), 1: (2, 3, 1)}),  # 57 / 3 = 19 is: the last worker leaves
        ({0: 80, 1: 8}, {0: (0,), 1: (1, 2, 3)}, {0: (0, 2, 3), 1: (1,)}),  # several at once
        ({1: 8, 2: 8}, {0: (0, 1), 1: (2,), 2: (3,)}, {1: (2, 0), 2: (3, 1)}),  # trainer 0 was merged away
        ({0: 8, 1: 8}, {0: (9, 1), 1: (2, 3)}, {0: (0, 1), 1: (2, 3)}),  # node 9 failed, and node 0 takes its place
        ({0: 8, 1: 24}, {0: (9, 1, 2), 1: (3,)}, {0: (1,), 1: (3, 0, 2)}),  # node 9 failed, and worker 1 moves up
        ({0: 8, 1: 8, 2: 8}, {0: (0, 1, 2), 1: (3,)}, {0: (0, 1), 1: (3,), 2: (2,)}),  # a new trainer gets one
    ],
)
def test_nodes_move_only_for_a_clear_difference_of_requests(requests, present, expected):
    assert distribute_nodes(requests, range(4), present) == expected


def test_trainers_that_share_a_node_stay_on_it_while_loads_are_even():
    present = {0: (0,), 1: (1,), 2: (0,), 3: (1,), 4: (0,)}
    assert distribute_nodes(dict.fromkeys(range(5), 8), range(2), present) == present
    left = {trainer: present[trainer] for trainer in (0, 2, 4)}
    assert distribute_nodes(dict.fromkeys(left, 8), range(2), left) == {0: (0,), 2: (0,), 4: (1,)}
    # With enough nodes the larger request keeps the shared one.
    assert distribute_nodes({0: 8, 2: 9}, range(3), {0: (0,), 2: (0,)}) == {0: (2,), 2: (0, 1)}


@given(REQUESTS, st.integers(1, 12), st.data())
def test_every_distribution_is_complete_proportional_and_stable(requests, count, data):
    """After any earlier distribution, of whose nodes some may be gone."""
    before = data.draw(st.dictionaries(st.integers(0, 50), st.integers(1, 1000), min_size=1, max_size=8))
    present = distribute_nodes(before, range(data.draw(st.integers(1, 14))))
    found = distribute_nodes(requests, range(count), present)
    used = [node for nodes in found.values() for node in nodes]
    assert set(found) == set(requests)
    assert set(used) == set(range(min(count, len(used))))
    assert all(found.values())
    if len(requests) < count:
        assert sorted(used) == list(range(count))
        for giver, taker in ((g, t) for g in requests for t in requests if g != t and len(found[g]) > 1):
            limit = 1.25 * requests[giver] / len(found[giver])
            assert requests[taker] / (len(found[taker]) + 1) <= limit * (1 + 1e-12)
            if requests[taker] > 1.25 * requests[giver]:
                assert len(found[taker]) >= len(found[giver])
    else:
        loads = [used.count(node) for node in range(count)]
        assert max(loads) - min(loads) <= 1
    assert distribute_nodes(requests, range(count), found) == found


@given(REQUESTS, st.integers(2, 12), st.data())
def test_a_larger_request_never_loses_nodes(requests, count, data):
    present = distribute_nodes(requests, range(count), {})
    trainer = data.draw(st.sampled_from(sorted(requests)))
    larger = requests | {trainer: requests[trainer] + data.draw(st.integers(1, 1000))}
    assert len(distribute_nodes(larger, range(count), present)[trainer]) >= len(present[trainer])


def test_every_worker_has_the_smallest_batch():
    def counts(requests, nodes, present=None):
        return node_counts(requests, nodes, present or {}, smallest_batch=16)

    assert [counts({0: request}, 4)[0] for request in (4, 31, 32, 47, 64, 900)] == [1, 1, 2, 2, 4, 4]
    assert counts({0: 40, 1: 100}, 8) == {0: 2, 1: 6}
    assert counts({0: 40, 1: 100}, 10) == {0: 2, 1: 6}
    # A worker leaves when the request is a quarter too small for all.
    assert counts({0: 52}, 4, {0: 4}) == {0: 4}  # 1.25 * 52 is 65, and 64 is needed
    assert counts({0: 51}, 4, {0: 4}) == {0: 3}
    # Nodes without use are idle.
    assert counts({0: 16, 1: 16}, 8, {0: 1, 1: 1}) == {0: 1, 1: 1}
    assert counts({0: 100, 1: 16}, 5, {0: 3, 1: 2}) == {0: 4, 1: 1}


@given(REQUESTS, st.integers(1, 12), st.integers(1, 400), st.data())
def test_nodes_are_idle_only_if_no_trainer_has_use_for_them(requests, count, smallest, data):
    before = data.draw(st.dictionaries(st.integers(0, 50), st.integers(1, 1000), min_size=1, max_size=8))
    present = distribute_nodes(before, range(data.draw(st.integers(1, 14))))
    found = distribute_nodes(requests, range(count), present, smallest)
    assert distribute_nodes(requests, range(count), found, smallest) == found
    if len(requests) < count:
        used = [node for nodes in found.values() for node in nodes]
        assert len(set(used)) == len(used)
        for trainer, nodes in found.items():
            assert len(nodes) == 1 or 1.25 * requests[trainer] >= len(nodes) * smallest
            assert len(used) == count or len(nodes) >= min(requests[trainer] // smallest, count)


# State that moves


def test_workers_keep_their_state_and_new_ones_copy_that_of_the_first():
    nothing_lost = frozenset()
    assert hand_overs((), (0, 1), nothing_lost) == []
    assert hand_overs((0, 1, 2), (0, 1), nothing_lost) == []  # surplus workers end
    assert hand_overs((0, 1), (0, 1, 5, 6), nothing_lost) == [HandOver(0, 0, {2: 5, 3: 6}, whole=False)]
    assert hand_overs((0, 1), (7, 1), nothing_lost) == [HandOver(0, 0, {0: 7}, whole=True)]
    assert hand_overs((0, 1, 2), (0, 1, 2), frozenset({0})) == [HandOver(1, 1, {0: 0}, whole=False)]
    assert hand_overs((0, 1), (0, 1, 2), frozenset({0, 1})) == []


def test_bytes_of_redistributions_by_hand():
    """Parameters and velocity: 800 bytes; two moments and a step count: 804; an encoding error: 400."""
    sizes = StateBytes(trainer=800, worker=804, personal=400)

    def sent(old, new, lost=()):
        return redistribution_bytes(old, new, hand_overs(old, new, frozenset(lost)), sizes)

    assert sent((), (0, 1)) == 0
    assert sent((0, 1), (0, 1)) == sent((0, 1), (0,)) == 0
    assert sent((0,), (0, 1, 2, 3)) == 3 * (800 + 804)
    assert sent((0, 1), (5, 1)) == 800 + 804 + 400  # worker 0 moves
    assert sent((0, 1), (0, 1), lost=[1]) == 804  # node 1 has the trainer's tensors already
    assert sent((0, 1), (0, 2), lost=[1]) == 800 + 804
    assert sent((0, 1), (1, 0)) == 2 * (804 + 400)
    # Worker 0 moves to node 1; the new worker on node 0 copies the moments that are there.
    assert sent((0, 1), (1, 0), lost=[1]) == (804 + 400) + 0


def test_bytes_of_merges_by_hand():
    assert merge_bytes((0,), [(1,)], 800) == 800
    assert merge_bytes((0,), [(1,), (2,), (3,)], 800) == 3 * 800
    assert (
        merge_bytes((0, 1, 2), [(3, 4), (5,)], 800) == 2 * 800 + 2 * 800
    )  # to its first node, and on to the two others
    assert merge_bytes((0,), [(0,), (1,)], 800) == 800  # node 0 serves both trainers
