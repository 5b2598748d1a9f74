"""Plugins: files of the user's own, imported before a configuration's words are checked so that they may add some.

A file is imported once in a process, however often and by whatever path it is named. One that fails is not tried again,
as what it had registered by then is there: its problem is reported again.
"""

import hashlib
import importlib.abc
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from utils.config.schema import ConfigError
from utils.config.yaml_reading import read_mapping


@dataclass(frozen=True)
class Plugin:
    """A plugin that has been imported. path: absolute. sha256: of the source that was run."""

    path: str
    sha256: str

    @property
    def name(self) -> str:
        """The file's, which is the same wherever it is."""
        return Path(self.path).name


# By the real path: the plugin, or what is wrong with it.
_tried: dict[str, Plugin | str] = {}


class _Loader(importlib.abc.SourceLoader):
    """Runs a source that has been read already: what is run is what was hashed, and nothing is cached beside it."""

    def __init__(self, path: str, source: bytes):
        self._path, self._source = path, source

    def get_filename(self, fullname: str) -> str:
        return self._path

    def get_data(self, path: str) -> bytes:
        return self._source

    def path_stats(self, path: str):
        raise OSError("its bytecode is not kept")


def import_plugins(paths: Iterable[str]) -> list[Plugin]:
    """Import these files, each once in this process; what is known of them, in their order.

    Raises:
        ConfigError: one line for each that cannot be read or imported, with the line in it that failed.
    """
    results = []
    for path in dict.fromkeys(map(os.path.realpath, paths)):
        if path not in _tried:
            _tried[path] = _imported(path)
        results.append(_tried[path])
    if problems := [result for result in results if isinstance(result, str)]:
        raise ConfigError(problems)
    return results


def _imported(path: str) -> Plugin | str:
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        return f"plugins: cannot read {path}: {error.strerror}"
    plugin = Plugin(path, hashlib.sha256(source).hexdigest())
    # Equal in all processes of a run, wherever they have the file: what it defines can be sent between them.
    name = f"plugin_{Path(path).stem}_{plugin.sha256[:16]}"
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, _Loader(path, source)))
    sys.modules[name] = module
    try:
        module.__spec__.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        line = _line(error, path)
        place = _shown(path) if line is None else f"{_shown(path)}, line {line}"
        said = error.msg if isinstance(error, SyntaxError) else error
        return f"plugins: {place}: {type(error).__name__}: {' '.join(str(said).split())}"
    return plugin


def _line(error: BaseException, path: str) -> int | None:
    """The line of the file that an error comes from, itself or through what it called."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return lines[-1] if lines else None


def _shown(path: str) -> str:
    """The path as seen from the working directory, where it lies in there."""
    folder = os.path.realpath(os.curdir)
    return os.path.relpath(path, folder) if path.startswith(folder + os.sep) else path


def check_plugins_of_run(folder: Path) -> None:
    """Refuse plugins that came with a run folder, which may be somebody else's.

    A run writes the absolute paths of its plugins. Whoever sends a folder does not know the path that it will have.

    Raises:
        ConfigError: one line for each plugin with a relative path, or inside the folder or its parent.
    """
    named = read_mapping(folder / "config.yaml").get("plugins") or []
    parent = folder.resolve().parent
    problems = []
    for path in named if isinstance(named, list) else [named]:
        if not Path(str(path)).is_absolute() or Path(str(path)).resolve().is_relative_to(parent):
            problems.append(
                f"plugins: {path} came with {folder}: to run that code, name it on the command line, plugins=[{path}]"
            )
    if problems:
        raise ConfigError(problems)
