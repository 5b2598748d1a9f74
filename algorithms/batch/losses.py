"""The loss of one example: the one place where labels meet logits.

The training loss is the mean over examples of each example's mean token loss. So an example is the unit of the batch
tests, whatever its length. Evaluation needs sums and counts instead (a token-weighted mean). Causal language models are
shifted here and nowhere else: `labels` are the input ids themselves.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

IGNORE_INDEX = -100


def logits_of(output: Any) -> torch.Tensor:
    """Return the logits of a module's output: the tensor itself, or its attribute `logits` as with transformers."""
    return output if isinstance(output, torch.Tensor) else output.logits


def example_loss_sums(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss in nats and the number of predicted targets of each example.

    Args:
        logits: [b, T, vocabulary] of a causal language model, or [b, classes] of a classifier.
        labels: [b, T] token ids, -100 for a token that is not to be predicted; or [b] class indices.

    Returns:
        sums [b] and counts [b] (int64). The token at position t is predicted from position t - 1.
    """
    if labels.dim() == 1:
        return F.cross_entropy(_at_least_float32(logits), labels, reduction="none"), torch.ones_like(labels)
    if logits.shape[:2] != labels.shape:
        raise ValueError(f"labels {tuple(labels.shape)} do not match logits {tuple(logits.shape)}")
    targets = _next_tokens(labels)
    return _loss_sums(logits, targets), (targets != IGNORE_INDEX).sum(1)


def chunked_loss_sums(
    hidden: torch.Tensor, head: nn.Module, labels: torch.Tensor, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `example_loss_sums` returns, with the logits of `chunk` tokens of each example at a time.

    The backward pass computes the logits of each chunk again. Chunks divide the sequence and not the batch, so that
    every call of the head has all examples, as per-example statistics need it.

    Args:
        hidden: [b, T, width], the input of the head.
        head: from `hidden` to logits; without dropout.
    """
    targets = _next_tokens(labels)
    sums = 0.0
    for inputs, answers in zip(hidden.split(chunk, 1), targets.split(chunk, 1), strict=True):
        sums = sums + checkpoint(
            lambda inputs, answers: _loss_sums(head(inputs), answers),
            inputs,
            answers,
            use_reentrant=False,
            preserve_rng_state=False,
        )
    return sums, (targets != IGNORE_INDEX).sum(1)


def _next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Return what is predicted at each position. Shifting the labels saves a copy of the logits."""
    return F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:].contiguous()


def _loss_sums(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    flat = _at_least_float32(logits).flatten(0, 1)
    losses = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    return losses.view_as(targets).sum(1)


def _at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
