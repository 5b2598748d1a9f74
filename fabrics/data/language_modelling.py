"""Examples of a causal language model: documents are tokenised once, cached, and cut into sequences."""

import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from fabrics.data.documents import DatasetError, Source
from fabrics.data.examples import DataShares, Examples, PackedSequences, PaddedSequences, TaskData
from fabrics.data.held_out import sizes, split
from fabrics.data.partition import Corpus, cut_packed, cut_single, labels_by_origin, partitioned
from fabrics.data.token_store import Recipe, TokenisedPart, TokenisedSet, content_digest, is_written, write_tokenised
from fabrics.data.tokenization import describe, fingerprint, named_tokenizer, padding, train_tokenizer, vocabulary_size
from utils.config.schema import Config, ConfigError
from utils.files import nearest_existing_folder

logger = logging.getLogger("adloco.dataset")


def tokenised_documents(config: Config, source: Source) -> TokenisedSet:
    """Return the tokenised documents of a source, from the cache if possible.

    Raises:
        ConfigError: the tokenizer cannot be loaded, there are too few documents, or the cache cannot be written.
        DatasetError: the source cannot be read.
    """
    named = named_tokenizer(config)
    recipe = Recipe(
        arguments={
            "source": source.identity,
            **sizes(config.data_sample_size, config.val_size),
            "tokenizer": {"trained": config.vocab_size} if named is None else fingerprint(named),
        },
        source=source.name,
        parts=lambda: split(source, config.data_sample_size, config.val_size),
        tokenizer=lambda parts: named or train_tokenizer(parts.texts(), config.vocab_size),
        details={},
    )
    key = hashlib.sha256(json.dumps(recipe.arguments, sort_keys=True).encode()).hexdigest()[:32]
    folder = Path(config.cache_dir) / "tokenised" / key
    try:
        return _cached(config, source, recipe, folder)
    except DatasetError as error:
        if not folder.exists():
            raise
        logger.warning("cached documents are damaged and will be made again: %s", error)
        shutil.rmtree(folder)
        return _cached(config, source, recipe, folder)


def _cached(config: Config, source: Source, recipe: Recipe, folder: Path) -> TokenisedSet:
    if is_written(folder, recipe):
        logger.info("documents of %s: tokenised before, in %s", source.name, folder)
    else:
        existing = nearest_existing_folder(folder)
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(f"cache_dir: cannot write to {config.cache_dir}: {existing} is not a writable folder")
        logger.info("documents of %s: reading and tokenising", source.name)
    return dataclasses.replace(write_tokenised(folder, recipe), origins=source.origins)


def task_data(config: Config, dataset: str, source: str, documents: TokenisedSet) -> TaskData:
    """Build training and validation examples from tokenised documents.

    Raises:
        ConfigError: there are too few documents, or they do not fill one sequence.
    """
    if documents.validation is None:
        raise ConfigError(f"{source}: has no validation documents; tokenise with --create_eval_split")
    parts = {
        "train": _first(documents.train, config.data_sample_size, "data_sample_size", "training", source),
        "validation": _first(documents.validation, config.val_size, "val_size", "validation", source),
    }
    if config.splits_data:
        train, shares = _partitioned(config, parts, documents)
    else:
        train, shares = _examples(config, "train", parts["train"], documents), None
    data = TaskData(
        task="causal_lm",
        dataset=dataset,
        source=source,
        train=train,
        validation=_examples(config, "validation", parts["validation"], documents, config.val_sequences),
        tokenizer=documents.tokenizer,
        documents={name: len(part) for name, part in parts.items()},
        skipped={reason: entry["documents"] for reason, entry in documents.metadata["skipped"].items()},
        shares=shares,
        content=content_digest(parts.values(), documents.tokenizer),
    )
    logger.info(
        "data: %s; %s training documents in %s sequences, %s validation documents in %s; tokenizer %s",
        source,
        f"{data.documents['train']:,}",
        f"{len(data.train):,}",
        f"{data.documents['validation']:,}",
        f"{len(data.validation):,}",
        describe(data.tokenizer, documents.metadata["tokenizer"]["name"]),
    )
    for reason, entry in documents.metadata["skipped"].items():
        logger.info("skipped %s documents: %s (first: %s)", f"{entry['documents']:,}", reason, entry["first"])
    return data


def _partitioned(
    config: Config, parts: Mapping[str, TokenisedPart], documents: TokenisedSet
) -> tuple[Examples, DataShares]:
    known = documents.origins
    corpus = Corpus(
        **parts,
        vocabulary=vocabulary_size(documents.tokenizer),
        origins=(lambda: labels_by_origin(known, parts["train"], parts["validation"])) if known else None,
        folder=documents.folder,
    )
    if config.packing:
        cut = cut_packed(config.sequence_length, config.data_shares)
    else:
        cut = cut_single(config.data_shares, lambda part: _examples(config, "", part, documents))
    return partitioned(config, corpus, cut, config.val_sequences)


def _first(part: TokenisedPart, count: int | None, key: str, kind: str, source: str) -> TokenisedPart:
    if count is not None and count > len(part):
        raise ConfigError(f"{key}: {source} has {len(part)} {kind} documents, got {count}")
    return part.first(count)


def _examples(
    config: Config, name: str, part: TokenisedPart, documents: TokenisedSet, most: int | None = None
) -> Examples:
    """The first `most` sequences of a part."""
    if not config.packing:
        offsets = part.offsets if most is None else part.offsets[: most + 1]
        return PaddedSequences(part.tokens, offsets, config.sequence_length, padding(documents.tokenizer))
    packed = part.packed(config.sequence_length)[:most]
    if not len(packed):
        raise ConfigError(
            f"sequence_length: the {len(part)} {name} documents do not fill one sequence of "
            f"{config.sequence_length} tokens"
        )
    return PackedSequences(packed)
