"""YAML from people, perhaps from strangers: it cannot run code, crash the process or fill its memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from utils.config.schema import ConfigError

# libyaml where PyYAML was built with it: a tenth of the time.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_MOST_LEVELS = 100
_MOST_CHARACTERS = 10_000_000  # where all aliases are expanded


def read_mapping(path: Path) -> dict:
    """Return the keys and values of a YAML file.

    Raises:
        ConfigError: it cannot be read, or is not a YAML mapping.
    """
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
    """Return the value of a YAML document; unlike in PyYAML, a key given twice in a mapping is an error.

    Raises:
        yaml.YAMLError: it is not valid YAML, has a key twice, is nested too deeply, or has too many aliases.
    """
    _check(text)
    try:
        return yaml.load(text, _Loader)
    except (ValueError, LookupError, AttributeError) as error:  # such as the date 2026-02-31 or !!bool maybe
        raise yaml.YAMLError(f"a value is not of its type: {error}") from None


@dataclass
class _Collection:
    """A list or mapping that is being read; keys: of a mapping, None of a list."""

    keys: set[str] | None
    anchored: bool
    children: int = 0  # keys count as well


def _check(text: str) -> None:
    """Check events before values are made of them, which takes recursive calls that can overflow the stack."""
    open_collections: list[_Collection] = []
    aliases = 0
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.CollectionEndEvent):
            open_collections.pop()
        if not isinstance(event, yaml.NodeEvent):
            continue
        if open_collections:
            parent = open_collections[-1]
            if parent.keys is not None and parent.children % 2 == 0:
                _add_key(event, parent.keys)
            parent.children += 1
        if isinstance(event, yaml.AliasEvent):
            aliases += 1
            if any(each.anchored for each in open_collections):
                raise yaml.MarkedYAMLError(problem="an alias inside an anchored value", problem_mark=event.start_mark)
        if isinstance(event, yaml.CollectionStartEvent):
            keys = set() if isinstance(event, yaml.MappingStartEvent) else None
            open_collections.append(_Collection(keys, event.anchor is not None))
        if len(open_collections) > _MOST_LEVELS:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=event.start_mark)
    if aliases * len(text) > _MOST_CHARACTERS:
        raise yaml.YAMLError("too many aliases")


def _add_key(event: yaml.NodeEvent, keys: set[str]) -> None:
    if not isinstance(event, yaml.ScalarEvent) or event.value == "<<":
        return
    if event.value in keys:
        raise yaml.MarkedYAMLError(problem=f"{event.value} is given twice", problem_mark=event.start_mark)
    keys.add(event.value)
