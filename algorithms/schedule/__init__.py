"""Learning rates and the limits of a run."""
