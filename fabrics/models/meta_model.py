"""A run's model without its numbers: built on the meta device, and what autograd would keep of a step, counted.

Nothing of model size is taken, and no weights are downloaded: of a pretrained model only its architecture is read.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedTokenizerBase

from algorithms.batch.losses import example_losses
from fabrics.data.examples import TaskData
from fabrics.data.tokenization import END_OF_TEXT, named_tokenizer, train_tokenizer
from fabrics.models.attention import unmasked_name
from fabrics.models.model_family import ModelFamily
from fabrics.models.registry import MODELS, build_model
from fabrics.planning.layer_steps import Call, Course, boundary_bytes, layer_moments, remembered_calls
from fabrics.pool.node_pool import probes_examples
from fabrics.sharding.model_layers import GroupOrder, layers_of, sharded_layers, sharded_parts
from utils.config.schema import Config

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
    if isinstance(family, ModelFamily):  # it asks the tokenizer
        few.add_tokens([f"<token {number}>" for number in range(config.vocab_size - len(few))])
    else:
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
class Recomputed:
    """Bytes of a step whose layers compute their activations again, beside the layers' inputs.

    fixed: kept outside of layers, whatever the examples, with the weights there as autocast casts them. outside: of an
    example, without logits. logits: of an example, as the model makes them. forward: of a layer in the forward pass,
    less its weights as they are cast, which stay until the end of that pass. layer: of one in the backward pass.
    tied: of the gradients of parameters that are in several places, which wait for each other.
    """

    fixed: int
    outside: int
    logits: int
    forward: Course
    layer: Course
    tied: int = 0


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
    recompute: makes what `recomputed` gives.
    """

    fixed: int
    activations: int
    logits: int
    layers: int = 1
    boundary: int = 0
    layer_casts: int = 0
    probed: int = 0
    once: frozenset[str] = frozenset()
    recompute: Callable[[], Recomputed | None] = field(default=lambda: None, compare=False, repr=False)

    @functools.cached_property
    def recomputed(self) -> Recomputed | None:
        """What else there is where activations are computed again; None: not known. It takes longer than the rest to
        find out, and few ask."""
        return self.recompute()


@dataclass(frozen=True)
class _Kept:
    """Bytes that autograd keeps of a step, without the parameters, and of these outside of layers; the logits; what
    `StepSizes.probed` says of all examples; the linear layers whose weights are kept; how the last layer is called."""

    total: int
    outside: int
    logits: torch.Tensor
    held: int
    weighing: frozenset[nn.Module]
    call: Call | None


def _computing(config: Config) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=config.autocast is not None)


def _kept(module: nn.Module, config: Config, task: str, examples: int) -> _Kept:
    """What is kept of a step with so many examples."""
    sizes: dict[int, int] = {}
    outside: set[int] = set()
    alive = []  # a storage that were gone might have its place taken by another
    held: dict[tuple, int] = {}
    layers, inside, weighing, calls = layers_of(module), [], set(), []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        alive.append(storage)
        sizes[storage._cdata] = storage.nbytes()
        if not inside:
            outside.add(storage._cdata)
        return tensor

    def hold(layer: nn.Module, arguments: tuple, output: torch.Tensor) -> None:
        if isinstance(layer, nn.Linear) and arguments[0].requires_grad:
            weighing.add(layer)
        if not layer.weight.requires_grad:
            return
        held[layer, "output"] = output.numel() * layer.weight.element_size()
        if isinstance(layer, nn.Linear):
            # Layers with one input hold it together, but for what each has of it in another type.
            (given,) = arguments
            of = given.untyped_storage()._cdata if given.dtype == layer.weight.dtype else layer
            held[of, "input"] = given.numel() * layer.weight.element_size()

    watched = [layer for layer in module.modules() if isinstance(layer, nn.Linear | nn.Embedding)]
    hooks = [layer.register_forward_hook(hold) for layer in watched]
    hooks += [layer.register_forward_pre_hook(lambda *_: inside.append(None)) for layer in layers]
    hooks += [layer.register_forward_hook(lambda *_: inside.clear()) for layer in layers]
    hooks += [remembered_calls(layer, calls) for layer in layers[-1:]]
    ids = torch.zeros(examples, config.sequence_length, dtype=torch.long)
    labels = ids[:, 0] if task == "classification" else ids
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with _computing(config):
            logits = module(input_ids=ids)
            logits = logits if isinstance(logits, torch.Tensor) else logits.logits
        example_losses(logits, labels).mean()
    for hook in hooks:
        hook.remove()
    for parameter in module.parameters():
        sizes.pop(parameter.untyped_storage()._cdata, None)
    total, beyond = sum(sizes.values()), sum(size for place, size in sizes.items() if place in outside)
    return _Kept(total, beyond, logits, sum(held.values()), frozenset(weighing), calls[-1] if calls else None)


def _tied_bytes(module: nn.Module) -> int:
    """Of trained parameters that several modules have."""
    owners = Counter(parameter for child in module.modules() for parameter in child.parameters(recurse=False))
    return sum(each.numel() * each.element_size() for each, n in owners.items() if n > 1 and each.requires_grad)


def _recomputed(module: nn.Module, config: Config, one: _Kept, two: _Kept, loss: int, tied: int) -> Recomputed | None:
    """Of steps with one and two examples; loss: what autograd keeps of an example's logits; tied: see Recomputed."""
    if one.call is None or two.call is None:
        return None
    layer = layers_of(module)[-1]
    try:
        moments = [layer_moments(layer, kept.call, lambda: _computing(config)) for kept in (one, two)]
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
        return None
    forward, both = (Course.of(*each) for each in zip(*moments, strict=True))
    outside = two.outside - one.outside
    return Recomputed(one.outside - outside, outside - loss, one.logits.nbytes, forward, both, tied)


def step_sizes(module: nn.Module, config: Config) -> StepSizes | None:
    """What a step of a model keeps, with the attention that PyTorch has for the device, from steps of 1 and 2 examples.

    None: the model cannot be called with token ids alone, or looks at numbers, which are not there. The module has no
    numbers afterwards either, and is of no other use.
    """
    own = getattr(module, "config", None)
    if getattr(own, "_attn_implementation", None) == "sdpa":
        # For any model, as to find out whether one needs a mask transformers looks at positions, which are not there.
        own._attn_implementation = unmasked_name()
    task, layers = MODELS[config.model_type].task, getattr(own, "num_hidden_layers", 1)
    tied = _tied_bytes(module)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with fake:
            module.to_empty(device="cpu")
            two = _kept(module, config, task, 2)
            order = GroupOrder(module, sharded_parts(module) if config.autocast else sharded_layers(module))
            one = _kept(module, config, task, 1)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
        return None
    # The loss is differentiated in float32 at least.
    loss = one.logits.numel() * max(one.logits.element_size(), 4)

    def recompute() -> Recomputed | None:
        with fake:
            kept = one, two
            if getattr(own, "use_cache", False):  # which transformers has not where activations are computed again
                own.use_cache = False
                kept = _kept(module, config, task, 1), _kept(module, config, task, 2)
            return _recomputed(module, config, *kept, loss, tied)

    cast = sharded_parts(module) if config.autocast else []
    weights = [child.weight for part in cast for child in part.modules() if child in one.weighing]
    casts = sum(weight.numel() for weight in weights) * torch.bfloat16.itemsize
    return StepSizes(
        fixed=2 * one.total - two.total,
        activations=two.total - one.total - loss,
        logits=3 * loss,  # logarithms, their gradients and those of the logits
        layers=layers,
        boundary=0 if one.call is None else boundary_bytes(one.call),
        layer_casts=casts,
        probed=one.held if probes_examples(config) else 0,
        once=order.once(),
        recompute=recompute,
    )
