"""Tokenised documents as much at a time as memory holds of any corpus: a sample of fixed size, and blocks."""

from collections.abc import Iterator

import numpy as np

from fabrics.data.token_store import TokenisedPart

# A block has so many documents at most, and so many tokens, if not one document has more.
BLOCK_DOCUMENTS, BLOCK_TOKENS = 5000, 4_000_000


def document_lengths(part: TokenisedPart) -> np.ndarray:
    """Tokens of each document."""
    return np.diff(np.asarray(part.offsets))


def document_sample(
    lengths: np.ndarray, most: int, most_tokens: int, generator: np.random.Generator, least: int = 1
) -> np.ndarray:
    """Documents drawn at random, in order: all of them, or as many as there may be with so many tokens.

    least: so many at any rate.
    """
    drawn = generator.permutation(len(lengths))[:most]
    fitting = int(np.searchsorted(np.cumsum(lengths[drawn]), most_tokens, side="right"))
    return np.sort(drawn[: max(least, fitting)])


def document_blocks(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """The places of documents of such lengths, one block after the other."""
    ends, first = np.cumsum(lengths), 0
    while first < len(lengths):
        before = ends[first] - lengths[first]
        fitting = int(np.searchsorted(ends, before + BLOCK_TOKENS, side="right"))
        last = min(max(fitting, first + 1), first + BLOCK_DOCUMENTS)
        yield np.arange(first, last)
        first = last


def joined_tokens(part: TokenisedPart, documents: np.ndarray) -> np.ndarray:
    """Tokens of some documents, in order, one after the other; they are read here."""
    starts, ends = np.asarray(part.offsets[documents]), np.asarray(part.offsets[documents + 1])
    bounds = np.flatnonzero(starts[1:] != ends[:-1]) + 1  # neighbours are read together
    firsts, lasts = starts[np.r_[0, bounds]], ends[np.r_[bounds - 1, len(ends) - 1]]
    return np.concatenate([part.tokens[first:last] for first, last in zip(firsts, lasts, strict=True)])
