"""The documentation of Python: about 2 MB of real English that is on every machine with Python."""

import ast
import functools
import pydoc_data.topics
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from fabrics.data.documents import Document, Source, document_hash
from utils.progress import progress_bar

# Folders of the standard library without user documentation.
_SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "__pycache__",
}  # fmt: skip


def documentable(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the nodes that may have a docstring, outer before inner."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return (node for node in ast.walk(tree) if isinstance(node, kinds))


def docstrings(source: bytes) -> list[str]:
    """Return the docstrings of a module, outer before inner; files that do not parse have none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the parsed code
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            return []
    texts = (ast.get_docstring(node) for node in documentable(tree))
    return [text.strip() for text in texts if text]


@functools.cache
def standard_library_docstrings() -> list[Document]:
    """Return the docstrings of the standard library in order of path; the origin is the module or package.

    Modules are parsed, never imported: importing some of them has side effects.
    """
    found = []
    root = Path(sysconfig.get_path("stdlib"))
    found_files = (path for path in root.rglob("*.py") if path.is_file())  # a link may lead nowhere
    files = sorted(path for path in found_files if not _SKIPPED_FOLDERS & set(path.relative_to(root).parts))
    for path in progress_bar(files, desc="reading docstrings", unit=" files", leave=False):
        module = path.relative_to(root).parts[0].removesuffix(".py")
        found += [Document(text, module) for text in docstrings(path.read_bytes())]
    return found


@functools.cache
def _documents() -> list[Document]:
    """The topics of pydoc and the docstrings, each text once."""
    topics = [Document(text.strip(), "(pydoc topics)") for _, text in sorted(pydoc_data.topics.topics.items())]
    found: dict[str, Document] = {}
    for document in (*topics, *standard_library_docstrings()):
        if document.text:
            found.setdefault(document.text, document)
    # A fixed random order: otherwise a sample would consist of neighbours in a module.
    return sorted(found.values(), key=lambda document: document_hash(document.text))


def python_documents() -> tuple[str, ...]:
    """Return the topics of pydoc and all docstrings of the standard library, each once, in order of hash."""
    return tuple(document.text for document in _documents())


def python_docs_source() -> Source:
    return Source(
        name=f"the documentation of Python {sys.version.split()[0]}",
        identity={"python": sys.version, "stdlib": sysconfig.get_path("stdlib")},
        train=lambda skipped: iter(_documents()),
    )
