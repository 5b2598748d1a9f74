"""A comparison file: methods, seeds, what every method is tuned over, and the hardware and networks to simulate.

A file in benchmarks/comparisons/ is YAML. Every run it describes is a run of run.py with overrides. A run is identified
by the settings that the file gives it, so stored outcomes stay valid when defaults change or keys are removed.
"""

import copy
import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, ValidationError

from benchmarks.compare.accounting import Hardware, Network
from benchmarks.compare.search import MethodSpace, Overrides, Part, Range, Search, Settings, Space, Value
from configs.make_samples import SAMPLES
from fabrics.config_checks import CHECKS
from utils.config.reading import ALIASES, parse_config
from utils.config.schema import BUDGETS, FIELDS, Config, ConfigError
from utils.config.yaml_reading import read_mapping, yaml_value

ROOT = Path(__file__).resolve().parents[2]
COMPARISONS = ROOT / "benchmarks" / "comparisons"
SUMMARY_LINES = 4
# Keys of stored comparisons that have another name now.
_RENAMED: dict[str, str] = {}


def _short(text: str) -> str:
    lines = text.strip().splitlines()
    if len(lines) > SUMMARY_LINES:
        raise ValueError(f"should have at most {SUMMARY_LINES} lines, has {len(lines)}")
    return text


class MethodSpec(Part):
    """One line of the comparison.

    Attributes:
        overrides: settings of this method, over `common`.
        tune: its own grid (a key and its values) instead of the comparison's; {}: not tuned.
        search: its own search space, over the comparison's; null: do not search this key.
        synchronous_workers: it stands for this many workers that average gradients at every inner step. It is run as
            one worker with the whole batch, which is the same mathematics; the bytes they would send are counted.
        baseline: the best baseline sets the target of the other methods.
        family: methods of one family (other batches, other rounds) are points of one frontier; empty: its own.
        tuned_as: with `tuned_on`, the method whose values it uses; None: the one of the same name.
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
    """A row of the overview's table of claims: a claim of arXiv 2508.18182, and the finding."""

    paper: str
    found: str


class ComparisonSpec(Part):
    """A file of benchmarks/comparisons/.

    Attributes:
        question: what the comparison is about.
        answer: conclusions of a person; empty before the runs.
        summary: question and answer in at most four lines.
        caveat: what a reader must know first.
        claims: claims of the paper that it tests.
        order: position in the overview; equal values are sorted by file name.
        base: the configuration that all methods start from.
        samples: samples of configs/make_samples.py that the runs read from .cache/samples.
        common: overrides for all methods.
        seeds: seeds of the runs; methods are tuned with the first.
        tune: a key and the values over which every method is tuned; {}: not tuned.
        search: random search for every method instead of a grid (benchmarks/compare/search.py).
        tuned_on: the comparison whose tuned values are used, unchanged.
        reference: the method to which the others are compared.
        hardware: devices to simulate.
        networks: networks to simulate.
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
    methods: list[MethodSpec] = Field(min_length=1)
    reference: str
    hardware: list[Hardware] = Field(min_length=1)
    networks: list[Network] = Field(min_length=1)

    def method(self, name: str) -> MethodSpec:
        """Return the method of that name."""
        return next(method for method in self.methods if method.name == name)

    def grid(self, method: MethodSpec) -> tuple[str | None, list[float | None]]:
        """Return the key over which a method is tuned and its values; (None, [None]) if it is not."""
        tune = self.tune if method.tune is None else method.tune
        return next(iter(tune.items()), (None, [None]))

    def with_found(self, found: Mapping[str, Settings]) -> "ComparisonSpec":
        """Return the comparison with the tuned values of its methods, by name."""
        methods = [with_settings(method, found.get(method.name, {})) for method in self.methods]
        return self.model_copy(update={"methods": methods})


def with_settings(method: MethodSpec, settings: Settings) -> MethodSpec:
    """Return a method with further overrides."""
    return method.model_copy(update={"overrides": method.overrides | dict(settings)})


@dataclass(frozen=True, eq=False)
class Run:
    """One run.

    Attributes:
        method: name of the method.
        value: value of the tuned key; None: none is tuned.
        seed: seed of the run.
        base: the configuration file.
        settings: overrides of the configuration, by key.
        share: fraction of the tokens and budgets; below 1 in the first rungs of a search.
    """

    method: str
    value: float | None
    seed: int
    base: str
    settings: Settings
    share: float = 1.0

    @functools.cached_property
    def id(self) -> str:
        """Digest of everything that the comparison file says about this run.

        Keys that the configuration no longer has are left out: removing a key keeps stored outcomes valid.
        """
        known = {}
        for key, value in self.settings.items():
            parts = key.split(".")  # synchronisation.steps is a key of a mapping
            parts[0] = (_RENAMED | ALIASES).get(parts[0], parts[0])
            if parts[0] in FIELDS:
                known[".".join(parts)] = value
        text = json.dumps([self.base, known, round(self.share, 6)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def config(self) -> Config:
        """Return the resolved configuration.

        Raises:
            ConfigError: it is wrong.
        """
        base = copy.deepcopy(_base(ROOT / self.base))
        return parse_config(base, self._assignments(self.settings), CHECKS)[0]

    def overrides(self) -> tuple[str, ...]:
        """Return the overrides of run.py, shortened to the run's share of tokens and budgets.

        Raises:
            ConfigError: the configuration is wrong.
        """
        settings = dict(self.settings)
        if self.share < 1.0:
            config = self.config()
            if config.max_tokens is None:
                raise ConfigError("max_tokens: a search with several rungs needs it: a rung uses a fraction of it")
            for key in ("max_tokens", *BUDGETS):
                value = getattr(config, key)
                if isinstance(value, float):
                    settings[key] = value * self.share
                elif value is not None:
                    settings[key] = max(1, round(value * self.share))
        return self._assignments(settings)

    @staticmethod
    def _assignments(settings: Settings) -> tuple[str, ...]:
        def text(value: Any) -> str:
            return yaml.dump(value, Dumper=_DUMPER, default_flow_style=True, width=2**30).splitlines()[0]

        return tuple(f"{key}={text(value)}" for key, value in settings.items())


# libyaml takes a tenth of the time.
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_base = functools.cache(read_mapping)


def make_run(spec: ComparisonSpec, method: MethodSpec, value: float | None, seed: int, share: float = 1.0) -> Run:
    """Return the run of a method with a value of its tuned key, a seed and a fraction of the tokens."""
    key, _ = spec.grid(method)
    settings = spec.common | method.overrides
    if key is not None:
        settings = settings | {key: value}
    return Run(method.name, value, seed, spec.base, settings | {"training_seed": seed}, share)


def tuning_runs(spec: ComparisonSpec) -> list[Run]:
    """Every method with every value of its grid, with the first seed."""
    return [make_run(spec, method, value, spec.seeds[0]) for method in spec.methods for value in spec.grid(method)[1]]


def seed_runs(spec: ComparisonSpec, best: Mapping[str, float | None]) -> list[Run]:
    """Every method with its best value, with all seeds."""
    return [make_run(spec, method, best[method.name], seed) for method in spec.methods for seed in spec.seeds]


def method_space(spec: ComparisonSpec, method: MethodSpec) -> Space:
    """Return the search space of a method."""
    return {key: values for key, values in (spec.search.over | method.search).items() if values is not None}


def load_spec(path: Path) -> ComparisonSpec:
    """Read a comparison file and check every configuration in it.

    Raises:
        ConfigError: one line per problem.
    """
    try:
        spec = ComparisonSpec.model_validate(yaml_value(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        raise ConfigError(
            [f"{path}: {'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r}" for e in error.errors()]
        ) from None
    names = [method.name for method in spec.methods]
    problems = [f"methods: {name!r} is there twice" for name in {n for n in names if names.count(n) > 1}]
    if spec.reference not in names:
        problems.append(f"reference: must be one of the methods, got {spec.reference!r}")
    problems += _tuning_problems(spec)
    if not problems:
        for method in spec.methods:
            problems += [f"{method.name}: {problem}" for problem in _method_problems(spec, method)]
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return spec


def _tuning_problems(spec: ComparisonSpec) -> list[str]:
    found = []
    has_grid = bool(spec.tune) or any(method.tune for method in spec.methods)
    ways = {"search": spec.search is not None, "tune": has_grid, "tuned_on": spec.tuned_on is not None}
    given = [name for name, is_given in ways.items() if is_given]
    if len(given) > 1:
        found.append(f"{given[0]}: cannot be combined with {' and '.join(given[1:])}")
    for method in spec.methods:
        if method.tuned_as and spec.tuned_on is None:
            found.append(f"{method.name}: tuned_as: the comparison has no tuned_on")
        if method.search and spec.search is None:
            found.append(f"{method.name}: search: the comparison has no search")
    return found


def _method_problems(spec: ComparisonSpec, method: MethodSpec) -> list[str]:
    """Problems of the first wrong configuration of a method."""
    seed = spec.seeds[0]
    try:
        if spec.search is None:
            for value in spec.grid(method)[1]:
                make_run(spec, method, value, seed).config()
            return []
        make_run(spec, method, None, seed, spec.search.share(0)).overrides()
        for key, values in method_space(spec, method).items():
            for value in (values.low, values.high) if isinstance(values, Range) else values:
                make_run(spec, with_settings(method, {key: value}), None, seed).config()
    except ConfigError as error:
        return error.problems
    return []
