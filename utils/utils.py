"""Small helpers: atomic files, folders, sizes, parts of messages."""

import difflib
import itertools
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, then move it there: never half a file under that name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{path.suffix}")
    # Not mkstemp: a result is as readable as any other file of its owner.
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_folder_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder beside `path`, then move it there in place of an old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        inside = temporary / "new"
        inside.mkdir()
        write(inside)
        if path.exists():
            os.replace(path, temporary / "old")
        os.replace(inside, path)
    finally:
        shutil.rmtree(temporary)


def write_text_atomically(path: Path, text: str) -> None:
    """Write UTF-8 text to `path`, whole or not at all."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def meant(word: str, known: Iterable[str]) -> str:
    """The end of a message about a word that is not known: which one may have been meant, if one is like it."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.5)
    return f"; did you mean {names[close[0]]}?" if close else ""


def json_text(value) -> str:
    """`value` as indented JSON; NaN and infinity become null."""

    def plain(item):
        if isinstance(item, dict):
            return {str(key): plain(entry) for key, entry in item.items()}
        if isinstance(item, list | tuple):
            return [plain(entry) for entry in item]
        if isinstance(item, float) and item - item != 0.0:
            return None
        return item

    return json.dumps(plain(value), indent=2, allow_nan=False) + "\n"


def write_json_atomically(path: Path, value) -> None:
    """Write `value` as `json_text` to `path`, whole or not at all."""
    write_text_atomically(path, json_text(value))


def checkpoints_of(run_folder: Path) -> Path:
    """Where the checkpoints of a run are."""
    return run_folder / "checkpoints"


def has_checkpoint(run_folder: Path) -> bool:
    """Whether a run can be resumed, as far as can be told without reading."""
    return any(checkpoints_of(run_folder).glob("round_*"))


def nearest_existing_folder(path: Path) -> Path:
    """The deepest ancestor of `path`, itself included, that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def batched(items: Iterable, size: int) -> Iterator[list]:
    """Lists of `size` items, the last one possibly shorter."""
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def budget_used(budget: Mapping) -> str:
    """The budget of a run, as its summary has it, for people."""
    if budget["unit"] == "bytes":
        used = byte_size(budget["used"])
        amount = byte_size(budget["amount"])
    else:
        used = f"{budget['used']:,}"
        amount = f"{budget['amount']:,} {budget['unit']}"
    return f"{used} of {amount} ({budget['deviation_percent']:+.1f}%)"


def byte_size(count: float | None) -> str:
    """Bytes with a unit, for people."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000.0:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000.0
    return f"{value:.1f} TB"
