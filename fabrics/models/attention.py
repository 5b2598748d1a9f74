"""Attention over sequences without padding: no mask is made, and the host does not wait to learn that none is needed.

From a language model that is called with token ids alone transformers takes no mask to mean that several texts may be
packed into a sequence, each with positions from 0 on, and looks: at every forward pass the host waits for the device,
and while a model is compiled there is nothing to look at, so that a mask of all pairs of tokens is made, and PyTorch's
attention cannot take its fastest way. Here positions never begin anew within a sequence. For an attention whose name
has no function that makes masks transformers makes none and does not look: PyTorch's attention has such a name besides
its own, for the length of a pass.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

_MASKED = "sdpa"
# Architectures that ask for no mask but that of causality and, if they have one, of a sliding window, and whose layers
# do not compare the attention's name with others: tests/unit/test_attention.py goes through them. All others look as
# before.
ARCHITECTURES = frozenset(("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3"))
_KINDS_OF_LAYERS = frozenset(("full_attention", "sliding_attention"))


@functools.cache
def unmasked_name() -> str:
    """Of PyTorch's attention without a mask, which transformers knows from now on."""
    # Imported where there is a model: it takes seconds, which programs without one need not wait.
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("sdpa_without_mask", sdpa_attention_forward)
    return "sdpa_without_mask"


def _is_known(module: nn.Module, architecture: str | None) -> bool:
    """Whether it is of these architectures, and computes as transformers has it: a class of somebody else that is made
    of such a one may begin positions anew."""
    if architecture not in ARCHITECTURES:
        return False
    origin = f"transformers.models.{architecture}.modeling_{architecture}"
    return all(type(part).forward.__module__ == origin for part in (module, getattr(module, "base_model", module)))


def _is_stock() -> bool:
    """Whether nobody has put something else in the place of PyTorch's attention, or of the masks for it."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention, masks = ALL_ATTENTION_FUNCTIONS[_MASKED], ALL_MASK_ATTENTION_FUNCTIONS[_MASKED]
    return attention is sdpa_attention_forward and masks is sdpa_mask


def needs_no_mask(module: nn.Module, batch: Mapping[str, torch.Tensor]) -> bool:
    """Whether every token of these keyword arguments attends to itself and to all before it, in every layer."""
    config = getattr(module, "config", None)
    if not _is_known(module, getattr(config, "model_type", None)) or batch.keys() != {"input_ids"}:
        return False
    if getattr(config, "_attn_implementation", None) != _MASKED or not getattr(config, "is_causal", True):
        return False
    window = getattr(config, "sliding_window", None)
    within = window is None or batch["input_ids"].shape[1] < window
    return within and _is_stock() and _KINDS_OF_LAYERS.issuperset(getattr(config, "layer_types", None) or ())


@contextmanager
def unmasked(module: nn.Module, batch: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Make no mask where none is needed, for the length of the context.

    A backward pass belongs into it, too: layers that it computes anew have been compiled for the attention's name.
    """
    if not needs_no_mask(module, batch):
        yield
        return
    module.config._attn_implementation = unmasked_name()
    try:
        yield
    finally:
        module.config._attn_implementation = _MASKED
