"""The start of a run: the models of devices, the initial weights of trainers, and their places in the data."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.pytorch_utils import Conv1D

from fabrics.data.dataset_loader import DATASETS
from fabrics.data.examples import TaskData
from fabrics.data.sampler import DataCursor, Shares, Subsets
from fabrics.data.tokenization import END_OF_TEXT, load_tokenizer, named_tokenizer
from fabrics.models.attention import body_and_head
from fabrics.models.lora import add_adapters, lora_of
from fabrics.models.model_family import (
    MODELS,
    ModelFamily,
    TransformersFamily,
    build_model,
    is_pretrained,
    reinitialise_output_layer,
)
from fabrics.sharding.sharded_model import ShardedModel
from fabrics.training.flat_model import FlatModel, shared_state_problem
from utils.config.schema import Config, ConfigError
from utils.distributed.processes import Processes
from utils.text import counted

META = torch.device("meta")
# A judgement: on GPUs the host needs longer to launch the kernels of an inner step than they run, for models with fewer
# parameters. 0.2M and 305M have been measured (docs/speed.md).
_LAUNCH_BOUND = 10_000_000


def initial_model(config: Config, data: TaskData, trainer: int) -> nn.Module:
    """Build or load the model that a trainer starts with, on the CPU."""
    seed = config.training_seed
    model = build_model(
        config.model_type,
        config.model_config,
        data.tokenizer,
        config.sequence_length,
        seed if config.identical_initialisation else seed + trainer,
        data.class_names,
    )
    if config.need_to_reinit_output_layers:
        reinitialise_output_layer(config.model_type, model, seed if config.single_seed else seed + trainer)
    if problem := shared_state_problem(model):
        raise ConfigError(f"model_type: {problem}")
    return _adapted(config, model)


def _adapted(config: Config, model: nn.Module) -> nn.Module:
    if (lora := lora_of(config)) is not None:
        add_adapters(model, lora, config.training_seed)
    return model


def architecture_settings(config: Config) -> dict:
    """Return the `model_config` of the model without its weights."""
    settings = dict(config.model_config)
    # A ModelFamily reads the architecture of a pretrained model from the same folder as its weights.
    if not isinstance(MODELS[config.model_type], ModelFamily):
        settings.pop("pretrained", None)
    return settings


def _architecture(
    config: Config, settings: dict, tokenizer: PreTrainedTokenizerBase | None, class_names: Sequence[str]
) -> nn.Module:
    with META:
        seed = config.training_seed
        model = build_model(config.model_type, settings, tokenizer, config.sequence_length, seed, class_names)
        return _adapted(config, model)


def _stand_in(config: Config, settings: dict) -> tuple[PreTrainedTokenizerBase, bool]:
    """Return a tokenizer, without reading data, and whether its size is assumed to be `vocab_size` (in settings)."""
    family = MODELS[config.model_type]
    # No model's vocabulary is smaller.
    few = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({END_OF_TEXT: 0}, END_OF_TEXT)),
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT),
    )
    if isinstance(family, ModelFamily) and is_pretrained(settings):
        # A folder without a tokenizer holds a model of other data than text.
        has_text = config.tokenizer is not None or Path(settings["name"], "tokenizer_config.json").exists()
        return (named_tokenizer(config) if has_text else few), False
    name = settings.get("preset") or settings.get("name") or "demo"
    if "vocab_size" in settings or "vocab_size" in family.presets.get(name, {"vocab_size": None}):
        return few, False
    named = named_tokenizer(config)
    if named is None and config.dataset == "c4" and config.c4_tokenized_path is not None:
        named = load_tokenizer(str(Path(config.c4_tokenized_path, "tokenizer")), "c4_tokenized_path")
    if named is not None:
        return named, False
    if isinstance(family, ModelFamily):  # reads the size of the tokenizer
        few.add_tokens([f"<token {number}>" for number in range(config.vocab_size - len(few))])
    else:
        settings["vocab_size"] = config.vocab_size
    return few, True


def meta_model(config: Config) -> tuple[nn.Module, list[str]]:
    """Return the model of a run on the meta device for estimates, and the assumptions about its data, one line each.

    It takes no model-sized memory, and reads neither data nor weights.
    """
    settings = architecture_settings(config)
    assumed = []
    tokenizer, assumes_vocabulary = _stand_in(config, settings)
    if assumes_vocabulary:
        assumed.append(f"vocabulary: {config.vocab_size} tokens, as vocab_size says")
    class_names = ()
    if isinstance(MODELS[config.model_type], ModelFamily) and DATASETS[config.dataset].task == "classification":
        class_names = ("0", "1")
        assumed.append("the classes of the data: assumed to be 2")
    return _architecture(config, settings, tokenizer, class_names), assumed


def check_architecture(config: Config) -> None:
    """Raise a ConfigError for a model that cannot be built, before the data are read."""
    family = MODELS[config.model_type]
    if isinstance(family, TransformersFamily):  # others may need the data's own tokenizer
        model, _ = meta_model(config)
        if config.need_to_reinit_output_layers:
            reinitialise_output_layer(config.model_type, model, config.training_seed)
        if config.activation_checkpointing:
            recompute_activations(model, config.model_type)
        if config.loss_chunk_tokens:
            body_and_head(model)


def flops_per_token(model: nn.Module, sequence_length: int) -> float:
    """Return the FLOPs of training on one token.

    6 for every weight of a linear layer (2 forward, 4 backward, of which 2 for its own gradient, if it is trained), and
    12 * layers * width * sequence_length for the attention of all pairs of tokens; causal attention masks half of them.
    A model whose config names no attention heads counts as having none.
    """
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
    linear = sum((6.0 if weight.requires_grad else 4.0) * weight.numel() for weight in weights)
    config = getattr(model, "config", None)
    width = 0  # of all layers
    # Layers may differ in their heads, as Gemma 4's do.
    for number in range(getattr(config, "num_hidden_layers", 0)):
        layer = config.per_layer_config[number] if hasattr(config, "per_layer_config") else config
        heads = getattr(layer, "num_attention_heads", None)
        if heads is not None:
            width += heads * (getattr(layer, "head_dim", None) or layer.hidden_size // heads)
    causal = all(getattr(module, "is_causal", True) for module in model.modules())
    return linear + (6.0 if causal else 12.0) * width * sequence_length


def recompute_activations(model: nn.Module, model_type: str) -> None:
    """Let a model's layers keep only their inputs for the backward pass; ConfigError: it is not of transformers."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigError(
            f"activation_checkpointing: must be false with model_type {model_type}, whose module is none of "
            f"transformers' that can recompute activations"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # transformers adds this for adapters over frozen embeddings; it would compute gradients that nothing needs.
    model.disable_input_require_grads()


def is_launch_bound(module: nn.Module, device: torch.device) -> bool:
    """True if inner steps on a GPU probably wait for the host to launch their kernels."""
    return device.type == "cuda" and sum(parameter.numel() for parameter in module.parameters()) <= _LAUNCH_BOUND


def compile_mode(config: Config, device: torch.device, module: nn.Module) -> bool | str:
    """Return compile_model for a module on a device: `auto` carried out."""
    if config.compile_model != "auto":
        return config.compile_model
    if device.type == "cpu":
        return False
    return "reduce-overhead" if is_launch_bound(module, device) else True


def check_compiler(config: Config, processes: Processes) -> None:
    """Raise a ConfigError if a machine lacks the C++ compiler that CPUs need, or CUDA graphs are asked for on CPUs."""
    if config.compile_model == "reduce-overhead" and processes.devices[0].type == "cpu":
        raise ConfigError("compile_model: must be true or false on CPUs, got reduce-overhead, which needs CUDA graphs")
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if processes.devices[0].type == "cpu" and not all(processes.gather(shutil.which(compiler) is not None)):
        raise ConfigError(f"compile_model: true needs the C++ compiler {compiler}, or another that CXX names")


def flat_model(config: Config, data: TaskData, processes: Processes) -> FlatModel:
    """Return the flat model on the device of this process, with the initial weights of trainer 0."""
    if config.compile_model not in (False, "auto"):
        check_compiler(config, processes)
    device = processes.own_device
    # The first device of a node has the weights, and sends the others their parts.
    has_weights = processes.shard_group.index == 0
    if has_weights:
        module = initial_model(config, data, 0)
    else:
        module = _architecture(config, architecture_settings(config), data.tokenizer, data.class_names)
    if config.activation_checkpointing:
        recompute_activations(module, config.model_type)
    autocast = None if config.autocast is None else getattr(torch, config.autocast)
    if processes.shard_group.size == 1:
        compiled = compile_mode(config, device, module)
        model = FlatModel(module, device, autocast, compiled, config.loss_chunk_tokens or None)
    else:
        try:
            model = ShardedModel(module, device, processes.shard_group, autocast)
        except ValueError as error:
            raise ConfigError(f"devices_per_node: {error}") from None
    model.compares_devices = config.compares_devices
    return model


def initial_parameters(config: Config, data: TaskData, trainer: int, first: FlatModel) -> torch.Tensor:
    """Return a trainer's initial parameters, a new flat tensor on the device of `first`, which has trainer 0's."""
    same_body = config.identical_initialisation or is_pretrained(config.model_config)
    same_head = config.single_seed or not config.need_to_reinit_output_layers
    if trainer == 0 or (same_body and same_head):
        return first.parameters.detach().clone()
    if first.shard_group.index > 0:  # the first device of the node sends this one its part
        return first.flatten(None)
    return first.flatten(initial_model(config, data, trainer))


def initial_cursors(config: Config, examples: int, sizes: Sequence[int] | None) -> list[DataCursor]:
    """Return each trainer's cursor at the beginning of its examples; sizes: of the shares; None: they are not split."""
    trainers = config.number_of_initial_trainers
    seed = config.training_seed
    data = Subsets(seed, examples, trainers) if sizes is None else Shares(seed, tuple(sizes))
    by_worker = sizes is not None and config.data_split_over == "workers"
    cursors = [DataCursor(data, data.first(trainer, trainers), by_worker) for trainer in range(trainers)]
    smallest = min(map(len, cursors))
    if config.INITIAL_BATCH_SIZE > smallest:
        raise ConfigError(
            f"INITIAL_BATCH_SIZE: must be at most the {smallest} examples of a trainer's subset "
            f"({examples} in all, {counted(trainers, 'trainer')}), got {config.INITIAL_BATCH_SIZE}"
        )
    return cursors
