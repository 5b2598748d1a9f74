"""YAML from people, perhaps from strangers: it cannot run code, crash the process or fill its memory."""

from pathlib import Path
from typing import Any

import yaml

from utils.config.schema import ConfigError


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # libyaml, if it is there, takes a tenth of the time
    """Refuses a mapping with a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_MOST_LEVELS = 100
_MOST_CHARACTERS = 10_000_000  # where all aliases are expanded


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
    _check(text)
    try:
        return yaml.load(text, _Loader)
    except (ValueError, LookupError, AttributeError) as error:  # such as the date 2026-02-31 or !!bool maybe
        raise yaml.YAMLError(f"a value is not of its type: {error}") from None


def _check(text: str) -> None:
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
