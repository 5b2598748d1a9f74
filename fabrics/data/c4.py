"""C4: tokenised beforehand, or from shards on this machine, or from the hub, whichever comes first.

The hub's own shards (`c4-train.00000-of-01024.json.gz`) are JSON lines with text, timestamp and url.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fabrics.data import hub
from fabrics.data.documents import (
    EMPTY,
    DatasetError,
    Documents,
    Origins,
    Skipped,
    Source,
    SourceLostError,
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
from utils.utils import first_line

logger = logging.getLogger("adloco.dataset")

T = TypeVar("T")

REPOSITORY = "allenai/c4"
_SUFFIXES = (".json.gz", ".json", ".jsonl.gz", ".jsonl")
_NO_HOST = "no host"


def host(record: Mapping[str, Any]) -> str:
    """The host of a record's URL."""
    try:
        return urlsplit(str(record.get("url"))).hostname or _NO_HOST
    except ValueError:  # of brackets that are no address
        return _NO_HOST


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
    """C4 on the hub, with its own validation split; nothing is asked of the hub before the documents are.

    Args:
        streaming: read the shards over the network as far as they are needed; otherwise download them, one by
            one as far as they are needed, into the hub's cache.
        repository: None: allenai/c4; a folder that is laid out as it is works as well.
    """
    on_hub = _Repository(repository or REPOSITORY, language)
    read = on_hub.streamed if streaming else on_hub.downloaded

    def texts(part: str) -> Documents:
        return lambda skipped: (record["text"] for record in read(part, skipped))

    def origins(part: str) -> Origins:
        return lambda: ((record["text"], host(record)) for record in read(part, Skipped()))

    return Source(
        name=f"{on_hub.name} ({language}) on the hub, {'streamed' if streaming else 'downloaded'}",
        identity={"repository": on_hub.name, "language": language},
        train=texts("train"),
        validation=texts("validation"),
        origins=(origins("train"), origins("validation")),
    )


class _Repository:
    """C4 on the hub: read with patience, once it has given a document.

    Raises, while it is read:
        DatasetError: nothing can be read.
        SourceLostError: something has been read, and what comes next cannot be.
    """

    def __init__(self, name: str, language: str):
        self.name, self._language = name, language
        self._begun = False

    def streamed(self, part: str, skipped: Skipped) -> Iterator[Mapping[str, Any]]:
        """The records of a part, over the network."""
        datasets, patience = self._prepared()
        number, state = 0, None
        while True:
            before = number
            try:
                dataset = datasets.load_dataset(self.name, self._language, split=part, streaming=True)
                if state is not None:
                    dataset.load_state_dict(state)
                for record in dataset:
                    number, self._begun = number + 1, True
                    patience.progressed()
                    if record["text"].strip():
                        yield record
                    else:
                        skipped.add(EMPTY, f"{part} record {number}")
                return
            except Exception as error:  # network, repository and format errors of half a dozen libraries
                self._failed(error, patience, f"{part} record {number + 1:,}")
            if number > before:
                state = dataset.state_dict()

    def downloaded(self, part: str, skipped: Skipped) -> Iterator[Mapping[str, Any]]:
        """The records of a part, from shards that are downloaded one after the other."""
        datasets, patience = self._prepared()

        def shards() -> list[str]:
            return datasets.load_dataset_builder(self.name, self._language).config.data_files[part]

        for number, shard in enumerate(self._persistently(shards, patience, f"{part} shard 1"), 1):
            download = functools.partial(datasets.DownloadManager().download, shard)
            path = Path(self._persistently(download, patience, f"{part} shard {number:,}"))
            for _, record in json_records(path, skipped):
                self._begun = True
                yield record

    def _prepared(self) -> tuple[ModuleType, hub.Patience]:
        """The library, which takes a second to import that other datasets need not wait, and patience of our own."""
        hub.prepare(self.name)
        import datasets

        hub.leave_patience_to_us(datasets)
        return datasets, hub.Patience(f"{self.name} ({self._language})")

    def _persistently(self, work: Callable[[], T], patience: hub.Patience, place: str) -> T:
        while True:
            try:
                result = work()
            except Exception as error:  # as above
                self._failed(error, patience, place)
            else:
                patience.progressed()
                return result

    def _failed(self, error: Exception, patience: hub.Patience, place: str) -> None:
        """Wait, to go on, or give up."""
        if self._begun and not patience.ends(error, place):
            return
        name, kind = f"{self.name} ({self._language})", type(error).__name__
        if self._begun:
            raise SourceLostError(f"{name}: lost at {place}: {kind}: {first_line(error)}") from error
        raise DatasetError(f"{name}: {kind}: {hub.problem_with(self.name, error)}") from error


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
        SourceLostError: the source that had been chosen failed on the way.
    """
    attempts = {"c4_tokenized_path": _tokenised, "c4_local_path": _local, "hub": _hub}
    failures = []
    for place, attempt in attempts.items():
        if place != "hub" and getattr(config, place) is None:
            continue
        if failures:
            logger.warning("C4 cannot be read from %s", failures[-1])
        try:
            name, documents = attempt(config)
        except SourceLostError:
            raise
        except DatasetError as error:
            failures.append(f"{place}: {error}")
        else:
            logger.info("C4 comes from %s: %s", place, name)
            return name, documents
    raise DatasetError("; ".join(failures))


def load_c4(config: Config) -> TaskData:
    """`c4`: the paper's data."""
    name, documents = open_c4(config)
    return task_data(config, "c4", name, documents)
