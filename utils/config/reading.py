"""Read a YAML file and `key=value` overrides into a checked `Config`, and write it back as YAML.

All problems are reported at once, one line each, with the nearest known key. The keys of the published AdLoCo code are
understood.
"""

import dataclasses
import datetime
import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from algorithms.registry import Registry
from utils.config.plugins import import_plugins
from utils.config.schema import FIELDS, Config, ConfigError
from utils.text import did_you_mean

# The names in the published code's config.yaml.
ALIASES = {
    "lr_inner": "learning_rate_for_inner_opt",
    "lr_outer": "learning_rate_for_outer_opt",
    "num_inner_steps": "number_of_inner_steps_between_outers",
    "num_outer_steps": "number_of_outer_steps",
    "num_init_trainers": "number_of_initial_trainers",
    "initial_batch_size": "INITIAL_BATCH_SIZE",
    "num_epochs": "number_of_training_epochs",
}

# Keys of the published code that have no effect here, and what to use instead.
IGNORED = {
    "log_file": "the log is training_log.log in the run folder",
    "memory_report_dir": "memory use is in memory_report in the run folder",
    "model_training_report_dir": "CSVs, summary and plots are in model_training_report in the run folder",
    "model_weights_dir": "models are in model_weights in the run folder",
    "c4_streaming": "C4 on the hub is always read over the network",
    "task_name": "the ClearML task has the name of the run folder, which run_name sets",
    "real_device_ids": "logs name devices as PyTorch does; CUDA_VISIBLE_DEVICES and devices choose them",
}

T = TypeVar("T")

_adapter_of = functools.cache(TypeAdapter)

# Characters of a wrong value that an error shows.
_LONGEST_VALUE = 60

_ADAPTERS = {
    name: TypeAdapter(entry.type, config=ConfigDict(coerce_numbers_to_str=True)) for name, entry in FIELDS.items()
}


def _takes_text(name: str) -> bool:
    try:
        return isinstance(_ADAPTERS[name].validate_python(1), str)
    except ValidationError:
        return False


# Keys of texts: a number or date is taken as it is written.
_TEXTS = frozenset(filter(_takes_text, _ADAPTERS))
_NOT_TEXT = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp"))


# YAML from people, perhaps from strangers: it cannot run code, crash the process or fill its memory

_MOST_LEVELS = 100
_MOST_DIGITS = 400
_MOST_CHARACTERS = 10_000_000  # where all aliases are expanded


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # libyaml, if it is there, takes a tenth of the time
    """Refuses a mapping with a key that is given twice, and leaves the texts of text keys as they are."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
                seen.add(key.value)
                if key.value in _TEXTS and value.tag in _NOT_TEXT:
                    value.tag = "tag:yaml.org,2002:str"  # run_name: 2024_01_15 is no number
        return super().construct_mapping(node, deep)

    def construct_integer(self, node: yaml.ScalarNode) -> int | str:
        # YAML 1.1 reads 010 in base 8, and 12:30 in base 60.
        if len(node.value) > _MOST_DIGITS:  # Python cannot print all of them
            raise ValueError(f"a number of {len(node.value):,} characters")
        if ":" in node.value:
            return node.value
        leading_zero = re.fullmatch(r"[-+]?0[0-9_]+", node.value)
        return int(node.value.replace("_", "")) if leading_zero else self.construct_yaml_int(node)

    def construct_decimal(self, node: yaml.ScalarNode) -> float | str:
        return node.value if ":" in node.value else self.construct_yaml_float(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_decimal)


def read_mapping(path: Path) -> dict:
    """Return the keys and values of a YAML file; ConfigError: it cannot be read, or is not a YAML mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{path}: cannot read the configuration: {reason}") from None
    try:
        values = yaml_value(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must be a mapping of keys to values, got {type(values).__name__}")
    return values


def yaml_value(text: str) -> Any:
    """Return the value of a YAML document; yaml.YAMLError: not valid, a key twice, too deep, or too many aliases."""
    _check_yaml(text)
    try:
        return yaml.load(text, _Loader)
    except (ValueError, LookupError, AttributeError) as error:  # such as the date 2026-02-31 or !!bool maybe
        raise yaml.YAMLError(f"a value is not of its type: {error}") from None


def _check_yaml(text: str) -> None:
    """Check events before values are made of them, which takes recursive calls that can overflow the stack."""
    anchored: list[bool] = []  # of each open list or mapping
    aliases = 0
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.CollectionEndEvent):
            anchored.pop()
        if isinstance(event, yaml.AliasEvent):
            aliases += 1
            if any(anchored):
                raise yaml.MarkedYAMLError(problem="an alias inside an anchored value", problem_mark=event.start_mark)
        if isinstance(event, yaml.CollectionStartEvent):
            anchored.append(event.anchor is not None)
        if len(anchored) > _MOST_LEVELS:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=event.start_mark)
    if aliases * len(text) > _MOST_CHARACTERS:
        raise yaml.YAMLError("too many aliases")


# Configurations


@dataclass(frozen=True)
class Checks:
    """Checks and choices from the rest of the program; fabrics/config_checks.py fills them in."""

    choices: Mapping[str, Collection[str]]
    problems: Sequence[Callable[[Config], list[str]]]
    warnings: Callable[[Config], list[str]] = lambda config: []
    left_open: Callable[[Collection[str], Config], list[str]] = lambda given, config: []


def load_config(
    source: str | Path | Mapping | Config, overrides: Sequence[str] = (), checks: Checks | None = None
) -> tuple[Config, list[str]]:
    """Read a YAML file, a mapping of its keys or a Config into a checked Config and its warnings; see parse_config."""
    if isinstance(source, Config):
        source = dataclasses.asdict(source)
    raw = source if isinstance(source, Mapping) else read_mapping(Path(source))
    if raw.keys() >= {"methods", "reference"}:
        raise ConfigError(f"{source}: a comparison, which python benchmarks/compare/compare.py runs")
    return parse_config(raw, overrides, checks)


def parse_config(raw: Mapping, overrides: Sequence[str] = (), checks: Checks | None = None) -> tuple[Config, list[str]]:
    """Return a checked Config, and warnings for the log.

    Args:
        overrides: such as "ETA=0.5" or "model_config.hidden_size=128"; they win over `raw`.
        checks: imports the plugins and checks names and combinations as well; None: only the schema is checked.

    Raises:
        ConfigError: one line per problem.
    """
    problems: list[str] = []
    warnings: list[str] = []
    values = _with_known_names(raw, problems)
    if "model_config" in values:
        values["model_config"] = _repaired_model_config(values["model_config"], warnings)
    for assignment in overrides:
        override(values, assignment, problems)
    for name in list(values):
        if name in IGNORED:
            warnings.append(f"{name}: has no effect, {IGNORED[name]}")
            del values[name]
        elif name not in FIELDS:
            problems.append(f"{name}: unknown key{did_you_mean(str(name), FIELDS) or did_you_mean(str(name), ALIASES)}")
            del values[name]
    typed = _convert(values, problems)
    config = Config(**typed)
    if checks is not None:
        if config.plugins and problems:
            raise ConfigError(problems)  # no code is run for a configuration that is wrong anyway
        try:
            import_plugins(config.plugins)
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems]) from None
        wrong_type = values.keys() - typed.keys()
        problems += _unknown_choices(config, {k: v for k, v in checks.choices.items() if k not in wrong_type})
    if not problems:
        problems += config.check()
    if not problems and checks is not None:
        for check in checks.problems:
            problems += check(config)
        if not problems:
            warnings += checks.warnings(config)
            if raw.keys() >= {"ETA", "vartheta", "nu"} and raw.keys() & IGNORED:  # as in both published files
                warnings += checks.left_open(values.keys(), config)
    if problems:
        raise ConfigError(problems)
    return config, warnings


def _with_known_names(raw: Mapping, problems: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    given: dict[str, str] = {}
    for key, value in raw.items():
        name = ALIASES.get(key, key)
        if name in values:
            problems.append(f"{name}: given twice, as {given[name]} and as {key}")
        values.setdefault(name, value)
        given.setdefault(name, key)
    return values


def _repaired_model_config(value: Any, warnings: list[str]) -> Any:
    """Repair {"name": ..., pretrained=True} of the published config, which YAML reads as a key 'pretrained=True'."""
    if not isinstance(value, dict):
        return value
    repaired = {}
    for key, entry in value.items():
        match = re.fullmatch(r"(\w+)=(\w+)", key) if isinstance(key, str) and entry is None else None
        if match is None:
            repaired[key] = entry
        else:
            repaired[match[1]] = yaml_value(match[2])
            warnings.append(f"model_config: '{match[0]}' is read as '{match[1]}: {match[2]}'")
    return repaired


def override(
    values: dict[str, Any], assignment: str, problems: list[str], aliases: Mapping[str, str] = ALIASES
) -> None:
    """Set the value of `key=value`; nested keys have dots."""
    key, separator, text = assignment.partition("=")
    if not separator or not key:
        problems.append(f"{assignment}: an override must have the form key=value")
        return
    try:
        value = yaml_value(text)
    except yaml.YAMLError:
        problems.append(f"{key}: value is not valid YAML: {text}")
        return
    except UnicodeEncodeError:
        problems.append(f"{key}: must be UTF-8 text, got {text!a}")
        return
    if isinstance(value, dict) and any(":" in str(name) and entry is None for name, entry in value.items()):
        problems.append(f"{key}: YAML needs a space after each colon, got {text}")
        return
    first, *rest = key.split(".")
    path = [aliases.get(first, first), *rest]
    if not rest and path[0] in _TEXTS and type(value) in (int, float, datetime.date, datetime.datetime):
        value = text.strip()  # as in a file
    if rest and path[0] == "model_config":
        values.setdefault("model_config", dict(Config().model_config))
    inner = values
    for depth, name in enumerate(path[:-1]):
        given = inner.get(name, {})
        if not isinstance(given, Mapping):
            problems.append(f"{key}: {'.'.join(path[: depth + 1])} is not a mapping")
            return
        inner[name] = dict(given)  # the caller's own mapping stays as it is
        inner = inner[name]
    inner[path[-1]] = value
    if path in (["model_config", "preset"], ["model_config", "name"]) and value is not None:
        inner.pop("name" if rest == ["preset"] else "preset", None)  # one takes the other's place


def _convert(values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    typed = {}
    for name, value in values.items():
        try:
            typed[name] = _ADAPTERS[name].validate_python(value)
        except ValidationError as error:
            problems.append(problem_lines(error, value, key=name)[0])
    return typed


def problem_lines(error: ValidationError, values: Any, known: Collection[str] = (), key: str = "") -> list[str]:
    """Return one line for each wrong place that pydantic found in values: the keys that lead there, and the reason.

    Args:
        known: the keys that an unknown one may have been meant as.
        key: the key whose value is `values`; empty: they are a whole file.
    """
    lines: dict[str, str] = {}
    for problem in error.errors():
        place = key
        inner = values
        for part in problem["loc"]:
            if isinstance(part, int) and isinstance(inner, list):
                place += f"[{part}]"
                inner = inner[part] if part < len(inner) else None
            elif isinstance(inner, Mapping) and (part in inner or problem["type"] == "missing"):
                place += f".{part}" if place else str(part)
                inner = inner.get(part)
            else:
                break  # the name of an alternative
        reason = problem["msg"].removeprefix("Value error, ").removeprefix("Input ").removeprefix("String ")
        reason = reason.partition(", got")[0]  # the value follows below
        if problem["type"] == "list_type":
            reason += ", such as [a, b]"
        if problem["type"] == "missing":
            line = "is missing"
        elif problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            line = f"unknown key{did_you_mean(place.rpartition('.')[2], known)}"
        elif not place:
            line = reason
        else:
            got = repr(problem["input"])
            got += "; YAML writes null" if problem["input"] == "None" else ""
            if problem["type"] == "string_type" and isinstance(problem["input"], bool):
                got += "; YAML reads on, off, yes and no as true and false"
            line = f"{reason}, got {got if len(got) <= _LONGEST_VALUE else got[:_LONGEST_VALUE] + '...'}"
            if problem["type"] in ("int_parsing", "float_parsing") and place in FIELDS:  # the value may have a unit
                line += f"; meaning: {FIELDS[place].metadata['meaning'].partition(';')[0]}"
        # For `X | None` pydantic reports each alternative; the first is X, which is what a person meant.
        lines.setdefault(place, f"{place}: {line}" if place else line)
    return list(lines.values())


def with_parameters(kind: type[T], values: Mapping[str, Any], key: str, name: str) -> T:
    """Return a dataclass with these values of its fields; key: of the mapping; name: of the choice that has them."""
    known = [field.name for field in dataclasses.fields(kind)]
    problems = []
    for parameter in values:
        if parameter not in known:
            hint = did_you_mean(str(parameter), known) or f"; it has {', '.join(known) or 'none'}"
            problems.append(f"{key}.{parameter}: {name} has no such parameter{hint}")
    types = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        allowed = (types[field.name], *get_args(types[field.name]))
        if isinstance(values.get(field.name), bool) and bool not in allowed:
            value = values[field.name]
            problems.append(f"{key}.{field.name}: should not be true or false, got {value}")
    if problems:
        raise ConfigError(problems)
    try:
        return _adapter_of(kind).validate_python(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # of __post_init__, which begins with the parameter
            raise ConfigError(f"{key}.{first['msg'].removeprefix('Value error, ')}") from None
        raise ConfigError(problem_lines(error, values, key=key)) from None


def _unknown_choices(config: Config, choices: Mapping[str, Collection[str]]) -> list[str]:
    found = []
    for name, known in choices.items():
        value = getattr(config, name)
        if value not in known and (value is not None or FIELDS[name].default is not None):
            others = ", or registered by a file in plugins" if isinstance(known, Registry) else ""
            names = f"{', '.join(known)}{others}"
            found.append(f"{name}: must be one of {names}, got {value!r}{did_you_mean(str(value), known)}")
    return found


def dump_config(config: Config) -> str:
    """Return the configuration as YAML with every default filled in; loading it gives an equal Config."""
    values = dataclasses.asdict(config)
    ordered = {name: values[name] for name in FIELDS}
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(ordered, Dumper=dumper, sort_keys=False, allow_unicode=True)
