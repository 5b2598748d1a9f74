"""Non-IID data: whole documents are divided into shares by what they are (docs/heterogeneous.md).

Each document has a label: its origin (file, host, module) or its cluster. Every label goes to one share. Documents are
divided before they are packed, so no example belongs to two shares.
"""

import importlib.util
import warnings
from collections.abc import Callable

import numpy as np

from algorithms.registry import Registry
from fabrics.data.sampler import CLUSTERS, DEALING
from fabrics.data.token_store import TokenisedPart
from utils.config.schema import Config, ConfigError
from utils.progress import progress_bar

# k-means is fitted on a random sample of at most this many documents; the others join the nearest centroid.
SAMPLED_DOCUMENTS = 20_000
_BLOCK_DOCUMENTS = 5_000
_RESTARTS = 4


def _token_counts(documents: TokenisedPart, chosen: np.ndarray, vocabulary: int):
    """Return the counts of tokens in the chosen documents: sparse [documents, vocabulary]."""
    from scipy import sparse

    offsets = documents.offsets
    tokens = np.concatenate([documents.tokens[offsets[i] : offsets[i + 1]] for i in chosen]).astype(np.int32)
    bounds = np.cumsum([0, *documents.lengths[chosen]])
    counts = sparse.csr_matrix((np.ones(len(tokens), np.float32), tokens, bounds), shape=(len(chosen), vocabulary))
    counts.sum_duplicates()
    return counts


def labels_by_cluster(documents: TokenisedPart, vocabulary: int, clusters: int, seed: int) -> np.ndarray:
    """Cluster documents by k-means over TF-IDF of their tokens.

    Cluster 0 has the most tokens. Documents weigh as their number of tokens. One thread does the work, so every process
    finds the same clusters.
    """
    if clusters > len(documents):
        raise ConfigError(f"data_shares: must be at most the {len(documents)} training documents, got {clusters}")
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.feature_extraction.text import TfidfTransformer
    from threadpoolctl import threadpool_limits

    lengths = documents.lengths
    generator = np.random.default_rng([seed, CLUSTERS])
    sample = np.sort(generator.permutation(len(lengths))[: max(SAMPLED_DOCUMENTS, clusters)])
    counts = _token_counts(documents, sample, vocabulary)
    tfidf = TfidfTransformer(sublinear_tf=True).fit(counts)
    random = int(generator.integers(2**31))
    found = []
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct documents than clusters
        weighted = tfidf.transform(counts)
        kmeans = KMeans(clusters, n_init=_RESTARTS, random_state=random).fit(weighted, sample_weight=lengths[sample])
        starts = range(0, len(documents), _BLOCK_DOCUMENTS)
        for start in progress_bar(starts, desc="clustering", unit=" blocks", leave=False, delay=1):
            block = np.arange(start, min(start + _BLOCK_DOCUMENTS, len(documents)))
            found.append(kmeans.predict(tfidf.transform(_token_counts(documents, block, vocabulary))))
    labels = np.concatenate(found)
    sizes = np.bincount(labels, weights=lengths, minlength=clusters)
    rank = np.empty(clusters, dtype=np.int32)
    rank[np.argsort(-sizes, kind="stable")] = np.arange(clusters)
    return rank[labels]


# Values of `data_split`: from the training documents and the size of the vocabulary to the share of each document


def split_iid(config: Config, documents: TokenisedPart, vocabulary: int) -> np.ndarray:
    """Every share gets equally many tokens of random documents."""
    lengths = documents.lengths
    order = np.random.default_rng([config.training_seed, DEALING, 1]).permutation(len(documents))
    middles = np.cumsum(lengths[order], dtype=np.float64) - lengths[order] / 2
    bounds = np.cumsum(np.full(config.data_shares, 1 / config.data_shares))[:-1]
    shares = np.empty(len(documents), dtype=np.int64)
    shares[order] = np.searchsorted(bounds, middles / lengths.sum(), side="right")
    return shares


def split_by_clusters(config: Config, documents: TokenisedPart, vocabulary: int) -> np.ndarray:
    """Every share gets one cluster (as in arXiv 2311.08105)."""
    labels = labels_by_cluster(documents, vocabulary, config.data_shares, config.training_seed)
    return shares_of_labels(labels, documents.lengths, config.data_shares)


def split_by_sources(config: Config, documents: TokenisedPart, vocabulary: int) -> np.ndarray:
    """Every share gets all documents of some origins."""
    _, labels = np.unique(np.array(documents.read_origins(), dtype=object), return_inverse=True)
    return shares_of_labels(labels, documents.lengths, config.data_shares)


def shares_of_labels(labels: np.ndarray, lengths: np.ndarray, shares: int) -> np.ndarray:
    """Return the share of each document: the label with most tokens first, each label to the smallest share so far."""
    sizes = np.bincount(labels, weights=lengths)
    present = int((sizes > 0).sum())
    if present < shares:
        raise ConfigError(
            f"data_split: the training documents have {present} labels, too few for {shares} shares; use fewer "
            f"(data_shares) or another split"
        )
    owners = np.empty(len(sizes), dtype=np.int64)
    loads = np.zeros(shares)
    for label in np.argsort(-sizes, kind="stable"):
        share = loads.argmin()
        loads[share] += sizes[label]
        owners[label] = share
    return owners[labels]


SPLITS: Registry[Callable[[Config, TokenisedPart, int], np.ndarray]] = Registry(
    {"iid": split_iid, "clusters": split_by_clusters, "sources": split_by_sources}
)


def split_problems(config: Config) -> list[str]:
    """Return one line per setting of the data split that cannot work."""
    shares = config.data_shares
    trainers = config.number_of_initial_trainers
    found = []
    if config.splits_data and shares is not None and shares < trainers:
        found.append(f"data_shares: must be at least the {trainers} trainers, got {shares}")
    if config.data_split == "clusters" and importlib.util.find_spec("sklearn") is None:
        found.append("data_split: clusters needs scikit-learn: pip install -r requirements-optional.txt")
    return found


def share_count(config: Config, nodes: int) -> int:
    """Number of shares: `data_shares`, else one per trainer or, over workers, one per node."""
    trainers = config.number_of_initial_trainers
    if config.data_shares is not None or config.data_split_over == "trainers":
        return config.data_shares or trainers
    return max(trainers, nodes)
