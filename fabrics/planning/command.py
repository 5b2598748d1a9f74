"""`python run.py --plan`: its options, and the estimate as text or JSON."""

import argparse
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from algorithms.nodes.traffic import Link

if TYPE_CHECKING:
    from fabrics.planning.estimate import Estimate

_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)([kMGT]?)(i?)B")

_PARTS = {
    "parameters": "parameters of the working model",
    "gradients": "its gradients",
    "moments": "state of the inner optimizer",
    "trainers": "parameters of the trainers and the method's state",
    "workers": "state of the method and the encoding per worker",
    "round": "sums of a round",
    "gathered": "layers that are whole at a time",
    "activations": "activations and logits",
}


def parse_link(text: str) -> tuple[str, Link]:
    """A link, with the text as its name."""
    try:
        return text, Link.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, got {text!r}") from None


def parse_memory(text: str) -> int:
    """A size in bytes."""
    found = _MEMORY.fullmatch(text)
    if found is None or not float(found[1]) or (found[3] and not found[2]):
        raise _wrong("a size such as 80GB or 141GiB", text)
    return int(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2]])


def parse_positive(text: str) -> float:
    """A positive number."""
    if not re.fullmatch(r"\d*\.?\d+(e[+-]?\d+)?", text) or not 0.0 < float(text) < float("inf"):
        raise _wrong("a positive number", text)
    return float(text)


def parse_count(text: str) -> int:
    """A positive integer."""
    if not text.isdecimal() or not int(text):
        raise _wrong("a positive integer", text)
    return int(text)


def _wrong(expected: str, text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"must be {expected}, got {text!r}")


OPTIONS: dict[str, tuple[str, Callable, str]] = {
    "link": ("1Gb/s,20ms", parse_link, "a link between nodes: rate and latency; may be repeated"),
    "tflops": ("X", parse_positive, "TFLOP/s that a device sustains"),
    "device-memory": ("80GB", parse_memory, "memory of a device; a run that does not fit is refused"),
    "devices": ("N", parse_count, "devices of all machines (default: as the key devices says)"),
    "json": ("FILE", str, "also write JSON; -: print JSON instead of text"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --plan and the options that belong to it."""
    parser.add_argument("--plan", action="store_true", help="train nothing; estimate memory, traffic and time")
    group = parser.add_argument_group("with --plan")
    for name, (metavar, parse, meaning) in OPTIONS.items():
        action = "append" if name == "link" else "store"
        group.add_argument(f"--{name}", metavar=metavar, type=parse, help=meaning, action=action)


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with a message if an option of --plan is given without it."""
    for name in OPTIONS:
        if getattr(options, name.replace("-", "_")) is not None and not options.plan:
            parser.error(f"--{name} needs --plan")


def print_plan(options: argparse.Namespace) -> None:
    """Print the estimate that the command line asks for, or write it.

    Raises:
        ConfigError: the configuration is wrong, the run does not fit, or the file cannot be written.
    """
    from fabrics.config_checks import CHECKS
    from fabrics.planning.estimate import Resources, estimate
    from utils.config.reading import load_config
    from utils.config.schema import ConfigError
    from utils.files import json_text, write_text_atomically

    logging.getLogger("adloco").setLevel(logging.WARNING)
    config, warnings = load_config(options.config or "config.yaml", options.overrides, CHECKS)
    resources = Resources(options.devices, options.device_memory, options.tflops, tuple(options.link or ()))
    found = estimate(config, resources)
    text = json_text(dataclasses.asdict(found) | {"device_bytes": found.device_bytes})
    if options.json == "-":
        print(text, end="")
        return
    print("\n".join([*_lines(found), *(f"warning: {warning}" for warning in warnings)]))
    if options.json is not None:
        try:
            write_text_atomically(Path(options.json), text)
        except OSError as error:
            raise ConfigError(f"--json: cannot write {options.json}: {error.strerror}") from None


def _lines(found: "Estimate") -> Iterator[str]:
    from utils.text import byte_size

    yield f"parameters: {found.parameters:,}"
    yield f"devices: {found.devices}; {found.nodes} nodes; {found.trainers} trainers with {found.workers} workers"
    yield f"memory per device: {byte_size(found.device_bytes)}"
    for name, meaning in _PARTS.items():
        if found.memory[name]:
            yield f"  {byte_size(found.memory[name]):>9}  {meaning}"
    if found.host_bytes:
        yield f"host memory: {byte_size(found.host_bytes)}"
    limit = "the largest that fits" if found.micro_batch is None else f"at most {found.micro_batch:,}"
    yield f"batch of an inner step, all trainers: {found.batch:,} examples; micro-batches: {limit}"
    if found.rounds is not None:
        yield f"rounds: {found.rounds:,}, {found.tokens:,} tokens, {found.flops:.3g} FLOPs"
    yield f"checkpoint: {byte_size(found.checkpoint_bytes)}"
    if found.round_bytes is not None:
        each = byte_size(found.round_bytes / found.workers)
        yield f"sent per round: {byte_size(found.round_bytes)}, {each} per worker"
    if found.total_bytes is not None:
        yield f"sent in the run: {byte_size(found.total_bytes)} in {found.communications:,} communications"
    if found.compute_seconds is not None:
        yield f"computing: {_duration(found.compute_seconds)}"
    for name, seconds in found.link_seconds.items():
        line = f"over {name}: {_duration(seconds)} of sending"
        if found.compute_seconds is not None:
            total = seconds + found.compute_seconds
            line += f", {_duration(total)} in all, {seconds / total:.1%} of it communicating"
        yield line
    for line in found.unknown:
        yield f"note: {line}"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2.0 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.3g} s"
