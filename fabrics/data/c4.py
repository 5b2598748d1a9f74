"""C4: a tokenised set or shards on this machine, else the hub.

The hub's shards (`c4-train.00000-of-01024.json.gz`) are JSON lines with text, timestamp and url.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fabrics.data.documents import (
    EMPTY,
    DatasetError,
    Documents,
    Origins,
    Skipped,
    Source,
    file_identities,
    json_documents,
    json_records,
    matching_files,
)
from fabrics.data.examples import TaskData
from fabrics.data.language_modelling import task_data, tokenised_documents
from fabrics.data.token_store import TokenisedSet, open_tokenised
from fabrics.data.tokenization import describe, fingerprint, named_tokenizer
from utils.config.schema import Config, ConfigError
from utils.text import first_line

REPOSITORY = "allenai/c4"
_SUFFIXES = (".json.gz", ".json", ".jsonl.gz", ".jsonl")
_NO_HOST = "no host"

Records = Iterator[Mapping[str, Any]]


def host(record: Mapping[str, Any]) -> str:
    """Return the host of a record's URL."""
    try:
        return urlsplit(str(record.get("url"))).hostname or _NO_HOST
    except ValueError:  # brackets that enclose no address
        return _NO_HOST


def local_source(pattern: str, language: str) -> Source:
    """Shards in a file, a folder (or its subfolder named after the language, as on the hub), or a glob.

    Files with `validation` in their name are the validation part; without any, validation is held out by hash.

    Raises:
        DatasetError: there is no training shard, or a folder cannot be read.
    """
    if Path(pattern, language).is_dir():
        pattern = str(Path(pattern, language))
    files = matching_files([pattern], _SUFFIXES)
    validation = [file for file in files if "validation" in file.name]
    train = [file for file in files if "validation" not in file.name]
    if not train:
        raise DatasetError(f"{pattern}: only validation shards, none to train on")

    def origins(paths: list[Path]) -> Origins:
        return lambda: ((record["text"], host(record)) for path in paths for _, record in json_records(path, Skipped()))

    return Source(
        name=f"{pattern} ({len(train)} training and {len(validation)} validation shards)",
        identity={"shards": file_identities(train), "validation_shards": file_identities(validation)},
        train=json_documents(train),
        validation=json_documents(validation) if validation else None,
        origins=(origins(train), origins(validation)) if validation else (origins(train),),
    )


def hub_source(language: str, streaming: bool, repository: str | None = None) -> Source:
    """C4 on the hub, with its own validation split; the hub is contacted when documents are read.

    `datasets` retries broken connections. HF_HUB_OFFLINE=1 skips the retries on a machine without a network.

    Args:
        streaming: read the shards over the network; otherwise download them one by one into the hub's cache. Either
            way only as many shards as needed.
        repository: None: allenai/c4; a folder with the same layout works as well.
    """
    name = repository or REPOSITORY
    read = _streamed if streaming else _downloaded

    def texts(part: str) -> Documents:
        return lambda skipped: (record["text"] for record in _checked(name, language, part, read, skipped))

    def origins(part: str) -> Origins:
        return lambda: ((rec["text"], host(rec)) for rec in _checked(name, language, part, read, Skipped()))

    return Source(
        name=f"{name} ({language}) on the hub, {'streamed' if streaming else 'downloaded'}",
        identity={"repository": name, "language": language},
        train=texts("train"),
        validation=texts("validation"),
        origins=(origins("train"), origins("validation")),
    )


def _streamed(name: str, language: str, part: str, skipped: Skipped) -> Records:
    import datasets  # takes a second

    records = datasets.load_dataset(name, language, split=part, streaming=True)
    for number, record in enumerate(records, 1):
        if record["text"].strip():
            yield record
        else:
            skipped.add(EMPTY, f"{part} record {number}")


def _downloaded(name: str, language: str, part: str, skipped: Skipped) -> Records:
    import datasets  # takes a second

    for shard in datasets.load_dataset_builder(name, language).config.data_files[part]:
        path = Path(datasets.DownloadManager().download(shard))
        for _, record in json_records(path, skipped):
            yield record


def _checked(name: str, language: str, part: str, read: Callable[..., Records], skipped: Skipped) -> Records:
    """Records of a part of the repository.

    Raises:
        DatasetError: nothing, or only the first records can be read.
    """
    count = 0
    try:
        for record in read(name, language, part, skipped):
            count += 1
            yield record
    except Exception as error:  # network, repository and format errors of half a dozen libraries
        lost = f"lost after {count:,} {part} records; the same command continues: " if count else ""
        raise DatasetError(f"{name} ({language}): {lost}{type(error).__name__}: {first_line(error)}") from error


def _check_tokenizer(config: Config, documents: TokenisedSet) -> None:
    """A model that was trained with another tokenizer would read noise."""
    named = named_tokenizer(config)
    if named is not None and fingerprint(named) != fingerprint(documents.tokenizer):
        raise ConfigError(
            f"c4_tokenized_path: {documents.folder} was tokenised with "
            f"{describe(documents.tokenizer, documents.metadata['tokenizer']['name'])}, "
            f"the model's tokenizer is {describe(named)}"
        )


def open_c4(config: Config) -> tuple[str, TokenisedSet]:
    """Open the configured source of C4; return its name and documents.

    Raises:
        ConfigError: the configured sizes or tokenizer do not fit the source.
        DatasetError: the source cannot be read.
    """
    if config.c4_tokenized_path is not None:
        documents = open_tokenised(Path(config.c4_tokenized_path))
        _check_tokenizer(config, documents)
        return f"{config.c4_tokenized_path} (tokenised from {documents.metadata['source']})", documents
    if config.c4_local_path is not None:
        source = local_source(config.c4_local_path, config.c4_language)
    elif config.data_sample_size is None:
        raise ConfigError("data_sample_size: C4 on the hub is too large to be read as a whole; give a number")
    else:
        source = hub_source(config.c4_language, config.c4_streaming)
    return source.name, tokenised_documents(config, source)


def load_c4(config: Config) -> TaskData:
    """`dataset: c4`: the paper's data."""
    name, documents = open_c4(config)
    return task_data(config, "c4", name, documents)
