"""The docstrings of the standard library, which take seconds to read, kept in .cache/ for all tests."""

import functools
import hashlib
import json
from pathlib import Path

from fabrics.data import python_docs
from fabrics.data.documents import Document
from utils.files import write_text_atomically


def keep_docstrings() -> None:
    """Let `dataset: python_docs` read them from a file until Python or the code that reads them changes."""
    read = python_docs.standard_library_docstrings
    source = python_docs.python_docs_source().identity, Path(python_docs.__file__).read_text(encoding="utf-8")
    name = hashlib.sha256(repr(source).encode()).hexdigest()
    path = Path(__file__).resolve().parents[2] / ".cache" / "tests" / f"docstrings_{name[:16]}.json"

    @functools.cache
    def kept() -> list[Document]:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(path, json.dumps(read()))
        return [Document(*fields) for fields in json.loads(path.read_text(encoding="utf-8"))]

    python_docs.standard_library_docstrings = kept
