"""Batch tests, exact gradient statistics, the batch controller and the switch mode."""
