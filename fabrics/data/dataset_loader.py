"""The registry of datasets, and the fallback if one cannot be loaded.

A dataset is a function from the config to `TaskData`, registered in DATASETS. Trainers read batches of model keyword
arguments from its `Examples` and never look inside.
"""

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass

from algorithms.registry import Registry
from fabrics.data.c4 import load_c4
from fabrics.data.documents import (
    DatasetError,
    Skipped,
    Source,
    SourceLostError,
    blank_line_blocks,
    file_identities,
    matching_files,
    python_docs_source,
    whole_files,
)
from fabrics.data.examples import TaskData
from fabrics.data.imdb import load_imdb
from fabrics.data.language_modelling import task_data, tokenised_documents
from fabrics.data.partition import describe_shares, share_count
from utils.config.schema import Config, ConfigError
from utils.distributed.collective_checks import agree, done_by_all
from utils.distributed.processes import LocalProcesses, Processes

logger = logging.getLogger("adloco.dataset")


@dataclass(frozen=True)
class Dataset:
    """One value of `dataset`: its task, and a function that may raise ConfigError and DatasetError."""

    task: str
    load: Callable[[Config], TaskData]


def _from_source(config: Config, source: Source) -> TaskData:
    return task_data(config, config.dataset, source.name, tokenised_documents(config, source))


def load_python_docs(config: Config) -> TaskData:
    """`python_docs`: about 2 MB of real English that is on every machine with Python; no network."""
    return _from_source(config, python_docs_source())


TEXT_DOCUMENTS = Registry({"files": whole_files, "blank_lines": blank_line_blocks})


def load_text(config: Config) -> TaskData:
    """`text`: the user's own files."""
    files, read = matching_files(config.text_files), TEXT_DOCUMENTS[config.text_documents]
    source = Source(
        name=f"{len(files)} text files ({', '.join(config.text_files)})",
        identity={"text": file_identities(files), "documents": config.text_documents},
        train=read(files),
        origins=(lambda: ((text, str(file)) for file in files for text in read([file])(Skipped())),),
    )
    return _from_source(config, source)


DATASETS = Registry(
    {
        "python_docs": Dataset("causal_lm", load_python_docs),
        "c4": Dataset("causal_lm", load_c4),
        "text": Dataset("causal_lm", load_text),
        "imdb": Dataset("classification", load_imdb),
    }
)
# Values of dataset_fallback.
FALLBACKS = ("none", "python_docs")


def _load(config: Config) -> tuple[TaskData | None, str | None]:
    """Return the data, or the reason why they cannot be loaded."""
    try:
        return DATASETS[config.dataset].load(config), None
    except SourceLostError as error:
        raise ConfigError(f"dataset: {error}; what was read is kept; the same command continues") from None
    except DatasetError as error:
        return None, str(error)


def _load_everywhere(config: Config, processes: Processes) -> tuple[TaskData | None, str | None]:
    """Load the data in every process; or return the main process's reason for failure in all of them.

    The first process of each machine loads before the others, which then find the cache.

    Raises:
        ConfigError: another process fails and the main process does not; or the config is wrong.
    """
    loaded: tuple[TaskData | None, str | None] = (None, None)
    for turn in (True, False):
        if processes.first_here is turn:
            loaded = done_by_all(processes, lambda: _load(config))
        else:
            done_by_all(processes, lambda: None)
        reasons = processes.gather(loaded[1])
        if reasons[0] is not None:
            return None, reasons[0]
        missing = {rank: reason for rank, reason in enumerate(reasons) if reason is not None}
        if missing:
            raise ConfigError(
                [f"dataset: rank {rank} cannot load {config.dataset}: {reason}" for rank, reason in missing.items()]
            )
    return loaded


def load_data(config: Config, processes: Processes | None = None) -> TaskData:
    """Load the data of a run; if C4 cannot be loaded, that of `dataset_fallback`, with the reason in `fallback_reason`.

    Args:
        processes: the processes of the run, which all call this; the main process decides about the fallback. None:
            only this process.

    Raises:
        ConfigError: the data cannot be loaded, do not fit the config, or differ between processes.
    """
    processes = processes or LocalProcesses()
    if config.splits_data:
        config = dataclasses.replace(config, data_shares=share_count(config, len(processes.devices)))
    data, reason = _load_everywhere(config, processes)
    if data is None:
        data = _fallback(config, processes, reason)
    if config.splits_data and data.shares is None:
        raise ConfigError(f"data_split: dataset {config.dataset} has no documents to divide; iid over trainers works")
    if data.shares is not None:
        logger.info("%s", describe_shares(data.shares.record))
    agree(
        processes,
        "data",
        {
            "dataset": data.dataset,
            "training examples": len(data.train),
            "validation examples": len(data.validation),
            "contents": data.fingerprint(),
            "shares of the documents": data.shares and data.shares.digest,
        },
    )
    return data


def _fallback(config: Config, processes: Processes, reason: str) -> TaskData:
    if config.dataset != "c4" or config.dataset_fallback == "none":
        raise ConfigError(f"dataset: {config.dataset} cannot be loaded: {reason}")
    logger.warning("DATASET FALLBACK: %s instead of c4", config.dataset_fallback)
    fallback = dataclasses.replace(config, dataset=config.dataset_fallback)
    try:
        data, missing = _load_everywhere(fallback, processes)
    except ConfigError as error:
        data, missing = None, str(error)
    if data is None:
        raise ConfigError(
            [
                f"dataset: c4 cannot be loaded: {reason}",
                *(f"dataset_fallback: nor can {fallback.dataset}: {line}" for line in missing.splitlines()),
            ]
        )
    return dataclasses.replace(data, fallback_reason=reason)
