"""The datasets that a config can name, and what happens where one cannot be loaded.

A dataset is a function from the config to `TaskData`, registered in DATASETS. What it returns is task-neutral:
trainers ask `Examples` for batches of keyword arguments of the model and never look inside.
"""

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass

from fabrics.c4 import load_c4
from fabrics.documents import (
    DatasetError,
    Source,
    blank_line_blocks,
    file_identities,
    matching_files,
    python_docs_source,
    whole_files,
)
from fabrics.examples import TaskData
from fabrics.imdb import load_imdb
from fabrics.language_modelling import task_data, tokenised_documents
from utils.config import Config, ConfigError

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


TEXT_DOCUMENTS = {"files": whole_files, "blank_lines": blank_line_blocks}


def load_text(config: Config) -> TaskData:
    """`text`: the user's own files."""
    files = matching_files(config.text_files)
    source = Source(
        name=f"{len(files)} text files ({', '.join(config.text_files)})",
        identity={"text": file_identities(files), "documents": config.text_documents},
        train=TEXT_DOCUMENTS[config.text_documents](files),
    )
    return _from_source(config, source)


DATASETS = {
    "python_docs": Dataset("causal_lm", load_python_docs),
    "c4": Dataset("causal_lm", load_c4),
    "text": Dataset("causal_lm", load_text),
    "imdb": Dataset("classification", load_imdb),
}
# What may stand in for C4: it is on every machine.
FALLBACKS = ("none", "python_docs")


def load_data(config: Config) -> TaskData:
    """The data of a run; where C4 cannot be loaded, that of `dataset_fallback`, and `fallback_reason` says why.

    Raises:
        ConfigError: it cannot be loaded, or does not fit the config.
    """
    try:
        return DATASETS[config.dataset].load(config)
    except DatasetError as error:
        reason = str(error)
    if config.dataset != "c4" or config.dataset_fallback == "none":
        raise ConfigError(f"dataset: {config.dataset} cannot be loaded: {reason}")
    logger.warning("DATASET FALLBACK: %s instead of c4", config.dataset_fallback)
    fallback = dataclasses.replace(config, dataset=config.dataset_fallback)
    try:
        data = DATASETS[fallback.dataset].load(fallback)
    except (ConfigError, DatasetError) as error:
        raise ConfigError(
            [
                f"dataset: c4 cannot be loaded: {reason}",
                *(f"dataset_fallback: nor can {fallback.dataset}: {line}" for line in str(error).splitlines()),
            ]
        ) from None
    return dataclasses.replace(data, fallback_reason=reason)
