"""C4: a tokenised set or shards on this machine, else the hub.

The hub's shards (`c4-train.00000-of-01024.json.gz`) are JSON lines with text, timestamp and url.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fabrics.data.documents import (
    EMPTY,
    DatasetError,
    Document,
    Skipped,
    Source,
    file_identities,
    json_records,
    matching_files,
)
from fabrics.data.token_store import TokenisedSet, open_tokenised, tokenised_documents
from fabrics.data.tokenization import describe, fingerprint, named_tokenizer
from utils.config.schema import Config, ConfigError
from utils.text import first_line

REPOSITORY = "allenai/c4"
_SUFFIXES = (".json.gz", ".json", ".jsonl.gz", ".jsonl")


def host(record: Mapping[str, Any]) -> str:
    try:
        return urlsplit(str(record.get("url"))).hostname or "no host"
    except ValueError:  # brackets that enclose no address
        return "no host"


def local_source(pattern: str, language: str) -> Source:
    """Shards in a file, a folder (or its subfolder named after the language, as on the hub), or a glob.

    Files with `validation` in their name are the validation part; without any, validation is held out by hash.
    """
    if Path(pattern, language).is_dir():
        pattern = str(Path(pattern, language))
    files = matching_files([pattern], _SUFFIXES)
    validation = [file for file in files if "validation" in file.name]
    train = [file for file in files if "validation" not in file.name]
    if not train:
        raise DatasetError(f"{pattern}: only validation shards, none to train on")
    return Source(
        name=f"{pattern} ({len(train)} training and {len(validation)} validation shards)",
        identity={"shards": file_identities(train), "validation_shards": file_identities(validation)},
        train=partial(_read_shards, train),
        validation=partial(_read_shards, validation) if validation else None,
    )


def _read_shards(paths: list[Path], skipped: Skipped) -> Iterator[Document]:
    for path in paths:
        for record in json_records(path, skipped):
            yield Document(record["text"], host(record))


def hub_source(language: str) -> Source:
    """C4 on the hub, with its own validation split; only as much is read as is needed.

    `datasets` retries broken connections. HF_HUB_OFFLINE=1 skips the retries on a machine without a network.
    """
    return Source(
        name=f"{REPOSITORY} ({language}) on the hub",
        identity={"repository": REPOSITORY, "language": language},
        train=partial(_read_hub, REPOSITORY, language, "train"),
        validation=partial(_read_hub, REPOSITORY, language, "validation"),
    )


def _read_hub(name: str, language: str, part: str, skipped: Skipped) -> Iterator[Document]:
    import datasets  # takes a second

    count = 0
    try:
        for record in datasets.load_dataset(name, language, split=part, streaming=True):
            count += 1
            if record["text"].strip():
                yield Document(record["text"], host(record))
            else:
                skipped.add(EMPTY, f"{part} record {count}")
    except Exception as error:  # network, repository and format errors of half a dozen libraries
        lost = f"lost after {count:,} {part} records; the same command continues: " if count else ""
        raise DatasetError(f"{name} ({language}): {lost}{type(error).__name__}: {first_line(error)}") from error


def c4_documents(config: Config) -> TokenisedSet:
    """Return the tokenised documents of the configured source of C4."""
    if config.c4_tokenized_path is not None:
        documents = open_tokenised(Path(config.c4_tokenized_path))
        _check_tokenizer(config, documents)
        return documents
    if config.c4_local_path is not None:
        return tokenised_documents(config, local_source(config.c4_local_path, config.c4_language))
    if config.data_sample_size is None:
        raise ConfigError("data_sample_size: C4 on the hub is too large to be read as a whole; give a number")
    return tokenised_documents(config, hub_source(config.c4_language))


def _check_tokenizer(config: Config, documents: TokenisedSet) -> None:
    """A model that was trained with another tokenizer would read noise."""
    named = named_tokenizer(config)
    if named is not None and fingerprint(named) != fingerprint(documents.tokenizer):
        raise ConfigError(
            f"c4_tokenized_path: {documents.folder} was tokenised with "
            f"{describe(documents.tokenizer, documents.metadata['tokenizer']['name'])}, "
            f"the model's tokenizer is {describe(named)}"
        )
