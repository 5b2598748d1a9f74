"""The synchronisation method that a configuration asks for."""

from functools import partial

from algorithms.batch.calc_batch import BATCH_TESTS
from algorithms.nodes.traffic import ExchangeSizes
from algorithms.synchronisation import METHODS, Method
from algorithms.synchronisation.encodings import COMMUNICATION_DTYPES, PLAIN
from algorithms.synchronisation.method import taken_names
from fabrics.training.flat_model import FlatModel
from fabrics.training.optimizers import inner_optimizer_of
from fabrics.training.statistics import measurement_of
from utils.config.reading import with_parameters
from utils.config.schema import Config, ConfigError


def method_of(config: Config, model: FlatModel | None = None) -> Method:
    """Return the method with the parameters of `synchronisation`; ConfigError: one is wrong, or unfit for the model."""
    name = config.distributed_algo
    found = with_parameters(METHODS[name], config.synchronisation, "synchronisation", name)
    if model is not None and (problems := found.capabilities.problems(None, model.blocks)):
        raise ConfigError(problems)
    return found


def round_bytes(config: Config, method: Method, model: FlatModel, workers: int, measures: bool) -> int:
    """Bytes that a trainer's workers send in a round of one exchange; measures: it takes gradient statistics."""
    encoding = COMMUNICATION_DTYPES[config.communication_dtype]
    elements = model.parameter_count
    dtype = model.parameters.dtype
    mean = encoding.reduction_bytes(workers, elements, dtype)
    message = encoding.sent_bytes(elements, dtype)
    exchanged = method.capabilities.bytes_per_round(workers, mean, message, model.blocks, dtype)
    return round(exchanged) + measurement_of(config, workers, measures).sent_bytes(workers, elements, dtype)


def settling_bytes(method: Method, model: FlatModel, workers: int) -> float:
    """Bytes that workers send before a merge, with a method whose rounds are one exchange each."""
    settles = method.capabilities.averages_copies or type(method).settle is not Method.settle
    return PLAIN.reduction_bytes(workers, model.parameter_count, model.parameters.dtype) if settles else 0


def exchange_sizes(config: Config, method: Method, model: FlatModel) -> ExchangeSizes:
    """The bytes of the exchanges of a trainer, with a method whose rounds are one exchange each."""
    one = model.parameter_count * model.parameters.element_size()
    optimizer = inner_optimizer_of(config)
    moments = 0 if optimizer is None else optimizer.state_bytes(model)
    names = ("parameters", *method.state)
    merged = sum(name not in method.capabilities.copies for name in names)
    tests = BATCH_TESTS[config.sampling_method] is not None

    def sent(workers: int, number: int) -> int:
        return round_bytes(config, method, model, workers, tests and number >= config.batch_test_start)

    return ExchangeSizes(sent, merged * one, len(names) * one + moments, partial(settling_bytes, method, model))


def check_state(config: Config, model: FlatModel) -> None:
    """Raise ConfigError if a name in the method's state is taken."""
    optimizer = inner_optimizer_of(config)
    moments = () if optimizer is None else optimizer.state(model, "meta")
    if taken := taken_names(method_of(config, model), moments):
        raise ConfigError([f"distributed_algo: {config.distributed_algo}: {problem}" for problem in taken])
