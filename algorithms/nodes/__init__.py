"""Nodes and trainers: distribution, merges, unequal speeds, simulated clocks and traffic."""
