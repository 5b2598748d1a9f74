"""Documentation of the packages that requirements.txt pins: English text on which no value was chosen.

A document is the description of a package on the package index, a text file (.md, .rst, .txt) or a docstring of its
modules and stubs, which are parsed, never imported. Kept are documents

- of 200 characters and more, at least half of them letters (no tables or lists of names);
- that are no licences;
- that are new: at most half of their runs of 13 words occur in Python's own documentation (`python_docs`) or in an
  earlier document.

Each package contributes at most 1 MB: its description, then files in order of the hash of their names, until a document
does not fit. So no package dominates, and large ones are sampled evenly.
"""

import hashlib
import importlib.metadata
import platform
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

from fabrics.data.documents import document_hash
from fabrics.data.python_docs import docstrings, python_documents
from utils.config.schema import ConfigError
from utils.files import write_json_atomically

_REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements.txt"
_SHORTEST_CHARACTERS = 200
_LARGEST_BYTES = 1_000_000
_RUN_WORDS = 13
_MODULES = (".py", ".pyi")
_TEXTS = (".md", ".rst", ".txt")
_LICENCE_FILES = re.compile(r"licen[cs]e|copying|copyright|notice", re.IGNORECASE)
_LICENCE = re.compile(
    r"all rights reserved|permission is hereby granted|redistributions? (of source|and use)|without warrant",
    re.IGNORECASE,
)


def pinned(requirements: Path = _REQUIREMENTS) -> list[str]:
    """Return the distributions that a requirements file pins to a version."""
    return re.findall(r"^([\w.-]+)==", requirements.read_text(encoding="utf-8"), re.MULTILINE)


def _installed(names: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """Find installed distributions with their lists of files.

    Raises:
        ConfigError: one line for each that is missing.
    """
    found = {}
    problems = []
    for name in names:
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"packages: {name} is not installed, and its documentation is part of them")
        else:
            if found[name].files is None:
                problems.append(f"packages: {name} is installed without a list of its files (RECORD); pip writes one")
    if problems:
        raise ConfigError(problems)
    return found


def _texts(distribution: importlib.metadata.Distribution) -> Iterator[str]:
    """Yield the texts of a distribution, its description first; unreadable files are skipped."""
    yield (distribution.metadata["Description"] or "").strip()
    for file in sorted(distribution.files, key=lambda file: document_hash(file.as_posix())):
        ours = ".." not in file.parts and not file.parts[0].endswith((".dist-info", ".egg-info"))
        path = Path(file.locate())
        if not ours or file.suffix not in _MODULES + _TEXTS or not path.is_file():
            continue
        if file.suffix in _MODULES:
            yield from docstrings(path.read_bytes())
        elif not _LICENCE_FILES.search(file.name):
            try:
                yield path.read_text(encoding="utf-8").strip()
            except UnicodeDecodeError:
                continue


def _is_prose(text: str) -> bool:
    letters = sum(map(len, re.findall(r"[A-Za-z]+", text)))
    return len(text) >= _SHORTEST_CHARACTERS and 2 * letters >= len(text) and not _LICENCE.search(text)


def word_runs(text: str) -> set[int]:
    """Return the hashes of all runs of 13 words, without case and punctuation; shorter texts are one run."""
    words = re.findall(r"\w+", text.lower())
    return {document_hash(" ".join(words[i : i + _RUN_WORDS])) for i in range(max(1, len(words) - _RUN_WORDS + 1))}


def _new_texts(texts: Iterable[str], known: set[int]) -> Iterator[str]:
    """Yield the documents of which at most half is known, and add their runs to the known ones."""
    for text in filter(_is_prose, texts):
        runs = word_runs(text)
        if 2 * len(runs & known) <= len(runs):
            known |= runs
            yield text


def write_packages(folder: Path, names: Iterable[str] | None = None) -> None:
    """Write FOLDER/<package>/<number>.txt, one document each, and manifest.json with versions, sizes and SHA-256.

    Args:
        names: distributions; None: those that requirements.txt pins.

    Raises:
        ConfigError: a package is not installed.
    """
    installed = _installed(pinned() if names is None else names)
    known = set().union(*map(word_runs, python_documents()))
    whole = hashlib.sha256()
    packages = []
    for name, distribution in tqdm(installed.items(), "reading packages", leave=False, unit=" packages", disable=None):
        (folder / name).mkdir()
        entry = {"name": name, "version": distribution.version, "documents": 0, "bytes": 0}
        for text in _new_texts(_texts(distribution), known):
            content = text.encode("utf-8", "replace")
            if entry["bytes"] + len(content) > _LARGEST_BYTES:
                break
            (folder / name / f"{entry['documents']:04d}.txt").write_bytes(content)
            whole.update(content + b"\0")
            entry["documents"] += 1
            entry["bytes"] += len(content)
        packages.append(entry)
    manifest = {
        "python": platform.python_version(),
        "packages": packages,
        "documents": sum(entry["documents"] for entry in packages),
        "bytes": sum(entry["bytes"] for entry in packages),
        "sha256": whole.hexdigest(),
    }
    write_json_atomically(folder / "manifest.json", manifest)
