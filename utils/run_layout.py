"""Names of the files and folders in a run folder."""

LOG_FILE = "training_log.log"
REPORT_FOLDER = "model_training_report"  # CSVs, summary, plots and report
MEMORY_FOLDER = "memory_report"
MODELS_FOLDER = "model_weights"
