"""Weights & Biases: online with credentials, otherwise a folder.

`wandb sync logs/<run>/wandb/wandb/offline-*` sends the folder.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training_logs.trackers.tracker import Tracker


class WeightsAndBiases(Tracker):
    """Reports to a run of W&B, which the folder remembers.

    W&B skips rounds that its run already has. An offline folder is written anew.
    """

    def start(self, config: Mapping[str, Any]) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")
        known = self.known_run() if mode == "online" else None
        self._run = wandb.init(
            project=config.get("project_name") or "AdLoCo",
            name=self._folder.name,
            id=known,
            resume="allow" if known else None,
            dir=str(self.store if mode == "online" else self.clear_store()),
            mode=mode,
            config=dict(config),
            settings=wandb.Settings(console="off", disable_git=True, save_code=False, x_disable_stats=True),
        )
        if mode == "online":
            self.remember_run(self._run.id)
        self._texts: list[list[str]] = []

    def scalars(self, outer_step: int, values: Mapping[str, float]) -> None:
        self._last_round = outer_step
        self._run.log(dict(values), step=outer_step)

    def text(self, text: str) -> None:
        self._texts.append([text])

    def figure(self, name: str, path: Path) -> None:
        import wandb

        self._run.log({f"plots/{name}": wandb.Image(str(path))}, step=self._last_round)

    def finish(self, status: str) -> None:
        import wandb

        self._run.log({"messages": wandb.Table(columns=["text"], data=self._texts)}, step=self._last_round)
        self._run.summary["status"] = status
        self._run.finish(exit_code=1 if status == "failed" else 0)


TRACKER = WeightsAndBiases
