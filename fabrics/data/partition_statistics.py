"""How much shares of the data differ, and what the summary says of them.

Distances of tokens are those of a sample of fixed size, and are kept beside the tokenised documents: to read all tokens
of a large corpus at every start would take hours.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fabrics.data.document_labels import Corpus, Kinds
from fabrics.data.document_samples import document_blocks, document_lengths, document_sample, joined_tokens
from fabrics.data.partition_sampler import first_shares
from fabrics.data.sampler import DEALING
from fabrics.data.token_store import TokenisedPart
from utils.config.schema import Config
from utils.utils import write_atomically

logger = logging.getLogger("adloco.dataset")

# What distances of tokens are measured on at most: some seconds of work.
SAMPLED_DOCUMENTS, SAMPLED_TOKENS = 100_000, 20_000_000
# So many kinds of a share are named in the summary, the largest.
_NAMED_KINDS = 5


def jensen_shannon(counts: np.ndarray) -> float:
    """Of the distributions that rows of counts [shares, outcomes] are of, weighted by their sums, in bits.

    The mutual information of share and outcome: 0 for equal shares, at most the entropy of the shares' sizes.
    """
    joint = counts / counts.sum()
    independent = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    some = joint > 0
    return float((joint[some] * np.log2(joint[some] / independent[some])).sum())


def divergences(counts: np.ndarray) -> list[float]:
    """Kullback-Leibler divergence of each row's distribution from that of all rows together, in bits; 0 of no counts.

    Their mean, weighted by the rows' sums, is `jensen_shannon`.
    """
    joint, every = counts / np.maximum(counts.sum(1, keepdims=True), 1), counts.sum(0) / counts.sum()
    ratios = np.divide(joint, every, out=np.ones_like(joint), where=joint > 0)
    return (joint * np.log2(ratios)).sum(1).tolist()


def total_variation(counts: np.ndarray) -> float:
    """Mean over shares, by size, of how much of a share would have to be exchanged to be like all data together."""
    joint = counts / counts.sum()
    return float(np.abs(joint - joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)).sum() / 2)


def _unigrams(
    part: TokenisedPart, documents: np.ndarray, owners: tuple[np.ndarray, ...], shares: int, vocabulary: int
) -> list[np.ndarray]:
    """How often each token is in each share [shares, vocabulary], by every one of several owners of the documents."""
    lengths = np.asarray(part.offsets[documents + 1]) - np.asarray(part.offsets[documents])
    counts = [np.zeros(shares * vocabulary, dtype=np.int64) for _ in owners]
    for block in document_blocks(lengths):
        tokens = joined_tokens(part, documents[block]).astype(np.int64)
        for found, owner in zip(counts, owners, strict=True):
            cells = np.repeat(owner[block], lengths[block]) * vocabulary + tokens
            found += np.bincount(cells, minlength=len(found))
    return [found.reshape(shares, vocabulary) for found in counts]


def _kept(path: Path | None) -> dict[str, Any] | None:
    """What a file has from when it was made; None: there is none, or it is damaged."""
    if path is None or not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        logger.warning("%s is damaged and will be made again: %s", path, error)
        return None


def token_distances(corpus: Corpus, share_of: np.ndarray, shares: int, seed: int) -> dict[str, Any]:
    """Distances of the shares' tokens, as they are and as they are at random, and what they are measured on.

    They are kept in the corpus's folder, under a name that tells of which documents in which shares they are.

    Args:
        share_of: the share of each training document.
    """
    generator = np.random.default_rng([seed, DEALING, 3])
    lengths = document_lengths(corpus.train)
    documents = np.arange(len(lengths))
    if len(lengths) > SAMPLED_DOCUMENTS or lengths.sum() > SAMPLED_TOKENS:
        documents = document_sample(lengths, SAMPLED_DOCUMENTS, SAMPLED_TOKENS, generator)
    own = share_of[documents]
    owners = own, generator.permutation(own)
    digest = hashlib.sha256(str((shares, corpus.vocabulary)).encode())
    for values in (documents, *owners):
        digest.update(np.ascontiguousarray(values, dtype=np.int64))
    path = corpus.folder and corpus.folder / f"distances_{digest.hexdigest()[:16]}.json"
    if (kept := _kept(path)) is not None:
        return kept
    apart, at_random = _unigrams(corpus.train, documents, owners, shares, corpus.vocabulary)
    found = {
        "divergence_bits": divergences(apart),
        "jensen_shannon_bits": jensen_shannon(apart),
        "jensen_shannon_bits_at_random": jensen_shannon(at_random),
        "sampled_documents": len(documents),
        "sampled_tokens": int(lengths[documents].sum()),
    }
    if path is not None:
        try:
            write_atomically(path, lambda file: file.write_text(json.dumps(found, indent=2), encoding="utf-8"))
        except OSError as error:  # of a set that others have made
            logger.info("%s cannot be kept: %s", path, error.strerror)
    return found


def share_record(
    config: Config, corpus: Corpus, kinds: Kinds, share_of: np.ndarray, sizes: np.ndarray
) -> Mapping[str, Any]:
    """What the summary says of shares: how large they are, of what, whose at first, and how far apart.

    Of two distances, each 0 where shares are alike, the first has beside it what it is for documents that are dealt at
    random, of which shares are never quite alike.
    """
    shares, count = len(sizes), len(kinds.names)
    of_kinds = np.bincount(
        share_of * count + kinds.train, weights=document_lengths(corpus.train), minlength=shares * count
    ).reshape(shares, count)
    trainers = config.number_of_initial_trainers
    first = {share: trainer for trainer in range(trainers) for share in first_shares(shares, trainer, trainers)}
    distances = token_distances(corpus, share_of, shares, config.training_seed)
    of_each = distances.pop("divergence_bits")
    documents, tokens = np.bincount(share_of, minlength=shares), of_kinds.sum(1)
    return {
        "split": config.data_split,
        "over": config.data_split_over,
        "kinds": count,
        **distances,
        "total_variation_of_kinds": total_variation(of_kinds),
        "shares": [
            {
                "share": share,
                "first_trainer": first[share],
                "documents": int(documents[share]),
                "examples": int(sizes[share]),
                "tokens": int(tokens[share]),
                "divergence_bits": of_each[share],
                "largest_kinds": {
                    kinds.names[kind]: round(float(of_kinds[share, kind] / tokens[share]), 4)
                    for kind in np.argsort(-of_kinds[share], kind="stable")[:_NAMED_KINDS].tolist()
                    if of_kinds[share, kind]
                },
            }
            for share in range(shares)
        ],
    }


def described(record: Mapping[str, Any]) -> str:
    """Shares for the log."""
    examples = [share["examples"] for share in record["shares"]]
    sampled = record["sampled_documents"]
    of = f" of a sample of {sampled:,} documents" if sampled < sum(s["documents"] for s in record["shares"]) else ""
    return (
        f"data_split {record['split']} over {record['over']}: {len(examples)} shares of {min(examples):,} to "
        f"{max(examples):,} examples; Jensen-Shannon divergence of their tokens{of} "
        f"{record['jensen_shannon_bits']:.4f} bits ({record['jensen_shannon_bits_at_random']:.4f} at random)"
    )
