"""The working models of a process: one on each of its devices, all alike."""

import torch

from fabrics.data.examples import TaskData
from fabrics.models.compilation import can_compile, compiles
from fabrics.models.initialisation import architecture, initial_model, recompute_activations
from fabrics.sharding.layers import sharded_layers
from fabrics.sharding.sharded_model import ShardedModel
from fabrics.training.flat_model import FlatModel
from utils.config.schema import Config, ConfigError
from utils.distributed.processes import Processes


def _working_model(config: Config, data: TaskData, device: torch.device, processes: Processes) -> FlatModel:
    # The first device of a node has the weights, and sends the others their parts.
    first = processes.shard_group.index == 0
    model = initial_model(config, data, 0) if first else architecture(config, data)
    if config.activation_checkpointing:
        recompute_activations(model, config.model_type)
    autocast = None if config.autocast is None else getattr(torch, config.autocast)
    if processes.shard_group.size == 1:
        working = FlatModel(model, device, autocast)
    else:
        try:
            working = ShardedModel(model, device, processes.shard_group, autocast)
        except ValueError as error:
            raise ConfigError(f"devices_per_node: {error}") from None
    working.compares_devices = config.compares_devices
    return working


class FlatModels(dict[torch.device, FlatModel]):
    """By device, with the weights of the first trainer. compiled: whether they compute so.

    Raises:
        ConfigError: they cannot be built or loaded, or not compute as they should.
    """

    def __init__(self, config: Config, data: TaskData, processes: Processes):
        devices = dict.fromkeys(d for node, d in enumerate(processes.devices) if processes.owns(node))
        super().__init__({device: _working_model(config, data, device, processes) for device in devices})
        self._auto, self._processes = config.compile_model == "auto", processes
        device = processes.devices[0].type
        possible = can_compile(processes)
        self._compute(compiles(config, self.first.parameter_count, len(data.train), device, possible))

    @property
    def first(self) -> FlatModel:
        """Of the first device."""
        return next(iter(self.values()))

    def _compute(self, compiled: bool) -> None:
        size = self._processes.shard_group.size
        if compiled and size > 1 and not sharded_layers(self.first.module):
            raise ConfigError(
                f"compile_model: must be false with devices_per_node {size}, as the model has no layers that can be "
                f"compiled one by one"
            )
        self.compiled = compiled
        for model in self.values():
            model.compiled = compiled

    def resume(self, compiled: bool) -> None:
        """Go on as the run was begun, whatever length it has now, unless the config says how.

        Raises:
            ConfigError: it was begun with a compiled model, and there is no compiler here.
        """
        if self._auto:
            if compiled and not can_compile(self._processes):
                raise ConfigError(
                    "compile_model: must be false, as the run was begun with a compiled model and this one cannot be "
                    "compiled here, got auto"
                )
            self._compute(compiled)
