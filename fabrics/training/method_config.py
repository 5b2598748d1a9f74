"""The synchronisation method that a configuration asks for."""

import dataclasses
import functools

from pydantic import TypeAdapter, ValidationError

from algorithms.synchronisation import METHODS, Method
from algorithms.synchronisation.encodings.encoding import Encoding
from algorithms.synchronisation.method import Capabilities, Outer, taken_names
from fabrics.training.flat_model import FlatModel
from fabrics.training.optimizers import INNER_OPTIMIZERS, inner_optimizer_name
from fabrics.training.statistics import plan_statistics
from utils.config.schema import Config, ConfigError
from utils.text import did_you_mean


@functools.cache
def _adapter(kind: type) -> TypeAdapter:
    return TypeAdapter(kind)


def method_settings(config: Config):
    """The values of `synchronisation`, as the method knows them.

    Raises:
        ConfigError: with one line per problem.
    """
    kind = METHODS[config.distributed_algo].Settings
    known, problems = [entry.name for entry in dataclasses.fields(kind)], []
    for name in config.synchronisation:
        if name not in known:
            hint = did_you_mean(str(name), known) or f"; it has {', '.join(known) or 'none'}"
            problems.append(f"synchronisation.{name}: {config.distributed_algo} has no such parameter{hint}")
    for entry in dataclasses.fields(kind):
        if isinstance(value := config.synchronisation.get(entry.name), bool) and entry.type is not bool:
            problems.append(f"synchronisation.{entry.name}: should not be true or false, got {value}")
    if not problems:
        try:
            return _adapter(kind).validate_python(config.synchronisation)
        except ValidationError as error:
            for each in error.errors():
                place = ".".join(str(part) for part in each["loc"] if part in known)
                reason = each["msg"].removeprefix("Value error, ")
                said = f"{place}: {reason.removeprefix('Input ')}, got {each['input']!r}" if place else reason
                problems.append(f"synchronisation.{said}")
    raise ConfigError(problems)


def method_of(config: Config, working: FlatModel) -> Method:
    """The method, for flat tensors of a working model.

    Raises:
        ConfigError: the method does not fit the model.
    """
    settings = method_settings(config)
    outer = Outer(config.learning_rate_for_outer_opt, config.outer_momentum, config.weight_decay)
    kind = METHODS[config.distributed_algo]
    try:
        return kind(settings, outer, working.blocks)
    except ValueError as error:
        raise ConfigError([f"synchronisation.{error}"]) from error


def round_bytes(
    config: Config, method: Method, encoding: Encoding, model: FlatModel, workers: int, tested: bool
) -> int:
    """Return the bytes that the workers of a trainer together send in a round of one exchange.

    Args:
        encoding: of pseudo-gradients in this round.
        tested: whether a batch test follows the round, which may compare the workers' gradients.
    """
    elements = model.parameter_count
    dtype = model.parameters.dtype
    mean = encoding.reduction_bytes(workers, elements, dtype)
    exchanged = method.bytes_per_round(workers, mean, encoding.sent_bytes(elements, dtype), dtype)
    return round(exchanged) + plan_statistics(config, workers, tested).sent_bytes(workers, elements, dtype)


def check_state(config: Config, working: FlatModel) -> None:
    """Raise ConfigError where the method's state has a name that something else is kept by, as its settings are."""
    kind = inner_optimizer_name(config)
    moments = () if kind is None else INNER_OPTIMIZERS[kind].state_shapes(working)
    if taken := taken_names(method_of(config, working), moments):
        raise ConfigError([f"distributed_algo: {config.distributed_algo}: {problem}" for problem in taken])


def capabilities_of(config: Config) -> Capabilities:
    """Return the capabilities of the method with its settings.

    Raises:
        ConfigError: the settings are wrong.
    """
    return METHODS[config.distributed_algo].configured(method_settings(config))


def check_method(config: Config, workers: int) -> None:
    """Raise ConfigError where the method cannot work with so many workers of a trainer."""
    settings = method_settings(config)
    found = METHODS[config.distributed_algo].problems(settings, config.number_of_inner_steps_between_outers, workers)
    if found:
        raise ConfigError(found)
