"""Whether a run compiles its model.

With `compile_model: auto` that follows from the configuration and the size of model and data, before the first step and
never from a clock, so that one configuration always has the same bits. The estimate behind it is of measurements on one
thread of a CPU: compiling from cold takes 33 s at 0.13M parameters and 62 s at 0.9M, and the bare loop is then 1.37 and
1.14 times as fast. Powers of the parameters through these two points say what lies between and around them.

Compiled code is kept where PyTorch keeps it (TORCHINDUCTOR_CACHE_DIR), for all runs and processes of a user.
"""

import os
import shutil
import sys

from utils.config.schema import Config, ConfigError
from utils.distributed.processes import Processes

# Parameters times tokens that one thread trains on in a second, uncompiled: 0.13M at 30,000 tokens/s.
_SPEED = 4e9
# So many times what compiling takes should be saved: processes share the tokens of a run, and each of them compiles.
_MARGIN = 4
# What is estimated to gain less, models of more than 7M parameters, is too far from what was measured.
_SMALLEST_GAIN = 1.05


def compiling_seconds(parameters: int) -> float:
    """What compiling a model takes from cold."""
    return 62.0 * (parameters / 0.9e6) ** (1 / 3)


def gain(parameters: int) -> float:
    """How many times as fast inner steps of a model are when it is compiled."""
    return 1.0 + 0.14 * (0.9e6 / parameters) ** 0.5


def worth_compiling(parameters: int, tokens: int, device: str) -> bool:
    """Whether it is, with so many training tokens on such devices; of GPUs nothing is measured, and there it is not."""
    faster = gain(parameters)
    saved = parameters * tokens / _SPEED * (1.0 - 1.0 / faster)
    return device == "cpu" and faster >= _SMALLEST_GAIN and saved >= _MARGIN * compiling_seconds(parameters)


def planned_tokens(config: Config, examples: int) -> int:
    """Tokens that a run will train on with so many training examples: as if all were of full length, and as if batches
    stayed as they are at first where the number of rounds ends it."""
    rounds, epochs = config.number_of_outer_steps, config.number_of_training_epochs
    step = config.number_of_initial_trainers * config.INITIAL_BATCH_SIZE
    limits = {
        config.max_tokens,
        epochs and round(epochs * examples) * config.sequence_length,
        rounds and rounds * config.number_of_inner_steps_between_outers * step * config.sequence_length,
    }
    return min(limits - {None})


def compiles(config: Config, parameters: int, examples: int, device: str, possible: bool) -> bool:
    """Whether a run that begins compiles its model.

    Args:
        parameters: of one model. examples: to train on. device: type of the run's devices. possible: whether it can.

    Raises:
        ConfigError: it is to be compiled and cannot.
    """
    if config.compile_model == "auto":
        measured = config.devices_per_node == 1
        return measured and possible and worth_compiling(parameters, planned_tokens(config, examples), device)
    if config.compile_model and not possible:
        raise ConfigError(f"compile_model: true needs the C++ compiler {_compiler()}, or another that CXX names")
    return config.compile_model


def _compiler() -> str:
    """As PyTorch names it."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def can_compile(processes: Processes) -> bool:
    """Whether all machines have what it takes."""
    return processes.devices[0].type != "cpu" or all(processes.gather(shutil.which(_compiler()) is not None))


def decided(config: Config, parameters: int, examples: int, processes: Processes) -> bool:
    """As `compiles`, with what all processes find on their machines."""
    device, possible = processes.devices[0].type, can_compile(processes)
    return compiles(config, parameters, examples, device, possible)
