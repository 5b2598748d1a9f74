"""Learning rates, the limits and the budget of a run."""
