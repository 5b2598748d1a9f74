"""What kind of document each one is: by where it comes from, or by the words that it has.

Kinds are what data that differ are shared out by (`fabrics.data.partition`). To find them takes seconds to minutes:
they are kept beside the tokenised documents.
"""

import importlib.util
import logging
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import sparse

from fabrics.data.document_samples import document_blocks, document_lengths, document_sample, joined_tokens
from fabrics.data.documents import DatasetError, Origins, document_hash
from fabrics.data.held_out import Hashes
from fabrics.data.sampler import CLUSTERS
from fabrics.data.token_store import TokenisedPart
from utils.config.schema import ConfigError
from utils.utils import write_atomically

logger = logging.getLogger("adloco.dataset")

# As in requirements-dev.txt: nothing but clusters needs it, and to import it takes longer than a short run should wait.
SCIKIT_LEARN = "1.7.2"
# What k-means looks at at most, a random sample; the others go to the cluster that is nearest.
SAMPLED_DOCUMENTS, SAMPLED_TOKENS = 20_000, 20_000_000
_RESTARTS = 4


@dataclass(frozen=True)
class Kinds:
    """names: of the kinds. train, validation: the kind of each document, by number."""

    names: tuple[str, ...]
    train: np.ndarray
    validation: np.ndarray


@dataclass(frozen=True)
class Corpus:
    """Tokenised documents of a run, and what is known of them.

    Attributes:
        vocabulary: how many tokens there are.
        origins: the kinds by where documents come from; None: nobody knows.
        folder: of the documents, for what is worth keeping; None: nothing is kept.
    """

    train: TokenisedPart
    validation: TokenisedPart
    vocabulary: int
    origins: Callable[[], Kinds] | None
    folder: Path | None = None


def remembered(path: Path | None, make: Callable[[], Kinds]) -> Kinds:
    """What `make` makes, or a file has from when it was made before."""
    if path is not None and path.exists():
        try:
            with np.load(path, allow_pickle=False) as file:
                return Kinds(tuple(file["names"].tolist()), file["train"], file["validation"])
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            logger.warning("%s is damaged and will be made again: %s", path, error)
    kinds = make()
    if path is not None:
        try:
            write_atomically(
                path,
                lambda file: np.savez(file, names=kinds.names, train=kinds.train, validation=kinds.validation),
            )
        except OSError as error:  # of a set that others have made: it is found anew every time
            logger.info("%s cannot be kept: %s", path, error.strerror)
    return kinds


def kinds_by_origin(origins: Sequence[Origins], train: TokenisedPart, validation: TokenisedPart) -> Kinds:
    """The documents by where they come from; of a text that is there several times where it is first.

    Args:
        origins: see `documents.Source`; each is read as far as it has to be.

    Raises:
        DatasetError: the source has not got all of them any more, or cannot be read.
    """
    unique, place = np.unique(np.concatenate([train.hashes, validation.hashes]), return_inverse=True)
    known, found, names = Hashes(unique), np.full(len(unique), -1, dtype=np.int32), {}
    parts = [train.hashes, validation.hashes] if len(origins) > 1 else [unique]
    for read, hashes in zip(origins, parts, strict=True):
        wanted = np.isin(unique, hashes) & (found < 0)
        left = int(wanted.sum())
        for text, origin in read() if left else ():
            index = known.index(document_hash(text))
            if index is not None and found[index] < 0:
                found[index] = names.setdefault(origin, len(names))
                left -= int(wanted[index])
                if not left:
                    break
        if left:
            raise DatasetError(
                f"{left} of {len(unique)} documents that were tokenised are not in their source any more"
            )
    of_documents = found[place]
    return Kinds(tuple(names), of_documents[: len(train)], of_documents[len(train) :])


def missing_scikit_learn() -> list[str]:
    """The line that says what clusters need, where it is not there."""
    if importlib.util.find_spec("sklearn") is not None:
        return []
    return [f"data_split: clusters are found with scikit-learn: pip install scikit-learn=={SCIKIT_LEARN}"]


def token_counts(part: TokenisedPart, documents: np.ndarray, vocabulary: int) -> sparse.csr_matrix:
    """How often each of some documents has each token, [documents, vocabulary]."""
    lengths = np.asarray(part.offsets[documents + 1]) - np.asarray(part.offsets[documents])
    tokens, bounds = joined_tokens(part, documents).astype(np.int32), np.cumsum([0, *lengths])
    counts = sparse.csr_matrix((np.ones(len(tokens), np.float32), tokens, bounds), shape=(len(documents), vocabulary))
    counts.sum_duplicates()
    return counts


def kinds_by_cluster(corpus: Corpus, clusters: int, seed: int) -> Kinds:
    """The documents by k-means over TF-IDF of their tokens; numbered from the one with the most training tokens on.

    A document counts as its tokens do: where all count alike most tokens may end in one cluster. Means, and the
    frequencies of tokens, are those of a sample of fixed size; every document is read once, in blocks, for the mean
    that is nearest: so a large corpus takes time, and no more memory. Tokens are the features, with a vocabulary of
    fixed size: there is nothing to hash. It is done by one thread, so that every process and every resume finds the
    same.

    Raises:
        ConfigError: scikit-learn is not installed, or there are fewer documents than clusters.
    """
    if problems := missing_scikit_learn():
        raise ConfigError(problems)
    if clusters > len(corpus.train):
        raise ConfigError(f"data_clusters: must be at most the {len(corpus.train)} training documents, got {clusters}")
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.feature_extraction.text import TfidfTransformer
    from threadpoolctl import threadpool_limits

    lengths, generator = document_lengths(corpus.train), np.random.default_rng([seed, CLUSTERS])
    sample = document_sample(lengths, SAMPLED_DOCUMENTS, SAMPLED_TOKENS, generator, least=clusters)
    counts = sparse.vstack(
        [token_counts(corpus.train, sample[block], corpus.vocabulary) for block in document_blocks(lengths[sample])],
        format="csr",
    )
    tfidf = TfidfTransformer(sublinear_tf=True).fit(counts)
    means = KMeans(clusters, n_init=_RESTARTS, random_state=int(generator.integers(2**31)))

    def nearest(part: TokenisedPart) -> np.ndarray:
        each = [
            means.predict(tfidf.transform(token_counts(part, block, corpus.vocabulary))).astype(np.int32)
            for block in document_blocks(document_lengths(part))
        ]
        return np.concatenate(each) if each else np.zeros(0, np.int32)

    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer different documents than clusters: some are empty
        means.fit(tfidf.transform(counts), sample_weight=lengths[sample])
        found = [nearest(part) for part in (corpus.train, corpus.validation)]
    sizes = np.bincount(found[0], weights=lengths, minlength=clusters)
    rank = np.empty(clusters, dtype=np.int32)
    rank[np.argsort(-sizes, kind="stable")] = np.arange(clusters)
    return Kinds(tuple(f"cluster {number}" for number in range(clusters)), rank[found[0]], rank[found[1]])
