"""Parameters of a named choice: a mapping in the configuration becomes a dataclass."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from utils.config.schema import ConfigError
from utils.text import did_you_mean

T = TypeVar("T")

_adapter = functools.cache(TypeAdapter)


def with_parameters(kind: type[T], values: Mapping[str, Any], key: str, name: str) -> T:
    """Return a dataclass with these values of its fields; the others have their defaults.

    Args:
        kind: the dataclass.
        values: the mapping in the configuration.
        key: of the mapping.
        name: of the choice that has the parameters.

    Raises:
        ConfigError: one line per unknown parameter or wrong value.
    """
    known = [field.name for field in dataclasses.fields(kind)]
    problems = []
    for parameter in values:
        if parameter not in known:
            hint = did_you_mean(str(parameter), known) or f"; it has {', '.join(known) or 'none'}"
            problems.append(f"{key}.{parameter}: {name} has no such parameter{hint}")
    for field in dataclasses.fields(kind):
        value = values.get(field.name)
        if isinstance(value, bool) and field.type is not bool:
            problems.append(f"{key}.{field.name}: should not be true or false, got {value}")
    if problems:
        raise ConfigError(problems)
    try:
        return _adapter(kind).validate_python(dict(values))
    except ValidationError as errors:
        raise ConfigError([_problem(error, key, known) for error in errors.errors()]) from None


def _problem(error: dict, key: str, known: list[str]) -> str:
    place = ".".join(str(part) for part in error["loc"] if part in known)
    reason = error["msg"].removeprefix("Value error, ")
    if place:
        return f"{key}.{place}: {reason.removeprefix('Input ')}, got {error['input']!r}"
    return f"{key}.{reason}"
