"""A small comparison."""

from pathlib import Path

import yaml


def small_comparison(folder: Path, **values) -> Path:
    """Write the file of a comparison of AdLoCo and DiLoCo that takes seconds."""
    common = {
        "max_tokens": 6000, "number_of_outer_steps": None, "number_of_inner_steps_between_outers": 5,
        "sequence_length": 16, "vocab_size": 300, "data_sample_size": 60, "model_config": {"preset": "demo",
        "hidden_size": 16, "intermediate_size": 24}, "max_batch_size": 16, "max_requested_batch": None,
        "smallest_worker_batch": None,
    }  # fmt: skip
    adaptive = {"number_of_initial_trainers": 2, "INITIAL_BATCH_SIZE": 8, "merge_frequency": 2, "ETA": 0.8}
    fixed = {"number_of_initial_trainers": 1, "INITIAL_BATCH_SIZE": 8, "sampling_method": "none"}
    written = {
        "title": "Small", "question": "Does it run?", "common": common, "seeds": [1, 2], "reference": "AdLoCo",
        "methods": [
            {"name": "AdLoCo", "overrides": adaptive}, {"name": "DiLoCo", "overrides": fixed},
        ],
        "hardware": [{"name": "paper", "t_min": 0.01, "t_example": 0.002}],
        "networks": [{"name": "1 Gb/s", "bits_per_second": 1e9, "latency": 0.001}],
    }  # fmt: skip
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(written | values))
    return path
