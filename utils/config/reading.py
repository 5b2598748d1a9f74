"""From a YAML file and `key=value` overrides to a checked `Config`, and back to YAML.

All problems are reported at once, one line each, with the nearest known key, and the key names of the published AdLoCo
code are understood. The choices of the registries are handed in by the caller.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from utils.config.plugins import import_plugins
from utils.config.schema import FIELDS, Config, ConfigError
from utils.config.yaml_reading import read_mapping, yaml_value
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

# Keys of the published code that do nothing here, and what to use instead.
IGNORED = {
    "log_file": "the log is training_log.log in the run folder",
    "memory_report_dir": "memory use is in memory_report in the run folder",
    "model_training_report_dir": "CSVs, summary and plots are in model_training_report in the run folder",
    "model_weights_dir": "models are in model_weights in the run folder",
    "real_device_ids": "logs name devices as PyTorch does; CUDA_VISIBLE_DEVICES and devices choose them",
}

_ADAPTERS = {
    name: TypeAdapter(entry.type, config=ConfigDict(coerce_numbers_to_str=True)) for name, entry in FIELDS.items()
}


def _repaired_model_config(value, warnings: list[str]):
    """The published config writes {"name": ..., pretrained=True}, which YAML reads as a key 'pretrained=True'."""
    if not isinstance(value, dict):
        return value
    repaired = {}
    for key, entry in value.items():
        if isinstance(key, str) and entry is None and (match := re.fullmatch(r"(\w+)=(\w+)", key)):
            key, entry = match[1], yaml_value(match[2])
            warnings.append(f"model_config: '{match[0]}' is read as '{key}: {match[2]}'")
        repaired[key] = entry
    return repaired


def _unknown(key) -> str:
    return f"{key}: unknown key{did_you_mean(str(key), [*ALIASES, *FIELDS])}"


def _override(values: dict, assignment: str) -> str | None:
    """Apply one `key=value` (nested keys with dots) to `values`; a problem comes back as its line."""
    key, separator, text = assignment.partition("=")
    if not separator or not key:
        return f"{assignment}: an override must have the form key=value"
    try:
        value = yaml_value(text)
    except yaml.YAMLError:
        return f"{key}: value is not valid YAML: {text}"
    *parents, last = key.split(".")
    if parents:
        parents[0] = ALIASES.get(parents[0], parents[0])
    else:
        last = ALIASES.get(last, last)
    for depth, parent in enumerate(parents):
        if depth == 0 and parent == "model_config":
            values.setdefault(parent, dict(Config().model_config))
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            return f"{key}: {'.'.join(parents[: depth + 1])} is not a mapping"
    values[last] = value
    return None


def _canonical(raw: Mapping, problems: list[str]) -> dict:
    """Aliases resolved, unknown keys and double definitions reported."""
    values, origin = {}, {}
    for key, value in raw.items():
        name = ALIASES.get(key, key)
        if name in IGNORED:
            values[name] = value
        elif name not in FIELDS:
            problems.append(_unknown(key))
        elif name in values:
            problems.append(f"{key}: given twice, as {origin[name]} and as {key}")
        else:
            values[name], origin[name] = value, key
    return values


def _check_types(values: Mapping, problems: list[str]) -> dict:
    typed = {}
    for name, value in values.items():
        try:
            typed[name] = _ADAPTERS[name].validate_python(value)
        except ValidationError as error:
            # For `X | None` pydantic reports each alternative; the first is X, which is what a person meant.
            first = error.errors()[0]
            place = "".join(f"[{part}]" for part in first["loc"] if isinstance(part, int))
            reason = first["msg"].removeprefix("Value error, ").removeprefix("Input ").removeprefix("String ")
            problems.append(f"{name}{place}: {reason}, got {value!r}")
    return typed


def _check_choices(config: Config, allowed: Mapping[str, Collection[str]], problems: list[str]) -> None:
    for name, choices in allowed.items():
        value = getattr(config, name)
        if value not in choices and (value is not None or FIELDS[name].default is not None):
            hint = did_you_mean(str(value), choices)
            problems.append(f"{name}: must be one of {', '.join(choices)}, got {value!r}{hint}")


Check = Callable[[Config], list[str]]


@dataclass(frozen=True)
class Checks:
    """What only other parts of the program know of a configuration, one line each.

    problems: what is wrong with it. warnings: which keys that it changes have no effect.
    """

    problems: tuple[Check, ...] = ()
    warnings: tuple[Check, ...] = ()


NO_CHECKS = Checks()


def parse_config(
    raw: Mapping,
    overrides: Sequence[str] = (),
    allowed: Mapping[str, Collection[str]] | None = None,
    checks: Checks = NO_CHECKS,
) -> tuple[Config, list[str]]:
    """A checked Config from parsed YAML and `key=value` overrides, and warnings for the log.

    Args:
        raw: the mapping from the file; AdLoCo's published names are accepted.
        overrides: such as "ETA=0.5" or "model_config.hidden_size=128"; they win over the file.
        allowed: key -> values that the program knows; keys left out are not checked against a list. The plugins are
            imported before, and may add values; None: nothing is checked against lists, and no plugin imported.
        checks: what else the program knows.

    Raises:
        ConfigError: with one line per problem.
    """
    problems: list[str] = []
    warnings: list[str] = []
    values = _canonical(raw, problems)
    if "model_config" in values:
        values["model_config"] = _repaired_model_config(values["model_config"], warnings)
    for assignment in overrides:
        problem = _override(values, assignment)
        if problem:
            problems.append(problem)
    for name in [name for name in values if name in IGNORED]:
        warnings.append(f"{name}: has no effect, {IGNORED[name]}")
        del values[name]
    for name in [name for name in values if name not in FIELDS]:
        problems.append(_unknown(name))
        del values[name]
    typed = _check_types(values, problems)
    # A value of a wrong type is reported once; the others are checked beside the defaults.
    config = Config(**typed)
    if allowed is not None:
        if config.plugins and problems:
            raise ConfigError(problems)  # code is not run for a configuration that is wrong anyway
        try:
            import_plugins(config.plugins)
        except ConfigError as error:
            # Without it nobody knows which words there are.
            raise ConfigError(problems + error.problems) from None
    _check_choices(config, {k: v for k, v in (allowed or {}).items() if k in typed or k not in values}, problems)
    if len(typed) == len(values):
        problems += config.check()
    for check in checks.problems:
        problems.extend(check(config))
    if problems:
        raise ConfigError(problems)
    more = [warning for check in checks.warnings for warning in check(config)]
    return config, warnings + more


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    allowed: Mapping[str, Collection[str]] | None = None,
    checks: Checks = NO_CHECKS,
) -> tuple[Config, list[str]]:
    """Read a YAML file into a Config and its warnings; see parse_config.

    Raises:
        ConfigError: the file cannot be read, is not a YAML mapping, or holds problems.
    """
    return parse_config(read_mapping(Path(path)), overrides, allowed, checks)


def check_plugins_of_run(folder: Path) -> None:
    """Code that came along with a run folder, which may be somebody else's, is imported for nobody who did not ask.

    A run writes where its plugins are from the root of the file system; whoever sends a folder does not know that.

    Raises:
        ConfigError: one line for each plugin that its configuration names otherwise, or that lies beside or in it.
    """
    named, beside = read_mapping(folder / "config.yaml").get("plugins"), folder.resolve().parent
    problems = [
        f"plugins: {path} came with {folder}: to run that code, name it on the command line, plugins=[{path}]"
        for path in (named if isinstance(named, list) else [named] if named else [])
        if not Path(str(path)).is_absolute() or Path(str(path)).resolve().is_relative_to(beside)
    ]
    if problems:
        raise ConfigError(problems)


class _FloatDumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):
    """Writes floats so that any YAML 1.1 reader takes them as floats (1.0e-05, not 1e-05)."""


def _represent_float(dumper: yaml.SafeDumper, value: float):
    text = repr(value)
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_FloatDumper.add_representer(float, _represent_float)


def dump_config(config: Config) -> str:
    """The configuration as YAML with every default filled in; loading it gives an equal Config."""
    values = dataclasses.asdict(config)
    ordered = {name: values[name] for name in FIELDS}
    return yaml.dump(ordered, Dumper=_FloatDumper, sort_keys=False, allow_unicode=True)
