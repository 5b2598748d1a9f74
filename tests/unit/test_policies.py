"""Merge policies by hand."""

import pytest

from algorithms.nodes.policies import best_with_worst, merge_of, worst_with_worst


@pytest.mark.parametrize(
    ("policy", "requests", "count", "representative", "weights"),
    [
        (worst_with_worst, {0: 10, 1: 30, 2: 20, 3: 40}, 2, 2, {0: 1 / 3, 2: 2 / 3}),
        (worst_with_worst, {0: 10, 1: 30, 2: 20, 3: 40}, 3, 1, {0: 1 / 6, 1: 3 / 6, 2: 2 / 6}),
        (worst_with_worst, {0: 8, 1: 8, 2: 8}, 2, 0, {0: 0.5, 1: 0.5}),  # ties: the smaller id
        (worst_with_worst, {5: 1, 7: 1}, 2, 5, {5: 0.5, 7: 0.5}),
        (worst_with_worst, {3: 6, 9: 2}, 4, 3, {3: 0.75, 9: 0.25}),  # fewer than count live
        (best_with_worst, {0: 10, 1: 30, 2: 20, 3: 40}, 2, 3, {0: 0.2, 3: 0.8}),
        (best_with_worst, {0: 10, 1: 30, 2: 20, 3: 40}, 3, 3, {0: 1 / 7, 2: 2 / 7, 3: 4 / 7}),
        (best_with_worst, {0: 8, 1: 8, 2: 8}, 2, 0, {0: 0.5, 1: 0.5}),
    ],
)
def test_merge_policies(policy, requests, count, representative, weights):
    merge = merge_of(requests, policy(requests, count))
    assert merge.representative == representative
    assert merge.weights == pytest.approx(weights)
