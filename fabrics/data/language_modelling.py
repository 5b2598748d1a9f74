"""Examples of a causal language model: documents are tokenised once, cached, joined and cut into sequences."""

import logging
from pathlib import Path

from fabrics.data.documents import Source
from fabrics.data.examples import PackedDocuments, PackedSequences, TaskData
from fabrics.data.partition import Corpus, labels_by_origin, partition
from fabrics.data.token_store import Recipe, TokenisedPart, TokenisedSet, content_digest, tokenised
from fabrics.data.tokenization import describe, named_tokenizer, vocabulary_size
from utils.config.schema import Config, ConfigError

logger = logging.getLogger("adloco.dataset")

# An evaluation reads at most this many sequences, so that long documents do not make it slow.
MOST_VALIDATION_SEQUENCES = 10_000


def tokenised_documents(config: Config, source: Source) -> TokenisedSet:
    """Return the tokenised documents of a source, from the cache if possible.

    Raises:
        ConfigError: the tokenizer cannot be loaded, there are too few documents, or the cache cannot be written.
        DatasetError: the source cannot be read.
    """
    recipe = Recipe(
        source,
        config.data_sample_size,
        config.val_size,
        tokenizer=named_tokenizer(config),
        vocab_size=config.vocab_size,
    )
    return tokenised(Path(config.cache_dir) / "tokenised" / recipe.key, recipe, cache=True)


def task_data(config: Config, documents: TokenisedSet) -> TaskData:
    """Build training and validation examples from tokenised documents.

    Raises:
        ConfigError: there are too few documents, or they do not fill one sequence.
    """
    source = documents.metadata["source"]
    if documents.validation is None:
        raise ConfigError(f"{documents.folder}: has no validation documents; tokenise with --create_eval_split")
    train = _first(documents.train, config.data_sample_size, "data_sample_size", "training", documents)
    validation = _first(documents.validation, config.val_size, "val_size", "validation", documents)
    content = content_digest((train, validation), documents.tokenizer)
    length = config.sequence_length
    shares = None
    if config.splits_data:
        corpus = Corpus(
            train,
            validation,
            vocabulary_size(documents.tokenizer),
            lambda: labels_by_origin(train.read_origins(), validation.read_origins()),
            content,
        )
        parts = partition(config, corpus)
        examples = PackedDocuments(train.tokens, train.offsets, parts.train, length)
        per_share = []
        if config.validation_per_share:
            most = -(-MOST_VALIDATION_SEQUENCES // len(parts.validation))
            for own in parts.validation:
                per_share.append(PackedDocuments(validation.tokens, validation.offsets, [own], length, most))
        shares = parts.shares(examples.sizes, per_share)
    else:
        examples = _packed(train, "training", length)
    skipped = documents.metadata["skipped"]
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
        "data: %s; %s training documents in %s sequences, %s validation documents in %s; tokenizer %s",
        source,
        f"{len(train):,}",
        f"{len(data.train):,}",
        f"{len(validation):,}",
        f"{len(data.validation):,}",
        describe(data.tokenizer, documents.metadata["tokenizer"]["name"]),
    )
    for reason, entry in skipped.items():
        logger.info("skipped %s documents: %s (first: %s)", f"{entry['documents']:,}", reason, entry["first"])
    return data


def _first(part: TokenisedPart, count: int | None, key: str, kind: str, documents: TokenisedSet) -> TokenisedPart:
    if count is not None and count > len(part):
        raise ConfigError(f"{key}: {documents.folder} has {len(part)} {kind} documents, got {count}")
    return part.first(count)


def _packed(part: TokenisedPart, kind: str, sequence_length: int, most: int | None = None) -> PackedSequences:
    packed = part.packed(sequence_length)[:most]
    if not len(packed):
        raise ConfigError(
            f"sequence_length: the {len(part)} {kind} documents do not fill one sequence of {sequence_length} tokens"
        )
    return PackedSequences(packed)
