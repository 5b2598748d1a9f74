"""IMDB: film reviews, positive or negative, from the hub or from the folder that aclImdb_v1.tar.gz unpacks to."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fabrics.data.documents import EMPTY, DatasetError, Skipped, document_hash, matching_files
from fabrics.data.examples import PaddedSequences, TaskData
from fabrics.data.partition import Corpus, DocumentLabels, cut_single, partitioned
from fabrics.data.token_store import TokenisedPart, content_digest
from fabrics.data.tokenization import describe, named_tokenizer, padding, train_tokenizer, vocabulary_size
from utils.config.schema import Config, ConfigError
from utils.text import first_line

logger = logging.getLogger("adloco.dataset")

REPOSITORY = "stanfordnlp/imdb"
CLASS_NAMES = ("neg", "pos")

Review = tuple[str, int]  # text, class


@dataclass(frozen=True)
class Reviews:
    """All reviews of a source."""

    name: str
    train: list[Review]
    test: list[Review]


def _add(reviews: list[Review], text: str, label: int, place: str, skipped: Skipped) -> None:
    if text.strip():
        reviews.append((text, label))
    else:
        skipped.add(EMPTY, place)


def local_reviews(path: str, skipped: Skipped) -> Reviews:
    """Read `imdb_local_path`: train/ and test/, each with neg/ and pos/, one text file per review.

    Raises:
        DatasetError: the folder has another layout or cannot be read.
    """
    parts: dict[str, list[Review]] = {"train": [], "test": []}
    for part, reviews in parts.items():
        for label, name in enumerate(CLASS_NAMES):
            folder = Path(path, part, name)
            files = matching_files([str(folder)], (".txt",))
            for file in tqdm(files, desc=f"reading {part}/{name}", unit=" reviews", leave=False, disable=None):
                try:
                    text = file.read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError) as error:
                    reason = getattr(error, "strerror", None) or "not UTF-8 text"
                    raise DatasetError(f"{file}: {reason}") from None
                _add(reviews, text, label, str(file), skipped)
    return Reviews(path, parts["train"], parts["test"])


def hub_reviews(skipped: Skipped, repository: str = REPOSITORY) -> Reviews:
    """Read IMDB from the hub, or from its cache on this machine.

    Raises:
        DatasetError: it is in neither.
    """
    from datasets import load_dataset  # takes a second

    parts: dict[str, list[Review]] = {"train": [], "test": []}
    for part, reviews in parts.items():
        try:
            table = load_dataset(repository, split=part)
        except Exception as error:  # network, repository and format errors of half a dozen libraries
            raise DatasetError(f"{repository}: {type(error).__name__}: {first_line(error)}") from error
        for number, (text, label) in enumerate(zip(table["text"], table["label"], strict=True), 1):
            _add(reviews, text, int(label), f"{repository} {part} record {number}", skipped)
    return Reviews(f"{repository} on the hub", parts["train"], parts["test"])


def choose(
    reviews: Reviews, seed: int, train_size: int | None, samples_per_class: int | None, skipped: Skipped
) -> tuple[list[Review], list[Review]]:
    """Choose training and evaluation reviews, shuffled with the seed; no text is in both.

    Args:
        train_size: None: all.
        samples_per_class: evaluation reviews of each class; None: as many as the smaller class of the test part has.

    Raises:
        ConfigError: there are not enough.
    """
    generator = np.random.default_rng([seed, 0])
    shuffled = [reviews.test[i] for i in generator.permutation(len(reviews.test))]
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
    for i in generator.permutation(len(reviews.train)):
        text = reviews.train[i][0]
        if text in held_out:
            skipped.add("the same text as an evaluation review", repr(text[:40]))
        else:
            train.append(reviews.train[i])
    if len(train) < (train_size or 1):
        raise ConfigError(
            f"data_sample_size: {len(train)} reviews are left for training beside {len(evaluation)} for evaluation, "
            f"got {train_size or 'null'}"
        )
    return train[:train_size], evaluation


def encode_reviews(
    reviews: Sequence[Review], tokenizer: PreTrainedTokenizerBase, sequence_length: int, name: str
) -> TokenisedPart:
    """Tokenise reviews as [CLS] text [SEP], cut at sequence_length."""
    parts = []
    lengths = []
    with tqdm(total=len(reviews), desc=f"tokenising {name} reviews", unit=" reviews", leave=False, disable=None) as bar:
        for start in range(0, len(reviews), 500):
            block = reviews[start : start + 500]
            ids = tokenizer(
                [text for text, _ in block], truncation=True, max_length=sequence_length, return_attention_mask=False
            )["input_ids"]
            parts += [np.array(tokens, dtype=np.int32) for tokens in ids]
            lengths += [len(tokens) for tokens in ids]
            bar.update(len(block))
    hashes = np.array([document_hash(text) for text, _ in reviews], dtype=np.uint64)
    return TokenisedPart(np.concatenate(parts), np.concatenate([[0], np.cumsum(lengths)]), hashes)


def _classes(reviews: Iterable[Review]) -> np.ndarray:
    return np.array([label for _, label in reviews])


def load_imdb(config: Config) -> TaskData:
    """`dataset: imdb`: the paper's second combination, BERT on film reviews."""
    skipped = Skipped()
    reviews = hub_reviews(skipped) if config.imdb_local_path is None else local_reviews(config.imdb_local_path, skipped)
    train, evaluation = choose(
        reviews, config.training_seed, config.data_sample_size, config.samples_per_class, skipped
    )
    tokenizer = named_tokenizer(config)
    name = None if tokenizer is not None else "trained on the reviews"
    tokenizer = tokenizer or train_tokenizer((text for text, _ in train), config.vocab_size, "classification")
    encoded = {
        "train": encode_reviews(train, tokenizer, config.sequence_length, "training"),
        "validation": encode_reviews(evaluation, tokenizer, config.sequence_length, "evaluation"),
    }
    labels = DocumentLabels(CLASS_NAMES, _classes(train), _classes(evaluation))
    examples = {
        name: PaddedSequences(part.tokens, part.offsets, config.sequence_length, padding(tokenizer), classes)
        for (name, part), classes in zip(encoded.items(), (labels.train, labels.validation), strict=True)
    }
    shares = None
    if config.splits_data:
        corpus = Corpus(**encoded, vocabulary=vocabulary_size(tokenizer), origins=lambda: labels)
        cut = cut_single(config.data_shares, lambda part: examples["train" if part is corpus.train else "validation"])
        examples["train"], shares = partitioned(config, corpus, cut)
    data = TaskData(
        task="classification",
        dataset="imdb",
        source=reviews.name,
        **examples,
        tokenizer=tokenizer,
        documents={"train": len(train), "validation": len(evaluation)},
        skipped=skipped.counts,
        class_names=CLASS_NAMES,
        shares=shares,
        content=content_digest(encoded.values(), tokenizer),
    )
    logger.info(
        "data: %s; %s training reviews (%s pos), %s evaluation reviews, balanced; tokenizer %s",
        reviews.name,
        f"{len(train):,}",
        f"{labels.train.sum():,}",
        f"{len(evaluation):,}",
        describe(tokenizer, name),
    )
    if skipped.counts:
        logger.info("skipped reviews: %s", skipped)
    return data
