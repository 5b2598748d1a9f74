"""Write the data of the *_small.yaml configurations and of comparisons.

    python configs/make_samples.py [FOLDER] [--only NAME ...]

Real English that every Python carries, in the real formats, without a network:

- FOLDER/c4: shards as in the hub's allenai/c4 (gzip JSON lines with text, timestamp and url) of the docstrings and
  topics of Python's documentation, and the repository's card, so that `datasets` loads the folder as it does the hub's;
- FOLDER/code: the source of the standard library's modules without docstrings and comments, a second kind of text;
- FOLDER/packages: the documentation of the packages that requirements.txt pins, a third (package_documents.py);
- FOLDER/libraries: the modules of four of these packages, 66 MB, for larger models;
- FOLDER/aclImdb: the folders and files that aclImdb_v1.tar.gz unpacks to. There are no film reviews in Python, so
  the two classes are paragraphs of the language reference (pos) and docstrings (neg); they can be distinguished.
"""

import argparse
import ast
import gzip
import importlib.metadata
import json
import pydoc_data.topics
import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs.package_documents import write_packages
from fabrics.data.documents import document_hash
from fabrics.data.python_docs import documentable, python_documents
from utils.config.schema import ConfigError
from utils.files import write_folder_atomically

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
    """Write a repository of C4; the validation part has one shard."""
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
    """Write the layout of aclImdb; file names are <number>_<stars>.txt."""
    for name, stars, texts in zip(("pos", "neg"), (9, 2), paragraphs_and_docstrings(), strict=True):
        parts = {"test": texts[:test_per_class], "train": texts[test_per_class : test_per_class + train_per_class]}
        for part, chosen in parts.items():
            target = folder / part / name
            target.mkdir(parents=True)
            for number, text in enumerate(chosen):
                (target / f"{number}_{stars}.txt").write_text(text, encoding="utf-8")


def write_code(folder: Path, modules: int | None = None) -> None:
    """Write the standard library's single-file modules (the first `modules`; None: all) as ast.unparse prints them.

    Docstrings are removed, so that the text is disjoint from python_docs.
    """
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:modules]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in documentable(tree):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        (folder / path.name).write_text(ast.unparse(tree) + "\n", encoding="utf-8")


# Longer modules are tables.
_LONGEST_MODULE = 200_000


def write_libraries(folder: Path, names: Iterable[str] = ("torch", "scipy", "numpy", "matplotlib")) -> None:
    """Write the modules of installed packages unchanged, each text once."""
    seen = set()
    for name in names:
        (folder / name).mkdir()
        for file in sorted(importlib.metadata.files(name), key=str):
            if file.suffix == ".py" and file.parts[0] == name:
                text = file.read_text(encoding="utf-8")
                if len(text) <= _LONGEST_MODULE and document_hash(text) not in seen:
                    seen.add(document_hash(text))
                    (folder / name / f"{len(seen):05}.py").write_text(text, encoding="utf-8")


SAMPLES = {
    "c4": write_c4,
    "aclImdb": write_imdb,
    "code": write_code,
    "packages": write_packages,
    "libraries": write_libraries,
}
CONFIGURED = ("c4", "aclImdb")


def main(folder: Path, names: Iterable[str] = CONFIGURED) -> None:
    """Write the missing samples.

    Raises:
        ConfigError: a package whose documentation is asked for is not installed.
    """
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
