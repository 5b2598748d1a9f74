"""`python run.py --plan`: its options, and the estimate as text or JSON."""

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

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


def parser_of(kind: str, example: str) -> Callable[[str], Any]:
    """Return a parser of a pydantic type, by name, that refuses everything unlike the example."""

    def parse(text: str) -> Any:
        import pydantic

        try:
            if kind == "ByteSize" and text.strip()[-1:].isdecimal():  # a number alone would be bytes
                raise ValueError(text)
            finite = pydantic.ConfigDict(allow_inf_nan=False)
            value = pydantic.TypeAdapter(getattr(pydantic, kind), config=finite).validate_python(text)
            if value > 1e18:  # later products would overflow
                raise ValueError(text)
            return value
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {example}, got {text!r}") from None

    return parse


parse_count = parser_of("PositiveInt", "a positive integer")
parse_positive = parser_of("PositiveFloat", "a positive number")
parse_memory = parser_of("ByteSize", "a size such as 80GB or 141GiB")

OPTIONS: dict[str, tuple[str, Callable, str]] = {
    "link": ("1Gb/s,20ms", parse_link, "a link between the nodes: rate and latency; may be given several times"),
    "tflops": ("X", parse_positive, "TFLOP/s that a device sustains"),
    "device-memory": ("80GB", parse_memory, "memory of a device; a run that does not fit is refused"),
    "devices": ("N", parse_count, "devices of all machines (default: those of the key devices, or one node's)"),
}


TITLES = {
    "batch": "requested batch of a trainer",
    "workers": "workers of a trainer",
    "flops": "FLOPs",
    "sent_bytes": "sent",
    "compute_seconds": "computing",
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
    from fabrics.planning.estimate import Estimate, Resources
    from fabrics.planning.memory_choice import with_chosen_memory
    from utils.config.reading import load_config
    from utils.config.schema import ConfigError
    from utils.files import given_config, json_text

    config, warnings = load_config(given_config(options.config), options.overrides, CHECKS)
    resources = Resources(options.devices, options.device_memory, options.tflops, tuple(options.link or ()))
    notes = [f"warning: {warning}" for warning in warnings]
    if config.memory == "auto":
        if options.device_memory is None:
            raise ConfigError("memory: auto needs --device-memory, as --plan looks at no device")
        on_gpus = not all(name.startswith("cpu") for name in config.devices or ("cuda",))
        config, choice = with_chosen_memory(config, resources, on_gpus)
        notes.insert(0, choice)
    found = Estimate(config, resources)
    for note in notes:
        print(note, file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json_text(found.as_dict()), end="")
        return
    for line in _lines(found, config):
        print(line)


def _lines(found: "Estimate", config: "Config") -> Iterator[str]:
    from utils.text import byte_size, counted

    yield f"model: {found.parameters:,} parameters, with sequences of {config.sequence_length:,} tokens"
    each = f"nodes_per_gpu {config.nodes_per_gpu}"
    if config.devices_per_node > 1:
        each += f", devices_per_node {config.devices_per_node}"
    yield f"devices: {found.devices}, with {counted(found.nodes, 'node')} ({each}), each for one worker"
    yield f"trainers: {found.trainers} at first"
    yield f"memory per device: {byte_size(found.device_bytes)}, with micro-batches of {found.micro_batch:,}"
    for part, size in found.memory.items():
        if size:
            yield f"  {byte_size(size):>9}  {part}"
    if found.host_bytes:
        yield f"host memory per device: {byte_size(found.host_bytes)}"
    for name, (least, most) in found.ranges.items():
        title = TITLES.get(name, name.removesuffix(" seconds"))
        if name.startswith("over "):
            title = f"sending {title}"
        shown = _shown(name, least)
        if _shown(name, most) != shown:
            shown += f" to {_shown(name, most)}"
        yield f"{title}: {shown}"
    if found.assumptions:
        yield "assumptions:"
    for line in found.assumptions:
        yield f"  - {line}"


def _shown(name: str, value: float) -> str:
    from utils.text import byte_size

    if name.endswith("seconds"):
        return _duration(value)
    if name.endswith("bytes"):
        return byte_size(value)
    return f"{value:.3g}" if name == "flops" else f"{value:,}"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2.0 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.3g} s"
