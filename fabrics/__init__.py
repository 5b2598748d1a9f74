"""Models, datasets and evaluation."""
