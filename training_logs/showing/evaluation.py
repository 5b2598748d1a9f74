"""Results of lm_eval (EleutherAI's lm-evaluation-harness) in a run folder, written by others and so not trusted."""

import json
from pathlib import Path
from typing import Any

from training_logs.showing.run_data import RunFolderError, damage_reported

FOLDER = "evaluation"
MOST_BYTES = 20_000_000
MOST_RESULTS = 50
MOST_CHARACTERS = 100


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e15


def downstream_results(run_folder: Path) -> dict[str, str]:
    """Return the metrics of tasks, as "task, metric": "value ± standard error"; empty without results.

    Of a metric with several results the newest counts. Only the first `MOST_RESULTS` metrics are returned.

    Raises:
        RunFolderError: a file is not a result of lm_eval, or is too large.
    """
    found: dict[str, str] = {}
    # The name of a file is its time; its folder is named by the model.
    for path in sorted((run_folder / FOLDER).glob("**/results_*.json"), key=lambda path: path.name):
        if path.stat().st_size > MOST_BYTES:
            raise RunFolderError(f"{path}: larger than {MOST_BYTES:,} bytes, so not a result of lm_eval: remove it")
        with damage_reported(path):
            tasks = json.loads(path.read_text(encoding="utf-8"))["results"]
            for task, values in tasks.items():
                for key, value in values.items():
                    metric, _, filtered = key.partition(",")  # acc,none: "none" is the filter of answers
                    if not filtered or metric.endswith("_stderr") or not _is_number(value):
                        continue
                    error = values.get(f"{metric}_stderr,{filtered}")
                    shown = f"{value:.4g} ± {error:.2g}" if _is_number(error) else f"{value:.4g}"
                    label = f"{task}, {metric}" if filtered == "none" else f"{task}, {metric} ({filtered})"
                    label.encode()  # fails for half a surrogate pair, which no page could be written with
                    found[label[:MOST_CHARACTERS]] = shown
    return dict(list(found.items())[:MOST_RESULTS])
