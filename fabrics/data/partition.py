"""Data that differ: the documents of a run in shares, by what they are; see docs/heterogeneous.md.

A split says which kinds of documents there are and which part of each kind every share gets; `dealt` gives whole
documents accordingly, before they are packed, so that no example is of two shares.
"""

import hashlib
import heapq
from collections.abc import Callable

import numpy as np

from algorithms.registry import Registry
from fabrics.data.document_labels import Corpus, Kinds, kinds_by_cluster, missing_scikit_learn, remembered
from fabrics.data.document_samples import document_lengths
from fabrics.data.examples import Chosen, DataShares, Examples, PackedDocuments
from fabrics.data.partition_statistics import share_record
from fabrics.data.sampler import DEALING
from fabrics.data.token_store import TokenisedPart
from utils.config.schema import Config, ConfigError

# Dirichlet's proportions are drawn again, so often at most, until every share has this part of an equal one.
SMALLEST_SHARE, MOST_DRAWS = 0.1, 1000
# So many kinds are named where there are too few.
_NAMED_KINDS = 5


# Who gets what


def whole_kinds(sizes: np.ndarray, shares: int) -> np.ndarray:
    """Proportions [kinds, shares], 0 or 1: each kind, the largest first, goes to the share that has least so far."""
    proportions, loads = np.zeros((len(sizes), shares)), [(0.0, share) for share in range(shares)]
    for kind in np.argsort(-sizes, kind="stable").tolist():
        load, share = loads[0]
        heapq.heapreplace(loads, (load + sizes[kind], share))
        proportions[kind, share] = 1.0
    return proportions


def dirichlet_proportions(
    sizes: np.ndarray, shares: int, alpha: float, generator: np.random.Generator
) -> np.ndarray | None:
    """Proportions [kinds, shares], each row drawn from Dirichlet(alpha) (arXiv 2102.02079); None: a share stays empty.

    alpha: the smaller it is the fewer shares have most of a kind; infinity would give every share the same.
    """
    for _ in range(MOST_DRAWS):
        proportions = generator.dirichlet(np.full(shares, alpha), size=len(sizes))
        if (sizes @ proportions).min() >= SMALLEST_SHARE * sizes.sum() / shares:
            return proportions
    return None


def dealt(
    kinds: np.ndarray, lengths: np.ndarray, proportions: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """The share of each document: those of a kind, in random order, are cut where the proportions of its tokens say.

    Args:
        kinds, lengths: of each document.
        proportions: [kinds, shares], rows sum to 1.
    """
    order = generator.permutation(len(kinds))
    order = order[np.argsort(kinds[order], kind="stable")]
    kinds_in_order, sizes = kinds[order], np.bincount(kinds, weights=lengths, minlength=len(proportions))
    starts = np.cumsum(sizes) - sizes
    middles = np.cumsum(lengths[order], dtype=np.float64) - lengths[order] / 2
    within = (middles - starts[kinds_in_order]) / sizes[kinds_in_order]
    bounds = np.cumsum(proportions, axis=1)[:, :-1]
    shares = np.empty(len(kinds), dtype=np.int64)
    shares[order] = (bounds[kinds_in_order] <= within[:, None]).sum(1)
    return shares


# Splits by name

Split = Callable[[Config, Corpus], tuple[Kinds, np.ndarray]]


def _sizes(kinds: Kinds, corpus: Corpus) -> np.ndarray:
    """Training tokens of each kind."""
    return np.bincount(kinds.train, weights=document_lengths(corpus.train), minlength=len(kinds.names))


def _origins(config: Config, corpus: Corpus) -> Kinds:
    if corpus.origins is None:
        raise ConfigError(
            f"data_split: nobody knows where the documents of this dataset ({config.dataset}) come from; data_split "
            f"clusters, or dirichlet with data_clusters, does without"
        )
    return remembered(corpus.folder and corpus.folder / "origins.npz", corpus.origins)


def _clusters(config: Config, corpus: Corpus, clusters: int) -> Kinds:
    sizes, seed = f"{len(corpus.train)}_{len(corpus.validation)}", config.training_seed
    path = corpus.folder and corpus.folder / f"{clusters}_clusters_of_{sizes}_seed_{seed}.npz"
    return remembered(path, lambda: kinds_by_cluster(corpus, clusters, seed))


def _wholly(kinds: Kinds, corpus: Corpus, shares: int) -> tuple[Kinds, np.ndarray]:
    sizes = _sizes(kinds, corpus)
    if (present := int((sizes > 0).sum())) < shares:
        names = ", ".join(kinds.names[:_NAMED_KINDS]) + (", ..." if len(kinds.names) > _NAMED_KINDS else "")
        raise ConfigError(
            f"data_split: the training documents are of {present} kinds ({names}), too few for {shares} shares; ask "
            f"for fewer (data_shares), or for another split"
        )
    return kinds, whole_kinds(sizes, shares)


def split_iid(config: Config, corpus: Corpus) -> tuple[Kinds, np.ndarray]:
    """Every share gets as many tokens of documents drawn at random."""
    none = (np.zeros(len(part), dtype=np.int32) for part in (corpus.train, corpus.validation))
    return Kinds(("all",), *none), np.full((1, config.data_shares), 1 / config.data_shares)


def split_by_clusters(config: Config, corpus: Corpus) -> tuple[Kinds, np.ndarray]:
    """Every share gets whole clusters, by default one (as in arXiv 2311.08105)."""
    return _wholly(_clusters(config, corpus, config.data_clusters or config.data_shares), corpus, config.data_shares)


def split_by_sources(config: Config, corpus: Corpus) -> tuple[Kinds, np.ndarray]:
    """Every share gets all documents of some origins."""
    return _wholly(_origins(config, corpus), corpus, config.data_shares)


def split_by_dirichlet(config: Config, corpus: Corpus) -> tuple[Kinds, np.ndarray]:
    """Of every origin, or cluster, shares get random parts."""
    by_cluster, shares, alpha = config.data_clusters, config.data_shares, config.dirichlet_alpha
    kinds = _clusters(config, corpus, by_cluster) if by_cluster else _origins(config, corpus)
    sizes, generator = _sizes(kinds, corpus), np.random.default_rng([config.training_seed, DEALING, 0])
    proportions = dirichlet_proportions(sizes, shares, alpha, generator)
    if proportions is None:
        raise ConfigError(
            f"dirichlet_alpha: {alpha:g} leaves one of {shares} shares without a tenth of an equal part of the "
            f"{len(sizes)} kinds of documents in each of {MOST_DRAWS} draws; a larger one, fewer data_shares or more "
            f"data_clusters would do"
        )
    return kinds, proportions


SPLITS: Registry[Split] = Registry(
    {"iid": split_iid, "clusters": split_by_clusters, "sources": split_by_sources, "dirichlet": split_by_dirichlet}
)


def split_problems(config: Config) -> list[str]:
    """What is wrong with how a config shares its data out, as far as the config alone tells."""
    found, shares, trainers = [], config.data_shares, config.number_of_initial_trainers
    if not config.splits_data:
        return [
            f"{key}: needs data that are in shares: another data_split than iid, or data_split_over workers"
            for key in ("validation_per_share", "weigh_shares")
            if getattr(config, key)
        ]
    if config.trainer_data_fraction is not None:
        found.append(
            f"trainer_data_fraction: must be null with data_split {config.data_split} over "
            f"{config.data_split_over}, whose shares are disjoint, got {config.trainer_data_fraction:g}"
        )
    if shares is not None and shares < trainers:
        found.append(f"data_shares: must be at least the {trainers} trainers, got {shares}")
    if config.data_split == "clusters" and (config.data_clusters or shares or trainers) < (shares or trainers):
        found.append(f"data_clusters: must be at least the {shares or trainers} shares, got {config.data_clusters}")
    if config.weigh_shares and config.data_split_over == "trainers" and trainers == 1:
        found.append(
            "weigh_shares: needs data_split_over workers, or several trainers, which merge: one reads all shares"
        )
    if config.data_split == "clusters" or (config.data_split == "dirichlet" and config.data_clusters):
        found += missing_scikit_learn()
    return found


def split_without_effect(config: Config) -> list[str]:
    """Which keys of a split that a config gives have no effect."""
    found = []
    if config.data_shares is not None and not config.splits_data:
        found.append("data_shares: has no effect with data_split iid over trainers")
    if config.data_clusters is not None and config.data_split not in ("clusters", "dirichlet"):
        found.append("data_clusters: has no effect without data_split clusters or dirichlet")
    if config.dirichlet_alpha != Config().dirichlet_alpha and config.data_split != "dirichlet":
        found.append("dirichlet_alpha: has no effect without data_split dirichlet")
    return found


def share_count(config: Config, nodes: int) -> int:
    """Shares of a run with so many nodes: as many as asked for, else one for each trainer, or each node.

    Raises:
        ConfigError: nobody knows the nodes yet.
    """
    trainers = config.number_of_initial_trainers
    if config.data_shares is not None or config.data_split_over == "trainers":
        return config.data_shares or trainers
    if not nodes:
        raise ConfigError("data_shares: must be given where data are loaded before there are nodes")
    return max(trainers, nodes)


# From documents to examples

# From the documents of a part and the share of each to examples in order of share, and how many each share has.
Cut = Callable[[TokenisedPart, np.ndarray], tuple[Examples, np.ndarray]]


def cut_packed(sequence_length: int, shares: int) -> Cut:
    """Documents of a share, joined and cut into full sequences; only its last partial one is lost."""

    def cut(part: TokenisedPart, share_of: np.ndarray) -> tuple[Examples, np.ndarray]:
        order, counts = np.argsort(share_of, kind="stable"), np.bincount(share_of, minlength=shares)
        packed = PackedDocuments(part.tokens, part.offsets, np.split(order, np.cumsum(counts)[:-1]), sequence_length)
        return packed, np.array(packed.sizes)

    return cut


def cut_single(shares: int, examples: Callable[[TokenisedPart], Examples]) -> Cut:
    """A document is an example. examples: of a part, in the order of its documents."""

    def cut(part: TokenisedPart, share_of: np.ndarray) -> tuple[Examples, np.ndarray]:
        order = np.argsort(share_of, kind="stable")
        return Chosen(examples(part), order), np.bincount(share_of, minlength=shares)

    return cut


def shared_out(
    config: Config, corpus: Corpus, cut: Cut, most_validation: int | None = None
) -> tuple[Examples, DataShares]:
    """The training examples in order of share, and what is known of the shares.

    Args:
        config: it says how many shares there are.
        most_validation: validation examples of all shares together.

    Raises:
        ConfigError: the data cannot be shared out as asked for.
    """
    kinds, proportions = SPLITS[config.data_split](config, corpus)
    of_documents = []
    for number, (part, of_kind) in enumerate(((corpus.train, kinds.train), (corpus.validation, kinds.validation)), 1):
        generator = np.random.default_rng([config.training_seed, DEALING, number])
        of_documents.append(dealt(of_kind, document_lengths(part), proportions, generator))
    train, sizes = cut(corpus.train, of_documents[0])
    if empty := np.flatnonzero(sizes == 0).tolist():
        raise ConfigError(
            f"data_split: the documents of share {empty[0]} of {len(sizes)} do not fill one example; fewer data_shares "
            f"or a shorter sequence_length would do"
        )
    validation: tuple[Examples, ...] = ()
    if config.validation_per_share:
        everything, counts = cut(corpus.validation, of_documents[1])
        most = None if most_validation is None else -(-most_validation // len(sizes))
        starts = np.cumsum(counts) - counts
        validation = tuple(
            Chosen(everything, np.arange(start, start + count)[:most])
            for start, count in zip(starts, counts, strict=True)
        )
    record = share_record(config, corpus, kinds, of_documents[0], sizes)
    digest = hashlib.sha256(b"".join(part.astype("<i8").tobytes() for part in of_documents)).hexdigest()
    return train, DataShares(tuple(sizes.tolist()), validation, record, digest)
