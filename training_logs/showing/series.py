"""Numbers that plots and dashboard show and that no column of a log holds."""

import numpy as np

from training_logs.showing.run_data import Row, RunData

# More points than pixels only cost time.
_POINTS = 500


def mode_switches(run: RunData, trainer: int) -> list[Row]:
    """The rows at which a trainer begins to accumulate gradients, having not done so before."""
    rows = run.of(trainer)
    before = [False, *(row["accumulation_steps"] > 1 for row in rows)]
    return [row for row, was in zip(rows, before, strict=False) if row["accumulation_steps"] > 1 and not was]


def step_losses(run: RunData, trainer: int) -> tuple[np.ndarray, np.ndarray]:
    """The trainer's inner steps, counted over all rounds, and their losses: means over its workers."""
    steps = run.steps
    if len(steps):
        # A worker that diverged has no loss to show.
        steps = steps[(steps[:, 1] == trainer) & np.isfinite(steps[:, 4])]
    if not len(steps):
        return np.empty(0), np.empty(0)
    lengths: dict[int, float] = {int(row["outer_step"]): row["inner_steps"] for row in run.rounds}
    before = np.cumsum([0, *(lengths.get(step, 0.0) for step in range(1, int(steps[:, 0].max()) + 1))])
    positions = before[steps[:, 0].astype(int) - 1] + steps[:, 3]
    numbers, place = np.unique(positions, return_inverse=True)
    weights = steps[:, 5]
    return numbers, np.bincount(place, steps[:, 4] * weights) / np.bincount(place, weights)


def thinned(xs: np.ndarray, ys: np.ndarray, points: int = _POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most so many points: means over stretches of equal length."""
    if len(xs) <= points:
        return xs, ys
    edges = np.linspace(0, len(xs), points + 1).astype(int)[:-1]
    counts = np.diff([*edges, len(xs)])
    return np.add.reduceat(xs, edges) / counts, np.add.reduceat(ys, edges) / counts
