"""Nodes, their assignment to trainers, the length of rounds, checkpoints and validation."""
