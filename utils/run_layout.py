"""Names of the files and folders in a run folder."""

from pathlib import Path

LOG_FILE = "training_log.log"
REPORT_FOLDER = "model_training_report"  # CSVs, summary, plots and report
MEMORY_FOLDER = "memory_report"
MODELS_FOLDER = "model_weights"
CHECKPOINTS_FOLDER = "checkpoints"


def has_checkpoint(run_folder: Path) -> bool:
    """Return whether a checkpoint is there; it may be damaged."""
    return any((run_folder / CHECKPOINTS_FOLDER).glob("round_*"))


def default_config() -> Path:
    """Return config.yaml in the working directory, or the one beside run.py."""
    here = Path("config.yaml")
    return here if here.exists() else Path(__file__).resolve().parents[1] / here
