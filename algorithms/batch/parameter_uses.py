"""How the examples of a batch make a parameter's gradient: their shares P_i of it, squared and held against a vector.

A layer that the per-example statistics know has a function here from one call of it to the uses of its parameters.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call

from algorithms.registry import Registry

# The three ways in which a parameter's gradient is made of examples. All tensors have the batch first.


@dataclass
class Outer:
    """Weight [out, in] of a linear layer: P_i = sum_t delta_it x_it^T."""

    x: torch.Tensor  # [b, T, in]
    delta: torch.Tensor  # [b, T, out]

    def joined(self, other: "Outer") -> "Outer":
        return Outer(torch.cat((self.x, other.x), 1), torch.cat((self.delta, other.delta), 1))

    def squares_and_products(self, gradient: torch.Tensor, products: bool) -> tuple[torch.Tensor, torch.Tensor | float]:
        """||P_i||^2 [b], and <P_i, gradient> [b] if wanted, in whichever form is cheaper (module docstring)."""
        steps, (out, inputs) = self.x.shape[1], gradient.shape
        if steps * (out + inputs) > out * inputs:
            share = torch.bmm(self.delta.transpose(1, 2), self.x).flatten(1)
            return share.square().sum(1), torch.mv(share, gradient.flatten()) if products else 0.0
        squares = torch.bmm(self.delta, self.delta.transpose(1, 2))
        squares.mul_(torch.bmm(self.x, self.x.transpose(1, 2)))
        found = (self.x @ gradient.t()).mul_(self.delta).sum((1, 2)) if products else 0.0
        return squares.sum((1, 2)), found


@dataclass
class Lookup:
    """Weight [vocabulary, width] of an embedding: row k of P_i is the sum of delta_it over tokens k."""

    tokens: torch.Tensor  # [b, T]
    delta: torch.Tensor  # [b, T, width]

    def joined(self, other: "Lookup") -> "Lookup":
        return Lookup(torch.cat((self.tokens, other.tokens), 1), torch.cat((self.delta, other.delta), 1))

    def squares_and_products(self, gradient: torch.Tensor, products: bool) -> tuple[torch.Tensor, torch.Tensor | float]:
        ordered, order = self.tokens.sort(1)
        new_token = torch.zeros_like(ordered)
        new_token[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        row = new_token.cumsum(1).unsqueeze(2).expand_as(self.delta)
        delta = self.delta.gather(1, order.unsqueeze(2).expand_as(self.delta))
        rows = torch.zeros_like(delta).scatter_add_(1, row, delta)
        found = (gradient[self.tokens] * self.delta).sum((1, 2)) if products else 0.0
        return rows.square().sum((1, 2)), found


@dataclass
class Dense:
    """Any parameter small enough to have its per-example gradient [b, ...] built: biases and norms."""

    share: torch.Tensor

    def joined(self, other: "Dense") -> "Dense":
        return Dense(self.share + other.share)

    def squares_and_products(self, gradient: torch.Tensor, products: bool) -> tuple[torch.Tensor, torch.Tensor | float]:
        share = self.share.flatten(1)
        return share.square().sum(1), torch.mv(share, gradient.flatten()) if products else 0.0


def cross_term(outer: Outer, lookup: Lookup) -> torch.Tensor:
    """<P_i of the head, P_i of the embedding> [b] for one weight used as both."""
    b, steps, _ = outer.delta.shape
    tokens = lookup.tokens.unsqueeze(1).expand(b, steps, lookup.tokens.shape[1])
    return outer.delta.gather(2, tokens).mul_(torch.bmm(outer.x, lookup.delta.transpose(1, 2))).sum((1, 2))


# From a module call to the uses of its parameters. `x` is [b, ..., in], `delta` the gradient of the output.


def _with_steps(tensor: torch.Tensor) -> torch.Tensor:
    """[b, ..., width] as [b, T, width]."""
    return tensor.reshape(tensor.shape[0], -1, tensor.shape[-1])


def _linear_uses(module: nn.Linear, x: torch.Tensor, delta: torch.Tensor):
    x, delta = _with_steps(x), _with_steps(delta)
    yield module.weight, lambda: Outer(x, delta)
    if module.bias is not None:
        yield module.bias, lambda: Dense(delta.sum(1))


def _embedding_uses(module: nn.Embedding, x: torch.Tensor, delta: torch.Tensor):
    tokens, delta = x.flatten(1), _with_steps(delta)
    if module.padding_idx is not None:  # autograd gives this row no gradient
        delta = delta.masked_fill((tokens == module.padding_idx).unsqueeze(2), 0.0)
    yield module.weight, lambda: Lookup(tokens, delta)


def _norm_uses(module: nn.Module, x: torch.Tensor, delta: torch.Tensor):
    # The module itself, with a weight of ones, gives the normalised input in the very arithmetic of its class.
    neutral = {
        name: torch.zeros_like(p) if name == "bias" else torch.ones_like(p) for name, p in module.named_parameters()
    }
    with torch.no_grad():
        normalised = functional_call(module, neutral, (x,))
    dims = delta.dim() - module.weight.dim()
    b = delta.shape[0]
    shape = (b, -1, *delta.shape[dims:])
    yield module.weight, lambda: Dense((delta * normalised).reshape(shape).sum(1))
    if getattr(module, "bias", None) is not None:
        yield module.bias, lambda: Dense(delta.reshape(shape).sum(1))


# By class name, so that the Llama norm is known without importing transformers. Exactly these classes: a
# subclass may compute something else.
SUPPORTED_MODULES = Registry(
    {
        "Linear": _linear_uses,
        "Embedding": _embedding_uses,
        "LayerNorm": _norm_uses,
        "RMSNorm": _norm_uses,
        "LlamaRMSNorm": _norm_uses,
    }
)
