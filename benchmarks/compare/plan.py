"""A comparison as a file says it: methods, seeds, the grid over which each method is tuned, and what to simulate.

A file in benchmarks/comparisons/ is YAML; every run it asks for is a run of run.py with overrides. A run is known by
what has an effect (benchmarks/compare/run_id.py), so that comparisons share runs, and none is made again.
"""

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, ValidationError

from benchmarks.compare.accounting import Hardware
from benchmarks.compare.network import Network
from benchmarks.compare.run_id import run_id
from benchmarks.compare.search_space import (
    MethodSpace,
    Overrides,
    Part,
    Range,
    Search,
    Settings,
    Space,
    Value,
    distinct_draws,
    own_space,
)
from configs.make_samples import SAMPLES
from fabrics.config_checks import CHECKS, CHOICES
from utils.config.reading import parse_config
from utils.config.schema import BUDGETS, Config, ConfigError
from utils.config.yaml_reading import read_mapping, yaml_value

ROOT = Path(__file__).resolve().parents[2]
# What a comparison may take of the overview for its summary.
SUMMARY_LINES = 4


def _short(text: str) -> str:
    if len(lines := text.strip().splitlines()) > SUMMARY_LINES:
        raise ValueError(f"should have at most {SUMMARY_LINES} lines, has {len(lines)}")
    return text


# libyaml's, where there is one: a tenth of the time.
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class Method(Part):
    """One line of the comparison.

    Attributes:
        overrides: what makes it this method, over `common`.
        tune: its own grid, a key and its values, where the comparison's does not fit; {}: as it is.
        search: its own keys to search, over the comparison's; null: that key means nothing to it.
        synchronous_workers: it stands for so many workers that average gradients at every inner step. Their mathematics
            is that of one worker with the whole batch, which is how it is run; what they would send is counted.
        baseline: it is one of those whose best sets the target for the others.
        family: methods of one family, with other batches or rounds, are points of one frontier; empty: its own.
        tuned_as: with `tuned_on`, the method whose values it has; None: that of its own name.
    """

    name: str
    overrides: Overrides = Field({})
    tune: dict[str, list[Value]] | None = Field(None, max_length=1)
    search: MethodSpace = Field({})
    synchronous_workers: int | None = Field(None, ge=2)
    baseline: bool = False
    family: str = ""
    tuned_as: str | None = None


class Claim(Part):
    """A line of the overview's table of claims: what the paper (arXiv 2508.18182) says, and what was found here."""

    paper: str
    found: str


class Comparison(Part):
    """A file of benchmarks/comparisons/.

    Attributes:
        question: what it is about. answer: what a person concluded from its numbers; empty until there are some.
        summary: both in at most four lines. caveat: what a reader must know first.
        claims: of the paper's, those that it tests.
        order: of the comparisons in the overview; equal ones go by the names of their files.
        base: the configuration that all methods begin with. common: overrides for all of them.
        samples: what the runs read of what configs/make_samples.py writes to .cache/samples.
        seeds: of the runs; the first is the one that methods are tuned with.
        tune: a key and the values over which each method is tuned; {}: methods are as they are.
        search: what every method is tuned over instead, with as many runs each (see benchmarks.compare.search).
        tuned_on: the comparison whose results hold the values that methods of the same names have here, unchanged.
        reference: the method that the others are held against at its communications and simulated times.
        hardware, networks: what is simulated. A t_min or t_example that is left out is measured on this machine.
    """

    title: str
    question: str
    answer: str = ""
    summary: Annotated[str, AfterValidator(_short)] = ""
    caveat: str = ""
    claims: list[Claim] = Field([])
    order: int = 0
    base: str = "config.yaml"
    samples: list[Literal[tuple(SAMPLES)]] = Field([])
    common: Overrides = Field({})
    seeds: list[int] = Field(min_length=1)
    tune: dict[str, list[Value]] = Field({}, max_length=1)
    search: Search | None = None
    tuned_on: str | None = None
    methods: list[Method] = Field(min_length=1)
    reference: str
    hardware: list[Hardware] = Field(min_length=1)
    networks: list[Network] = Field(min_length=1)


@dataclass(frozen=True)
class Run:
    """One run: a method, a value of what is tuned (None: nothing is), a seed. id: of what its configuration does."""

    method: str
    value: float | None
    seed: int
    overrides: tuple[str, ...]
    id: str


def load_comparison(path: Path) -> Comparison:
    """Read a comparison and check every configuration that it asks for.

    Raises:
        ConfigError: one line per problem.
    """
    try:
        comparison = Comparison.model_validate(yaml_value(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        raise ConfigError(
            [f"{path}: {'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r}" for e in error.errors()]
        ) from None
    names = [method.name for method in comparison.methods]
    problems = [f"methods: {name!r} is there twice" for name in {n for n in names if names.count(n) > 1}]
    if comparison.reference not in names:
        problems.append(f"reference: must be one of the methods, got {comparison.reference!r}")
    problems += _ways_of_tuning(comparison)
    if not problems:
        for method in comparison.methods:
            problems += [f"{method.name}: {problem}" for problem in _method_problems(comparison, method)]
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return comparison


def _ways_of_tuning(comparison: Comparison) -> list[str]:
    """Whether methods are tuned in several ways, or say what to search where nothing is."""
    grids = comparison.tune or any(method.tune for method in comparison.methods)
    ways = {"search": comparison.search is not None, "tune": bool(grids), "tuned_on": comparison.tuned_on is not None}
    given = [name for name, is_given in ways.items() if is_given]
    found = [f"{given[0]}: {' and '.join(given[1:])} is there too; one must go"] if len(given) > 1 else []
    if comparison.tuned_on is None:
        found += [
            f"{each.name}: tuned_as: the comparison has no tuned_on" for each in comparison.methods if each.tuned_as
        ]
    if comparison.search is None:
        own = [method.name for method in comparison.methods if method.search]
        return found + [f"{name}: search: the comparison itself has no search" for name in own]
    return found + [
        f"{method.name}: search.{key}: null drops a key, and this one is not searched by all"
        for method in comparison.methods
        for key, values in method.search.items()
        if values is None and key not in comparison.search.over
    ]


def _method_problems(comparison: Comparison, method: Method) -> list[str]:
    """Of the configurations that a method asks for, the first that is wrong."""
    seed = comparison.seeds[0]
    try:
        if comparison.search is None:
            for value in grid(comparison, method)[1]:
                make_run(comparison, method, value, seed)
            return []
        for key, values in method_space(comparison, method).items():
            for value in (values.low, values.high) if isinstance(values, Range) else values:
                make_run(comparison, with_settings(method, {key: value}), None, seed)
        draws(comparison, method)
    except ConfigError as error:
        return error.problems
    return []


def grid(comparison: Comparison, method: Method) -> tuple[str | None, list[float | None]]:
    """The key over which a method is tuned, and its values; (None, [None]) where it is not."""
    tune = comparison.tune if method.tune is None else method.tune
    return next(iter(tune.items()), (None, [None]))


def method_space(comparison: Comparison, method: Method) -> Space:
    """What a method of a comparison with a search is tuned over."""
    return own_space(comparison.search, method.search)


def draws(comparison: Comparison, method: Method) -> list[dict[str, Any]]:
    """The settings that the search of a method draws, as many as it can make runs.

    Raises:
        ConfigError: a configuration is wrong.
    """
    search, seed = comparison.search, comparison.seeds[0]

    def identify(settings: Settings) -> str:
        return make_run(comparison, with_settings(method, settings), None, seed, search.share(0)).id

    return distinct_draws(method_space(comparison, method), search.seed, method.name, search.budget, identify)


def with_settings(method: Method, settings: Settings) -> Method:
    """A method with other values of some keys."""
    return method.model_copy(update={"overrides": method.overrides | dict(settings)})


def with_found(comparison: Comparison, found: Mapping[str, Settings]) -> Comparison:
    """A comparison whose methods have the values that were found for them, by name."""
    methods = [with_settings(method, found.get(method.name, {})) for method in comparison.methods]
    return comparison.model_copy(update={"methods": methods})


def make_run(comparison: Comparison, method: Method, value: float | None, seed: int, share: float = 1.0) -> Run:
    """The run of a method with a value of what is tuned, and a share of its tokens.

    Raises:
        ConfigError: the configuration is wrong.
    """
    key, _ = grid(comparison, method)
    values: Mapping[str, Any] = comparison.common | method.overrides | {"training_seed": seed}
    if key is not None:
        values = values | {key: value}
    config = _resolved(comparison, values)
    if share < 1.0:
        values = values | _shortened(config, share)
        config = _resolved(comparison, values)
    return Run(method.name, value, seed, _assignments(values), run_id(config))


def _shortened(config: Config, share: float) -> dict[str, float]:
    """The tokens for a share of a run, and what it may use of its budget for them."""
    if config.max_tokens is None:
        raise ConfigError("max_tokens: a search with rungs needs it, as a rung has a share of it")
    whole = {key: getattr(config, key) for key in ("max_tokens", *BUDGETS)}
    return {
        key: value * share if isinstance(value, float) else max(1, round(value * share))
        for key, value in whole.items()
        if value is not None
    }


def _assignments(values: Settings) -> tuple[str, ...]:
    def text(value) -> str:
        return yaml.dump(value, Dumper=_DUMPER, default_flow_style=True, width=2**30).splitlines()[0]

    return tuple(f"{key}={text(value)}" for key, value in values.items())


# All runs of a comparison are changes of one file.
_base = functools.cache(read_mapping)


def _resolved(comparison: Comparison, values: Settings) -> Config:
    raw = copy.deepcopy(_base(ROOT / comparison.base))
    return parse_config(raw, _assignments(values), CHOICES, CHECKS)[0]


def tuning_runs(comparison: Comparison) -> list[Run]:
    """Every method with every value of its grid, with the first seed."""
    seed = comparison.seeds[0]
    return [make_run(comparison, m, value, seed) for m in comparison.methods for value in grid(comparison, m)[1]]


def seed_runs(comparison: Comparison, best: Mapping[str, float | None]) -> list[Run]:
    """Every method with its best value, with all seeds."""
    return [make_run(comparison, m, best[m.name], seed) for m in comparison.methods for seed in comparison.seeds]
