"""Estimates of what a run needs (`--plan`)."""
