"""A run's model without its numbers: built on the meta device, and what autograd would keep of a step, counted.

Nothing of model size is taken, and no weights are downloaded: of a pretrained model only its architecture is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedTokenizerBase

from algorithms.losses import example_losses
from fabrics.attention import unmasked_name
from fabrics.examples import TaskData
from fabrics.model_family import ModelFamily
from fabrics.model_layers import GroupOrder, sharded_layers, sharded_parts
from fabrics.models import MODELS, build_model
from fabrics.nodes import probes_examples
from fabrics.tokenization import END_OF_TEXT, named_tokenizer, train_tokenizer
from utils.config import Config

META = torch.device("meta")
# Smaller than any vocabulary that a model from scratch may have.
_FEW_TOKENS = 258


def _architecture(config: Config) -> dict:
    """The settings of the model without its weights."""
    settings = dict(config.model_config)
    if not isinstance(MODELS[config.model_type], ModelFamily):  # that reads its architecture where its weights are
        settings.pop("pretrained", None)
    return settings


def _stand_in(config: Config, settings: dict) -> tuple[PreTrainedTokenizerBase, bool]:
    """A tokenizer for data that nobody has read, and whether the vocabulary, which is in the settings then, is taken to
    be of `vocab_size`, because nothing names one."""
    family = MODELS[config.model_type]
    few = train_tokenizer([END_OF_TEXT], _FEW_TOKENS, family.task)
    name = settings.get("preset") or settings.get("name") or "demo"
    presets: Mapping[str, Mapping] = getattr(family, "presets", {})
    if "vocab_size" in settings or "vocab_size" in presets.get(name, {"vocab_size": None}):
        return few, False
    if (named := named_tokenizer(config)) is not None:
        return named, False
    if isinstance(family, ModelFamily):
        return few, True
    settings["vocab_size"] = config.vocab_size
    return few, True


def meta_model(config: Config, data: TaskData | None = None) -> tuple[nn.Module, bool]:
    """The model of a run on the meta device, and whether its vocabulary is only taken to be of `vocab_size`.

    data: of the run, where somebody has read them.

    Raises:
        ConfigError: it cannot be built.
    """
    settings, assumed = _architecture(config), False
    if data is not None:
        tokenizer, class_names = data.tokenizer, data.class_names
    else:
        (tokenizer, assumed), class_names = _stand_in(config, settings), ()
    with META:
        arguments = tokenizer, config.sequence_length, config.training_seed, class_names
        model = build_model(config.model_type, settings, *arguments)
    return model.to(getattr(torch, config.parameter_dtype)), assumed


@dataclass(frozen=True)
class StepSizes:
    """Bytes that a step needs besides parameters and gradients.

    fixed: whatever the examples; with autocast the weights as it casts them. activations: of an example, without
    logits. logits: of an example: what of logits, their logarithms and gradients is there at one time, at most: a step
    needs most memory there.
    layer_casts: of the fixed ones those weights that are in layers, which islands gather in that type.
    probed: of an example, what statistics of examples hold on islands when a backward pass ends: the inputs of all
    linear layers, and the gradients of their outputs and of embeddings, in the parameters' type.
    once: the parameters, by name, that islands gather for a forward pass alone.
    layers, boundary: where activations are computed again, of so many layers only the input is kept, of so many bytes.
    """

    fixed: int
    activations: int
    logits: int
    layers: int = 1
    boundary: int = 0
    layer_casts: int = 0
    probed: int = 0
    once: frozenset[str] = frozenset()


def _kept(module: nn.Module, config: Config, task: str, examples: int) -> tuple[int, torch.Tensor, int]:
    """Bytes that autograd keeps of a step with so many examples, without the parameters; the logits; and what
    `StepSizes.probed` says of all examples."""
    sizes: dict[int, int] = {}
    alive = []  # a storage that were gone might have its place taken by another
    held: dict[tuple, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        alive.append(storage)
        sizes[storage._cdata] = storage.nbytes()
        return tensor

    def hold(layer: nn.Module, arguments: tuple, output: torch.Tensor) -> None:
        held[layer, "output"] = output.numel() * layer.weight.element_size()
        if isinstance(layer, nn.Linear):
            # Layers with one input hold it together, but for what each has of it in another type.
            (given,) = arguments
            of = given.untyped_storage()._cdata if given.dtype == layer.weight.dtype else layer
            held[of, "input"] = given.numel() * layer.weight.element_size()

    watched = [layer for layer in module.modules() if isinstance(layer, nn.Linear | nn.Embedding)]
    hooks = [layer.register_forward_hook(hold) for layer in watched if layer.weight.requires_grad]
    ids = torch.zeros(examples, config.sequence_length, dtype=torch.long)
    labels = ids[:, 0] if task == "classification" else ids
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=config.autocast is not None)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with autocast:
            logits = module(input_ids=ids)
            logits = logits if isinstance(logits, torch.Tensor) else logits.logits
        example_losses(logits, labels).mean()
    for hook in hooks:
        hook.remove()
    own = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    return sum(size for place, size in sizes.items() if place not in own), logits, sum(held.values())


def step_sizes(module: nn.Module, config: Config) -> StepSizes | None:
    """What a step of a model keeps, with the attention that PyTorch has for the device, from steps of 1 and 2 examples.

    None: the model cannot be called with token ids alone, or looks at numbers, which are not there. The module has no
    numbers afterwards either, and is of no other use.
    """
    if getattr(getattr(module, "config", None), "_attn_implementation", None) == "sdpa":
        # For any model, as to find out whether one needs a mask transformers looks at positions, which are not there.
        module.set_attn_implementation(unmasked_name())
    task, layers = MODELS[config.model_type].task, getattr(getattr(module, "config", None), "num_hidden_layers", 1)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            module.to_empty(device="cpu")
            order = GroupOrder(module, sharded_parts(module) if config.autocast else sharded_layers(module))
            one, logits, held = _kept(module, config, task, 1)
            once = order.once()
            two, *_ = _kept(module, config, task, 2)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
        return None
    cast = sharded_parts(module) if config.autocast else []
    weights = [child.weight for part in cast for child in part.modules() if isinstance(child, nn.Linear)]
    casts = sum(weight.numel() for weight in weights) * torch.bfloat16.itemsize
    # Logarithms, their gradients and those of the logits: the loss is differentiated in float32 at least.
    numbers, wide = logits.numel(), max(logits.element_size(), 4)
    width = getattr(getattr(module, "config", None), "hidden_size", 0)
    return StepSizes(
        fixed=2 * one - two,
        activations=two - one - numbers * wide,
        logits=3 * numbers * wide,
        layers=layers,
        boundary=logits.element_size() * width * config.sequence_length,
        layer_casts=casts,
        probed=held if probes_examples(config) else 0,
        once=once,
    )
