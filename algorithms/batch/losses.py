"""The loss of one example: the one place where labels meet logits.

The training loss is the mean over examples of each example's own mean token loss, so that an example is the unit of the
batch tests whatever its length. Evaluation needs sums and counts instead (a token-weighted mean). Causal language
models are shifted here and nowhere else: `labels` are the input ids themselves.
"""

from typing import Any

import torch
import torch.nn.functional as F

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
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if labels.dim() == 1:
        return F.cross_entropy(logits, labels, reduction="none"), torch.ones_like(labels)
    if logits.shape[:2] != labels.shape:
        raise ValueError(f"labels {tuple(labels.shape)} do not match logits {tuple(logits.shape)}")
    # Shifting the labels, not the logits, saves a copy of the largest tensor of the step.
    targets = F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:].contiguous()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    return losses.view_as(targets).sum(1), (targets != IGNORE_INDEX).sum(1)


def example_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of each example over its own targets, [b]; 0 for an example without targets."""
    sums, counts = example_loss_sums(logits, labels)
    return sums / counts.clamp(min=1)
