"""YAML from people, perhaps from strangers: it cannot run code, crash the process or fill its memory."""

import math
from pathlib import Path
from typing import Any

import yaml

from utils.config.schema import ConfigError

# libyaml where PyYAML was built with it: a tenth of the time.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_MOST_LEVELS = 100
_MOST_CHARACTERS = 1_000_000


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
        yaml.YAMLError: it is not valid YAML, has a key twice, is nested too deeply, or becomes too large where its
            aliases are expanded.
    """
    _refuse_deep_nesting(text)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check(node, {})
        return loader.construct_document(node)
    except (ValueError, LookupError, AttributeError) as error:  # such as the date 2026-02-31 or !!bool maybe
        raise yaml.YAMLError(f"a value is not of its type: {error}") from None
    finally:
        loader.dispose()


def _refuse_deep_nesting(text: str) -> None:
    """Check before nodes are built, which takes recursive calls in C: these can overflow the stack."""
    level = 0
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            level += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            level -= 1
        if level > _MOST_LEVELS:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=event.start_mark)


def _check(node: yaml.Node, known: dict[int, tuple[float, float]]) -> tuple[float, float]:
    """Refuse repeated keys, and aliases that expand to too much.

    Merges (`<<`) are not done yet: afterwards a mapping may have given a merged key again.

    Args:
        node: the root of what is checked.
        known: results by the id of a node, to which several aliases may refer.

    Returns:
        The characters and the levels of the node with its aliases expanded; infinite inside the node itself.
    """
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = (math.inf, math.inf)
    characters = 1.0
    levels = 0.0
    if isinstance(node, yaml.ScalarNode):
        characters += len(node.value)
    else:
        children = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
        if isinstance(node, yaml.MappingNode):
            _refuse_repeated_keys(node)
        found = [_check(child, known) for child in children]
        characters += sum(count for count, _ in found)
        levels = 1.0 + max((level for _, level in found), default=0.0)
    if characters > _MOST_CHARACTERS or levels > _MOST_LEVELS:
        raise yaml.MarkedYAMLError(problem="too large where aliases are expanded", problem_mark=node.start_mark)
    known[id(node)] = (characters, levels)
    return characters, levels


def _refuse_repeated_keys(mapping: yaml.MappingNode) -> None:
    keys = set()
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        if key.value in keys:
            raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
        keys.add(key.value)
