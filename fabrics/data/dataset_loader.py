"""Datasets by name, and how all processes of a run load the same one.

A dataset is a function from the config to `TaskData`, registered in DATASETS. Trainers read batches of model keyword
arguments from its `Examples` and never look inside.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from algorithms.registry import Registry
from fabrics.data.c4 import load_c4
from fabrics.data.documents import (
    DatasetError,
    Document,
    Skipped,
    Source,
    blank_line_blocks,
    file_identities,
    matching_files,
    whole_file,
)
from fabrics.data.examples import TaskData
from fabrics.data.imdb import load_imdb
from fabrics.data.language_modelling import task_data, tokenised_documents
from fabrics.data.partition import share_count
from fabrics.data.python_docs import python_docs_source
from utils.config.schema import Config, ConfigError
from utils.distributed.collective_checks import agree, done_by_all
from utils.distributed.processes import LocalProcesses, Processes


@dataclass(frozen=True)
class Dataset:
    """One value of `dataset`: its task, and a loader that may raise ConfigError and DatasetError."""

    task: str
    load: Callable[[Config], TaskData]


def load_python_docs(config: Config) -> TaskData:
    """`dataset: python_docs`: no network, nothing to prepare."""
    return task_data(config, tokenised_documents(config, python_docs_source()))


# Values of `text_documents`.
TEXT_DOCUMENTS = Registry({"files": whole_file, "blank_lines": blank_line_blocks})


def load_text(config: Config) -> TaskData:
    """`dataset: text`: the user's own files."""
    files = matching_files(config.text_files)
    read = TEXT_DOCUMENTS[config.text_documents]

    def documents(skipped: Skipped) -> Iterator[Document]:
        for file in files:
            for text in read(file, skipped):
                yield Document(text, str(file))

    source = Source(
        name=f"{len(files)} text files ({', '.join(config.text_files)})",
        identity={"text": file_identities(files), "documents": config.text_documents},
        train=documents,
    )
    return task_data(config, tokenised_documents(config, source))


DATASETS = Registry(
    {
        "python_docs": Dataset("causal_lm", load_python_docs),
        "c4": Dataset("causal_lm", load_c4),
        "text": Dataset("causal_lm", load_text),
        "imdb": Dataset("classification", load_imdb),
    }
)


def _load(config: Config) -> TaskData:
    try:
        return DATASETS[config.dataset].load(config)
    except DatasetError as error:
        hint = "; dataset=python_docs works without a download" if config.dataset == "c4" else ""
        raise ConfigError(f"dataset: {config.dataset} cannot be loaded: {error}{hint}") from None


def load_data(config: Config, processes: Processes | None = None) -> TaskData:
    """Load the data of a run.

    Args:
        processes: the processes of the run, which all call this; None: only this process.

    Raises:
        ConfigError: the data cannot be loaded, do not fit the config, or differ between processes.
    """
    processes = processes or LocalProcesses()
    if config.splits_data:
        config = dataclasses.replace(config, data_shares=share_count(config, len(processes.devices)))
    # The first process of each machine fills the cache for the others.
    data = done_by_all(processes, lambda: _load(config) if processes.first_here else None)
    data = done_by_all(processes, lambda: data or _load(config))
    if config.splits_data and data.shares is None:
        raise ConfigError(f"data_split: dataset {config.dataset} has no documents to divide; iid over trainers works")
    agree(
        processes,
        "data",
        {
            "dataset": data.dataset,
            "training examples": len(data.train),
            "validation examples": len(data.validation),
            "contents": data.fingerprint(),
        },
    )
    return data
