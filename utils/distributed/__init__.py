"""Processes: launching, joining, reductions and liveness."""
