"""The synchronisation method that a configuration asks for."""

from functools import partial

from algorithms.batch.calc_batch import BATCH_TESTS
from algorithms.nodes.traffic import ExchangeSizes
from algorithms.synchronisation import METHODS, Method
from algorithms.synchronisation.encodings import COMMUNICATION_DTYPES, PLAIN
from algorithms.synchronisation.method import taken_names
from fabrics.training.flat_model import FlatModel
from fabrics.training.optimizers import inner_optimizer_name, inner_optimizer_of
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


def method_problems(config: Config) -> list[str]:
    """Return one line for each value that does not go with the method."""
    name = config.distributed_algo
    try:
        method = method_of(config)
    except ConfigError as error:
        return error.problems
    able = method.capabilities
    found = able.problems(config.number_of_inner_steps_between_outers, None)
    if able.encodings is not None and config.communication_dtype not in able.encodings:
        known = " or ".join(able.encodings)
        found.append(f"communication_dtype: must be {known} with {name}, got {config.communication_dtype}")
    each_step = able.exchanges_gradients and able.inner_optimizer is not None
    if config.budget is not None and not (able.one_exchange or (config.simulates_time_budget and each_step)):
        found.append(
            f"{config.budget}: must be null with {name}, whose rounds are not one communication each, of known size"
        )
    if config.balance == "batch" and not able.weighted:
        found.append(f"balance: must be equal with {name}, in which workers cannot be weighted by their examples")
    if config.balance == "steps" and (able.exchanges_gradients or not able.weighted):
        allowed = "equal or batch" if able.weighted else "equal"
        found.append(f"balance: must be {allowed} with {name}, whose workers all make every inner step")
    if config.node_speeds is None and able.needs_speeds:
        found.append(f"synchronisation: {name} needs the simulated speeds of node_speeds to {able.needs_speeds}")
    if config.compares_workers and method.keeps != "shared":
        found.append(
            f"statistics_estimator: must be per_example with {name}, whose workers are not at the same parameters"
        )
    if config.offload_outer_state and (able.exchanges_gradients or able.reads_state_often):
        found.append(f"offload_outer_state: must be false with {name}, which uses this state in many inner steps")
    if config.offload_moments and able.exchanges_gradients:
        found.append(f"offload_moments: must be false with {name}, whose workers have no moments of their own")
    if able.correction and inner_optimizer_name(config) != "sgd":
        found.append(f"inner_optimizer: must be null or sgd with {name}, got {config.inner_optimizer}")
    if able.correction and config.gradient_clipping is not None:
        found.append(f"gradient_clipping: must be null with {name}, got {config.gradient_clipping}")
    if able.inner_optimizer is None and config.inner_optimizer is not None:
        found.append(f"inner_optimizer: must be null with {name}, which updates the parameters itself")
    if config.participants < 1.0 and method.keeps != "shared":
        found.append(
            f"participants: must be 1 with {name}, as resting workers would keep old parameters of their own, got "
            f"{config.participants}"
        )
    if config.message_loss > 0.0 and method.keeps != "shared":
        found.append(
            f"message_loss: must be 0 with {name}, which decides itself from where its workers continue, got "
            f"{config.message_loss}"
        )
    elif config.message_loss > 0.0 and able.exchanges_gradients:
        found.append(
            f"message_loss: must be 0 with {name}, whose workers exchange gradients in every inner step, got "
            f"{config.message_loss}"
        )
    if config.message_loss > 0.0 and config.compares_workers:
        found.append(
            f"statistics_estimator: must be per_example with message_loss, after which workers are not at the same "
            f"parameters, got {config.statistics_estimator}"
        )
    return found


def round_bytes(config: Config, method: Method, model: FlatModel, workers: int, measures: bool) -> int:
    """Bytes that a trainer's workers send in a round of one exchange; measures: it takes gradient statistics."""
    encoding = COMMUNICATION_DTYPES[config.communication_dtype]
    elements = model.parameter_count
    dtype = model.parameters.dtype
    mean = encoding.reduction_bytes(workers, elements, dtype)
    message = encoding.sent_bytes(elements, dtype)
    exchanged = method.capabilities.bytes_per_round(workers, mean, message, model.blocks, dtype)
    return round(exchanged) + measurement_of(config, workers, measures).sent_bytes(workers, model)


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

    joining = len(names) * one + moments
    settling = partial(settling_bytes, method, model)
    return ExchangeSizes(sent, merged * one, joining, settling, method.capabilities.recipients)


def check_state(config: Config, model: FlatModel) -> None:
    """Raise ConfigError if a name in the method's state is taken."""
    optimizer = inner_optimizer_of(config)
    moments = () if optimizer is None else optimizer.state(model, "meta")
    if taken := taken_names(method_of(config, model), moments):
        raise ConfigError([f"distributed_algo: {config.distributed_algo}: {problem}" for problem in taken])
