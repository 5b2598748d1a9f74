"""The docstrings of Python's own library, which take seconds to read: by one process for all, and for the next time.

For tests and for the programs that they start as forks, from when this is imported on. Programs with an interpreter of
their own read them as anybody does.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

from filelock import FileLock

from fabrics.data import documents
from utils.utils import write_json_atomically

# The folder where they are kept; without it they are read anew.
FOLDER = "ADLOCO_TESTS_DOCSTRINGS"
_read = documents.standard_library_docstrings


def _read_once() -> list[list[str]] | list[tuple[str, str]]:
    if FOLDER not in os.environ:
        return _read()
    # Until what reads them has changed.
    of = hashlib.sha256(sys.version.encode() + Path(documents.__file__).read_bytes()).hexdigest()
    folder = Path(os.environ[FOLDER])
    path = folder / f"{of}.json"
    with FileLock(folder / "lock"):
        if not path.exists():
            for old in folder.glob("*.json"):
                old.unlink()
            write_json_atomically(path, _read())
    return json.loads(path.read_text())


documents.standard_library_docstrings = _read_once
