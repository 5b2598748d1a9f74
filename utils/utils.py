"""Small helpers: atomic files, seeds, devices."""

import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, then move it there: never half a file under that name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        # mkstemp makes a private file; a result is as readable as any other file of its owner.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
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


def write_json_atomically(path: Path, value) -> None:
    """Write `value` as indented JSON to `path`, whole or not at all; NaN and infinity become null."""

    def plain(item):
        if isinstance(item, dict):
            return {str(key): plain(entry) for key, entry in item.items()}
        if isinstance(item, list | tuple):
            return [plain(entry) for entry in item]
        if isinstance(item, float) and item - item != 0.0:
            return None
        return item

    write_text_atomically(path, json.dumps(plain(value), indent=2, allow_nan=False) + "\n")


def nearest_existing_folder(path: Path) -> Path:
    """The deepest ancestor of `path`, itself included, that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def resolve_devices(requested: list[str] | None) -> tuple[list[torch.device], list[str]]:
    """The devices to train on, and warnings for the log.

    Args:
        requested: names such as "cuda:0" or "cpu"; None for every visible GPU, or the CPU without one.

    Raises:
        ValueError: a device is named twice, or a GPU that is not among those visible.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if requested is None:
        names = [f"cuda:{index}" for index in range(visible)] or ["cpu"]
        return [torch.device(name) for name in names], []
    # "cuda" is the first GPU, and the same device under two names would be two.
    devices = [torch.device("cuda:0" if name == "cuda" else name) for name in requested]
    cuda = [device for device in devices if device.type == "cuda"]
    if cuda and not visible:
        return [torch.device("cpu")], [f"devices: {requested} asked for, but CUDA is not available: running on the CPU"]
    if len(set(devices)) < len(devices):
        raise ValueError(f"every device once, got {requested}")
    for device in cuda:
        if device.index >= visible:
            raise ValueError(
                f"{device} asked for, but only {visible} are visible (cuda:0 to cuda:{visible - 1}); indices count "
                "the devices that CUDA_VISIBLE_DEVICES leaves"
            )
    return devices, []


def batched(items: Iterable, size: int) -> Iterator[list]:
    """Lists of `size` items, the last one possibly shorter."""
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


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
