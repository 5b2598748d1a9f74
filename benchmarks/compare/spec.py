"""A comparison file: methods, seeds, tuning, and the hardware and networks to simulate.

Every run of a comparison is a run of run.py with overrides. The settings in the file identify it, so recorded outcomes
remain valid when a default changes or a key is removed.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from benchmarks.compare.accounting import Hardware, Network
from benchmarks.compare.search import Part, Range, Search, Settings, Space
from configs.make_samples import SAMPLES
from fabrics.config_checks import CHECKS
from utils.config.reading import ALIASES, parse_config, problem_lines
from utils.config.schema import BUDGETS, FIELDS, Config, ConfigError
from utils.config.yaml_reading import read_mapping

ROOT = Path(__file__).resolve().parents[2]
COMPARISONS = ROOT / "benchmarks" / "comparisons"


class MethodSpec(Part):
    """A method of a comparison; docs/comparing.md describes its keys."""

    name: str
    overrides: dict[str, Any] = Field({})
    search: Space = Field({})
    synchronous_workers: int | None = Field(None, ge=2)
    tuned_as: str | None = None

    def with_settings(self, settings: Settings) -> "MethodSpec":
        """Return the method with further overrides."""
        return self.model_copy(update={"overrides": self.overrides | dict(settings)})


class ComparisonSpec(Part):
    """A comparison file; docs/comparing.md describes its keys."""

    title: str
    question: str
    answer: str = ""
    details: str = ""
    corpus: str = ""
    base: str = "config.yaml"
    samples: list[Literal[tuple(SAMPLES)]] = Field([])
    common: dict[str, Any] = Field({})
    seeds: list[int] = Field(min_length=1)
    search: Search | None = None
    tuned_on: str | None = None
    methods: list[MethodSpec] = Field(min_length=1)
    reference: str
    hardware: list[Hardware] = Field([])
    networks: list[Network] = Field([])

    @property
    def reported_seeds(self) -> list[int]:
        """Seeds of the runs that are reported; a search with only one seed reports its tuning runs."""
        return self.seeds[1:] if self.search is not None and len(self.seeds) > 1 else self.seeds

    def method(self, name: str) -> MethodSpec:
        return next(method for method in self.methods if method.name == name)

    def space(self, method: MethodSpec) -> Space:
        return {key: values for key, values in (self.search.over | method.search).items() if values is not None}

    def with_settings(self, found: Mapping[str, Settings]) -> "ComparisonSpec":
        """Return the comparison with further overrides of its methods, by name."""
        methods = [method.with_settings(found.get(method.name, {})) for method in self.methods]
        return self.model_copy(update={"methods": methods})


@dataclass(frozen=True, eq=False)
class Run:
    """One run of run.py; token_fraction: fraction of tokens and budgets, below 1 in the first rungs of a search."""

    method: str
    seed: int
    base: str
    settings: Settings
    token_fraction: float = 1.0

    @functools.cached_property
    def id(self) -> str:
        """Digest of everything that the comparison file says about this run.

        Keys that the configuration no longer has are ignored, so that removing a key keeps recorded outcomes valid.
        """
        known = {}
        for key, value in self.settings.items():
            name, *rest = key.split(".")  # synchronisation.steps is a key of a mapping
            name = ALIASES.get(name, name)
            if name in FIELDS:
                known[".".join([name, *rest])] = value
        text = json.dumps([self.base, known, round(self.token_fraction, 6)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def config(self) -> Config:
        """Return the resolved configuration, or raise ConfigError."""
        overrides = [as_override(*item) for item in self.settings.items()]
        return parse_config(read_mapping(ROOT / self.base), overrides, CHECKS)[0]

    def overrides(self) -> tuple[str, ...]:
        """Return the overrides of run.py, with this run's fraction of tokens and budgets."""
        settings = dict(self.settings)
        if self.token_fraction < 1.0:
            config = self.config()
            if config.max_tokens is None:
                raise ConfigError("max_tokens: a search with several rungs needs it, because a rung uses a part of it")
            for key in ("max_tokens", *BUDGETS):
                value = getattr(config, key)
                if isinstance(value, float):
                    settings[key] = value * self.token_fraction
                elif value is not None:
                    settings[key] = max(1, round(value * self.token_fraction))
        return tuple(as_override(*item) for item in settings.items())


def as_override(key: str, value: Any) -> str:
    """Return key=value as run.py reads it."""
    return f"{key}={yaml.safe_dump(value, default_flow_style=True, width=2**30).splitlines()[0]}"


def make_run(spec: ComparisonSpec, method: MethodSpec, seed: int, token_fraction: float = 1.0) -> Run:
    settings = spec.common | method.overrides | {"training_seed": seed}
    return Run(method.name, seed, spec.base, settings, token_fraction)


def load_spec(path: Path) -> ComparisonSpec:
    """Read a comparison file and check every configuration in it; raise ConfigError with one line per problem."""
    values = read_mapping(path)
    try:
        spec = ComparisonSpec.model_validate(values)
    except ValidationError as error:
        known = [*ComparisonSpec.model_fields, *MethodSpec.model_fields]
        raise ConfigError([f"{path}: {line}" for line in problem_lines(error, values, known)]) from None
    problems = _problems(spec)
    if not problems:
        for method in spec.methods:
            problems += [f"{method.name}: {problem}" for problem in _method_problems(spec, method)]
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return spec


def _problems(spec: ComparisonSpec) -> list[str]:
    names = [method.name for method in spec.methods]
    found = [f"methods: {name!r} is there twice" for name in {n for n in names if names.count(n) > 1}]
    if spec.reference not in names:
        found.append(f"reference: must be one of the methods, got {spec.reference!r}")
    if bool(spec.hardware) != bool(spec.networks):
        found.append("hardware, networks: give both or neither")
    if spec.search is not None and spec.tuned_on is not None:
        found.append("search: cannot be combined with tuned_on")
    for method in spec.methods:
        if method.tuned_as and spec.tuned_on is None:
            found.append(f"{method.name}: tuned_as: the comparison has no tuned_on")
        if method.search and spec.search is None:
            found.append(f"{method.name}: search: the comparison has no search")
    return found


def _method_problems(spec: ComparisonSpec, method: MethodSpec) -> list[str]:
    seed = spec.seeds[0]
    try:
        make_run(spec, method, seed).config()
        if spec.search is not None:
            make_run(spec, method, seed, spec.search.token_fraction(0)).overrides()
            for key, values in spec.space(method).items():
                for value in (values.low, values.high) if isinstance(values, Range) else values:
                    make_run(spec, method.with_settings({key: value}), seed).config()
    except ConfigError as error:
        return error.problems
    return []
