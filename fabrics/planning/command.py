"""python run.py --plan: what a run would need, as text or JSON."""

import argparse
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from fabrics.config_checks import CHECKS, CHOICES
from fabrics.planning.estimate import Estimate, Resources, estimate
from fabrics.planning.parse_units import amount, count, link, memory
from utils.config.reading import load_config
from utils.config.schema import ConfigError
from utils.files import json_text, write_text_atomically
from utils.text import byte_size

T = TypeVar("T")

_PARTS = {
    "parameters": "parameters of the working model",
    "gradients": "its gradients",
    "moments": "moments of the inner optimizer",
    "trainers": "parameters of the trainers, and the method's state of each",
    "workers": "state of the method and the encoding of each worker",
    "round": "sums of a round",
    "gathered": "layers that are whole at a time",
    "activations": "activations and logits",
    "host": "in host memory",
}


def read_resources(options: argparse.Namespace) -> Resources:
    """The resources that the options of --plan give.

    Raises:
        ConfigError: with one line for each option that cannot be read.
    """
    problems: list[str] = []

    def read(name: str, reader: Callable[[str], T], value: str | None) -> T | None:
        if value is None:
            return None
        try:
            return reader(value)
        except ValueError as error:
            problems.append(f"--{name}: {error}, got {value!r}")
            return None

    links = [(text, read("link", link, text)) for text in options.link or ()]
    resources = Resources(
        devices=read("devices", count, options.devices),
        memory=read("device-memory", memory, options.device_memory),
        tflops=read("tflops", amount, options.tflops),
        links=tuple(links),
    )
    if problems:
        raise ConfigError(problems)
    return resources


def duration(seconds: float) -> str:
    """Seconds with a unit, for people."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2.0 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.3g} s"


def as_values(found: Estimate) -> dict:
    """The estimate as JSON values."""
    values = dataclasses.asdict(found)
    values["memory"]["device"] = found.memory.device
    return values


def as_text(found: Estimate, resources: Resources) -> str:
    """The estimate for people."""
    return "\n".join(_lines(found, resources))


def _lines(found: Estimate, resources: Resources) -> Iterator[str]:
    yield f"parameters: {found.parameters:,}"
    yield f"devices: {found.devices}; {found.nodes} nodes; {found.trainers} trainers with {found.workers} workers"
    yield f"memory of a device: {byte_size(found.memory.device)}"
    for name, meaning in _PARTS.items():
        size = getattr(found.memory, name)
        if size:
            yield f"  {byte_size(size):>9}  {meaning}"
    if resources.memory is not None:
        yield f"  of {byte_size(resources.memory)}: it fits"
    micro_batch = "the largest that fits" if found.micro_batch is None else f"{found.micro_batch:,} at most"
    yield f"batch of an inner step, all trainers: {found.batch:,} examples; micro-batches: {micro_batch}"
    if found.rounds is not None:
        yield f"rounds: {found.rounds:,}, {found.tokens:,} tokens, {found.flops:.3g} FLOPs"
    yield f"a checkpoint: {byte_size(found.checkpoint_bytes)}"
    if found.round_bytes is not None:
        yield f"a round: {byte_size(found.round_bytes)}, {byte_size(found.worker_bytes)} of each worker"
    if found.total_bytes is not None:
        yield f"the run: {byte_size(found.total_bytes)} in {found.communications:,} communications"
    if found.compute_seconds is not None:
        yield f"computing: {duration(found.compute_seconds)}"
    for name, seconds in found.link_seconds.items():
        line = f"over {name}: {duration(seconds)} for what is sent"
        if found.compute_seconds is not None:
            total = seconds + found.compute_seconds
            share = seconds / total if total else math.nan
            line += f", {duration(total)} in all, {share:.1%} of it communicating"
        yield line
    for line in found.unknown:
        yield f"not known: {line}"


def print_plan(options: argparse.Namespace) -> None:
    """Print the estimate that the command line asks for, or write it.

    Raises:
        ConfigError: the configuration is wrong, or does not fit, or the file cannot be written.
    """
    logging.getLogger("adloco").setLevel(logging.WARNING)
    resources = read_resources(options)
    config, warnings = load_config(options.config or "config.yaml", options.overrides, CHOICES, CHECKS)
    found = estimate(config, resources)
    if options.json == "-":
        print(json_text(as_values(found)), end="")
        return
    print("\n".join([as_text(found, resources), *(f"warning: {warning}" for warning in warnings)]))
    if options.json is not None:
        try:
            write_text_atomically(Path(options.json), json_text(as_values(found)))
        except OSError as error:
            raise ConfigError(f"--json: cannot write {options.json}: {error.strerror}") from None
