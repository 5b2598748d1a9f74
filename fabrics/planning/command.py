"""`python run.py --plan`: its options, and the estimate as text or JSON."""

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from algorithms.nodes.traffic import Link

if TYPE_CHECKING:
    from fabrics.planning.estimate import Estimate
    from utils.config.schema import Config


def parse_link(text: str) -> tuple[str, Link]:
    """A link, with the text as its name."""
    try:
        return text, Link.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, got {text!r}") from None


def parse_memory(text: str) -> int:
    from pydantic import ByteSize, TypeAdapter

    try:
        if text.strip()[-1:].isdecimal():  # a number alone would be bytes
            raise ValueError(text)
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a size such as 80GB or 141GiB, got {text!r}") from None


def parse_positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value


def parse_count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


OPTIONS: dict[str, tuple[str, Callable, str]] = {
    "link": ("1Gb/s,20ms", parse_link, "a link between the nodes: rate and latency; may be given several times"),
    "tflops": ("X", parse_positive, "TFLOP/s that a device sustains"),
    "device-memory": ("80GB", parse_memory, "memory of a device; a run that does not fit is refused"),
    "devices": ("N", parse_count, "devices of all machines (default: those of the key devices, or one node's)"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --plan and the options that belong to it."""
    parser.add_argument("--plan", action="store_true", help="train nothing; estimate what the run would need")
    group = parser.add_argument_group("with --plan")
    for name, (metavar, parse, meaning) in OPTIONS.items():
        action = "append" if name == "link" else "store"
        group.add_argument(f"--{name}", metavar=metavar, type=parse, help=meaning, action=action)
    group.add_argument("--json", action="store_true", default=None, help="print JSON instead of text")


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with a message if an option of --plan is given without it."""
    for name in (*OPTIONS, "json"):
        if getattr(options, name.replace("-", "_")) is not None and not options.plan:
            parser.error(f"--{name} needs --plan")


def print_plan(options: argparse.Namespace) -> None:
    """Print the estimate that the command line asks for; ConfigError: a configuration that a run would refuse."""
    from fabrics.config_checks import CHECKS
    from fabrics.planning.estimate import Resources, estimate
    from fabrics.planning.memory_choice import with_chosen_memory
    from utils.config.reading import load_config
    from utils.config.schema import ConfigError
    from utils.files import given_config, json_text

    config, warnings = load_config(given_config(options.config), options.overrides, CHECKS)
    resources = Resources(options.devices, options.device_memory, options.tflops, tuple(options.link or ()))
    chosen = []
    if config.memory == "auto":
        if options.device_memory is None:
            raise ConfigError("memory: auto needs --device-memory, as --plan looks at no device")
        on_gpus = not all(name.startswith("cpu") for name in config.devices or ("cuda",))
        config, line = with_chosen_memory(config, resources, on_gpus)
        chosen = [line]
    found = estimate(config, resources)
    if options.json:
        print(json_text(dataclasses.asdict(found)), end="")
        return
    for line in (*chosen, *_lines(found, config), *(f"warning: {warning}" for warning in warnings)):
        print(line)


def _lines(found: "Estimate", config: "Config") -> Iterator[str]:
    from utils.text import byte_size, counted

    yield f"model: {found.parameters:,} parameters, with sequences of {config.sequence_length:,} tokens"
    each = config.nodes_per_gpu
    yield f"devices: {found.devices}, with {counted(found.nodes, 'node')} (nodes_per_gpu {each}), each for one worker"
    yield f"trainers: {found.trainers} at first"
    yield f"memory per device: {byte_size(found.device_bytes)}, with micro-batches of {found.micro_batch:,}"
    for part, size in found.memory.items():
        if size:
            yield f"  {byte_size(size):>9}  {part}"
    if found.host_bytes:
        yield f"host memory per device: {byte_size(found.host_bytes)}"
    yield f"requested batch of a trainer: {_range(found, 'batch', _count)} examples"
    yield f"workers of a trainer: {_range(found, 'workers', _count)}"
    names = {
        "rounds": ("rounds", _count),
        "tokens": ("tokens", _count),
        "flops": ("FLOPs", lambda value: f"{value:.3g}"),
        "communications": ("communications", _count),
        "sent_bytes": ("sent", byte_size),
        "compute_seconds": ("computing", _duration),
    }
    for name in found.ranges:
        if name in names:
            title, shown = names[name]
            yield f"{title}: {_range(found, name, shown)}"
        elif name.startswith("over "):
            yield f"sending {name.removesuffix(' seconds')}: {_range(found, name, _duration)}"
    yield "assumptions:"
    for line in found.assumptions:
        yield f"  - {line}"


def _range(found: "Estimate", name: str, shown: Callable[[float], str]) -> str:
    least, most = map(shown, found.ranges[name])
    return least if least == most else f"{least} to {most}"


def _count(value: float) -> str:
    return f"{value:,}"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2.0 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.3g} s"
