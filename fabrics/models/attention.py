"""Causal attention without a mask: every token sees itself and all tokens before it.

A model of transformers that gets token ids alone checks in every forward pass whether several texts share a sequence.
On a GPU the host waits for that check. A compiled model cannot make it, builds a mask over all pairs of tokens, and
loses PyTorch's fastest attention kernel. Here texts never share a sequence, and padding is on the right, where no token
before it sees it. For an attention name without a mask function transformers neither checks nor builds a mask. So
causal attention is registered under a name of its own, which is used during a pass.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from utils.config.schema import ConfigError

_MASKED = "sdpa"
# Architectures whose only masks are causal or of a sliding window, and whose layers do not look at the name of the
# attention; tests/unit/test_attention.py goes through them. All others keep their masks.
ARCHITECTURES = frozenset(("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3"))
_LAYER_TYPES = frozenset(("full_attention", "sliding_attention"))


def repeats_keys(device: str, dtype: torch.dtype) -> bool:
    """True if keys and values must be repeated for grouped queries.

    On GPUs only the kernels of 16-bit types take grouped queries. For others PyTorch would fall back to one that keeps
    the weights of all pairs of tokens.
    """
    return device == "cuda" and dtype not in (torch.float16, torch.bfloat16)


def causal_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Return PyTorch's causal attention, [b, T, heads, width], in the form of an attention function of transformers.

    Args:
        query: [b, heads, T, width].
        key: [b, key-value heads, T, width]; value alike.
        attention_mask: not read.
    """
    groups = query.shape[1] // key.shape[1]
    device = query.device.type
    # Rotated queries and keys are float32 under autocast, which casts them here.
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    if groups > 1 and repeats_keys(device, dtype):
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    grouped = key.shape[1] < query.shape[1]
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped
    )
    return output.transpose(1, 2).contiguous(), None


@functools.cache
def unmasked_name() -> str:
    """Return the name of causal attention without a mask; the first call registers it with transformers."""
    # Imported here because programs without a model need not wait for it.
    from transformers import AttentionInterface

    AttentionInterface.register("sdpa_without_mask", causal_attention)
    return "sdpa_without_mask"


def _is_known(module: nn.Module, architecture: str | None) -> bool:
    """True for an unchanged class of transformers: a class derived from one may restart positions."""
    if architecture not in ARCHITECTURES:
        return False
    origin = f"transformers.models.{architecture}.modeling_{architecture}"
    return all(type(part).forward.__module__ == origin for part in (module, getattr(module, "base_model", module)))


def _is_unpatched() -> bool:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = ALL_ATTENTION_FUNCTIONS[_MASKED]
    masks = ALL_MASK_ATTENTION_FUNCTIONS[_MASKED]
    return attention is sdpa_attention_forward and masks is sdpa_mask


def body_and_head(module: nn.Module) -> tuple[nn.Module, nn.Linear]:
    """Return a language model's body, with `last_hidden_state`, and its output layer; ConfigError: an unknown class."""
    if not _is_known(module, getattr(getattr(module, "config", None), "model_type", None)):
        raise ConfigError(
            f"loss_chunk_tokens: must be null with {type(module).__name__}; known are the language models of "
            f"transformers named {', '.join(sorted(ARCHITECTURES))}"
        )
    return module.base_model, module.get_output_embeddings()


def needs_no_mask(module: nn.Module, batch: Mapping[str, torch.Tensor]) -> bool:
    """True if, with these keyword arguments, every token attends to itself and all tokens before it, in every layer."""
    config = getattr(module, "config", None)
    if not _is_known(module, getattr(config, "model_type", None)) or batch.keys() != {"input_ids"}:
        return False
    if getattr(config, "_attn_implementation", None) != _MASKED or not getattr(config, "is_causal", True):
        return False
    window = getattr(config, "sliding_window", None)
    if window is not None and batch["input_ids"].shape[1] >= window:
        return False
    return _LAYER_TYPES.issuperset(getattr(config, "layer_types", None) or ()) and _is_unpatched()


@contextmanager
def unmasked(module: nn.Module, batch: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Context of a pass in which no mask is built, if none is needed.

    It includes the backward pass: layers that are recomputed there have been compiled for the attention's name.
    """
    if not needs_no_mask(module, batch):
        yield
        return
    module.config._attn_implementation = unmasked_name()
    try:
        yield
    finally:
        module.config._attn_implementation = _MASKED
