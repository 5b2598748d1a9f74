"""MLflow: the server of MLFLOW_TRACKING_URI, or files.

`MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri logs/<run>/mlflow` shows the files.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training_logs.trackers.tracker import Tracker


class MLflow(Tracker):
    """Reports to a run of MLflow. A run that is reported again takes the place of the one before."""

    def start(self, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow prefers a database, for which it needs more
        import mlflow

        server = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = mlflow.MlflowClient(server or self.clear_store().as_uri())
        project = config.get("project_name") or "AdLoCo"
        experiment = self._client.get_experiment_by_name(project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(project)
        self._run = self._client.create_run(number, run_name=self._folder.name).info.run_id
        if server:
            known = self.known_run(server)
            self.remember_run(self._run, server)
            if known:
                with contextlib.suppress(mlflow.MlflowException):  # somebody has deleted it
                    self._client.delete_run(known)
        for name, value in config.items():
            self._client.log_param(self._run, name, value)
        self._texts: list[str] = []

    def scalars(self, outer_step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=outer_step)

    def text(self, text: str) -> None:
        self._texts.append(text)

    def figure(self, name: str, path: Path) -> None:
        self._client.log_artifact(self._run, str(path), "plots")

    def artifact(self, name: str, path: Path) -> None:
        if path.suffix != ".safetensors":
            self._client.log_artifact(self._run, str(path))

    def finish(self, status: str) -> None:
        self._client.log_text(self._run, "\n\n".join(self._texts), "messages.txt")
        ended = {"completed": "FINISHED", "failed": "FAILED"}.get(status, "KILLED")
        self._client.set_terminated(self._run, ended)


TRACKER = MLflow
