"""The synchronisation method that a configuration asks for."""

import dataclasses
import functools

from pydantic import TypeAdapter, ValidationError

from algorithms.synchronisation import METHODS, Method
from algorithms.synchronisation.encodings.encoding import Encoding
from algorithms.synchronisation.method import taken_names
from fabrics.training.flat_model import FlatModel
from fabrics.training.optimizers import INNER_OPTIMIZERS, inner_optimizer_name
from fabrics.training.statistics import plan_statistics
from utils.config.schema import Config, ConfigError
from utils.text import did_you_mean


@functools.cache
def _adapter(method: type[Method]) -> TypeAdapter:
    return TypeAdapter(method)


def method_of(config: Config, model: FlatModel | None = None) -> Method:
    """Return the method with the parameters of `synchronisation`.

    Raises:
        ConfigError: with one line per problem; a parameter is wrong, or does not fit the model.
    """
    method = METHODS[config.distributed_algo]
    known = [field.name for field in dataclasses.fields(method)]
    problems = []
    for name in config.synchronisation:
        if name not in known:
            hint = did_you_mean(str(name), known) or f"; it has {', '.join(known) or 'none'}"
            problems.append(f"synchronisation.{name}: {config.distributed_algo} has no such parameter{hint}")
    for field in dataclasses.fields(method):
        value = config.synchronisation.get(field.name)
        if isinstance(value, bool) and field.type is not bool:
            problems.append(f"synchronisation.{field.name}: should not be true or false, got {value}")
    if problems:
        raise ConfigError(problems)
    try:
        found = _adapter(method).validate_python(config.synchronisation)
    except ValidationError as errors:
        raise ConfigError([_problem(error, known) for error in errors.errors()]) from None
    if model is not None and (problems := found.capabilities.problems(None, None, model.blocks)):
        raise ConfigError(problems)
    return found


def _problem(error: dict, known: list[str]) -> str:
    place = ".".join(str(part) for part in error["loc"] if part in known)
    reason = error["msg"].removeprefix("Value error, ")
    if place:
        return f"synchronisation.{place}: {reason.removeprefix('Input ')}, got {error['input']!r}"
    return f"synchronisation.{reason}"


def method_if_valid(config: Config) -> Method | None:
    """Return the method, or None if a parameter is wrong."""
    try:
        return method_of(config)
    except ConfigError:
        return None


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
    message = encoding.sent_bytes(elements, dtype)
    exchanged = method.capabilities.bytes_per_round(workers, mean, message, model.blocks, dtype)
    return round(exchanged) + plan_statistics(config, workers, tested).sent_bytes(workers, elements, dtype)


def check_state(config: Config, model: FlatModel) -> None:
    """Raise ConfigError if a name in the method's state is taken."""
    kind = inner_optimizer_name(config)
    moments = () if kind is None else INNER_OPTIMIZERS[kind].state(model, "meta")
    if taken := taken_names(method_of(config, model), moments):
        raise ConfigError([f"distributed_algo: {config.distributed_algo}: {problem}" for problem in taken])


def check_method(config: Config, workers: int) -> None:
    """Raise ConfigError if the method cannot work with this number of workers of a trainer."""
    if problems := method_of(config).capabilities.problems(None, workers, None):
        raise ConfigError(problems)
