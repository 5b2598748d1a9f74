"""Trackio: a store in the run folder, which `TRACKIO_DIR=logs/<run>/trackio trackio show` shows."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training_logs.trackers.tracker import Tracker


class Trackio(Tracker):
    """Writes a store, anew if a run is reported again."""

    def start(self, config: Mapping[str, Any]) -> None:
        os.environ["TRACKIO_DIR"] = str(self.clear_store())  # read when trackio is imported
        import trackio

        self._run = trackio.init(
            project=config.get("project_name") or "AdLoCo",
            name=self._folder.name,
            config=dict(config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def scalars(self, outer_step: int, values: Mapping[str, float]) -> None:
        self._last_round = outer_step
        self._run.log(dict(values), step=outer_step)

    def text(self, text: str) -> None:
        import trackio

        self._run.log({"messages": trackio.Markdown(text)}, step=self._last_round)

    def figure(self, name: str, path: Path) -> None:
        import trackio

        self._run.log({f"plots/{name}": trackio.Image(str(path))}, step=self._last_round)

    def finish(self, status: str) -> None:
        import trackio

        self._run.log({"status": trackio.Markdown(status)}, step=self._last_round)
        trackio.finish()


TRACKER = Trackio
