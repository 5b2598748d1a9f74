"""What is shown of a run, while it goes on or afterwards: read from its folder and from nowhere else."""
