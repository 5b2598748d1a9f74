"""What is searched: ranges and lists of values, draws from them that are the same everywhere, and their edges.

A draw is known by the search's seed, the method's name, the key and its number: it depends on no other key, and on
neither the machine nor the order in which runs are made.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

# Within this share of a range from its end a value is at its edge; so far, in ranges, goes the step beyond.
EDGE, STEP = 0.1, 0.25
# So many draws in a row that bring nothing new: there is nothing left to draw.
_PATIENCE = 200

Side = Literal["low", "high"]
Settings = Mapping[str, Any]


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-3 as text."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[\d.]+e[+-]?\d+", value) else value


Value = Annotated[Any, BeforeValidator(_number)]
Overrides = dict[str, Value]


class Part(BaseModel):
    """A part of a comparison's file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Range(Part):
    """All numbers from low to high, to two significant digits; whole ones where both ends are.

    log: equal ratios are equally likely.
    """

    low: Annotated[int | float, BeforeValidator(_number)]
    high: Annotated[int | float, BeforeValidator(_number)]
    log: bool = False

    @model_validator(mode="after")
    def _in_order(self) -> "Range":
        if not self.low < self.high:
            raise ValueError("low must be below high")
        if self.log and self.low <= 0:
            raise ValueError("low must be above 0 with log")
        return self

    def at(self, share: float) -> float:
        """The number at a share of the way from low to high; below 0 and above 1 it lies outside."""
        number = self.low * (self.high / self.low) ** share if self.log else self.low + (self.high - self.low) * share
        number = float(f"{number:.2g}")
        return round(number) if isinstance(self.low, int) and isinstance(self.high, int) else number

    def share(self, value: float) -> float:
        """Where a number lies; what `at` takes."""
        if not self.log:
            return (value - self.low) / (self.high - self.low)
        return math.log(value / self.low) / math.log(self.high / self.low)


def _kind(value: Any) -> str:
    return {list: "list", type(None): "null"}.get(type(value), "range")


_List = Annotated[Annotated[list[Value], Field(min_length=1)], Tag("list")]
_Range = Annotated[Range, Tag("range")]
Space = dict[str, Annotated[_List | _Range, Discriminator(_kind)]]
MethodSpace = dict[str, Annotated[_List | _Range | Annotated[None, Tag("null")], Discriminator(_kind)]]


class Search(Part):
    """How all methods are tuned.

    Attributes:
        budget: tuning runs of each method, whatever their length.
        over: key -> the values, or the range, that every method is tuned over.
        seed: of the draws.
        reduction: runs of a rung have this many times the tokens of those of the rung before, and of a rung one in so
            many is kept. rungs: the last has all tokens; 1: random search.
    """

    budget: int = Field(ge=1)
    over: Space = Field(min_length=1)
    seed: int = Field(0, ge=0)
    reduction: int = Field(3, ge=2)
    rungs: int = Field(3, ge=1)

    @model_validator(mode="after")
    def _affordable(self) -> "Search":
        least = sum(count for _, count in _sizes(2, self.rungs, self.reduction))
        if self.budget < least:
            raise ValueError(f"budget must be at least {least} with {self.rungs} rungs, got {self.budget}")
        return self

    def share(self, rung: int) -> float:
        """The share of a run's tokens that runs of a rung have."""
        return self.reduction ** (rung + 1 - self.rungs)

    def sizes(self, available: int) -> list[tuple[int, int]]:
        """(rung, runs) of each rung, with at most so many different settings to begin with.

        They begin with the most that leave as many runs of the budget as the last rung would keep, if there are such;
        the others can be spent beyond the edges.
        """
        found = _sizes(min(available, 2), self.rungs, self.reduction)
        for first in range(2, min(available, self.budget) + 1):
            sizes = _sizes(first, self.rungs, self.reduction)
            if sum(count for _, count in sizes) + max(1, sizes[-1][1] // self.reduction) <= self.budget:
                found = sizes
        return found


def _sizes(first: int, rungs: int, reduction: int) -> list[tuple[int, int]]:
    """A rung that would drop nothing is left out."""
    counts = [first]
    for _ in range(rungs - 1):
        counts.append(max(1, counts[-1] // reduction))
    return [(rung, count) for rung, count in enumerate(counts) if rung == rungs - 1 or count > counts[rung + 1]]


def own_space(search: Search, own: Mapping[str, Any]) -> Space:
    """What one method is tuned over: what all are, but for the keys it says itself."""
    return {key: values for key, values in (search.over | own).items() if values is not None}


def _uniform(*words: Any) -> float:
    """A number from 0 to 1 that depends on the words alone."""
    digest = hashlib.sha256(repr(words).encode()).digest()
    return float(np.random.default_rng(int.from_bytes(digest[:16], "big")).random())


def draw(space: Space, seed: int, method: str, number: int) -> dict[str, Any]:
    """The settings of a method's draw of that number."""
    settings = {}
    for key, values in space.items():
        share = _uniform(seed, method, key, number)
        settings[key] = values.at(share) if isinstance(values, Range) else values[int(share * len(values))]
    return settings


def distinct_draws(
    space: Space, seed: int, method: str, count: int, identify: Callable[[Settings], str]
) -> list[dict[str, Any]]:
    """The first draws that make different runs; fewer than `count` where there are no more.

    Args:
        identify: the id of the run that settings make.
    """
    found: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    number = idle = 0
    while len(found) < count and idle < _PATIENCE:
        settings = draw(space, seed, method, number)
        number, idle = number + 1, idle + 1
        if repr(settings) not in seen:
            seen.add(repr(settings))
            idle = 0
            found.setdefault(identify(settings), settings)
    return list(found.values())


def is_ordered(values: Sequence[Any] | Range) -> bool:
    """Whether there are edges: a range, or a list of numbers that grow or shrink."""
    if isinstance(values, Range):
        return True
    if len(values) < 2 or any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        return False
    return all(a < b for a, b in pairwise(values)) or all(a > b for a, b in pairwise(values))


def position(values: Sequence[Any] | Range, value: float) -> float:
    """Where a value lies among ordered ones: 0 at the lowest, 1 at the highest, outside beyond them."""
    if isinstance(values, Range):
        return values.share(value)
    ordered = sorted(values)
    if value in ordered:
        return ordered.index(value) / (len(ordered) - 1)
    return -1.0 / (len(ordered) - 1) if value < ordered[0] else 1.0 + 1.0 / (len(ordered) - 1)


def edge(values: Sequence[Any] | Range, value: float) -> Side | None:
    """The edge that a value of ordered ones lies at, or beyond."""
    near, share = EDGE if isinstance(values, Range) else 0.0, position(values, value)
    return "low" if share <= near else "high" if share >= 1.0 - near else None


def beyond(values: Sequence[Any] | Range, side: Side, number: int, count: int) -> float:
    """The value of the `number`-th of so many further runs beyond an edge.

    Of a range they are evenly spaced over one step; of a list they are the one number that goes on like its last two,
    by their ratio where they have the same sign.
    """
    if isinstance(values, Range):
        share = STEP * (number + 1) / count
        return values.at(1.0 + share if side == "high" else -share)
    last, before = (sorted(values)[-1], sorted(values)[-2]) if side == "high" else sorted(values)[:2]
    step = last * last / before if before * last > 0 else 2 * last - before
    whole = all(isinstance(value, int) for value in values)
    step = float(f"{step:.2g}")
    return round(step) if whole else step
