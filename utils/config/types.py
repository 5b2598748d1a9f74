"""The types of configuration keys, pydantic's, and how a key is written."""

import os
from dataclasses import field
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field


def _no_bool(value):
    if isinstance(value, bool):
        raise ValueError("Input should be a number, not true or false")
    return value


def off_is_a_word(value):
    return "off" if value is False else value  # YAML reads off as false


def auto_or_a_count(value):
    if isinstance(value, bool) or not (value == "auto" or (str(value).isdecimal() and int(value) > 0)):
        raise ValueError("Input should be auto or a positive integer")
    return value


def auto_or_a_bool(value):
    if not (value == "auto" or isinstance(value, bool)):
        raise ValueError("Input should be auto, true or false")
    return value


def a_type_of_parameters(value):
    if value not in ("float32", "float64"):
        raise ValueError("Input should be float32 or float64 (autocast: bfloat16 computes in bfloat16 over float32)")
    return value


Number = BeforeValidator(_no_bool)
PositiveInt = Annotated[int, Field(gt=0), Number]
NonNegativeInt = Annotated[int, Field(ge=0), Number]
Seed = Annotated[int, Field(ge=0, lt=2**64), Number]  # what PyTorch's generators take
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False), Number]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False), Number]
Fraction = Annotated[float, Field(gt=0, le=1), Number]
BelowOne = Annotated[float, Field(ge=0, lt=1), Number]
AtLeastOne = Annotated[float, Field(ge=1), Number]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]
Name = Annotated[str, Field(min_length=1)]
# Absolute from then on, so that the configuration in a run folder means the same from everywhere.
File = Annotated[str, Field(min_length=1), AfterValidator(os.path.abspath)]


def key(default, meaning: str, *, choices: bool = False, datasets: tuple[str, ...] = (), changes_training: bool = True):
    """A config key: default, meaning (shown in docs/configuration.md), whether a registry lists its values, the only
    datasets it has an effect with, and whether a run that is resumed with another value trains differently."""
    metadata = {"meaning": meaning, "choices": choices, "datasets": datasets, "changes_training": changes_training}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)
