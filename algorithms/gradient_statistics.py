"""Gradient statistics for the batch tests: exact per-example quantities out of one ordinary backward pass.

For a sample of b examples with gradients g_i and mean g:

    n_i = ||g_i||^2     d_i = <g_i, g>
    variance                 V = (sum n_i - b ||g||^2) / (b - 1)             trace of the covariance, unbiased
    inner-product variance   P = sample variance of the d_i
    orthogonal variance      O = sum (n_i - d_i^2 / ||g||^2) / (b - 1)

How: a hook on every supported layer keeps the layer's input x and the gradient delta of its output. As soon
as a parameter's own gradient G has been accumulated, both its shares are computed and dropped again:
n_i += ||P_i||^2 and d_i += <P_i, G>, where P_i is the example's share of G. For y = W x it is
P_i = sum_t delta_it x_it^T, and when T (out + in) <= out * in the same numbers come from products of activations
(||P_i||^2 = sum_tt' <delta_t, delta_t'> <x_t, x_t'>) without ever building it. So the extra memory stays in the
order of a layer's own activations, nothing runs per example, and a parameter with several uses (a module called
twice, an embedding tied to the head) is exact, cross terms included; x and delta of such a parameter are held until
its last use has been differentiated.

Measured: see benchmarks/throughput.py, which prints the cost of a step with the hooks against a plain one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call

from algorithms.losses import example_losses


@dataclass(frozen=True)
class GradientStatistics:
    """Statistics of one sample of examples; squared norms are in squared units of the gradient.

    sample_size: examples in the sample. squared_norm: ||g||^2 of their mean gradient. variance, V:
    trace of the covariance of one example's gradient. inner_product_variance, P. orthogonal_variance, O. The last
    three are NaN for a sample of one, which has no variance.
    """

    sample_size: int
    squared_norm: float
    variance: float
    inner_product_variance: float
    orthogonal_variance: float


class UnsupportedModuleError(ValueError):
    """A trainable parameter whose per-example gradients cannot be had from hooks."""


def _statistics(squared_norms: torch.Tensor, inner_products: torch.Tensor, squared_norm: float) -> GradientStatistics:
    """From n_i [b] and d_i [b] in float64 and ||g||^2 to the statistics."""
    b = squared_norms.numel()
    if b < 2:
        return GradientStatistics(b, squared_norm, float("nan"), float("nan"), float("nan"))
    variance = (squared_norms.sum().item() - b * squared_norm) / (b - 1)
    if squared_norm > 0.0:
        orthogonal = (squared_norms - inner_products.square() / squared_norm).sum().item() / (b - 1)
    else:
        orthogonal = variance
    # Rounding may leave a tiny negative number where examples are equal; a NaN must stay one.
    return GradientStatistics(
        sample_size=b,
        squared_norm=squared_norm,
        variance=0.0 if variance < 0.0 else variance,
        inner_product_variance=inner_products.var().item(),
        orthogonal_variance=0.0 if orthogonal < 0.0 else orthogonal,
    )


# The three ways in which a parameter's gradient is made of examples. All tensors have the batch first.


@dataclass
class _Outer:
    """Weight [out, in] of a linear layer: P_i = sum_t delta_it x_it^T."""

    x: torch.Tensor  # [b, T, in]
    delta: torch.Tensor  # [b, T, out]

    def joined(self, other: "_Outer") -> "_Outer":
        return _Outer(torch.cat((self.x, other.x), 1), torch.cat((self.delta, other.delta), 1))

    def squares_and_products(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """||P_i||^2 [b] and <P_i, gradient> [b], in whichever form is cheaper (module docstring)."""
        steps, (out, inputs) = self.x.shape[1], gradient.shape
        if steps * (out + inputs) > out * inputs:
            share = torch.bmm(self.delta.transpose(1, 2), self.x)
            return share.square().sum((1, 2)), torch.mv(share.flatten(1), gradient.flatten())
        squares = torch.bmm(self.delta, self.delta.transpose(1, 2))
        squares.mul_(torch.bmm(self.x, self.x.transpose(1, 2)))
        return squares.sum((1, 2)), (self.x @ gradient.t()).mul_(self.delta).sum((1, 2))


@dataclass
class _Lookup:
    """Weight [vocabulary, width] of an embedding: row k of P_i is the sum of delta_it over tokens k."""

    tokens: torch.Tensor  # [b, T]
    delta: torch.Tensor  # [b, T, width]

    def joined(self, other: "_Lookup") -> "_Lookup":
        return _Lookup(torch.cat((self.tokens, other.tokens), 1), torch.cat((self.delta, other.delta), 1))

    def squares_and_products(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ordered, order = self.tokens.sort(1)
        new_token = torch.zeros_like(ordered)
        new_token[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        row = new_token.cumsum(1).unsqueeze(2).expand_as(self.delta)
        delta = self.delta.gather(1, order.unsqueeze(2).expand_as(self.delta))
        rows = torch.zeros_like(delta).scatter_add_(1, row, delta)
        products = (gradient[self.tokens] * self.delta).sum((1, 2))
        return rows.square().sum((1, 2)), products


@dataclass
class _Dense:
    """Any parameter small enough to have its per-example gradient [b, ...] built: biases and norms."""

    share: torch.Tensor

    def joined(self, other: "_Dense") -> "_Dense":
        return _Dense(self.share + other.share)

    def squares_and_products(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        share = self.share.flatten(1)
        return share.square().sum(1), torch.mv(share, gradient.flatten())


def _cross_term(outer: _Outer, lookup: _Lookup) -> torch.Tensor:
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
    yield module.weight, lambda: _Outer(x, delta)
    if module.bias is not None:
        yield module.bias, lambda: _Dense(delta.sum(1))


def _embedding_uses(module: nn.Embedding, x: torch.Tensor, delta: torch.Tensor):
    tokens, delta = x.flatten(1), _with_steps(delta)
    if module.padding_idx is not None:  # autograd gives this row no gradient
        delta = delta.masked_fill((tokens == module.padding_idx).unsqueeze(2), 0.0)
    yield module.weight, lambda: _Lookup(tokens, delta)


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
    yield module.weight, lambda: _Dense((delta * normalised).reshape(shape).sum(1))
    if getattr(module, "bias", None) is not None:
        yield module.bias, lambda: _Dense(delta.reshape(shape).sum(1))


# By class name, so that the Llama norm is known without importing transformers. Exactly these classes: a
# subclass may compute something else.
SUPPORTED_MODULES = {
    "Linear": _linear_uses,
    "Embedding": _embedding_uses,
    "LayerNorm": _norm_uses,
    "RMSNorm": _norm_uses,
    "LlamaRMSNorm": _norm_uses,
}


class PerExampleProbe:
    """Context in which one backward pass also yields the statistics of the examples in it.

    The gradients (`.grad`) must be None or zero on entry, and the loss must be `loss_weight` times the mean over
    the batch of losses that each depend on one example only. The batch is the first dimension of every layer's
    input.

    Args:
        model: its trainable parameters must belong to modules in SUPPORTED_MODULES.
        batch_size: b, examples in the pass.
        direction: by parameter; inner products are then taken with it instead of the batch's own gradient, of losses
            as they are (in a sum, not a mean), for `squared_norms`, `inner_products` and `squared_norms_by_parameter`.

    Raises:
        UnsupportedModuleError: naming the module that owns a trainable parameter and is not supported.
    """

    def __init__(self, model: nn.Module, batch_size: int, direction: Mapping[nn.Parameter, torch.Tensor] | None = None):
        self._batch_size = batch_size
        self._direction = direction
        self.squared_norms_by_parameter: dict[nn.Parameter, torch.Tensor] = {}
        self._handles: list = []
        self._uses: dict[nn.Parameter, list] = {}
        self._names: dict[nn.Parameter, str] = {}
        self._squared_norms = torch.zeros(batch_size, dtype=torch.float64)
        self._inner_products = torch.zeros(batch_size, dtype=torch.float64)
        self._squared_norm = torch.zeros((), dtype=torch.float64)
        self._layers: list[tuple[str, nn.Module]] = []
        for path, module in model.named_modules():
            parameters = {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}
            if not parameters:
                continue
            self._check_supported(path, module)
            self._layers.append((path, module))
            for name, parameter in parameters.items():
                self._names.setdefault(parameter, f"{path}.{name}" if path else name)
        if self._names:
            device = next(iter(self._names)).device
            self._squared_norms = self._squared_norms.to(device)
            self._inner_products = self._inner_products.to(device)
            self._squared_norm = self._squared_norm.to(device)

    @staticmethod
    def _check_supported(path: str, module: nn.Module) -> None:
        kind = type(module).__name__
        advice = "set statistics_estimator: across_workers"
        if kind not in SUPPORTED_MODULES:
            raise UnsupportedModuleError(
                f"per-example statistics do not know the module '{path}' of class {kind} "
                f"(known: {', '.join(SUPPORTED_MODULES)}); {advice}"
            )
        if isinstance(module, nn.Embedding) and (
            module.sparse or module.scale_grad_by_freq or module.max_norm is not None
        ):
            raise UnsupportedModuleError(
                f"per-example statistics need the embedding '{path}' to be dense, without max_norm and "
                f"scale_grad_by_freq; {advice}"
            )

    def __enter__(self) -> "PerExampleProbe":
        for path, module in self._layers:
            self._handles.append(module.register_forward_hook(self._forward_hook(path)))
            if isinstance(module, nn.Embedding):
                self._handles.append(module.register_forward_pre_hook(self._expand_shared_index))
        for parameter in self._names:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))
        return self

    def __exit__(self, *exception) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._uses.clear()

    def _expand_shared_index(self, module: nn.Module, args: tuple):
        """Positions looked up once for the whole batch, [1, T], are looked up per example instead."""
        if args[0].shape[0] == 1 and self._batch_size > 1:
            return (args[0].expand(self._batch_size, *args[0].shape[1:]), *args[1:])
        return None

    def _forward_hook(self, path: str):
        def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
            if not (torch.is_grad_enabled() and output.requires_grad):
                return
            if args[0].shape[0] != self._batch_size:
                raise UnsupportedModuleError(
                    f"per-example statistics need the batch of {self._batch_size} examples as first dimension "
                    f"of every input, but '{path}' got {tuple(args[0].shape)}; "
                    f"set statistics_estimator: across_workers"
                )
            x = args[0].detach()
            output.register_hook(lambda delta: self._on_output_gradient(module, x, delta))

        return hook

    def _on_output_gradient(self, module: nn.Module, x: torch.Tensor, delta: torch.Tensor) -> None:
        delta = delta.detach()
        dtype = module.weight.dtype
        x = x.to(dtype) if x.is_floating_point() else x
        with torch.autocast(delta.device.type, enabled=False):
            uses = SUPPORTED_MODULES[type(module).__name__](module, x, delta.to(dtype))
            for parameter, use in uses:
                if parameter.requires_grad:
                    self._uses.setdefault(parameter, []).append(use())

    @torch.no_grad()
    def _on_gradient(self, parameter: nn.Parameter) -> None:
        joined: dict[type, _Outer | _Lookup | _Dense] = {}
        for use in self._uses.pop(parameter, ()):
            known = joined.get(type(use))
            joined[type(use)] = known.joined(use) if known else use
        if not joined or (_Dense in joined and len(joined) > 1):
            raise UnsupportedModuleError(
                f"the parameter '{self._names[parameter]}' got a gradient from outside the modules that own it; "
                f"set statistics_estimator: across_workers"
            )
        gradient = parameter.grad
        against = gradient if self._direction is None else self._direction[parameter]
        with torch.autocast(gradient.device.type, enabled=False):
            before = self._squared_norms.sum() if self._direction is not None else None
            for use in joined.values():
                squares, products = use.squares_and_products(against)
                self._squared_norms += squares
                self._inner_products += products
            if len(joined) == 2:
                self._squared_norms += 2.0 * _cross_term(joined[_Outer], joined[_Lookup])
            if before is not None:
                self.squared_norms_by_parameter[parameter] = self._squared_norms.sum() - before
            self._squared_norm += gradient.square().sum()

    @property
    def squared_norms(self) -> torch.Tensor:
        """||g_i||^2 of each example's loss as it stands in the sum that was differentiated, [b], float64."""
        return self._squared_norms

    @property
    def inner_products(self) -> torch.Tensor:
        """<g_i, direction>, likewise."""
        return self._inner_products

    def statistics(self, loss_weight: float = 1.0) -> GradientStatistics:
        """Statistics of the backward pass made inside the context, of losses not multiplied by loss_weight.

        Raises:
            UnsupportedModuleError: the examples' shares do not add up to the gradient, which means that a part
                of it did not pass through the hooked modules.
        """
        b, scale = self._batch_size, 1.0 / loss_weight
        squared_norms = self._squared_norms * (b * scale) ** 2
        inner_products = self._inner_products * (b * scale**2)
        squared_norm = self._squared_norm.item() * scale**2
        # sum_i d_i = b ||g||^2 holds exactly; by Cauchy-Schwarz its rounding is relative to this bound.
        bound = (b * squared_norms.sum().item() * squared_norm) ** 0.5
        if abs(inner_products.sum().item() - b * squared_norm) > 0.05 * bound:
            raise UnsupportedModuleError(
                "the per-example gradients do not add up to the batch gradient: a parameter is used outside the "
                "module that owns it, or an example's loss depends on another example; "
                "set statistics_estimator: across_workers"
            )
        return _statistics(squared_norms, inner_products, squared_norm)


def per_example_statistics(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> GradientStatistics:
    """Exact statistics of the examples of one batch, from one forward and one backward pass.

    Args:
        model: a Hugging Face model (Llama, BERT, tied or not, some parameters frozen or not), left in its train
            or eval mode. Old gradients are discarded; afterwards `.grad` holds the gradient of the mean over
            the examples of each example's mean token loss.
        batch: the model's keyword arguments: input_ids [b, T], optional attention_mask [b, T], and labels, [b, T]
            with -100 where ignored (not shifted) or [b] classes.

    Raises:
        UnsupportedModuleError: a trainable parameter belongs to a module that the hooks do not know.
    """
    if "labels" not in batch:
        raise ValueError("per_example_statistics needs labels in the batch")
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    labels = batch["labels"]
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    b = labels.shape[0]
    with PerExampleProbe(model, batch_size=b) as probe:
        # The sum, not the mean: a factor 1 / b would round differently inside layers that compute in float32
        # whatever the model's type (Llama's norm), and float64 would agree with single examples to 1e-8 only.
        example_losses(model(**inputs).logits, labels).sum().backward()
    statistics = probe.statistics(loss_weight=b)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(b)
    return statistics


@dataclass(frozen=True)
class GradientMoments:
    """What one worker's gradient g_m says beside the workers' mean gradient g; scalars, so that they can be sent.

    squared_norm: ||g_m||^2. inner_product: <g_m, g>. squared_distance: ||g_m - g||^2. mean_squared_norm: ||g||^2.
    """

    squared_norm: float
    inner_product: float
    squared_distance: float
    mean_squared_norm: float


@torch.no_grad()
def gradient_moments(gradient: torch.Tensor, mean: torch.Tensor) -> GradientMoments:
    """Moments of a worker's flat gradient and the mean over all workers."""
    # The squared distance is taken directly: its difference form would cancel where workers agree.
    distance = torch.dist(gradient, mean).double().square()
    values = [gradient.dot(gradient).double(), gradient.dot(mean).double(), distance, mean.dot(mean).double()]
    return GradientMoments(*torch.stack(values).tolist())


def across_workers_statistics(moments: Sequence[GradientMoments], batch: int) -> GradientStatistics:
    """Statistics from the workers' last gradients (DDP-Norm, arXiv 2412.21124).

    Args:
        moments: of M >= 2 gradients g_m, each the mean over `batch` examples of worker m.
        batch: b, examples behind each gradient.

    Returns:
        Statistics whose sample is the M * b examples behind the mean gradient g, in the unit of one example:
        V = b / (M - 1) * sum ||g_m - g||^2, P = b * var(<g_m, g>), and O likewise from the parts of the g_m
        orthogonal to g.
    """
    workers = len(moments)
    if workers < 2:
        raise ValueError(f"across_workers statistics need at least 2 workers, got {workers}")
    squared_norm, scale = moments[0].mean_squared_norm, batch / (workers - 1)
    products = [m.inner_product for m in moments]
    average = sum(products) / workers
    variance = scale * sum(m.squared_distance for m in moments)
    orthogonal = variance
    if squared_norm > 0.0:
        orthogonal = scale * sum(m.squared_norm - m.inner_product**2 / squared_norm for m in moments)
    return GradientStatistics(
        sample_size=workers * batch,
        squared_norm=squared_norm,
        variance=variance,
        inner_product_variance=scale * sum((product - average) ** 2 for product in products),
        orthogonal_variance=0.0 if orthogonal < 0.0 else orthogonal,
    )
