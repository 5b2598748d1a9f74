"""From a YAML file and `key=value` overrides to a checked `Config`, and back to YAML.

All problems are reported at once, one line each, with the nearest known key, and the key names of the published AdLoCo
code are understood. The choices of the registries are handed in by the caller.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from utils.config.plugins import import_plugins
from utils.config.schema import BUDGETS, FIELDS, Config, ConfigError
from utils.config.yaml_reading import read_mapping, yaml_value
from utils.utils import meant

# The names in the published code's config.yaml, and what keys were called in run folders from before.
ALIASES = {
    "lr_inner": "learning_rate_for_inner_opt",
    "lr_outer": "learning_rate_for_outer_opt",
    "num_inner_steps": "number_of_inner_steps_between_outers",
    "num_outer_steps": "number_of_outer_steps",
    "num_init_trainers": "number_of_initial_trainers",
    "initial_batch_size": "INITIAL_BATCH_SIZE",
    "num_epochs": "number_of_training_epochs",
    "new_worker_moments": "joining_moments",
}

_ADAPTERS = {
    name: TypeAdapter(entry.type, config=ConfigDict(coerce_numbers_to_str=True)) for name, entry in FIELDS.items()
}


def value_schema(name: str) -> dict:
    """The JSON schema of a key's values."""
    return _ADAPTERS[name].json_schema()


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
    return f"{key}: unknown key{meant(str(key), [*ALIASES, *FIELDS])}"


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
        if name not in FIELDS:
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
            hint = meant(str(value), choices)
            problems.append(f"{name}: must be one of {', '.join(choices)}, got {value!r}{hint}")


def _check_schedule(config: Config, problems: list[str]) -> None:
    if config.batch_schedule is None:
        return
    if config.sampling_method != "none":
        problems.append(
            f"batch_schedule: needs sampling_method none, got {config.sampling_method}, which sets the batch itself"
        )
    shares, batches = zip(*config.batch_schedule, strict=True) if config.batch_schedule else ((), ())
    grows = all(before < after for before, after in itertools.pairwise(shares))
    whole = all(batch >= 1 and float(batch).is_integer() for batch in batches)
    if not (grows and max(shares, default=0.0) <= 1.0 and whole):
        problems.append(
            f"batch_schedule: shares must grow from 0 to at most 1 and batches be positive integers, got "
            f"{config.batch_schedule}"
        )


def _check_budget(config: Config, problems: list[str]) -> None:
    given = [name for name in BUDGETS if getattr(config, name) is not None]
    if len(given) > 1:
        problems.append(f"{', '.join(given)}: a run has one budget; give one of them")
    for name in given:
        if config.max_tokens is config.number_of_training_epochs is None:
            problems.append(f"{name}: needs max_tokens or number_of_training_epochs, which it is spent on")
        if config.number_of_outer_steps is not None:
            problems.append(f"number_of_outer_steps: must be null with a {name}, which says how many rounds there are")
        if config.budget_sets == "batch":
            problems += [
                f"{key}: must be null where {name} sets the batch, got {value}"
                for key in ("batch_schedule", "smallest_worker_batch")
                if (value := getattr(config, key)) is not None
            ]
        if config.inner_steps_rule != "fixed":
            problems.append(f"inner_steps_rule: must be fixed where {name} says how long rounds are")
    if config.time_budget is not None:
        if config.link_bits_per_second is None:
            problems.append("time_budget: needs link_bits_per_second, by which communications take time")
        if config.deterministic:
            problems.append("deterministic: a run with a time_budget follows the clock and never has the same bits")


def _check_speeds(config: Config, problems: list[str]) -> None:
    if config.node_speeds is not None:
        problems += [
            f"{key}: must be null with node_speeds, as it goes by what is measured here, got {value}"
            for key in ("drop_slow_nodes", "time_budget")
            if (value := getattr(config, key)) is not None
        ]
    elif config.balance != "equal":
        if config.deterministic:
            problems.append(
                f"deterministic: a run with balance {config.balance} and without node_speeds follows the clock and "
                f"never has the same bits"
            )
        if config.number_of_inner_steps_between_outers < 2:
            problems.append(
                "number_of_inner_steps_between_outers: must be 2 at least to measure speeds, as the first inner step "
                "does not count; or give node_speeds"
            )
    if config.balance == "batch" and config.smallest_worker_batch is not None:
        problems.append(
            f"smallest_worker_batch: must be null with balance batch, in which slower workers have fewer examples, "
            f"got {config.smallest_worker_batch}"
        )
    if config.redistribute_horizon is not None:
        problems += _redistribution_problems(config)
    if config.balance == "steps" and config.plans_batches:
        problems.append(
            f"balance: must be equal or batch where {config.budget} sets the batch, so that rounds have the examples "
            f"that are planned, got steps"
        )


def _redistribution_problems(config: Config) -> list[str]:
    """What a redistribution by speeds needs."""
    found, horizon = [], config.redistribute_horizon
    if config.balance == "equal":
        found.append(
            f"redistribute_horizon: must be null with balance equal, in which every node of a trainer does as "
            f"much as the others, got {horizon}"
        )
    if config.smallest_worker_batch is not None:
        found.append(
            f"redistribute_horizon: must be null with smallest_worker_batch, which counts workers, got {horizon}"
        )
    if config.node_speeds is None and config.link_bits_per_second is None:
        found.append("redistribute_horizon: needs link_bits_per_second, by which moves take time, or node_speeds")
    return found


def _check_together(config: Config, problems: list[str]) -> None:
    if config.number_of_outer_steps is config.number_of_training_epochs is config.max_tokens is None:
        problems.append(
            "number_of_outer_steps: give it, number_of_training_epochs or max_tokens, so that the run has an end"
        )
    if config.max_requested_batch is not None and config.max_requested_batch < config.INITIAL_BATCH_SIZE:
        problems.append(
            f"max_requested_batch: must be at least INITIAL_BATCH_SIZE ({config.INITIAL_BATCH_SIZE}), "
            f"got {config.max_requested_batch}"
        )
    if config.inner_steps_rule != "fixed" and config.number_of_outer_steps is not None:
        problems.append(
            f"number_of_outer_steps: must be null with inner_steps_rule {config.inner_steps_rule}, which says itself "
            f"how many rounds the tokens or epochs make"
        )
    smallest = config.smallest_worker_batch
    if smallest and config.compares_workers and config.INITIAL_BATCH_SIZE < 2 * smallest:
        problems.append(
            f"smallest_worker_batch: across_workers needs two workers from the first round on, and so an "
            f"INITIAL_BATCH_SIZE of {2 * smallest} at least, got {config.INITIAL_BATCH_SIZE}"
        )
    if config.autocast is not None and config.parameter_dtype != "float32":
        problems.append(
            f"autocast: must be null with parameter_dtype {config.parameter_dtype}, which it leaves as it is, "
            f"got {config.autocast}"
        )
    _check_schedule(config, problems)
    _check_budget(config, problems)
    _check_speeds(config, problems)
    if config.dataset == "text" and not config.text_files:
        problems.append("text_files: dataset text needs the names of its files")
    if config.devices and config.real_device_ids and len(config.devices) != len(config.real_device_ids):
        problems.append(
            f"real_device_ids: must name each of the {len(config.devices)} devices, got {config.real_device_ids}"
        )


def _warnings(config: Config, given: Mapping) -> list[str]:
    """A key that is changed and cannot have an effect is said to have none."""
    warnings, defaults = [], Config()
    for name, value in given.items():
        if getattr(config, name) == getattr(defaults, name):
            continue
        metadata = FIELDS[name].metadata
        if metadata["datasets"] and config.dataset not in metadata["datasets"]:
            warnings.append(f"{name}: has no effect with dataset {config.dataset}")
        if name in ("project_name", "task_name") and config.clearml == "off":
            warnings.append(f"{name}: has no effect with clearml: off")
        if name.startswith("link_") and config.time_budget is config.node_speeds is config.redistribute_horizon is None:
            warnings.append(f"{name}: has no effect without time_budget, node_speeds or redistribute_horizon")
        if name == "redistribute_horizon" and config.number_of_initial_trainers == 1:
            warnings.append("redistribute_horizon: has no effect with one trainer")
        if name == "redistribute_horizon" and len(set(config.node_speeds or (1, 2))) == 1:
            warnings.append("redistribute_horizon: has no effect with node_speeds that are all the same")
        if name == "balance_hysteresis" and (config.balance == "equal" or config.node_speeds is not None):
            warnings.append("balance_hysteresis: has no effect without balance batch or steps and measured speeds")
        if name == "vocab_size" and (config.tokenizer or config.model_config.get("pretrained") is True):
            warnings.append("vocab_size: has no effect, the tokenizer is not trained here")
        if name == "single_seed" and value and not config.need_to_reinit_output_layers:
            warnings.append("single_seed: has no effect without need_to_reinit_output_layers")
        if name == "batch_schedule" and value and value[0][0] == 0 and value[0][1] != config.INITIAL_BATCH_SIZE:
            warnings.append(
                f"batch_schedule: has no effect on the first round, which has INITIAL_BATCH_SIZE, "
                f"{config.INITIAL_BATCH_SIZE}, and not {value[0][1]:g}"
            )
        if name == "inner_steps_alpha" and config.inner_steps_rule == "fixed":
            warnings.append("inner_steps_alpha: has no effect with inner_steps_rule fixed")
    return warnings


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
        _check_together(config, problems)
    for check in checks.problems:
        problems.extend(check(config))
    if problems:
        raise ConfigError(problems)
    more = [warning for check in checks.warnings for warning in check(config)]
    return config, warnings + _warnings(config, values) + more


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
    return yaml.dump(dataclasses.asdict(config), Dumper=_FloatDumper, sort_keys=False, allow_unicode=True)
