"""The names in a run folder, and files and folders that are written whole or not at all."""

import argparse
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOG_FILE = "training_log.log"
REPORT_FOLDER = "model_training_report"  # CSVs, summary, plots and report
MEMORY_FOLDER = "memory_report"
MODELS_FOLDER = "model_weights"
CHECKPOINTS_FOLDER = "checkpoints"


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{path.suffix}")
    # Not mkstemp, whose files only their owner can read.
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """Write UTF-8 text to `path`."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json_atomically(path: Path, value: Any) -> None:
    """Write `value` to `path` as indented JSON; NaN and infinity become null."""
    write_text_atomically(path, json_text(value))


def json_text(value: Any) -> str:
    """Return `value` as indented JSON; NaN and infinity become null."""

    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {str(key): plain(entry) for key, entry in item.items()}
        if isinstance(item, list | tuple):
            return [plain(entry) for entry in item]
        if isinstance(item, float) and item - item != 0.0:
            return None
        return item

    return json.dumps(plain(value), indent=2, allow_nan=False) + "\n"


def write_folder_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder beside `path`, then rename it to `path`; an old folder there is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        new = temporary / "new"
        new.mkdir()
        write(new)
        old = temporary / "old"
        if path.exists():
            os.replace(path, old)
        try:
            os.replace(new, path)
        except OSError:
            if old.exists():
                os.replace(old, path)
            raise
    finally:
        shutil.rmtree(temporary)


def path_argument(text: str) -> Path:
    """Return a path from a command line whose name pages and plots can show."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"must be UTF-8 text, got {text!r}") from None
    return Path(text)


def nearest_existing_folder(path: Path) -> Path:
    """Return the deepest of `path` and its parents that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def has_checkpoint(run_folder: Path) -> bool:
    """Return whether a checkpoint is there; it may be damaged."""
    return any((run_folder / CHECKPOINTS_FOLDER).glob("round_*"))


def given_config(given: Any) -> Any:
    """Return the given configuration; None: config.yaml in the working directory, or the one beside run.py."""
    if given is not None:
        return given
    here = Path("config.yaml")
    return here if here.exists() else Path(__file__).resolve().parents[1] / here
