"""A comparison as a file says it: methods, seeds, the grid over which each method is tuned, and what to simulate.

A file in benchmarks/comparisons/ is YAML; every run it asks for is a run of run.py with overrides. A run is known by
those values of its resolved configuration that have an effect, so that comparisons share runs, and a run that is
finished is never made again.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from benchmarks.accounting import Hardware, Network
from fabrics.choices import CHECKS, CHOICES
from utils.config import ConfigError
from utils.config_reading import dump_config, load_config

ROOT = Path(__file__).resolve().parent.parent
# What a comparison may take of the overview for its summary.
SUMMARY_LINES = 4
# Where a run is written, and by how many processes and threads it is made, has nothing to do with what it finds.
_PLACES = ("log_dir", "log_file", "cache_dir", "processes", "cpu_threads", "clearml", "memory_sample_seconds")
# Nor have the settings of a batch test that there is not.
_OF_BATCH_TESTS = ("ETA", "ETA_at_end", "vartheta", "nu", "debias", "statistics_estimator", "statistics_batch_size",
                   "statistics_smoothing", "batch_test_start", "batch_test_confidence",
                   "max_batch_growth")  # fmt: skip


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-3 as text."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[\d.]+e[+-]?\d+", value) else value


def _short(text: str) -> str:
    if len(lines := text.strip().splitlines()) > SUMMARY_LINES:
        raise ValueError(f"should have at most {SUMMARY_LINES} lines, has {len(lines)}")
    return text


Value = Annotated[Any, BeforeValidator(_number)]
Overrides = dict[str, Value]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Method(_Part):
    """One line of the comparison.

    Attributes:
        overrides: what makes it this method, over `common`.
        tune: its own grid, a key and its values, where the comparison's does not fit; {}: as it is.
        synchronous_workers: it stands for so many workers that average gradients at every inner step. Their mathematics
            is that of one worker with the whole batch, which is how it is run; what they would send is counted.
        baseline: it is one of those whose best sets the target for the others.
        family: methods of one family, with other batches or rounds, are points of one frontier; empty: its own.
    """

    name: str
    overrides: Overrides = {}
    tune: dict[str, list[Value]] | None = Field(None, max_length=1)
    synchronous_workers: int | None = Field(None, ge=2)
    baseline: bool = False
    family: str = ""


class Claim(_Part):
    """A line of the overview's table of claims: what the paper (arXiv 2508.18182) says, and what was found here."""

    paper: str
    found: str


class Comparison(_Part):
    """A file of benchmarks/comparisons/.

    Attributes:
        question: what it is about. answer: what a person concluded from its numbers; empty until there are some.
        summary: both in at most four lines. caveat: what a reader must know first.
        claims: of the paper's, those that it tests.
        order: of the comparisons in the overview; equal ones go by the names of their files.
        base: the configuration that all methods begin with. common: overrides for all of them.
        samples: the runs read what configs/make_samples.py writes to .cache/samples.
        seeds: of the runs; the first is the one that methods are tuned with.
        tune: a key and the values over which each method is tuned; {}: methods are as they are.
        reference: the method that the others are held against at its communications and simulated times.
        hardware, networks: what is simulated. A t_min or t_example that is left out is measured on this machine.
    """

    title: str
    question: str
    answer: str = ""
    summary: Annotated[str, AfterValidator(_short)] = ""
    caveat: str = ""
    claims: list[Claim] = []
    order: int = 0
    base: str = "config.yaml"
    samples: bool = False
    common: Overrides = {}
    seeds: list[int] = Field(min_length=1)
    tune: dict[str, list[Value]] = Field({}, max_length=1)
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
        comparison = Comparison.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        raise ConfigError(
            [f"{path}: {'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r}" for e in error.errors()]
        ) from None
    names = [method.name for method in comparison.methods]
    problems = [f"{path}: methods: {name!r} is there twice" for name in {n for n in names if names.count(n) > 1}]
    if comparison.reference not in names:
        problems.append(f"{path}: reference: must be one of the methods, got {comparison.reference!r}")
    for method in comparison.methods:
        for value in grid(comparison, method)[1]:
            try:
                make_run(comparison, method, value, comparison.seeds[0])
            except ConfigError as error:
                problems += [f"{path}: {method.name}: {problem}" for problem in error.problems]
                break
    if problems:
        raise ConfigError(problems)
    return comparison


def grid(comparison: Comparison, method: Method) -> tuple[str | None, list[float | None]]:
    """The key over which a method is tuned, and its values; (None, [None]) where it is not."""
    tune = comparison.tune if method.tune is None else method.tune
    return next(iter(tune.items()), (None, [None]))


def _assignment(key: str, value: Any) -> str:
    return f"{key}={yaml.safe_dump(value, default_flow_style=True, width=math.inf).splitlines()[0]}"


def make_run(comparison: Comparison, method: Method, value: float | None, seed: int) -> Run:
    """The run of a method with a value of what is tuned.

    Raises:
        ConfigError: the configuration is wrong.
    """
    key, _ = grid(comparison, method)
    values: Mapping[str, Any] = comparison.common | method.overrides | {"training_seed": seed}
    if key is not None:
        values = values | {key: value}
    overrides = tuple(_assignment(name, entry) for name, entry in values.items())
    config, _ = load_config(ROOT / comparison.base, overrides, CHOICES, CHECKS)
    kept = yaml.safe_load(dump_config(config))
    for name in _PLACES + (_OF_BATCH_TESTS if config.sampling_method == "none" else ()):
        kept.pop(name)
    text = yaml.safe_dump(kept, sort_keys=True)
    return Run(method.name, value, seed, overrides, hashlib.sha256(text.encode()).hexdigest()[:16])


def tuning_runs(comparison: Comparison) -> list[Run]:
    """Every method with every value of its grid, with the first seed."""
    seed = comparison.seeds[0]
    return [make_run(comparison, m, value, seed) for m in comparison.methods for value in grid(comparison, m)[1]]


def seed_runs(comparison: Comparison, best: Mapping[str, float | None]) -> list[Run]:
    """Every method with its best value, with all seeds."""
    return [make_run(comparison, m, best[m.name], seed) for m in comparison.methods for seed in comparison.seeds]
