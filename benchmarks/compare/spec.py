"""A comparison file: methods, seeds, and the hardware and networks to simulate.

Every run of a comparison is a run of run.py with overrides. The settings in the file identify it, so recorded outcomes
remain valid when a default changes or a key is removed.
"""

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from benchmarks.compare.accounting import Hardware, Network
from configs.make_samples import SAMPLES
from fabrics.config_checks import CHECKS
from utils.config.reading import ALIASES, parse_config, problem_lines, read_mapping
from utils.config.schema import FIELDS, Config, ConfigError

ROOT = Path(__file__).resolve().parents[2]
COMPARISONS = ROOT / "benchmarks" / "comparisons"
DEFAULT_BASE = "config.yaml"


class Part(BaseModel):
    """A part of a comparison file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class MethodSpec(Part):
    """A method of a comparison; docs/comparing.md describes its keys."""

    name: str
    overrides: dict[str, Any] = Field({})
    reference: str | None = None
    seeds: list[int] | None = Field(None, min_length=1)


class ComparisonSpec(Part):
    """A comparison file; docs/comparing.md describes its keys."""

    title: str
    question: str
    answer: str = ""
    details: str = ""
    corpus: str = ""
    base: str = DEFAULT_BASE
    samples: list[Literal[tuple(SAMPLES)]] = Field([])
    common: dict[str, Any] = Field({})
    seeds: list[int] = Field(min_length=1)
    methods: list[MethodSpec] = Field(min_length=1)
    reference: str
    hardware: list[Hardware] = Field([])
    networks: list[Network] = Field([])

    def method(self, name: str) -> MethodSpec:
        return next(method for method in self.methods if method.name == name)

    def runs(self) -> "list[Run]":
        """Return all runs, method by method."""
        return [make_run(self, method, seed) for method in self.methods for seed in method.seeds or self.seeds]


@dataclass(frozen=True, eq=False)
class Run:
    """One run of run.py."""

    method: str
    seed: int
    base: str
    settings: Mapping[str, Any]

    @functools.cached_property
    def id(self) -> str:
        """Digest of everything that the comparison file says about this run.

        With the content of its plugins. Keys that the configuration no longer has are ignored, so that removing a key
        keeps recorded outcomes valid.
        """
        known = {}
        for key, value in self.settings.items():
            name, *rest = key.split(".")  # synchronisation.steps is a key of a mapping
            name = ALIASES.get(name, name)
            if name in FIELDS:
                known[".".join([name, *rest])] = value
        base: Any = self.base
        plugins = self.settings.get("plugins")
        if base != DEFAULT_BASE:  # the defaults may change; a base of the user's own is what is compared
            values = read_mapping(ROOT / base)
            base = [base, values]
            plugins = plugins or values.get("plugins")
        content = [base, known, 1.0]  # the 1.0 was the share of the tokens; it stays, so that recorded ids do
        if plugins:
            content.append([hashlib.sha256((ROOT / plugin).read_bytes()).hexdigest() for plugin in plugins])
        text = json.dumps(content, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def config(self) -> Config:
        """Return the resolved configuration, or raise ConfigError."""
        return parse_config(read_mapping(ROOT / self.base), self.overrides(), CHECKS)[0]

    def overrides(self) -> tuple[str, ...]:
        """Return the overrides of run.py, key=value."""
        return tuple(
            f"{key}={yaml.safe_dump(value, default_flow_style=True, width=2**30).splitlines()[0]}"
            for key, value in self.settings.items()
        )


def make_run(spec: ComparisonSpec, method: MethodSpec, seed: int) -> Run:
    settings = spec.common | method.overrides | {"training_seed": seed}
    return Run(method.name, seed, spec.base, settings)


def load_spec(path: Path) -> ComparisonSpec:
    """Read a comparison file and check every configuration in it; raise ConfigError with one line per problem."""
    values = read_mapping(path)
    if not values.keys() & ComparisonSpec.model_fields.keys():
        raise ConfigError(f"{path}: not a comparison: it has no key of one, such as methods and seeds")
    try:
        spec = ComparisonSpec.model_validate(values)
    except ValidationError as error:
        known = [*ComparisonSpec.model_fields, *MethodSpec.model_fields]
        raise ConfigError([f"{path}: {line}" for line in problem_lines(error, values, known)]) from None
    names = [method.name for method in spec.methods]
    given = {"methods": names, "seeds": spec.seeds}
    given |= {key: [entry.name for entry in getattr(spec, key)] for key in ("hardware", "networks")}
    given |= {f"{method.name}: seeds": method.seeds for method in spec.methods if method.seeds}
    problems = [
        f"{key}: {value!r} is there twice"
        for key, values in given.items()
        for value in dict.fromkeys(values)
        if values.count(value) > 1
    ]
    references = dict.fromkeys([spec.reference, *(method.reference or spec.reference for method in spec.methods)])
    for reference in references:
        if reference not in names:
            problems.append(f"reference: must be one of the methods, got {reference!r}")
    for method in spec.methods:
        reference = next(
            (other for other in spec.methods if other.name == (method.reference or spec.reference)), method
        )
        if not set(method.seeds or spec.seeds) & set(reference.seeds or spec.seeds):
            problems.append(f"{method.name}: seeds: none is one of its reference, {reference.name}")
        if method.name in references and method.reference not in (None, method.name):
            problems.append(f"{method.name}: other methods are compared with it, so it has no reference of its own")
    if bool(spec.hardware) != bool(spec.networks):
        problems.append("hardware, networks: give both or neither")
    lengths: set[int] = set()
    speeds: set[float] = set()  # of the fastest nodes
    for method in spec.methods if not problems else ():
        try:
            config = make_run(spec, method, spec.seeds[0]).config()
        except ConfigError as error:
            problems += [f"{method.name}: {problem}" for problem in error.problems]
        else:
            lengths.add(config.sequence_length)
            speeds |= {max(config.node_speeds)} if config.simulates_time_budget else set()
    if len(lengths) > 1:  # evaluations would read other sequences
        problems.append("sequence_length: must be equal in all methods")
    for device, speed in itertools.product(spec.hardware, speeds):
        if device.t_min or not math.isclose(device.t_example, 1.0 / speed, rel_tol=1e-3):
            clock = f"t_min 0 and t_example {1.0 / speed:.4g}"
            problems.append(f"hardware {device.name}: must have {clock}, the clock of time_budget with node_speeds")
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return spec
