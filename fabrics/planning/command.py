"""python run.py --plan: what a run would need, as text or JSON."""

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fabrics.config_checks import CHECKS, CHOICES
from fabrics.planning.parse_units import amount, count, link, memory
from fabrics.planning.plan import Asked, make_plan
from fabrics.planning.text import text
from utils.config.reading import load_config
from utils.config.schema import ConfigError
from utils.utils import json_text, write_text_atomically

T = TypeVar("T")


def asked_for(options: argparse.Namespace) -> Asked:
    """What the options of --plan say.

    Raises:
        ConfigError: one of them is no such thing.
    """
    problems: list[str] = []

    def read(name: str, reader: Callable[[str], T], value: str | None) -> T | None:
        try:
            return None if value is None else reader(value)
        except ValueError as error:
            problems.append(f"--{name}: {error}, got {value!r}")
            return None

    asked = Asked(
        read("devices", count, options.devices),
        read("device-memory", memory, options.device_memory),
        read("tflops", amount, options.tflops),
        tuple(read("link", link, each) for each in options.link or ()),
    )
    if problems:
        raise ConfigError(problems)
    return asked


def print_plan(options: argparse.Namespace) -> None:
    """Print the plan that the command line asks for, or write it.

    Raises:
        ConfigError: there is nothing to plan: the configuration is wrong, or does not fit, or nothing can be written.
    """
    logging.getLogger("adloco").setLevel(logging.WARNING)
    asked = asked_for(options)
    config, warnings = load_config(options.config or "config.yaml", options.overrides, CHOICES, CHECKS)
    made = make_plan(config, asked)
    if options.json == "-":
        print(json_text(made.values()), end="")
        return
    print("\n".join([text(made, asked), *(f"warning: {warning}" for warning in warnings)]))
    if options.json is not None:
        try:
            write_text_atomically(Path(options.json), json_text(made.values()))
        except OSError as error:
            raise ConfigError(f"--json: cannot write {options.json}: {error.strerror}") from None
