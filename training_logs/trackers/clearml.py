"""ClearML: a task on a server, or an offline session in the run folder."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training_logs.trackers.tracker import Tracker
from utils.config.schema import ConfigError


def has_credentials() -> bool:
    """Return whether ClearML's credentials are in the environment or in clearml.conf."""
    if os.environ.get("CLEARML_API_ACCESS_KEY") and os.environ.get("CLEARML_API_SECRET_KEY"):
        return True
    path = Path(os.environ.get("CLEARML_CONFIG_FILE") or "~/clearml.conf").expanduser()
    try:
        return "access_key" in path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def resolved_mode(mode: str) -> str:
    """Return online, offline or off; ConfigError: the mode is online and there are no credentials."""
    if mode == "online" and not has_credentials():
        raise ConfigError(
            "clearml: online needs credentials: run clearml-init, or set CLEARML_API_HOST, CLEARML_API_ACCESS_KEY and "
            "CLEARML_API_SECRET_KEY; auto and offline do without"
        )
    if mode == "auto":
        return "online" if has_credentials() else "offline"
    return mode


class ClearML(Tracker):
    """Reports to a ClearML task.

    The folder remembers its task: a resumed run, and a run that is sent again, continue it. The server replaces points
    that it already has. An offline session replaces the one before.
    """

    def start(self, config: Mapping[str, Any]) -> None:
        self.store.mkdir(exist_ok=True)
        if self._mode == "offline":
            shutil.rmtree(self.store / "offline", ignore_errors=True)
            # clearml reads this when it is imported.
            os.environ["CLEARML_CACHE_DIR"] = str(self.store)
        known = self.known_run() if self._mode == "online" else None
        from clearml import Task
        from clearml.config import ConfigWrapper

        # Closing a task waits for clearml's own reporting process, up to minutes (2.1.12); a thread closes at once.
        # support_stopping: clearml kills a process whose task is not in progress, as a continued task is not at first.
        # vcs_repo_detect_async: its thread and Task.init can wait for each other forever (2.1.12).
        settings = {"report_use_subprocess": False, "support_stopping": False, "vcs_repo_detect_async": False}
        ConfigWrapper.set_overrides({"sdk": {"development": settings}})
        Task.set_offline(self._mode == "offline")
        self._task = Task.init(
            project_name=config.get("project_name") or "AdLoCo",
            task_name=self._folder.name,
            reuse_last_task_id=known or False,
            continue_last_task=0 if known else False,  # 0: iterations keep their numbers
            auto_connect_arg_parser=False,
            auto_connect_frameworks=False,
            auto_resource_monitoring=False,
            auto_connect_streams=False,
        )
        self._task.connect(dict(config), name="config")
        if self._mode == "online":
            self.remember_run(self._task.id)

    def scalars(self, outer_step: int, values: Mapping[str, float]) -> None:
        self._last_round = outer_step
        for name, value in values.items():
            title, series = name.split("/", 1)
            self._task.get_logger().report_scalar(title, series, value=value, iteration=outer_step)

    def text(self, text: str) -> None:
        self._task.get_logger().report_text(text, print_console=False)

    def figure(self, name: str, path: Path) -> None:
        self._task.get_logger().report_image("plots", name, iteration=self._last_round, local_path=str(path))

    def artifact(self, name: str, path: Path) -> None:
        if path.suffix != ".safetensors":
            self._task.upload_artifact(name, str(path.resolve()))
            return
        # Weights stay where they are; the task gets their address.
        from clearml import OutputModel

        model = OutputModel(task=self._task, name=self._folder.name, framework="PyTorch")
        if self._task.is_offline():
            # clearml 2.1.12 reads this attribute of its offline model, which does not have it.
            model._get_base_model().locked = False
        model.update_weights(register_uri=path.resolve().as_uri())

    def finish(self, status: str) -> None:
        self._task.flush(wait_for_uploads=True)
        if status == "completed":
            self._task.mark_completed()
        elif status == "failed":
            self._task.mark_failed()
        else:
            self._task.mark_stopped()
        self._task.close()


TRACKER = ClearML
