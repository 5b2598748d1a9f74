"""The arithmetic of a training step, from a model's shape."""

from torch import nn


def flops_per_token(model: nn.Module, sequence_length: int) -> float:
    """Of training on a token: 6 for every weight of a linear layer, the head included (2 forward, 4 backward), and
    6 * layers * width * sequence_length for attention: 12 with all pairs, half of which are masked.

    A model whose config names no attention heads is taken to have none.
    """
    linear = 6.0 * sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    config = getattr(model, "config", None)
    if (heads := getattr(config, "num_attention_heads", None)) is None:
        return linear
    width = heads * getattr(config, "head_dim", config.hidden_size // heads)
    return linear + 6.0 * config.num_hidden_layers * width * sequence_length
