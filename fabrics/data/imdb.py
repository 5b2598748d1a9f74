"""IMDB: film reviews, positive or negative, from the hub or from the folder that aclImdb_v1.tar.gz unpacks to."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from fabrics.data.documents import EMPTY, DatasetError, Skipped, document_hash, matching_files, whole_file
from fabrics.data.examples import PaddedSequences, TaskData
from fabrics.data.token_store import TokenisedPart, cached_arrays, content_digest
from fabrics.data.tokenization import describe, fingerprint, named_tokenizer, padding, train_tokenizer
from utils.config.schema import Config, ConfigError
from utils.progress import progress_bar
from utils.text import first_line

logger = logging.getLogger("adloco.dataset")

REPOSITORY = "stanfordnlp/imdb"
CLASS_NAMES = ("neg", "pos")

Review = tuple[str, int]  # text, class


def local_reviews(path: str, skipped: Skipped) -> dict[str, list[Review]]:
    """Return the reviews of train/ and test/ in `imdb_local_path`, each with neg/ and pos/ of a file per review."""
    parts: dict[str, list[Review]] = {"train": [], "test": []}
    for part, reviews in parts.items():
        for label, name in enumerate(CLASS_NAMES):
            files = matching_files([str(Path(path, part, name))], (".txt",))
            for file in progress_bar(files, desc=f"reading {part}/{name}", unit=" reviews", leave=False):
                reviews += [(text, label) for text in whole_file(file, skipped)]
    return parts


def hub_reviews(skipped: Skipped, repository: str = REPOSITORY) -> dict[str, list[Review]]:
    """Return the reviews of train and test from the hub or its cache on this machine; DatasetError: in neither."""
    from datasets import load_dataset  # takes a second

    parts: dict[str, list[Review]] = {"train": [], "test": []}
    for part, reviews in parts.items():
        try:
            table = load_dataset(repository, split=part)
        except Exception as error:  # network, repository and format errors of half a dozen libraries
            raise DatasetError(f"{repository}: {type(error).__name__}: {first_line(error)}") from error
        for number, (text, label) in enumerate(zip(table["text"], table["label"], strict=True), 1):
            if text.strip():
                reviews.append((text, int(label)))
            else:
                skipped.add(EMPTY, f"{repository} {part} record {number}")
    return parts


def choose(
    parts: Mapping[str, list[Review]],
    seed: int,
    train_size: int | None,
    samples_per_class: int | None,
    skipped: Skipped,
) -> tuple[list[Review], list[Review]]:
    """Choose training and evaluation reviews, shuffled with the seed; no text is in both.

    samples_per_class: evaluation reviews of each class; None: as many as the smaller class of the test part has.
    """
    generator = np.random.default_rng([seed, 0])
    shuffled = [parts["test"][i] for i in generator.permutation(len(parts["test"]))]
    by_class = [[review for review in shuffled if review[1] == label] for label in range(len(CLASS_NAMES))]
    if samples_per_class is None:
        samples_per_class = min(len(members) for members in by_class)
    for name, members in zip(CLASS_NAMES, by_class, strict=True):
        if len(members) < max(samples_per_class, 1):
            raise ConfigError(
                f"samples_per_class: class {name} has {len(members)} reviews to evaluate on, "
                f"got {samples_per_class or 'null'}"
            )
    # Classes alternate, so that any prefix is balanced.
    evaluation = [members[i] for i in range(samples_per_class) for members in by_class]
    held_out = {text for text, _ in evaluation}
    train = []
    for i in generator.permutation(len(parts["train"])):
        text, label = parts["train"][i]
        if text in held_out:
            skipped.add("the same text as an evaluation review", repr(text[:40]))
        else:
            train.append((text, label))
    if len(train) < (train_size or 1):
        raise ConfigError(
            f"data_sample_size: {len(train)} reviews are left for training beside {len(evaluation)} for evaluation, "
            f"got {train_size or 'null'}"
        )
    return train[:train_size], evaluation


def encode_reviews(
    config: Config, reviews: Sequence[Review], tokenizer: PreTrainedTokenizerBase, name: str
) -> TokenisedPart:
    """Tokenise reviews as [CLS] text [SEP], cut at sequence_length; special tokens that a text spells out are text."""
    hashes = np.array([document_hash(text) for text, _ in reviews], dtype=np.uint64)

    def encoded() -> dict[str, np.ndarray]:
        parts = []
        for start in progress_bar(range(0, len(reviews), 500), desc=f"tokenising {name} reviews", leave=False):
            ids = tokenizer(
                [text for text, _ in reviews[start : start + 500]],
                truncation=True,
                max_length=config.sequence_length,
                split_special_tokens=True,
                return_attention_mask=False,
            )["input_ids"]
            parts += [np.array(tokens, dtype=np.int32) for tokens in ids]
        return {"tokens": np.concatenate(parts), "offsets": np.cumsum([0, *map(len, parts)])}

    texts = hashlib.sha256(hashes.tobytes()).hexdigest()
    cut = [config.sequence_length, tokenizer.truncation_side]
    arrays = cached_arrays(config, ["reviews", texts, cut, fingerprint(tokenizer)], encoded)
    return TokenisedPart(arrays["tokens"], arrays["offsets"], hashes)


def load_imdb(config: Config) -> TaskData:
    """`dataset: imdb`: film reviews for BERT, the second combination of the published code."""
    skipped = Skipped()
    path = config.imdb_local_path
    parts = hub_reviews(skipped) if path is None else local_reviews(path, skipped)
    source = f"{REPOSITORY} on the hub" if path is None else path
    train, evaluation = choose(parts, config.training_seed, config.data_sample_size, config.samples_per_class, skipped)
    tokenizer = named_tokenizer(config)
    name = None
    if tokenizer is None:
        tokenizer = train_tokenizer((text for text, _ in train), config.vocab_size, "classification")
        name = "trained on the reviews"
    length = config.sequence_length
    train_part = encode_reviews(config, train, tokenizer, "training")
    evaluation_part = encode_reviews(config, evaluation, tokenizer, "evaluation")
    train_classes, evaluation_classes = (np.array([label for _, label in part]) for part in (train, evaluation))
    pad = padding(tokenizer)
    data = TaskData(
        task="classification",
        dataset="imdb",
        source=source,
        train=PaddedSequences(train_part.tokens, train_part.offsets, length, pad, train_classes),
        validation=PaddedSequences(evaluation_part.tokens, evaluation_part.offsets, length, pad, evaluation_classes),
        tokenizer=tokenizer,
        documents={"train": len(train), "validation": len(evaluation)},
        skipped=skipped.counts,
        class_names=CLASS_NAMES,
        content=content_digest((train_part, evaluation_part), tokenizer, (train_classes, evaluation_classes)),
    )
    logger.info(
        "data: %s; %s training reviews (%s pos), %s evaluation reviews, balanced; tokenizer %s",
        source,
        f"{len(train):,}",
        f"{train_classes.sum():,}",
        f"{len(evaluation):,}",
        describe(tokenizer, name),
    )
    if skipped.counts:
        logger.info("skipped reviews: %s", skipped)
    return data
