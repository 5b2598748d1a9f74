"""Numbers that plots and dashboard show and that no column of a log holds."""

import numpy as np

from training_logs.showing.number_log import Rows
from training_logs.showing.run_data import RunData

# More points than pixels only cost time.
POINTS = 500
# More marks than this on a line cannot be told apart.
MARKS = 80


def mode_switches(rows: Rows) -> Rows:
    """Of one trainer's rows those at which it begins to accumulate gradients, having not done so before."""
    accumulates = rows["accumulation_steps"] > 1
    return rows.where(accumulates & ~np.concatenate([[False], accumulates[:-1]]))


def step_losses(run: RunData, trainer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The trainer's inner steps, counted over all rounds, their losses, and how many steps each is the mean of."""
    return run.step_losses.get(trainer, (np.empty(0), np.empty(0), np.empty(0)))


def thinned(
    xs: np.ndarray, ys: np.ndarray, weights: np.ndarray | None = None, points: int = POINTS
) -> tuple[np.ndarray, np.ndarray]:
    """At most so many points: weighted means over stretches of equal weight; without weights all weigh the same."""
    if len(xs) <= points:
        return xs, ys
    weights = np.ones(len(xs)) if weights is None else weights
    ends = np.cumsum(weights)
    place = ((ends - weights) * points / ends[-1]).astype(int)
    sums = np.bincount(place, weights)
    used = sums > 0.0
    return tuple(np.bincount(place, weights * values)[used] / sums[used] for values in (xs, ys))


def spread(count: int, points: int = POINTS) -> np.ndarray:
    """At most so many of `count` places, the first and the last among them, in equal steps."""
    return np.arange(count) if count <= points else np.linspace(0, count - 1, points).astype(int)


def marked(run: RunData, rows: Rows) -> Rows:
    """Of one trainer's rows those that get a mark of their own: of every round, or of every so many of a long run."""
    every = -(-len(run.by_round) // MARKS)
    return rows.where((rows["outer_step"] - 1) % every == 0)
