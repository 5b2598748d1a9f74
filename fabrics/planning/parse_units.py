"""Links, memory sizes and amounts as people write them; anything else is a ValueError that says what would work."""

import re

from algorithms.nodes.communication_rounds import Link

_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_NUMBER = r"(\d+(?:\.\d+)?)"
_LINK = re.compile(rf"{_NUMBER}([kMGT]?)(b|B)/s(?:,{_NUMBER}(s|ms|us))?")
_MEMORY = re.compile(rf"{_NUMBER}([kMGT]?)(i?)B")


def link(text: str) -> Link:
    """A link from a rate in bits (b) or bytes (B) per second and a latency, 0 if it is missing."""
    found = _LINK.fullmatch(text)
    if found is None or not float(found[1]):
        raise ValueError("must be a rate in bits (b) or bytes (B), and a latency, such as 1Gb/s,20ms or 100MB/s")
    bits = float(found[1]) * 1000.0 ** _POWERS[found[2]] * (8.0 if found[3] == "B" else 1.0)
    latency = float(found[4]) * _SECONDS[found[5]] if found[4] else 0.0
    return Link(bits, latency)


def memory(text: str) -> int:
    """Bytes."""
    found = _MEMORY.fullmatch(text)
    if found is None or not float(found[1]) or (found[3] and not found[2]):
        raise ValueError("must be a size such as 80GB or 141GiB")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2]])


def amount(text: str) -> float:
    """A positive number."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise ValueError("must be a positive number")
    return value


def count(text: str) -> int:
    """A positive integer."""
    if not text.isdecimal() or not int(text):
        raise ValueError("must be a positive integer")
    return int(text)
