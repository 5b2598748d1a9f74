"""Equal tuning of methods: random search with successive halving (arXiv 1502.07943), equally many runs per method.

The first rung runs random settings with a fraction of the tokens. The best 1/reduction of a rung run with `reduction`
times as many tokens, up to all of them. A draw depends only on the search's seed, the method's name, the key and its
number. It does not depend on the machine or on the order of the runs.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Settings = Mapping[str, Any]


class Part(BaseModel):
    """A part of a comparison file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class Range:
    """Numbers from low to high, drawn uniformly in the logarithm and rounded to two significant digits."""

    low: float
    high: float

    def at(self, fraction: float) -> float:
        """Return the number at a fraction of the way from low to high."""
        return float(f"{self.low * (self.high / self.low) ** fraction:.2g}")


def _values(value: Any) -> list | Range | None:
    """Check the searched values of a key; null: the key is not searched."""
    if value is None or (isinstance(value, list) and value):
        return value
    try:
        low, high = float(value["low"]), float(value["high"])
    except (KeyError, TypeError, ValueError):
        low = high = 0.0
    if not (0.0 < low < high and len(value) == 2):
        raise ValueError("must be a list of values, a range {low: ..., high: ...} with 0 < low < high, or null")
    return Range(low, high)


Space = dict[str, Annotated[Any, BeforeValidator(_values)]]


class Search(Part):
    """The search by which all methods are tuned; docs/comparing.md describes its keys."""

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

    def token_fraction(self, rung: int) -> float:
        """Return the fraction of the tokens that runs of a rung use."""
        return self.reduction ** (rung + 1 - self.rungs)

    def sizes(self) -> list[int]:
        """Return the number of runs of each rung: the largest first rung that the budget allows."""
        found = [1] * self.rungs
        for first in range(2, self.budget + 1):
            sizes = [max(1, first // self.reduction**rung) for rung in range(self.rungs)]
            if sum(sizes) <= self.budget:
                found = sizes
        return found


def draw(space: Space, seed: int, method: str, number: int) -> dict[str, Any]:
    """Draw random settings for a method."""
    settings = {}
    for key, values in space.items():
        digest = hashlib.sha256(repr((seed, method, key, number)).encode()).digest()
        fraction = float(np.random.default_rng(int.from_bytes(digest[:16], "big")).random())
        settings[key] = values.at(fraction) if isinstance(values, Range) else values[int(fraction * len(values))]
    return settings


def halve(
    search: Search, space: Space, method: str, losses_of: Callable[[int, list[dict[str, Any]]], list[float]]
) -> dict[str, Any]:
    """Return the best settings of a method; losses_of runs settings in a rung and returns their losses."""
    candidates = [draw(space, search.seed, method, number) for number in range(search.sizes()[0])]
    for rung, count in enumerate(search.sizes()):
        losses = losses_of(rung, candidates[:count])
        candidates = [candidates[index] for index in sorted(range(count), key=losses.__getitem__)]
    return candidates[0]
