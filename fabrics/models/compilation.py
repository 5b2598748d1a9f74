"""The decision whether a run compiles its model (`compile_model`).

`auto` decides before the first step, from the configuration and the sizes of model and data, never from a clock: one
configuration always has the same bits. The estimate is a power law through two measurements on one CPU thread:
compiling takes 33 s at 0.13M parameters and 62 s at 0.9M, and inner steps are then 1.37 and 1.14 times as fast.

PyTorch caches compiled code (TORCHINDUCTOR_CACHE_DIR) for all runs and processes of a user.
"""

import os
import shutil
import sys

from utils.config.schema import Config, ConfigError
from utils.distributed.processes import Processes

# Parameters times tokens that one thread trains per second, uncompiled: 30,000 tokens/s at 0.13M parameters.
_SPEED = 4e9
# Compiling must save this many times its own seconds: processes share the tokens of a run, and each of them compiles.
_MARGIN = 4
# Smaller speed-ups, of models with more than 7M parameters, are too far from the measurements.
_SMALLEST_SPEEDUP = 1.05


def compiling_seconds(parameters: int) -> float:
    """Return the seconds that it takes to compile a model from scratch."""
    return 62.0 * (parameters / 0.9e6) ** (1 / 3)


def speedup(parameters: int) -> float:
    """Return how many times as fast the inner steps of a compiled model are."""
    return 1.0 + 0.14 * (0.9e6 / parameters) ** 0.5


def worth_compiling(parameters: int, tokens: int, device: str) -> bool:
    """True if compiling saves time in a run of n training tokens. GPUs have not been measured: False."""
    factor = speedup(parameters)
    saved = parameters * tokens / _SPEED * (1.0 - 1.0 / factor)
    return device == "cpu" and factor >= _SMALLEST_SPEEDUP and saved >= _MARGIN * compiling_seconds(parameters)


def planned_tokens(config: Config, examples: int) -> int:
    """Return the training tokens of a run, as if all examples had full length and batches kept their first size."""
    limits = []
    if config.max_tokens is not None:
        limits.append(config.max_tokens)
    if config.number_of_training_epochs is not None:
        limits.append(round(config.number_of_training_epochs * examples) * config.sequence_length)
    if config.number_of_outer_steps is not None:
        steps = config.number_of_outer_steps * config.number_of_inner_steps_between_outers
        examples_per_step = config.number_of_initial_trainers * config.INITIAL_BATCH_SIZE
        limits.append(steps * examples_per_step * config.sequence_length)
    return min(limits)


def compiles(config: Config, parameters: int, examples: int, device: str, possible: bool) -> bool:
    """Decide whether a new run compiles its model.

    Args:
        parameters: elements of one model.
        examples: number of training examples.
        device: type of the run's devices.
        possible: whether there is a compiler.

    Raises:
        ConfigError: the configuration says true, and there is no compiler.
    """
    if config.compile_model == "auto":
        measured = config.devices_per_node == 1
        return measured and possible and worth_compiling(parameters, planned_tokens(config, examples), device)
    if config.compile_model and not possible:
        raise ConfigError(f"compile_model: true needs the C++ compiler {_compiler()}, or another that CXX names")
    return config.compile_model


def _compiler() -> str:
    """Return the command of the C++ compiler that PyTorch uses."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def can_compile(processes: Processes) -> bool:
    """True if all machines can compile: for a GPU PyTorch brings a compiler, for a CPU it needs one of C++."""
    return processes.devices[0].type != "cpu" or all(processes.gather(shutil.which(_compiler()) is not None))
