"""C4: tokenised beforehand, or from shards on this machine, or from the hub, whichever comes first.

The hub's own shards (`c4-train.00000-of-01024.json.gz`) are JSON lines with text, timestamp and url.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

from fabrics.documents import (
    DatasetError,
    Documents,
    Skipped,
    Source,
    file_identities,
    json_documents,
    matching_files,
)
from fabrics.examples import TaskData
from fabrics.language_modelling import task_data, tokenised_documents
from fabrics.tokenised import TokenisedSet, open_tokenised
from fabrics.tokenization import describe, fingerprint, named_tokenizer
from utils.config import Config, ConfigError

logger = logging.getLogger("adloco.dataset")

REPOSITORY = "allenai/c4"
_SUFFIXES = (".json.gz", ".json", ".jsonl.gz", ".jsonl")


def local_source(pattern: str, language: str) -> Source:
    """Shards in a file, a folder (or its subfolder of the language's name, as on the hub), or a glob.

    Files with `validation` in their name are the validation part; without any, it is held out by hash.

    Raises:
        DatasetError: there is no training shard, or a folder cannot be read.
    """
    if Path(pattern, language).is_dir():
        pattern = str(Path(pattern, language))
    files = matching_files([pattern], _SUFFIXES)
    validation = [file for file in files if "validation" in file.name]
    train = [file for file in files if file not in set(validation)]
    if not train:
        raise DatasetError(f"{pattern}: only validation shards, none to train on")
    return Source(
        name=f"{pattern} ({len(train)} training and {len(validation)} validation shards)",
        identity={"shards": file_identities(train), "validation_shards": file_identities(validation)},
        train=json_documents(train),
        validation=json_documents(validation) if validation else None,
    )


def hub_source(language: str, streaming: bool, repository: str | None = None) -> Source:
    """C4 on the hub, with its own validation split; nothing is asked of the hub before the documents are.

    Args:
        streaming: read the shards over the network as far as they are needed; otherwise download them, one by
            one as far as they are needed, into the hub's cache.
        repository: None: allenai/c4; a folder that is laid out as it is works as well.
    """
    repository = repository or REPOSITORY
    read = _streamed if streaming else _downloaded
    return Source(
        name=f"{repository} ({language}) on the hub, {'streamed' if streaming else 'downloaded'}",
        identity={"repository": repository, "language": language},
        train=read(repository, language, "train"),
        validation=read(repository, language, "validation"),
    )


def _unreachable(repository: str, language: str, error: Exception) -> DatasetError:
    lines = str(error).strip().splitlines() or [""]
    return DatasetError(f"{repository} ({language}): {type(error).__name__}: {lines[0]}")


def _streamed(repository: str, language: str, part: str) -> Documents:
    def read(skipped: Skipped) -> Iterator[str]:
        from datasets import load_dataset  # takes a second, which other datasets need not wait

        try:
            for number, record in enumerate(load_dataset(repository, language, split=part, streaming=True), 1):
                if record["text"].strip():
                    yield record["text"]
                else:
                    skipped.add("empty", f"{part} record {number}")
        except Exception as error:  # network, repository and format errors of half a dozen libraries
            raise _unreachable(repository, language, error) from error

    return read


def _downloaded(repository: str, language: str, part: str) -> Documents:
    def read(skipped: Skipped) -> Iterator[str]:
        from datasets import DownloadManager, load_dataset_builder

        try:
            shards = load_dataset_builder(repository, language).config.data_files[part]
            manager = DownloadManager()
        except Exception as error:  # as above
            raise _unreachable(repository, language, error) from error
        for shard in shards:
            try:
                path = Path(manager.download(shard))
            except Exception as error:  # as above
                raise _unreachable(repository, language, error) from error
            yield from json_documents([path])(skipped)

    return read


def _check_tokenizer(config: Config, documents: TokenisedSet) -> None:
    """A model that was trained with another tokenizer would read noise."""
    named = named_tokenizer(config)
    if named is not None and fingerprint(named) != fingerprint(documents.tokenizer):
        raise ConfigError(
            f"c4_tokenized_path: {documents.folder} was tokenised with "
            f"{describe(documents.tokenizer, documents.metadata['tokenizer']['name'])}, "
            f"the model's tokenizer is {describe(named)}"
        )


def _tokenised(config: Config) -> tuple[str, TokenisedSet]:
    documents = open_tokenised(Path(config.c4_tokenized_path))
    _check_tokenizer(config, documents)
    return f"{config.c4_tokenized_path} (tokenised from {documents.metadata['source']})", documents


def _local(config: Config) -> tuple[str, TokenisedSet]:
    source = local_source(config.c4_local_path, config.c4_language)
    return source.name, tokenised_documents(config, source)


def _hub(config: Config) -> tuple[str, TokenisedSet]:
    if config.data_sample_size is None:
        raise ConfigError("data_sample_size: C4 on the hub is too large to be read as a whole; give a number")
    source = hub_source(config.c4_language, config.c4_streaming)
    return source.name, tokenised_documents(config, source)


def open_c4(config: Config) -> tuple[str, TokenisedSet]:
    """The first of the config's sources that can be read: its name, and its documents.

    Raises:
        ConfigError: what the config says does not fit the source: sizes, or the tokenizer.
        DatasetError: no source can be read; the message says why of each.
    """
    attempts = {"c4_tokenized_path": _tokenised, "c4_local_path": _local, "hub": _hub}
    failures = []
    for place, attempt in attempts.items():
        if place != "hub" and getattr(config, place) is None:
            continue
        try:
            name, documents = attempt(config)
        except DatasetError as error:
            failures.append(f"{place}: {error}")
            logger.warning("C4 cannot be read from %s: %s", place, error)
        else:
            logger.info("C4 comes from %s: %s", place, name)
            return name, documents
    raise DatasetError("; ".join(failures))


def load_c4(config: Config) -> TaskData:
    """`c4`: the paper's data."""
    name, documents = open_c4(config)
    return task_data(config, "c4", name, documents)
