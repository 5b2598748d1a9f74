"""IMDB: film reviews, positive or negative, from the hub or from this machine.

On this machine it is the folder that aclImdb_v1.tar.gz unpacks to (train/pos/*.txt and so on), a folder with one CSV
or JSON-lines file for training and one for testing, or a single such file, of which a part is held out.
"""

import csv
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fabrics.data import hub
from fabrics.data.document_labels import Corpus, Kinds
from fabrics.data.documents import EMPTY, DatasetError, Skipped, document_hash, json_records, matching_files
from fabrics.data.examples import PaddedSequences, TaskData
from fabrics.data.partition import cut_single, shared_out
from fabrics.data.token_store import TokenisedPart
from fabrics.data.tokenization import describe, named_tokenizer, padding, train_tokenizer, vocabulary_size
from utils.config.schema import Config, ConfigError
from utils.utils import batched

logger = logging.getLogger("adloco.dataset")

REPOSITORY = "stanfordnlp/imdb"
CLASS_NAMES = ("neg", "pos")
_LABELS = {"0": 0, "1": 1, "neg": 0, "pos": 1, "negative": 0, "positive": 1}
_SUFFIXES = (".csv", ".jsonl", ".json", ".jsonl.gz", ".json.gz")

Review = tuple[str, int]


@dataclass(frozen=True)
class Reviews:
    """All reviews of a source: texts with their class. test is None where the source has no such part."""

    name: str
    train: list[Review]
    test: list[Review] | None


# Reading


def _label(value: object, place: str) -> int:
    label = _LABELS.get(str(value).strip().lower())
    if label is None:
        raise DatasetError(f"{place}: label must be 0 or 1 (neg or pos), got {value!r}")
    return label


def _class_folders(folder: Path, skipped: Skipped) -> list[Review]:
    """The reviews of train/ or test/ in the layout of aclImdb."""
    reviews = []
    for label, name in enumerate(CLASS_NAMES):
        files = matching_files([str(folder / name)], (".txt",))
        for file in tqdm(files, desc=f"reading {folder.name}/{name}", unit=" reviews", leave=False, disable=None):
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "not UTF-8 text"
                raise DatasetError(f"{file}: {reason}") from None
            _keep(reviews, text, label, str(file), skipped)
    return reviews


def _keep(reviews: list[Review], text: str, label: int, place: str, skipped: Skipped) -> None:
    if text.strip():
        reviews.append((text, label))
    else:
        skipped.add(EMPTY, place)


def _csv_records(path: Path) -> Iterator[tuple[str, dict]]:
    csv.field_size_limit(2**27)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            if not {"text", "label"} <= set(reader.fieldnames or ()):
                raise DatasetError(f"{path}: the first line must name the columns text and label")
            for record in reader:
                yield f"{path}:{reader.line_num}", record
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DatasetError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _table(path: Path, skipped: Skipped) -> list[Review]:
    """The reviews of one CSV or JSON-lines file."""
    reviews: list[Review] = []
    records = _csv_records(path) if path.suffix == ".csv" else json_records(path, skipped)
    for place, record in tqdm(records, desc=f"reading {path.name}", unit=" reviews", leave=False, disable=None):
        _keep(reviews, record["text"] or "", _label(record.get("label"), place), place, skipped)
    return reviews


def local_reviews(path: str, skipped: Skipped) -> Reviews:
    """Read `imdb_local_path`.

    Raises:
        DatasetError: it is in none of the layouts, cannot be read, or holds a label that is not 0 or 1.
    """
    root = Path(path)
    try:
        is_folder = root.is_dir()
        names = set(os.listdir(root)) if is_folder else set()
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror}") from None
    if (root / "train").is_dir() and (root / "test").is_dir():
        parts = {part: _class_folders(root / part, skipped) for part in ("train", "test")}
        return Reviews(path, parts["train"], parts["test"])
    if not is_folder:
        return Reviews(path, _table(matching_files([path])[0], skipped), None)
    found = {}
    for part in ("train", "test"):
        tables = sorted(name for name in names if part in name and name.endswith(_SUFFIXES))
        if len(tables) != 1:
            raise DatasetError(
                f"{path}: must hold train/ and test/ with neg/ and pos/ in each, or one CSV or JSON-lines file each "
                f"with train and test in its name; found {len(tables)} for {part}"
            )
        found[part] = _table(root / tables[0], skipped)
    return Reviews(path, found["train"], found["test"])


def hub_reviews(skipped: Skipped, repository: str = REPOSITORY) -> Reviews:
    """Read IMDB from the hub, or from its cache on this machine.

    Raises:
        DatasetError: neither is to be had.
    """
    from datasets import load_dataset  # takes a second, which other datasets need not wait

    hub.prepare(repository)
    parts: dict[str, list[Review]] = {"train": [], "test": []}
    for part, reviews in parts.items():
        try:
            table = load_dataset(repository, split=part)
        except Exception as error:  # network, repository and format errors of half a dozen libraries
            raise DatasetError(
                f"{repository}: {type(error).__name__}: {hub.problem_with(repository, error)}"
            ) from error
        for number, (text, label) in enumerate(zip(table["text"], table["label"], strict=True), 1):
            place = f"{repository} {part} record {number}"
            _keep(reviews, text, _label(label, place), place, skipped)
    return Reviews(f"{repository} on the hub", parts["train"], parts["test"])


# Choosing


def choose(
    reviews: Reviews, seed: int, train_size: int | None, samples_per_class: int | None, skipped: Skipped
) -> tuple[list[Review], list[Review]]:
    """Training and evaluation reviews, shuffled with the seed; no text is in both.

    Args:
        train_size: None: all that are left.
        samples_per_class: evaluation reviews of each class, from the test part, else held out; None: as many as the
            smaller class of the test part has, or one in twenty of it where it is held out.

    Raises:
        ConfigError: there are not enough.
    """
    generator = np.random.default_rng([seed, 0])
    pool = reviews.train if reviews.test is None else reviews.test
    shuffled = [pool[i] for i in generator.permutation(len(pool))]
    by_class = [[review for review in shuffled if review[1] == label] for label in range(len(CLASS_NAMES))]
    smallest = min(len(members) for members in by_class)
    if samples_per_class is None:
        samples_per_class = smallest if reviews.test is not None else smallest // 20
    for name, members in zip(CLASS_NAMES, by_class, strict=True):
        if len(members) < max(samples_per_class, 1):
            raise ConfigError(
                f"samples_per_class: class {name} has {len(members)} reviews to evaluate on, "
                f"got {samples_per_class or 'null'}"
            )
    if samples_per_class == 0:
        raise ConfigError(f"samples_per_class: {smallest} reviews of a class are too few to hold out one in twenty")
    # Class by turns: any beginning is balanced as well.
    evaluation = [members[i] for i in range(samples_per_class) for members in by_class]
    held_out = {text for text, _ in evaluation}
    train = []
    for i in generator.permutation(len(reviews.train)):
        text = reviews.train[i][0]
        if text not in held_out:
            train.append(reviews.train[i])
        elif reviews.test is not None:
            skipped.add("the same text as an evaluation review", repr(text[:40]))
    if len(train) < (train_size or 1):
        raise ConfigError(
            f"data_sample_size: {len(train)} reviews are left for training beside {len(evaluation)} for evaluation, "
            f"got {train_size or 'null'}"
        )
    return train[:train_size], evaluation


# Examples


def encode_reviews(
    reviews: Sequence[Review], tokenizer: PreTrainedTokenizerBase, sequence_length: int, name: str
) -> TokenisedPart:
    """Reviews as [CLS] text [SEP], cut at sequence_length."""
    parts, lengths = [], []
    with tqdm(total=len(reviews), desc=f"tokenising {name} reviews", unit=" reviews", leave=False, disable=None) as bar:
        for block in batched(reviews, 500):
            ids = tokenizer(
                [text for text, _ in block], truncation=True, max_length=sequence_length, return_attention_mask=False
            )["input_ids"]
            parts += [np.array(tokens, dtype=np.int32) for tokens in ids]
            lengths += [len(tokens) for tokens in ids]
            bar.update(len(block))
    hashes = np.array([document_hash(text) for text in _texts(reviews)], dtype=np.uint64)
    return TokenisedPart(np.concatenate(parts), np.concatenate([[0], np.cumsum(lengths)]), hashes)


def _classes(reviews: Iterable[Review]) -> np.ndarray:
    return np.array([label for _, label in reviews])


def _texts(reviews: Iterable[Review]) -> Iterator[str]:
    return (text for text, _ in reviews)


def load_imdb(config: Config) -> TaskData:
    """`imdb`: the paper's second combination, BERT on film reviews."""
    skipped = Skipped()
    reviews = hub_reviews(skipped) if config.imdb_local_path is None else local_reviews(config.imdb_local_path, skipped)
    train, evaluation = choose(
        reviews, config.training_seed, config.data_sample_size, config.samples_per_class, skipped
    )
    tokenizer = named_tokenizer(config)
    name = None if tokenizer is not None else "trained on the reviews"
    tokenizer = tokenizer or train_tokenizer(_texts(train), config.vocab_size, "classification")
    encoded = {
        "train": encode_reviews(train, tokenizer, config.sequence_length, "training"),
        "validation": encode_reviews(evaluation, tokenizer, config.sequence_length, "evaluation"),
    }
    labels = Kinds(CLASS_NAMES, _classes(train), _classes(evaluation))
    examples = {
        name: PaddedSequences(part.tokens, part.offsets, config.sequence_length, padding(tokenizer), classes)
        for (name, part), classes in zip(encoded.items(), (labels.train, labels.validation), strict=True)
    }
    shares = None
    if config.splits_data:
        corpus = Corpus(**encoded, vocabulary=vocabulary_size(tokenizer), origins=lambda: labels)
        cut = cut_single(config.data_shares, lambda part: examples["train" if part is corpus.train else "validation"])
        examples["train"], shares = shared_out(config, corpus, cut)
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
    )
    positive = sum(label for _, label in train)
    logger.info(
        "data: %s; %s training reviews (%s pos), %s evaluation reviews, balanced; tokenizer %s",
        reviews.name,
        f"{len(train):,}",
        f"{positive:,}",
        f"{len(evaluation):,}",
        describe(tokenizer, name),
    )
    if skipped.counts:
        logger.info("skipped reviews: %s", skipped)
    return data
