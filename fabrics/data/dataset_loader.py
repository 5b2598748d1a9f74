"""Datasets by name, and how all processes of a run load the same one.

A dataset is a task and a function from the config to `TaskData`, registered in DATASETS as a `Dataset`. Trainers read
batches of model keyword arguments from its `Examples` and never look inside.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from algorithms.registry import Registry
from fabrics.data.c4 import c4_documents
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
from fabrics.data.examples import PackedDocuments, PackedSequences, TaskData
from fabrics.data.imdb import load_imdb
from fabrics.data.messages import load_messages
from fabrics.data.partition import SPLITS, share_count
from fabrics.data.python_docs import python_docs_source
from fabrics.data.token_store import TokenisedPart, TokenisedSet, content_digest, tokenised_documents, verified_sets
from fabrics.data.tokenization import describe, tokenizer_name, vocabulary_size
from utils.config.schema import Config, ConfigError
from utils.distributed.processes import Processes, agree, done_by_all
from utils.text import counted

logger = logging.getLogger("adloco.dataset")

# An evaluation reads at most this many sequences, so that long documents do not make it slow.
MOST_VALIDATION_SEQUENCES = 10_000

# Up to four passes over the data are nearly as good as new data (arXiv 2305.16264).
_USEFUL_PASSES = 4
# A validation part of more than this share of all sequences takes much from training: one document may be long.
_USUAL_VALIDATION_SHARE = 0.2


@dataclass(frozen=True)
class Dataset:
    """One value of `dataset`: its task, and a loader that may raise ConfigError and DatasetError.

    Attributes:
        packed: every example has `sequence_length` tokens.
        keys: those that it reads, of the keys that not every dataset reads; None: it may read all.
    """

    task: str
    load: Callable[[Config], TaskData]
    packed: bool = False
    keys: tuple[str, ...] | None = None


def task_data(config: Config, documents: TokenisedSet) -> TaskData:
    """Build training and validation examples from tokenised documents."""
    source = documents.metadata["source"]
    train = _first(documents.train, config.data_sample_size, "data_sample_size", "training", documents)
    validation = _first(documents.validation, config.val_size, "val_size", "validation", documents)
    content = content_digest((train, validation), documents.tokenizer)
    length = config.sequence_length
    shares = None
    if config.splits_data:
        share_of = SPLITS[config.data_split](config, train, vocabulary_size(documents.tokenizer))
        groups = [np.flatnonzero(share_of == share) for share in range(config.data_shares)]
        examples = PackedDocuments(train.tokens, train.offsets, groups, length)
        shares = _described_shares(train, groups, examples.sizes)
    else:
        examples = _packed(train, "training", length)
    skipped = documents.metadata["skipped"]
    # A cached set may name another folder, or one that is gone, with an equal tokenizer.
    tokenizer, _ = tokenizer_name(config) or (documents.metadata["tokenizer"]["name"], "")
    data = TaskData(
        task="causal_lm",
        dataset=config.dataset,
        source=source,
        train=examples,
        validation=_packed(validation, "validation", length, MOST_VALIDATION_SEQUENCES),
        tokenizer=documents.tokenizer,
        documents={"train": len(train), "validation": len(validation)},
        skipped={reason: entry["documents"] for reason, entry in skipped.items()},
        shares=shares,
        content=content,
    )
    logger.info(
        "data: %s; %s in %s, %s in %s; tokenizer %s",
        source,
        counted(len(train), "training document"),
        counted(len(data.train), "sequence"),
        counted(len(validation), "validation document"),
        f"{len(data.validation):,}",
        describe(data.tokenizer, tokenizer),
    )
    passes = (config.max_tokens or 0) / (len(data.train) * length)
    if passes > _USEFUL_PASSES:
        logger.info(
            "max_tokens: %s are %.1f passes over the training data; if validation gets worse, lower it or add data",
            f"{config.max_tokens:,}",
            passes,
        )
    held_out, rest = (int(part.lengths.sum()) for part in (validation, train))
    if held_out > _USUAL_VALIDATION_SHARE * (held_out + rest):
        logger.info(
            "val_size: much of the text is for validation; a smaller val_size leaves more for training, "
            "and so do smaller documents (with dataset text: text_documents blank_lines)"
        )
    for reason, entry in skipped.items():
        logger.info("skipped %s: %s (first: %s)", counted(entry["documents"], "document"), reason, entry["first"])
    return data


def _first(part: TokenisedPart, count: int | None, key: str, kind: str, documents: TokenisedSet) -> TokenisedPart:
    if count is not None and count > len(part):
        raise ConfigError(f"{key}: {documents.folder} has {len(part)} {kind} documents, got {count}")
    return part.first(count)


def _described_shares(train: TokenisedPart, groups: list[np.ndarray], sizes: tuple[int, ...]) -> list[dict[str, int]]:
    if 0 in sizes:
        raise ConfigError(
            f"data_split: the documents of share {sizes.index(0)} of {len(sizes)} do not fill one example; use fewer "
            f"data_shares or a shorter sequence_length"
        )
    lengths = train.lengths
    return [
        {"documents": len(own), "examples": size, "tokens": int(lengths[own].sum())}
        for own, size in zip(groups, sizes, strict=True)
    ]


def _packed(part: TokenisedPart, kind: str, sequence_length: int, most: int | None = None) -> PackedSequences:
    packed = part.packed(sequence_length)
    if most is not None and len(packed) > most:  # from all documents, as the source may be sorted
        logger.info("evaluation reads %s of %s %s sequences", f"{most:,}", f"{len(packed):,}", kind)
        packed = packed[np.linspace(0, len(packed) - 1, most).astype(np.int64)]
    if not len(packed):
        raise ConfigError(
            f"sequence_length: the {len(part)} {kind} documents do not fill one sequence of {sequence_length} tokens"
        )
    return PackedSequences(packed)


def load_python_docs(config: Config) -> TaskData:
    """`dataset: python_docs`: no network, nothing to prepare."""
    return task_data(config, tokenised_documents(config, python_docs_source()))


def load_c4(config: Config) -> TaskData:
    """`dataset: c4`: the paper's data."""
    return task_data(config, c4_documents(config))


# Values of `text_documents`.
TEXT_DOCUMENTS = Registry({"files": whole_file, "blank_lines": blank_line_blocks})


def load_text(config: Config) -> TaskData:
    """`dataset: text`: the user's own files."""
    files = matching_files(config.text_files, subfolders=True)
    read = TEXT_DOCUMENTS[config.text_documents]

    def documents(skipped: Skipped) -> Iterator[Document]:
        for file in files:
            for text in read(file, skipped):
                yield Document(text, str(file))

    source = Source(
        name=f"{counted(len(files), 'text file')} ({', '.join(config.text_files)})",
        identity={"text": file_identities(files), "documents": config.text_documents},
        train=documents,
    )
    return task_data(config, tokenised_documents(config, source))


def _check_registered(name: str, dataset: Dataset) -> None:
    if not isinstance(dataset, Dataset):
        raise ValueError(f"{name}: must be a Dataset: its task, and the function that loads it")


DATASETS = Registry(
    {
        "python_docs": Dataset("causal_lm", load_python_docs, packed=True, keys=("val_size",)),
        "c4": Dataset(
            "causal_lm", load_c4, packed=True, keys=("val_size", "c4_tokenized_path", "c4_local_path", "c4_language")
        ),
        "text": Dataset("causal_lm", load_text, packed=True, keys=("val_size", "text_files", "text_documents")),
        "messages": Dataset("causal_lm", load_messages, keys=("val_size", "text_files")),
        "imdb": Dataset("classification", load_imdb, keys=("samples_per_class", "imdb_local_path")),
    },
    _check_registered,
)


def _load(config: Config) -> TaskData:
    try:
        return DATASETS[config.dataset].load(config)
    except DatasetError as error:
        hint = ""
        if config.dataset == "c4":
            tokenised = config.c4_tokenized_path is not None
            hint = "; c4/tokenize_c4.py writes one" if tokenised else "; dataset=python_docs works without a download"
        if ".cache/samples" in str(error):
            hint = "; python configs/make_samples.py writes it"
        raise ConfigError(f"dataset: {config.dataset} cannot be loaded: {error}{hint}") from None


def load_data(config: Config, processes: Processes | None = None) -> TaskData:
    """Load the data of a run; all its processes call this. ConfigError: data do not fit, or differ in processes."""
    processes = processes or Processes()
    if config.splits_data:
        config = dataclasses.replace(config, data_shares=share_count(config, len(processes.devices)))
    # The first process of each machine fills the cache for the others, and verifies its checksums.
    data = done_by_all(processes, lambda: _load(config) if processes.first_here else None)
    with verified_sets():
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
