"""Views of a run, during training or afterwards. They read its folder and nothing else."""
