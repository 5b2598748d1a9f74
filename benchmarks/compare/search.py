"""Equal tuning of methods: random search with successive halving (arXiv 1502.07943), equally many runs per method.

The first rung runs random settings with a fraction of the tokens. The best 1/reduction of a rung run with `reduction`
times as many tokens, up to all of them. A draw depends only on the search's seed, the method's name, the key and the
number of the draw, so it does not depend on the machine or on the order of the runs.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

# A value this close to an end of a range, as a fraction of the range, lies at its edge.
EDGE = 0.1

Settings = Mapping[str, Any]


def _number(value: Any) -> Any:
    """Read 1e-3, which YAML 1.1 takes for text, as a number."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[\d.]+e[+-]?\d+", value) else value


Value = Annotated[Any, BeforeValidator(_number)]
Overrides = dict[str, Value]


class Part(BaseModel):
    """A part of a comparison file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Range(Part):
    """Numbers from low to high, drawn uniformly in the logarithm and rounded to two significant digits."""

    low: Annotated[float, Field(gt=0), BeforeValidator(_number)]
    high: Annotated[float, BeforeValidator(_number)]

    @model_validator(mode="after")
    def _in_order(self) -> "Range":
        if not self.low < self.high:
            raise ValueError("low must be below high")
        return self

    def at(self, fraction: float) -> float:
        """Return the number at a fraction of the way from low to high."""
        return float(f"{self.low * (self.high / self.low) ** fraction:.2g}")

    def fraction(self, value: float) -> float:
        """Return the fraction of the way from low to high at which a number lies."""
        return math.log(value / self.low) / math.log(self.high / self.low)


def _kind(value: Any) -> str:
    return {list: "list", type(None): "null"}.get(type(value), "range")


# The values or the range of each key. null: the key is not searched.
Space = dict[
    str,
    Annotated[
        Annotated[list[Value], Field(min_length=1), Tag("list")]
        | Annotated[Range, Tag("range")]
        | Annotated[None, Tag("null")],
        Discriminator(_kind),
    ],
]


class Search(Part):
    """The search by which all methods are tuned.

    Attributes:
        budget: tuning runs per method.
        over: values or range of each key.
        seed: seed of the draws.
        reduction: ratio of the tokens of two consecutive rungs; one run in `reduction` enters the next rung.
        rungs: number of rungs; the last uses all tokens. One rung is plain random search.
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


def edge(values: Sequence[Any] | Range, value: Any) -> Literal["low", "high"] | None:
    """Return the edge of the searched values at which a value lies; None: inside, or the values have no order."""
    if isinstance(values, Range):
        fraction = values.fraction(value)
        if fraction <= EDGE:
            return "low"
        return "high" if fraction >= 1.0 - EDGE else None
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
        losses_of: runs settings in a rung and returns their losses; infinite for a failed run.

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
