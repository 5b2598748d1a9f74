"""Non-IID data: whole documents are divided into shares by what they are (docs/heterogeneous.md).

Each document has a label: its origin (file, host, class, module) or its cluster. `data_split` says which part of each
label's documents every share gets. Documents are divided before they are packed, so no example belongs to two shares.
"""

import heapq
import importlib.util
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from algorithms.registry import Registry
from fabrics.data.examples import DataShares, Examples
from fabrics.data.sampler import CLUSTERS, DEALING, Shares
from fabrics.data.token_store import TokenisedPart, read_arrays, write_arrays
from utils.config.schema import Config, ConfigError

logger = logging.getLogger("adloco.dataset")

# Dirichlet proportions are redrawn, at most MOST_DRAWS times, until each share has this fraction of an equal share.
SMALLEST_SHARE = 0.1
MOST_DRAWS = 1000
# k-means is fitted on a random sample of at most this many documents; the others join the nearest centroid.
SAMPLED_DOCUMENTS = 20_000
_BLOCK_DOCUMENTS = 5_000
_RESTARTS = 4
_NAMED_LABELS = 5


@dataclass(frozen=True)
class DocumentLabels:
    """The label of each document.

    Attributes:
        names: names of the labels.
        train: label index of each training document, [documents].
        validation: label index of each validation document, [documents].
    """

    names: tuple[str, ...]
    train: np.ndarray
    validation: np.ndarray


@dataclass(frozen=True)
class Corpus:
    """The tokenised documents of a run.

    Attributes:
        vocabulary: number of tokens in the vocabulary.
        origins: finds the origin of each document.
        content: digest of the documents and of the tokenizer.
    """

    train: TokenisedPart
    validation: TokenisedPart
    vocabulary: int
    origins: Callable[[], DocumentLabels]
    content: str


@dataclass(frozen=True)
class Partition:
    """The division of a corpus.

    Attributes:
        train: indices of the training documents of each share.
        validation: indices of the validation documents of each share.
        record: description of the shares, without numbers of examples.
    """

    train: list[np.ndarray]
    validation: list[np.ndarray]
    record: dict[str, Any]

    def shares(self, sizes: Sequence[int], validation: Sequence[Examples]) -> DataShares:
        """Describe the shares of the training examples.

        Args:
            sizes: training examples of each share.
            validation: validation examples of each share; empty: they are not evaluated.

        Raises:
            ConfigError: a share has no example.
        """
        if 0 in sizes:
            raise ConfigError(
                f"data_split: the documents of share {list(sizes).index(0)} of {len(sizes)} do not fill one example; "
                f"use fewer data_shares or a shorter sequence_length"
            )
        entries = [entry | {"examples": int(size)} for entry, size in zip(self.record["shares"], sizes, strict=True)]
        record = self.record | {"shares": entries}
        logger.info(
            "data_split %s over %s: %d shares of %s to %s examples; total variation over %s labels %.3f",
            record["split"], record["over"], len(sizes), f"{min(sizes):,}", f"{max(sizes):,}", record["labels"],
            record["total_variation"],
        )  # fmt: skip
        return DataShares(tuple(sizes), tuple(validation), record)


# Labels


def labels_by_origin(train: Sequence[str], validation: Sequence[str]) -> DocumentLabels:
    """Number the origins of the documents in alphabetical order."""
    names, numbers = np.unique(np.array([*train, *validation], dtype=object), return_inverse=True)
    numbers = numbers.astype(np.int32)
    return DocumentLabels(tuple(names), numbers[: len(train)], numbers[len(train) :])


def missing_scikit_learn() -> list[str]:
    """Return an error line if scikit-learn is not installed."""
    if importlib.util.find_spec("sklearn") is not None:
        return []
    return ["data_split: clusters needs scikit-learn: pip install -r requirements-optional.txt"]


def _token_counts(part: TokenisedPart, documents: np.ndarray, vocabulary: int):
    """How often each token occurs in each document: sparse [documents, vocabulary]."""
    from scipy import sparse

    tokens = np.concatenate([part.tokens[part.offsets[i] : part.offsets[i + 1]] for i in documents]).astype(np.int32)
    bounds = np.cumsum([0, *part.lengths[documents]])
    counts = sparse.csr_matrix((np.ones(len(tokens), np.float32), tokens, bounds), shape=(len(documents), vocabulary))
    counts.sum_duplicates()
    return counts


def clusters_of(corpus: Corpus, clusters: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Cluster the training and validation documents by k-means over TF-IDF of their tokens.

    Cluster 0 has the most training tokens. Documents weigh as their number of tokens. One thread does the work, so
    every process finds the same clusters.

    Raises:
        ConfigError: scikit-learn is not installed, or there are fewer documents than clusters.
    """
    if problems := missing_scikit_learn():
        raise ConfigError(problems)
    if clusters > len(corpus.train):
        raise ConfigError(f"data_shares: must be at most the {len(corpus.train)} training documents, got {clusters}")
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.feature_extraction.text import TfidfTransformer
    from threadpoolctl import threadpool_limits

    lengths = corpus.train.lengths
    generator = np.random.default_rng([seed, CLUSTERS])
    sample = np.sort(generator.permutation(len(lengths))[: max(SAMPLED_DOCUMENTS, clusters)])
    counts = _token_counts(corpus.train, sample, corpus.vocabulary)
    tfidf = TfidfTransformer(sublinear_tf=True).fit(counts)
    kmeans = KMeans(clusters, n_init=_RESTARTS, random_state=int(generator.integers(2**31)))

    def nearest(part: TokenisedPart) -> np.ndarray:
        found = [np.zeros(0, np.int32)]
        for start in range(0, len(part), _BLOCK_DOCUMENTS):
            block = np.arange(start, min(start + _BLOCK_DOCUMENTS, len(part)))
            found.append(kmeans.predict(tfidf.transform(_token_counts(part, block, corpus.vocabulary))))
        return np.concatenate(found).astype(np.int32)

    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct documents than clusters
        kmeans.fit(tfidf.transform(counts), sample_weight=lengths[sample])
        train = nearest(corpus.train)
        validation = nearest(corpus.validation)
    sizes = np.bincount(train, weights=lengths, minlength=clusters)
    rank = np.empty(clusters, dtype=np.int32)
    rank[np.argsort(-sizes, kind="stable")] = np.arange(clusters)
    return rank[train], rank[validation]


def _cached_clusters(config: Config, corpus: Corpus) -> DocumentLabels:
    """Find the clusters, which takes seconds to minutes, or read them from the cache."""
    count = config.data_shares
    names = tuple(f"cluster {number}" for number in range(count))
    path = Path(config.cache_dir) / "clusters" / f"{corpus.content}_{count}_seed_{config.training_seed}.npz"
    found = read_arrays(path)
    if found is None:
        train, validation = clusters_of(corpus, count, config.training_seed)
        found = {"train": train, "validation": validation}
        try:
            write_arrays(path, found)
        except OSError as error:
            logger.warning("cache_dir: %s cannot be written: %s", path, error.strerror)
    return DocumentLabels(names, found["train"], found["validation"])


# Proportions: the part of each label's tokens that each share gets


def whole_labels(sizes: np.ndarray, shares: int) -> np.ndarray:
    """Proportions [labels, shares], 0 or 1: each label, largest first, goes to the smallest share so far."""
    proportions = np.zeros((len(sizes), shares))
    loads = [(0.0, share) for share in range(shares)]
    for label in np.argsort(-sizes, kind="stable").tolist():
        load, share = loads[0]
        heapq.heapreplace(loads, (load + sizes[label], share))
        proportions[label, share] = 1.0
    return proportions


def dirichlet_proportions(
    sizes: np.ndarray, shares: int, alpha: float, generator: np.random.Generator
) -> np.ndarray | None:
    """Proportions [labels, shares], each row drawn from Dirichlet(alpha) (arXiv 2102.02079).

    Args:
        sizes: tokens of each label.
        alpha: a small value concentrates each label in few shares; infinity would give all shares the same mixture.

    Returns:
        None if a share stays too small in every draw.
    """
    for _ in range(MOST_DRAWS):
        proportions = generator.dirichlet(np.full(shares, alpha), size=len(sizes))
        if (sizes @ proportions).min() >= SMALLEST_SHARE * sizes.sum() / shares:
            return proportions
    return None


def assign_documents(
    labels: np.ndarray, lengths: np.ndarray, proportions: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Assign each document to a share: a label's documents, shuffled, are cut where its token proportions say.

    Args:
        labels: label of each document.
        lengths: tokens of each document.
        proportions: [labels, shares]; rows sum to 1.
    """
    order = generator.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    sorted_labels = labels[order]
    sizes = np.bincount(labels, weights=lengths, minlength=len(proportions))
    starts = np.cumsum(sizes) - sizes
    middles = np.cumsum(lengths[order], dtype=np.float64) - lengths[order] / 2
    within = (middles - starts[sorted_labels]) / sizes[sorted_labels]
    bounds = np.cumsum(proportions, axis=1)[:, :-1]
    shares = np.empty(len(labels), dtype=np.int64)
    shares[order] = (bounds[sorted_labels] <= within[:, None]).sum(1)
    return shares


# Values of `data_split`

Split = Callable[[Config, Corpus], tuple[DocumentLabels, np.ndarray]]


def _label_sizes(labels: DocumentLabels, corpus: Corpus) -> np.ndarray:
    return np.bincount(labels.train, weights=corpus.train.lengths, minlength=len(labels.names))


def _whole(labels: DocumentLabels, corpus: Corpus, shares: int) -> tuple[DocumentLabels, np.ndarray]:
    sizes = _label_sizes(labels, corpus)
    present = int((sizes > 0).sum())
    if present < shares:
        names = ", ".join(labels.names[:_NAMED_LABELS]) + (", ..." if len(labels.names) > _NAMED_LABELS else "")
        raise ConfigError(
            f"data_split: the training documents have {present} labels ({names}), too few for {shares} shares; use "
            f"fewer (data_shares) or another split"
        )
    return labels, whole_labels(sizes, shares)


def split_iid(config: Config, corpus: Corpus) -> tuple[DocumentLabels, np.ndarray]:
    """Every share gets equally many tokens of random documents."""
    train = np.zeros(len(corpus.train), dtype=np.int32)
    validation = np.zeros(len(corpus.validation), dtype=np.int32)
    return DocumentLabels(("all",), train, validation), np.full((1, config.data_shares), 1 / config.data_shares)


def split_by_clusters(config: Config, corpus: Corpus) -> tuple[DocumentLabels, np.ndarray]:
    """Every share gets one cluster (as in arXiv 2311.08105)."""
    return _whole(_cached_clusters(config, corpus), corpus, config.data_shares)


def split_by_sources(config: Config, corpus: Corpus) -> tuple[DocumentLabels, np.ndarray]:
    """Every share gets all documents of some origins."""
    return _whole(corpus.origins(), corpus, config.data_shares)


def split_by_dirichlet(config: Config, corpus: Corpus) -> tuple[DocumentLabels, np.ndarray]:
    """Every share gets a random part of each origin."""
    labels = corpus.origins()
    sizes = _label_sizes(labels, corpus)
    generator = np.random.default_rng([config.training_seed, DEALING, 0])
    proportions = dirichlet_proportions(sizes, config.data_shares, config.dirichlet_alpha, generator)
    if proportions is None:
        raise ConfigError(
            f"dirichlet_alpha: {config.dirichlet_alpha:g} leaves one of {config.data_shares} shares with less than a "
            f"tenth of an equal share of {len(sizes)} origins in {MOST_DRAWS} draws; use a larger value or fewer "
            f"data_shares"
        )
    return labels, proportions


SPLITS: Registry[Split] = Registry(
    {"iid": split_iid, "clusters": split_by_clusters, "sources": split_by_sources, "dirichlet": split_by_dirichlet}
)


def split_problems(config: Config) -> list[str]:
    """Return one line per setting of the data split that cannot work."""
    shares = config.data_shares
    trainers = config.number_of_initial_trainers
    if not config.splits_data:
        return [
            f"{key}: needs data that are in shares: another data_split than iid, or data_split_over workers"
            for key in ("validation_per_share", "weigh_shares")
            if getattr(config, key)
        ]
    found = []
    if shares is not None and shares < trainers:
        found.append(f"data_shares: must be at least the {trainers} trainers, got {shares}")
    if config.weigh_shares and config.data_split_over == "trainers" and trainers == 1:
        found.append(
            "weigh_shares: needs data_split_over workers, or several trainers, which merge: one reads all shares"
        )
    if config.data_split == "clusters":
        found += missing_scikit_learn()
    return found


def share_count(config: Config, nodes: int) -> int:
    """Number of shares: `data_shares`, else one per trainer or, over workers, one per node.

    Raises:
        ConfigError: the number of nodes is needed and unknown.
    """
    trainers = config.number_of_initial_trainers
    if config.data_shares is not None or config.data_split_over == "trainers":
        return config.data_shares or trainers
    if not nodes:
        raise ConfigError("data_shares: must be given where data are loaded before there are nodes")
    return max(trainers, nodes)


# The partition


def partition(config: Config, corpus: Corpus) -> Partition:
    """Divide the documents into `data_shares` shares.

    Raises:
        ConfigError: they cannot be divided as configured.
    """
    labels, proportions = SPLITS[config.data_split](config, corpus)

    def shares_of(part: TokenisedPart, own: np.ndarray, stream: int) -> np.ndarray:
        generator = np.random.default_rng([config.training_seed, DEALING, stream])
        return assign_documents(own, part.lengths, proportions, generator)

    def by_share(share_of: np.ndarray) -> list[np.ndarray]:
        return [np.flatnonzero(share_of == share) for share in range(config.data_shares)]

    train = shares_of(corpus.train, labels.train, 1)
    validation = shares_of(corpus.validation, labels.validation, 2)
    return Partition(by_share(train), by_share(validation), _record(config, corpus, labels, train))


def total_variation(counts: np.ndarray) -> float:
    """Fraction of a share, on average by size, that must be exchanged for all shares to have the same mixture.

    Args:
        counts: [shares, labels].
    """
    joint = counts / counts.sum()
    return float(np.abs(joint - joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)).sum() / 2)


def _record(config: Config, corpus: Corpus, labels: DocumentLabels, share_of: np.ndarray) -> dict[str, Any]:
    """`data_shares` of the summary: sizes, first owner and largest labels of each share."""
    shares = config.data_shares
    count = len(labels.names)
    cells = np.bincount(share_of * count + labels.train, weights=corpus.train.lengths, minlength=shares * count)
    tokens = cells.reshape(shares, count)
    trainers = config.number_of_initial_trainers
    first = Shares(config.training_seed, (0,) * shares).first
    owners = {share: trainer for trainer in range(trainers) for share in first(trainer, trainers)}
    entries = []
    for share, own in enumerate(tokens):
        largest = np.argsort(-own, kind="stable")[:_NAMED_LABELS].tolist()
        fractions = {labels.names[label]: round(float(own[label] / max(own.sum(), 1)), 4) for label in largest}
        entries.append(
            {
                "share": share,
                "first_trainer": owners[share],
                "documents": int((share_of == share).sum()),
                "tokens": int(own.sum()),
                "largest_labels": {name: fraction for name, fraction in fractions.items() if fraction},
            }
        )
    return {
        "split": config.data_split,
        "over": config.data_split_over,
        "labels": count,
        "total_variation": total_variation(tokens),
        "shares": entries,
    }
