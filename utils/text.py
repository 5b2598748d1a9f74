"""Parts of messages for people."""

import difflib
from collections.abc import Iterable, Mapping


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: known words that begin with it, or one that is near."""
    names = {name.lower(): name for name in known}
    word = word.lower()
    close = [word] if word in names else sorted(name for name in names if name.startswith(f"{word}_"))
    close = close or difflib.get_close_matches(word, names, n=1, cutoff=0.7)
    close = close or [name for name in names if word in name.split("_")][:1]
    return f"; did you mean {' or '.join(names[name] for name in close)}?" if close else ""


def byte_size(count: float) -> str:
    """Return bytes with a unit, such as 1.5 MB."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000.0:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000.0
    return f"{value:.1f} TB"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, such as 1 round or 2 rounds."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def budget_used(budget: Mapping) -> str:
    """Return how much of its budget a run has used; `budget` is as in summary.json."""
    unit = budget["unit"]
    if unit == "bytes":
        used = byte_size(budget["used"])
        amount = byte_size(budget["amount"])
    else:
        decimals = 1 if unit == "seconds" else 0
        used = f"{budget['used']:,.{decimals}f}"
        amount = f"{budget['amount']:,.{decimals}f} {unit}"
    return f"{used} of {amount} used"


def merge_line(outer_step: int, representative: int, weights: Mapping[int, float]) -> str:
    parts = ", ".join(f"trainer {trainer} ({weight:.2f})" for trainer, weight in weights.items())
    return f"merge after round {outer_step}: {parts} become trainer {representative}"
