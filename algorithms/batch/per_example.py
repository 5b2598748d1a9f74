"""Exact per-example quantities out of one ordinary backward pass, for the batch tests and the gradient analysis.

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

An accumulated step is probed micro-batch by micro-batch into one gradient, and `step_estimate` makes estimates of the
true gradient out of that (algorithms.batch.gradient_statistics). Inner products, with the gradient as far as it has
been accumulated, are taken only where they are needed, in the first micro-batch and in the last.

Measured: see benchmarks/performance/throughput.py, which prints the cost of a step with the hooks against a plain one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from algorithms.batch.gradient_statistics import Comparison, SampleEstimate, sample_estimate
from algorithms.batch.losses import example_losses, logits_of
from algorithms.batch.parameter_uses import SUPPORTED_MODULES, Dense, Lookup, Outer, cross_term


@dataclass(frozen=True)
class SampleStatistics:
    """One sample of examples as it is, noise included; squared norms are in squared units of the gradient.

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


def _statistics(squared_norms: torch.Tensor, inner_products: torch.Tensor, squared_norm: float) -> SampleStatistics:
    """From n_i [b] and d_i [b] in float64 and ||g||^2 to the statistics."""
    b = squared_norms.numel()
    if b < 2:
        return SampleStatistics(b, squared_norm, float("nan"), float("nan"), float("nan"))
    variance = (squared_norms.sum().item() - b * squared_norm) / (b - 1)
    if squared_norm > 0.0:
        orthogonal = (squared_norms - inner_products.square() / squared_norm).sum().item() / (b - 1)
    else:
        orthogonal = variance
    # Rounding may leave a tiny negative number where examples are equal; a NaN must stay one.
    return SampleStatistics(
        sample_size=b,
        squared_norm=squared_norm,
        variance=0.0 if variance < 0.0 else variance,
        inner_product_variance=inner_products.var().item(),
        orthogonal_variance=0.0 if orthogonal < 0.0 else orthogonal,
    )


def _kind(module: nn.Module) -> str:
    """The name of a module's class. What is sharded by itself has one of FSDP2's making, FSDP and that name."""
    kind = type(module)
    original = kind.__bases__[-1].__name__
    return original if kind.__name__ == f"FSDP{original}" else kind.__name__


class _Kept(torch.autograd.Function):
    """Keeps a tensor as autograd keeps what a backward pass needs: where activations are computed anew, it is as well.

    Nothing is differentiated through it: what is wanted is the node of its output, and `saved_tensors` there.
    """

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return anchor.clone()


class PerExampleProbe:
    """Context in which one backward pass also yields the statistics of the examples in it.

    Every loss must depend on one example only. The batch is the first dimension of every layer's input. The gradients
    (`.grad`) may hold those of earlier micro-batches on entry: inner products are with what they hold in the end.

    Args:
        model: its trainable parameters must belong to modules in SUPPORTED_MODULES.
        batch_size: b, examples in the pass.
        direction: by parameter; inner products are then taken with it instead of the accumulated gradient, and
            `squared_norms_by_parameter` is known.
        products: whether inner products and the gradient's squared norm are wanted.

    Raises:
        UnsupportedModuleError: naming the module that owns a trainable parameter and is not supported.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_size: int,
        direction: Mapping[nn.Parameter, torch.Tensor] | None = None,
        products: bool = True,
    ):
        self.batch_size = batch_size
        self._direction = direction
        self._with_products = products
        self.squared_norms_by_parameter: dict[nn.Parameter, torch.Tensor] = {}
        self._handles: list = []
        self._uses: dict[nn.Parameter, list] = {}
        self._names: dict[nn.Parameter, str] = {}
        self._anchor = torch.empty(0, requires_grad=True)
        self._layers: list[tuple[str, nn.Module]] = []
        for path, module in model.named_modules():
            parameters = {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}
            if not parameters:
                continue
            self._check_supported(path, module)
            self._layers.append((path, module))
            for name, parameter in parameters.items():
                self._names.setdefault(parameter, f"{path}.{name}" if path else name)
        device = next((parameter.device for parameter in self._names), None)
        self._squared_norms = torch.zeros(batch_size, dtype=torch.float64, device=device)
        self._inner_products = torch.zeros_like(self._squared_norms)
        self._squared_norm = torch.zeros((), dtype=torch.float64, device=device)

    @staticmethod
    def _check_supported(path: str, module: nn.Module) -> None:
        kind = _kind(module)
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
        self._watch_gradients()
        return self

    def _watch_gradients(self) -> None:
        for parameter in self._names:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))

    def __exit__(self, *exception) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._uses.clear()

    def _expand_shared_index(self, module: nn.Module, args: tuple):
        """Positions looked up once for the whole batch, [1, T], are looked up per example instead."""
        if args[0].shape[0] == 1 and self.batch_size > 1:
            return (args[0].expand(self.batch_size, *args[0].shape[1:]), *args[1:])
        return None

    def _forward_hook(self, path: str):
        def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
            if not (torch.is_grad_enabled() and output.requires_grad):
                return
            if args[0].shape[0] != self.batch_size:
                raise UnsupportedModuleError(
                    f"per-example statistics need the batch of {self.batch_size} examples as first dimension "
                    f"of every input, but '{path}' got {tuple(args[0].shape)}; "
                    f"set statistics_estimator: across_workers"
                )
            kept = _Kept.apply(self._anchor, args[0].detach())  # before PyTorch 2.13 its node does not live without it
            output.register_hook(lambda delta: self._on_output_gradient(module, *kept.grad_fn.saved_tensors, delta))

        return hook

    def _on_output_gradient(self, module: nn.Module, x: torch.Tensor, delta: torch.Tensor) -> None:
        delta = delta.detach()
        dtype = self._dtype_of(module)
        x = x.to(dtype) if x.is_floating_point() else x
        with torch.autocast(delta.device.type, enabled=False):
            uses = SUPPORTED_MODULES[_kind(module)](module, x, delta.to(dtype))
            for parameter, use in uses:
                if parameter.requires_grad:
                    self._uses.setdefault(parameter, []).append(use())

    def _dtype_of(self, module: nn.Module) -> torch.dtype:
        """That its parameters' gradients have, and shares in these."""
        return module.weight.dtype

    @torch.no_grad()
    def _on_gradient(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        before = self._squared_norms.sum() if self._direction is not None else None
        against = gradient if self._direction is None else self._direction[parameter]
        self._add(self._names[parameter], self._uses.pop(parameter, ()), against)
        if before is not None:
            self.squared_norms_by_parameter[parameter] = self._squared_norms.sum() - before
        if self._with_products:
            self._squared_norm += gradient.square().sum()

    def _add(self, name: str, uses: Sequence[Outer | Lookup | Dense], against: torch.Tensor) -> None:
        """Add what the uses of a parameter say; against: what products are taken with."""
        joined: dict[type, Outer | Lookup | Dense] = {}
        for use in uses:
            known = joined.get(type(use))
            joined[type(use)] = known.joined(use) if known else use
        if not joined or (Dense in joined and len(joined) > 1):
            raise UnsupportedModuleError(
                f"the parameter '{name}' got a gradient from outside the modules that own it; "
                f"set statistics_estimator: across_workers"
            )
        with torch.autocast(against.device.type, enabled=False):
            for use in joined.values():
                squares, products = use.squares_and_products(against, self._with_products)
                self._squared_norms += squares
                self._inner_products += products
            if len(joined) == 2:
                self._squared_norms += 2.0 * cross_term(joined[Outer], joined[Lookup])

    @property
    def squared_norms(self) -> torch.Tensor:
        """||g_i||^2 of each example's loss as it stands in the sum that was differentiated, [b], float64."""
        return self._squared_norms

    @property
    def inner_products(self) -> torch.Tensor:
        """<g_i, direction>, likewise."""
        return self._inner_products

    @property
    def squared_norm(self) -> torch.Tensor:
        """Of the accumulated gradient, float64."""
        return self._squared_norm

    def statistics(self, loss_weight: float = 1.0) -> SampleStatistics:
        """Statistics of the only backward pass into the gradient, of losses not multiplied by loss_weight.

        The loss was `loss_weight` times the mean over the batch.

        Raises:
            UnsupportedModuleError: the examples' shares do not add up to the gradient, which means that a part
                of it did not pass through the hooked modules.
        """
        b, scale = self.batch_size, 1.0 / loss_weight
        squared_norms = self._squared_norms * (b * scale) ** 2
        inner_products = self._inner_products * (b * scale**2)
        squared_norm = self._squared_norm.item() * scale**2
        _check_sum(squared_norms.sum().item() / b**2, inner_products.sum().item() / b, squared_norm, b)
        return _statistics(squared_norms, inner_products, squared_norm)


def _check_sum(squares: float, products: float, squared_norm: float, count: int) -> None:
    """The shares P_i of `count` examples in the gradient have sum <P_i, g> = ||g||^2, exactly on paper."""
    # By Cauchy-Schwarz rounding is relative to this bound.
    if abs(products - squared_norm) > 0.05 * (count * squares * squared_norm) ** 0.5:
        raise UnsupportedModuleError(
            "the per-example gradients do not add up to the batch gradient: a parameter is used outside the "
            "module that owns it, or an example's loss depends on another example; "
            "set statistics_estimator: across_workers"
        )


def compared_micro_batches(sizes: Sequence[int]) -> set[int]:
    """Which micro-batches of a step need inner products: the first, which is checked, the last, and one that is both
    early and has at least three examples behind it, for P and R."""
    early = next((index for index in range(len(sizes)) if sum(sizes[: index + 1]) > 2), 0)
    return {0, early, len(sizes) - 1}


def step_estimate(probes: Sequence[PerExampleProbe]) -> SampleEstimate:
    """What the examples of one step say, all with one weight, from the probes of its micro-batches in their order.

    Those of `compared_micro_batches` have products; of a single one P and R stay unknown. Waits for the device.

    Raises:
        UnsupportedModuleError: as PerExampleProbe.statistics.
    """
    sizes = [probe.batch_size for probe in probes]
    b, compared = sum(sizes), sorted(compared_micro_batches(sizes))
    tensors = [probe.squared_norms for probe in probes]
    for index in compared:
        tensors += [probes[index].inner_products, probes[index].squared_norm.reshape(1)]
    numbers = iter(torch.cat(tensors).tolist())
    # Every example entered with weight 1 / b: what the probes know is g_i / b, and sums over these.
    raw = [next(numbers) for _ in range(b)]
    squares = [number * b**2 for number in raw]
    comparisons = []
    for index in compared:
        n = sum(sizes[: index + 1])
        products = [next(numbers) for _ in range(sizes[index])]
        squared_norm = next(numbers)
        if index == 0:
            _check_sum(math.fsum(raw[:n]), math.fsum(products), squared_norm, n)
        comparisons.append(
            Comparison(
                examples=n,
                squared_norm=squared_norm * (b / n) ** 2,
                total=math.fsum(squares[:n]),
                squared_norms=squares[n - sizes[index] : n],
                inner_products=[product * b**2 / n for product in products],
            )
        )
    part = next((comparison for comparison in comparisons if 2 < comparison.examples < b), None)
    return sample_estimate(comparisons[-1], math.fsum(square**2 for square in squares), part)


def per_example_statistics(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> SampleStatistics:
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
        example_losses(logits_of(model(**inputs)), labels).sum().backward()
    statistics = probe.statistics(loss_weight=b)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(b)
    return statistics
