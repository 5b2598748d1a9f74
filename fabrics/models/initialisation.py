"""What trainers start from: their models' initial weights and their shares of the training examples."""

from collections.abc import Sequence

import torch

from fabrics.data.examples import TaskData
from fabrics.data.partition_sampler import OrderedShares, ShareCursor, first_shares
from fabrics.data.sampler import DataCursor, Subsets
from fabrics.models.model_family import ModelFamily, is_pretrained
from fabrics.models.registry import MODELS, build_model, reinitialise_output_layer
from fabrics.training.flat_model import FlatModel
from utils.config.schema import Config, ConfigError


def initial_model(config: Config, data: TaskData, trainer: int) -> torch.nn.Module:
    """The model that a trainer starts with, on the CPU.

    Raises:
        ConfigError: it cannot be built or loaded.
    """
    seed = config.training_seed
    model = build_model(
        config.model_type,
        config.model_config,
        data.tokenizer,
        config.sequence_length,
        seed if config.identical_initialisation else seed + trainer,
        data.class_names,
    )
    if config.parameter_dtype != "float32":
        model = model.to(getattr(torch, config.parameter_dtype))
    if config.need_to_reinit_output_layers:
        reinitialise_output_layer(config.model_type, model, seed if config.single_seed else seed + trainer)
    return model


def architecture_settings(config: Config) -> dict:
    """The `model_config` of the model without its weights."""
    settings = dict(config.model_config)
    if not isinstance(MODELS[config.model_type], ModelFamily):  # that reads its architecture where its weights are
        settings.pop("pretrained", None)
    return settings


def architecture(config: Config, data: TaskData) -> torch.nn.Module:
    """The model of every trainer on the meta device, without weights."""
    with torch.device("meta"):
        model = build_model(
            config.model_type,
            architecture_settings(config),
            data.tokenizer,
            config.sequence_length,
            config.training_seed,
            data.class_names,
        )
    return model if config.parameter_dtype == "float32" else model.to(getattr(torch, config.parameter_dtype))


def recompute_activations(model: torch.nn.Module, model_type: str) -> None:
    """Let the layers of a model keep their inputs alone for the backward pass, and compute the rest anew there.

    Raises:
        ConfigError: it is not one of transformers' that can.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigError(
            f"activation_checkpointing: must be false with model_type {model_type}, whose module is none of "
            f"transformers' that can compute activations anew"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # What that adds for adapters over frozen embeddings would have gradients computed that nobody needs.
    model.disable_input_require_grads()


def initial_parameters(config: Config, data: TaskData, trainer: int, first: FlatModel) -> torch.Tensor:
    """The flat parameters that a trainer starts with, a tensor of its own on the device of `first`.

    first: holds those of trainer 0.
    """
    same_body = config.identical_initialisation or is_pretrained(config.model_config)
    same_head = config.single_seed or not config.need_to_reinit_output_layers
    if trainer == 0 or (same_body and same_head):
        return first.parameters.detach().clone()
    if first.shard_group.index > 0:  # the first device of the node sends this one its part
        return first.flatten(None)
    return first.flatten(initial_model(config, data, trainer))


def initial_cursors(
    config: Config, examples: int, sizes: Sequence[int] | None = None
) -> list[DataCursor] | list[ShareCursor]:
    """The beginning of each trainer's way through its own part of so many training examples.

    sizes: of the shares that these consist of, where they differ.

    Raises:
        ConfigError: a part is smaller than the first batch.
    """
    trainers, seed = config.number_of_initial_trainers, config.training_seed
    if sizes is None:
        subsets = Subsets(seed, examples, trainers, config.trainer_data_fraction)
        smallest = subsets.smallest
    else:
        shares, count = OrderedShares(seed, sizes), len(sizes)
        owned = [first_shares(count, trainer, trainers) for trainer in range(trainers)]
        smallest = min(sum(shares.sizes[share] for share in own) for own in owned)
    if config.INITIAL_BATCH_SIZE > smallest:
        raise ConfigError(
            f"INITIAL_BATCH_SIZE: must be at most the {smallest} examples of a trainer's subset "
            f"({examples} in all, {trainers} trainers), got {config.INITIAL_BATCH_SIZE}"
        )
    if sizes is None:
        return [DataCursor(subsets, trainer) for trainer in range(trainers)]
    return [ShareCursor(shares, own, config.data_split_over == "workers") for own in owned]
