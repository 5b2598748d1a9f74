"""The max batch of every node, measured in the memory that the device has left."""

from collections.abc import Mapping

import numpy as np
import torch

from algorithms.batch.per_example import UnsupportedModuleError
from algorithms.synchronisation.encodings.encoding import COMMUNICATION_DTYPES
from fabrics.data.examples import Examples
from fabrics.training.flat_model import FlatModel
from fabrics.training.forward_backward import backward, probed_backward
from fabrics.training.method_config import method_of
from fabrics.training.statistics import probes_examples
from fabrics.training.worker import TrainingError
from utils.config.schema import Config, ConfigError
from utils.distributed.processes import Processes
from utils.max_batch_calculator import calculate_max_batch


def round_tensors(config: Config, workers: int, several_processes: bool, elsewhere: int = 0) -> float:
    """Model-sized tensors that a round of a trainer allocates on a device, besides the state between rounds.

    These are the sum of the pseudo-gradients, temporaries of the method and of the encoding, gradients that the
    across-workers estimator compares, and messages of workers.

    Args:
        workers: the most workers of a trainer on the device.
        several_processes: whether a trainer's workers may be in several processes.
        elsewhere: the most workers of a trainer in other processes.
    """
    method = method_of(config).capabilities
    encoding = COMMUNICATION_DTYPES[config.communication_dtype]
    held = workers if several_processes else 0
    if method.message_tensors:
        messages = workers + 1
        if several_processes:
            received = elsewhere if method.recipients is None else min(method.recipients, elsewhere)
            messages += workers + min(elsewhere, workers * received)
        held = max(held, method.message_tensors * messages)
    encoded = 0
    if not encoding.lossless:
        encoded = 3 if encoding.keeps_error else 2
    compared = workers if config.compares_workers else 0
    temporaries = method.temporaries + method.temporaries_per_worker * (workers + elsewhere)
    return 1 + held + encoded + compared + temporaries


def measured_max_batches(
    config: Config,
    models: Mapping[torch.device, FlatModel],
    examples: Examples,
    processes: Processes,
    state_bytes: int,
) -> dict[int, int]:
    """Measure the max batch of every node, once all trainers exist; all processes call this together.

    The owner of a device's first node measures for all nodes of the device. The nodes of a process take turns;
    processes that share a device divide what is left. The devices of a shard group measure together, and the one with
    the least memory decides.

    Args:
        state_bytes: bytes between rounds in this process, which on a CPU are not in use before they are first written.

    Raises:
        ConfigError: not even one example fits, or the model has no per-example statistics.
    """
    processes.gather(None)  # afterwards the tensors of all processes exist
    per_device = config.nodes_per_gpu
    own: dict[int, int] = {}
    for first in range(0, len(processes.devices), per_device):
        if processes.owns(first):
            model = models[processes.devices[first]]
            workers = sum(processes.owns(node) for node in range(first, first + per_device))
            elsewhere = len(processes.devices) - workers
            tensors = round_tensors(config, workers, processes.count > 1, elsewhere)
            needed = round(model.parameters.numel() * model.parameters.element_size() * tensors)
            if model.device.type == "cpu":
                needed += state_bytes
            sharing = processes.sharing(first)
            own[first] = _measured_max_batch(config, model, examples, sharing, sharing * needed)
    measured: dict[int, int] = {}
    for of_process in processes.gather(own):
        measured |= of_process
    return {node: measured[node - node % per_device] for node in range(len(processes.devices))}


def _measured_max_batch(config: Config, model: FlatModel, examples: Examples, sharing: int, reserved: int) -> int:
    # A probed step needs more than a plain one.
    step = probed_backward if probes_examples(config) or model.compares_devices else backward
    devices = model.shard_group.size

    def run(count: int) -> None:
        model.gradient.zero_()
        indices = np.full(count * devices, examples.largest)
        if model.attempt(lambda: step(model, examples, indices)) is None:
            raise MemoryError(f"a step with {count} examples did not fit")

    try:
        return devices * calculate_max_batch(
            run, model.gradient, model.device, config.padding_percentage, sharing, reserved, model.shard_group
        )
    except UnsupportedModuleError as error:
        raise ConfigError(f"statistics_estimator: {error}") from None
    except (MemoryError, TrainingError) as error:
        raise ConfigError(f"max_batch_size: {error}") from None
