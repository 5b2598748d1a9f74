"""TensorBoard: event files in the run folder, which `tensorboard --logdir logs` shows."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training_logs.trackers.tracker import Tracker


class TensorBoard(Tracker):
    """Writes event files with tensorboardX, anew if a run is reported again."""

    def start(self, config: Mapping[str, Any]) -> None:
        sys.modules.setdefault("torch", None)  # tensorboardX would import it, for seconds, and does without
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(self.clear_store()))
        self._texts = 0
        self._writer.add_text("config", f"    {json.dumps(dict(config), indent=1)}".replace("\n", "\n    "))

    def scalars(self, outer_step: int, values: Mapping[str, float]) -> None:
        self._last_round = outer_step
        for name, value in values.items():
            self._writer.add_scalar(name, value, outer_step)
        self._writer.flush()

    def text(self, text: str) -> None:
        self._texts += 1  # a point of the series for each
        self._writer.add_text("messages", text.replace("\n", "  \n"), self._texts)

    def figure(self, name: str, path: Path) -> None:
        from matplotlib.image import imread

        image = (imread(path) * 255).astype("uint8")
        self._writer.add_image(f"plots/{name}", image, self._last_round, dataformats="HWC")

    def finish(self, status: str) -> None:
        self._writer.add_text("status", status)
        self._writer.close()


TRACKER = TensorBoard
