"""Merge policies by hand."""

import pytest

from algorithms.nodes.policies import Merge, best_with_worst, worst_with_worst


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
    plan = policy(requests, count)
    assert plan.representative == representative
    assert plan.weights == pytest.approx(weights)


@pytest.mark.parametrize(
    ("representative", "weights", "problem"),
    [
        (0, {0: 0.5, 1: 0.5}, None),
        (0, {0: 0.5, 7: 0.5}, "merges trainers [7], and there are [0, 1, 2]"),
        (2, {0: 0.5, 1: 0.5}, "merges [0, 1] into 2, which are not two or more and one of them"),
        (0, {0: 1.0}, "merges [0] into 0, which are not two or more and one of them"),
        (0, {0: 0.5, 1: 0.6}, "has weights {0: 0.5, 1: 0.6}, which must not be negative and sum to 1"),
        (0, {0: 1.5, 1: -0.5}, "has weights {0: 1.5, 1: -0.5}, which must not be negative and sum to 1"),
    ],
)
def test_a_plan_that_is_no_merge_names_the_problem(representative, weights, problem):
    assert Merge(representative, weights).problem([0, 1, 2]) == problem
