"""YAML from people: files and values, read without being run."""

from pathlib import Path
from typing import Any

import yaml

from utils.config.schema import ConfigError

# libyaml where PyYAML was built with it: a tenth of the time.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def yaml_value(text: str) -> Any:
    """What a YAML document says; a key that a mapping has twice, of which PyYAML would take the last, is an error.

    Raises:
        yaml.YAMLError: it is no YAML, or has such a key.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_repeated_keys(node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _refuse_repeated_keys(root: yaml.Node) -> None:
    """Before anything is made of it: mappings that are merged into others (`<<`) have more keys afterwards."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.ScalarNode) or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
            continue
        keys = set()
        for key, value in node.value:
            waiting += [key, value]
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in keys:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
                keys.add(key.value)


def read_mapping(path: Path) -> dict:
    """A YAML file's keys and values.

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
