"""Comparisons of methods."""
