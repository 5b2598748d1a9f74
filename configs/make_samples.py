"""Write the data of the *_small.yaml configurations and of comparisons.

    python configs/make_samples.py [FOLDER] [--only NAME ...]

All of it is English or code that Python and the pinned packages carry, in the real formats; no network is needed.
"""

import argparse
import ast
import contextlib
import gzip
import importlib.metadata
import json
import pydoc_data.topics
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fabrics.data.documents import document_hash
from fabrics.data.python_docs import docstrings, documentable, python_documents
from utils.config.schema import ConfigError
from utils.files import write_folder_atomically
from utils.progress import progress_bar

_REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements.txt"
LONGEST_MODULE = 200_000
LARGEST_PACKAGE_BYTES = 1_000_000
_RUN_WORDS = 13
_LICENCE_FILES = re.compile(r"licen[cs]e|copying|copyright|notice", re.IGNORECASE)
_LICENCE = re.compile(
    r"all rights reserved|permission is hereby granted|redistributions? (of source|and use)|without warrant",
    re.IGNORECASE,
)

_CARD = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/c4-train.*.json.gz
  - split: validation
    path: en/c4-validation.*.json.gz
---
"""


def write_shard(path: Path, texts: Iterable[str]) -> None:
    """Write a shard of C4; the same texts give the same bytes."""
    with path.open("wb") as file, gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0) as packed:
        for number, text in enumerate(texts):
            record = {"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": f"https://example.org/{number}"}
            packed.write((json.dumps(record, ensure_ascii=False) + "\n").encode())


def write_c4(folder: Path, train: int = 2000, validation: int = 200, shards: int = 2) -> None:
    """Write Python's documentation as `datasets` finds allenai/c4 on the hub, with one validation shard."""
    (folder / "en").mkdir()
    (folder / "README.md").write_text(_CARD, encoding="utf-8")
    texts = python_documents()
    for shard in range(shards):
        write_shard(folder / "en" / f"c4-train.{shard:05d}-of-{shards:05d}.json.gz", texts[shard:train:shards])
    write_shard(folder / "en" / "c4-validation.00000-of-00001.json.gz", texts[train : train + validation])


def paragraphs_and_docstrings() -> tuple[list[str], list[str]]:
    """Return paragraphs of the language reference, and docstrings, of 80 to 2,000 characters, in order of hash."""
    topics = {text.strip() for text in pydoc_data.topics.topics.values()}
    paragraphs = {part.strip() for topic in topics for part in re.split(r"\n\s*\n", topic)}
    docstrings = set(python_documents()) - topics
    kept = ([text for text in texts if 80 <= len(text) <= 2000] for texts in (paragraphs, docstrings - paragraphs))
    positive, negative = (sorted(texts, key=document_hash) for texts in kept)
    return positive, negative


def write_imdb(folder: Path, train_per_class: int = 400, test_per_class: int = 100) -> None:
    """Write what aclImdb_v1.tar.gz unpacks to: folders of files named <number>_<stars>.txt.

    There are no film reviews in Python: pos has paragraphs of the language reference, neg docstrings.
    """
    for name, stars, texts in zip(("pos", "neg"), (9, 2), paragraphs_and_docstrings(), strict=True):
        parts = {"test": texts[:test_per_class], "train": texts[test_per_class : test_per_class + train_per_class]}
        for part, chosen in parts.items():
            target = folder / part / name
            target.mkdir(parents=True)
            for number, text in enumerate(chosen):
                (target / f"{number}_{stars}.txt").write_text(text, encoding="utf-8")


def write_code(folder: Path, modules: int | None = None) -> None:
    """Write the standard library's single-file modules (None: all) without comments and docstrings.

    So the text is disjoint from python_docs.
    """
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:modules]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in documentable(tree):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        (folder / path.name).write_text(ast.unparse(tree) + "\n", encoding="utf-8")


def _installed(sample: str, name: str) -> importlib.metadata.Distribution:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        distribution = importlib.metadata.distribution(name)
        if distribution.files is not None:  # without RECORD its files are unknown
            return distribution
    raise ConfigError(f"{sample}: {name}: not installed by pip, and its files are part of them")


def write_libraries(folder: Path) -> None:
    """Write the modules of installed packages unchanged, each text once; modules over 200,000 characters are tables."""
    seen = set()
    for name in ("torch", "scipy", "numpy", "matplotlib"):
        (folder / name).mkdir()
        for file in sorted(_installed("libraries", name).files, key=str):
            if file.suffix == ".py" and file.parts[0] == name:
                text = file.read_text(encoding="utf-8")
                if len(text) <= LONGEST_MODULE and document_hash(text) not in seen:
                    seen.add(document_hash(text))
                    (folder / name / f"{len(seen):05}.py").write_text(text, encoding="utf-8")


# Documentation of packages


def _pinned() -> list[str]:
    """Return the distributions that requirements.txt pins to a version."""
    return re.findall(r"^([\w.-]+)==", _REQUIREMENTS.read_text(encoding="utf-8"), re.MULTILINE)


def _texts(distribution: importlib.metadata.Distribution) -> Iterator[str]:
    """Yield the description, text files and docstrings of a distribution, files in order of the hash of their names."""
    yield (distribution.metadata["Description"] or "").strip()
    for file in sorted(distribution.files, key=lambda file: document_hash(file.as_posix())):
        path = Path(file.locate())
        if ".." in file.parts or file.parts[0].endswith((".dist-info", ".egg-info")) or not path.is_file():
            continue
        if file.suffix in (".py", ".pyi"):
            yield from docstrings(path.read_bytes())
        elif file.suffix in (".md", ".rst", ".txt") and not _LICENCE_FILES.search(file.name):
            try:
                yield path.read_text(encoding="utf-8").strip()
            except UnicodeDecodeError:
                continue


def _is_prose(text: str) -> bool:
    letters = sum(map(len, re.findall(r"[A-Za-z]+", text)))
    return len(text) >= 200 and 2 * letters >= len(text) and not _LICENCE.search(text)


def word_runs(text: str) -> set[int]:
    """Return the hashes of all runs of 13 words, without case and punctuation; shorter texts are one run."""
    words = re.findall(r"\w+", text.lower())
    return {document_hash(" ".join(words[i : i + _RUN_WORDS])) for i in range(max(1, len(words) - _RUN_WORDS + 1))}


def _new_texts(texts: Iterable[str], known: set[int]) -> Iterator[str]:
    """Yield prose of which at most half is known, and add its runs to the known ones."""
    for text in filter(_is_prose, texts):
        runs = word_runs(text)
        if 2 * len(runs & known) <= len(runs):
            known |= runs
            yield text


def write_packages(folder: Path, names: Iterable[str] | None = None) -> None:
    """Write documentation on which no value was chosen, one document per file.

    A document has 200 characters or more, at least half of them letters, and is no licence. At most half of its runs of
    13 words are in Python's own documentation or in an earlier document. No package contributes more than 1 MB.

    names: distributions; None: those that requirements.txt pins.
    """
    installed = {name: _installed("packages", name) for name in (names or _pinned())}
    known = set().union(*map(word_runs, python_documents()))
    for name, distribution in progress_bar(installed.items(), desc="reading packages", unit=" packages"):
        (folder / name).mkdir()
        size = 0
        for number, text in enumerate(_new_texts(_texts(distribution), known)):
            content = text.encode("utf-8", "replace")
            size += len(content)
            if size > LARGEST_PACKAGE_BYTES:
                break
            (folder / name / f"{number:04d}.txt").write_bytes(content)


SAMPLES = {
    "c4": write_c4,
    "aclImdb": write_imdb,
    "code": write_code,
    "packages": write_packages,
    "libraries": write_libraries,
}
CONFIGURED = ("c4", "aclImdb")


def main(folder: Path, names: Iterable[str] = CONFIGURED) -> None:
    """Write the missing samples; ConfigError: a package is not installed."""
    for name in names:
        if (folder / name).exists():
            print(f"{folder / name}: there already")
        else:
            write_folder_atomically(folder / name, SAMPLES[name])
            print(f"{folder / name}: written")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write samples of data in the real formats.")
    parser.add_argument("folder", nargs="?", type=Path, default=".cache/samples", help="default: .cache/samples")
    parser.add_argument("--only", nargs="+", choices=SAMPLES, default=CONFIGURED, help="default: c4 aclImdb")
    options = parser.parse_args()
    try:
        main(options.folder, options.only)
    except ConfigError as error:
        sys.exit("\n".join(f"error: {problem}" for problem in error.problems))
    except OSError as error:
        sys.exit(f"error: {error}")
