"""Whether a run is shown in ClearML's dashboard, and where its session is."""

import os
from pathlib import Path

from utils.config.schema import ConfigError

SESSION = "clearml"
# How long the last reports may take when the run does not wait any more.
LAST_SECONDS = 600
# What the folder of a gradient analysis is known by.
ANALYSIS_SUMMARY = "gradient_analysis.json"


def has_credentials() -> bool:
    """Whether ClearML's credentials are in the environment or in clearml.conf."""
    if os.environ.get("CLEARML_API_ACCESS_KEY") and os.environ.get("CLEARML_API_SECRET_KEY"):
        return True
    path = Path(os.environ.get("CLEARML_CONFIG_FILE") or "~/clearml.conf").expanduser()
    try:
        return "access_key" in path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def resolved_mode(mode: str) -> str:
    """online, offline or off.

    Raises:
        ConfigError: online is asked for and there are no credentials.
    """
    if mode == "online" and not has_credentials():
        raise ConfigError(
            "clearml: online needs credentials: run clearml-init, or set CLEARML_API_HOST, CLEARML_API_ACCESS_KEY and "
            "CLEARML_API_SECRET_KEY; auto and offline do without"
        )
    if mode == "auto":
        return "online" if has_credentials() else "offline"
    return mode
