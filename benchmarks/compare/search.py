"""Equal tuning: random search with successive halving (arXiv 1502.07943), with the same number of runs for each method.

Settings are drawn and run with a fraction of the tokens; the best 1/reduction of a rung is run with `reduction` times
as many tokens, up to all of them. Every run counts as one, whatever its length. A draw depends on the search's seed,
the method's name, the key and its number alone: neither on the machine nor on the order of the runs.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

# A value within this fraction of a range from its end lies at the edge.
EDGE = 0.1

Side = Literal["low", "high"]
Settings = Mapping[str, Any]


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-3 as text."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[\d.]+e[+-]?\d+", value) else value


Value = Annotated[Any, BeforeValidator(_number)]
Overrides = dict[str, Value]


class Part(BaseModel):
    """A part of a comparison file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Range(Part):
    """The numbers from low to high, to two significant digits; integers if both ends are.

    Attributes:
        log: draw uniformly in the logarithm.
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
        """Return the number at a fraction of the way from low to high."""
        number = self.low * (self.high / self.low) ** share if self.log else self.low + (self.high - self.low) * share
        number = float(f"{number:.2g}")
        return round(number) if isinstance(self.low, int) and isinstance(self.high, int) else number

    def position(self, value: float) -> float:
        """Return the fraction of the way at which a number lies."""
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
        budget: tuning runs of each method.
        over: values, or the range, of each key.
        seed: seed of the draws.
        reduction: factor between the tokens of two rungs; one run in `reduction` goes on to the next rung.
        rungs: number of rungs; the last has all tokens; 1: random search.
    """

    budget: int = Field(ge=1)
    over: Space = Field(min_length=1)
    seed: int = Field(0, ge=0)
    reduction: int = Field(3, ge=2)
    rungs: int = Field(3, ge=1)

    @model_validator(mode="after")
    def _affordable(self) -> "Search":
        if self.budget < self.rungs:
            raise ValueError(f"budget must be at least {self.rungs} with {self.rungs} rungs, got {self.budget}")
        return self

    def share(self, rung: int) -> float:
        """Return the fraction of the tokens of a rung."""
        return self.reduction ** (rung + 1 - self.rungs)

    def sizes(self) -> list[int]:
        """Return the runs of each rung: the largest first rung that the budget affords."""
        found = [1] * self.rungs
        for first in range(2, self.budget + 1):
            sizes = [max(1, first // self.reduction**rung) for rung in range(self.rungs)]
            if sum(sizes) <= self.budget:
                found = sizes
        return found


def draw(space: Space, seed: int, method: str, number: int) -> dict[str, Any]:
    """Return the settings of a draw of a method."""
    settings = {}
    for key, values in space.items():
        digest = hashlib.sha256(repr((seed, method, key, number)).encode()).digest()
        share = float(np.random.default_rng(int.from_bytes(digest[:16], "big")).random())
        settings[key] = values.at(share) if isinstance(values, Range) else values[int(share * len(values))]
    return settings


def edge(values: Sequence[Any] | Range, value: Any) -> Side | None:
    """Return the edge of the searched values at which a value lies; None: inside, or the values have no order."""
    if isinstance(values, Range):
        position = values.position(value)
        if position <= EDGE:
            return "low"
        return "high" if position >= 1.0 - EDGE else None
    if len(values) < 2 or any(isinstance(entry, bool) or not isinstance(entry, int | float) for entry in values):
        return None
    if value == min(values):
        return "low"
    return "high" if value == max(values) else None


def halve(
    search: Search, space: Space, method: str, losses_of: Callable[[int, list[dict[str, Any]]], list[float]]
) -> tuple[dict[str, Any], list[tuple[int, dict[str, Any]]]]:
    """Search the settings of one method.

    Args:
        losses_of: runs settings in a rung and returns their losses (inf: the run failed).

    Returns:
        The best settings, and all runs as (rung, settings).
    """
    candidates = [draw(space, search.seed, method, number) for number in range(search.sizes()[0])]
    runs = []
    for rung, count in enumerate(search.sizes()):
        candidates = candidates[:count]
        losses = losses_of(rung, candidates)
        runs += [(rung, settings) for settings in candidates]
        candidates = [candidates[index] for index in sorted(range(count), key=losses.__getitem__)]
    return candidates[0], runs
