"""Merge policies, the distribution of nodes, speeds and the simulated clock."""
