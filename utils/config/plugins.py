"""Plugins: Python files of the user's own that add names to the registries.

They are imported before the names in a configuration are checked. A file is imported once per process, by whatever path
it is named. A file that fails is not tried again, as part of what it registers is there already.
"""

import hashlib
import os
import sys
import traceback
import types
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from utils.config.schema import ConfigError


@dataclass(frozen=True)
class Plugin:
    """An imported plugin: its absolute path, and the digest of the source that was run."""

    path: str
    sha256: str

    @property
    def name(self) -> str:
        return Path(self.path).name


# By the real path: the plugin, or its problem.
_tried: dict[str, Plugin | str] = {}


def import_plugins(paths: Iterable[str]) -> list[Plugin]:
    """Import these files, each once in this process, and return them; ConfigError: one line for each that fails."""
    results = []
    for path in dict.fromkeys(map(os.path.realpath, paths)):
        if path not in _tried:
            _tried[path] = _import(path)
        results.append(_tried[path])
    if problems := [result for result in results if isinstance(result, str)]:
        raise ConfigError(problems)
    return results


def _import(path: str) -> Plugin | str:
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        return f"plugins: cannot read {path}: {error.strerror}"
    plugin = Plugin(path, hashlib.sha256(source).hexdigest())
    # The same name in all processes of a run, so that objects of the plugin can be pickled between them.
    module = types.ModuleType(f"plugin_{Path(path).stem}_{plugin.sha256[:16]}")
    module.__file__ = path
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        line = _failing_line(error, path)
        place = _shown(path) if line is None else f"{_shown(path)}, line {line}"
        said = error.msg if isinstance(error, SyntaxError) else error
        return f"plugins: {place}: {type(error).__name__}: {' '.join(str(said).split())}"
    return plugin


def _failing_line(error: BaseException, path: str) -> int | None:
    if isinstance(error, SyntaxError) and error.filename == path:
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return lines[-1] if lines else None


def _shown(path: str) -> str:
    """Return the path relative to the working directory if it lies in there."""
    folder = os.path.realpath(os.curdir)
    return os.path.relpath(path, folder) if path.startswith(folder + os.sep) else path
