"""Exact per-example gradient statistics from one ordinary backward pass, for the batch tests and the gradient analysis.

For a sample of b examples with gradients g_i and mean g these are n_i = ||g_i||^2 and d_i = <g_i, g>.

How: a hook on every supported layer keeps the layer's input x and the gradient delta of its output. As soon as a
parameter's own gradient G has been accumulated, n_i += ||P_i||^2 and d_i += <P_i, G>, where P_i is the example's share
of G. For y = W x it is P_i = sum_t delta_it x_it^T. When T (out + in) <= out * in, the same numbers come from products
of activations, ||P_i||^2 = sum_tt' <delta_t, delta_t'> <x_t, x_t'>, without ever building it. So the extra memory is of
the order of a layer's own activations, and nothing runs per example. A parameter with several uses (a module called
twice, an embedding tied to the head) is exact, cross terms included; its x and delta are held until its last use has
been differentiated.

An accumulated step is probed micro-batch by micro-batch into one gradient, and `step_estimate` turns that into
estimates of the true gradient (algorithms.batch.gradient_statistics). Inner products, with the gradient as accumulated
so far, are taken only where they are needed. benchmarks/performance/throughput.py measures the cost of a batch test.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call

from algorithms.batch.gradient_statistics import Comparison, SampleEstimate, sample_estimate, sum_or_nan
from algorithms.registry import Registry


class UnsupportedModuleError(ValueError):
    """A trainable parameter whose per-example gradients hooks cannot yield."""

    def __init__(self, problem: str):
        super().__init__(
            f'{problem}; set statistics_estimator: across_workers, or statistics="across_workers" of adloco.Worker'
        )
        self.problem = problem


# The examples' shares P_i of one parameter's gradient, in three forms. All tensors have the batch first. Each form has
#   joined(other)                               the shares of two uses of the parameter together
#   squares_and_products(gradient, products)    ||P_i||^2 [b], and <P_i, gradient> [b] if wanted


@dataclass
class Outer:
    """Shares of the weight [out, in] of a linear layer: P_i = sum_t delta_it x_it^T.

    uses: inputs x [b, T, in] and gradients of the outputs delta [b, T, out] of each use of the layer. T may differ.
    They are not put together: those of a head over a chunked loss would need as much memory again.
    """

    uses: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    def joined(self, other: "Outer") -> "Outer":
        return Outer(self.uses + other.uses)

    def squares_and_products(self, gradient: torch.Tensor, products: bool) -> tuple[torch.Tensor, torch.Tensor | float]:
        steps = sum(x.shape[1] for x, _ in self.uses)
        out, inputs = gradient.shape
        if steps * (out + inputs) > out * inputs:
            (x, delta), *others = self.uses
            share = torch.bmm(delta.transpose(1, 2), x)
            for x, delta in others:
                share.baddbmm_(delta.transpose(1, 2), x)
            share = share.flatten(1)
            return share.square().sum(1), torch.mv(share, gradient.flatten()) if products else 0.0
        squares = 0.0
        found = 0.0
        for index, (x, delta) in enumerate(self.uses):
            for number, (other_x, other_delta) in enumerate(self.uses[: index + 1]):
                terms = torch.bmm(delta, other_delta.transpose(1, 2))
                terms.mul_(torch.bmm(x, other_x.transpose(1, 2)))
                squares += terms.sum((1, 2)) * (1.0 if number == index else 2.0)  # pairs of uses count twice
            if products:
                found += (x @ gradient.t()).mul_(delta).sum((1, 2))
        return squares, found


@dataclass
class Lookup:
    """Shares of the weight [vocabulary, width] of an embedding: row k of P_i is the sum of delta_it over tokens k.

    Attributes:
        tokens: [b, T].
        delta: gradients of the outputs, [b, T, width].
    """

    tokens: torch.Tensor
    delta: torch.Tensor

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
    """Shares [b, ...] of a parameter small enough to build them: biases and norms."""

    share: torch.Tensor

    def joined(self, other: "Dense") -> "Dense":
        return Dense(self.share + other.share)

    def squares_and_products(self, gradient: torch.Tensor, products: bool) -> tuple[torch.Tensor, torch.Tensor | float]:
        share = self.share.flatten(1)
        return share.square().sum(1), torch.mv(share, gradient.flatten()) if products else 0.0


Shares = Outer | Lookup | Dense


def cross_term(outer: Outer, lookup: Lookup) -> torch.Tensor:
    """Return <P_i of the head, P_i of the embedding> [b] for one weight used as both."""
    found = 0.0
    for x, delta in outer.uses:
        tokens = lookup.tokens.unsqueeze(1).expand(-1, delta.shape[1], -1)
        found += delta.gather(2, tokens).mul_(torch.bmm(x, lookup.delta.transpose(1, 2))).sum((1, 2))
    return found


# From one call of a layer, with input x [b, ..., in] and the gradient delta of its output, to its parameters, each with
# a function that computes its shares.
Uses = Iterator[tuple[nn.Parameter, Callable[[], Shares]]]


def _with_steps(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(tensor.shape[0], -1, tensor.shape[-1])


def _linear_uses(module: nn.Linear, x: torch.Tensor, delta: torch.Tensor) -> Uses:
    x = _with_steps(x)
    delta = _with_steps(delta)
    yield module.weight, lambda: Outer(((x, delta),))
    if module.bias is not None:
        yield module.bias, lambda: Dense(delta.sum(1))


def _conv1d_uses(module: nn.Module, x: torch.Tensor, delta: torch.Tensor) -> Uses:
    """Uses of the linear layer of transformers that has its weight as [in, out]."""
    x = _with_steps(x)
    delta = _with_steps(delta)
    yield module.weight, lambda: Outer(((delta, x),))
    yield module.bias, lambda: Dense(delta.sum(1))


def _embedding_uses(module: nn.Embedding, x: torch.Tensor, delta: torch.Tensor) -> Uses:
    tokens = x.flatten(1)
    delta = _with_steps(delta)
    if module.padding_idx is not None:  # autograd gives this row no gradient
        delta = delta.masked_fill((tokens == module.padding_idx).unsqueeze(2), 0.0)
    yield module.weight, lambda: Lookup(tokens, delta)


def _norm_uses(module: nn.Module, x: torch.Tensor, delta: torch.Tensor) -> Uses:
    # With a weight of ones the module itself yields the normalised input, in exactly the arithmetic of its class.
    zeros = {name: torch.zeros_like(parameter) for name, parameter in module.named_parameters()}
    ones = zeros | {"weight": torch.ones_like(module.weight)}
    with torch.no_grad():
        normalised = functional_call(module, ones, (x,))
        if _library(module) not in _LIBRARIES:  # it may scale by 1 + weight
            normalised = normalised - functional_call(module, zeros, (x,))
    shape = (delta.shape[0], -1, *delta.shape[delta.dim() - module.weight.dim() :])
    yield module.weight, lambda: Dense((delta * normalised).reshape(shape).sum(1))
    if getattr(module, "bias", None) is not None:
        yield module.bias, lambda: Dense(delta.reshape(shape).sum(1))


# By class name, so that the classes of transformers are known without importing it.
SUPPORTED_MODULES: Registry[Callable[[nn.Module, torch.Tensor, torch.Tensor], Uses]] = Registry(
    {
        "Linear": _linear_uses,
        "Conv1D": _conv1d_uses,
        "Embedding": _embedding_uses,
        "LayerNorm": _norm_uses,
        "RMSNorm": _norm_uses,
        "LlamaRMSNorm": _norm_uses,
        "MistralRMSNorm": _norm_uses,
        "Qwen2RMSNorm": _norm_uses,
        "Qwen3RMSNorm": _norm_uses,
    }
)

# A class of this name from elsewhere may compute something else; norms are only assumed to be linear in their weight.
_OF_LIBRARIES = ("Linear", "Conv1D", "Embedding")
_LIBRARIES = ("torch", "transformers")


def _class_of(module: nn.Module) -> type[nn.Module]:
    """Return a module's class; FSDP2 derives classes of its own from those of sharded modules."""
    kind = type(module)
    original = kind.__bases__[-1]
    return original if kind.__name__ == f"FSDP{original.__name__}" else kind


def _kind(module: nn.Module) -> str:
    return _class_of(module).__name__


def _library(module: nn.Module) -> str:
    return _class_of(module).__module__.split(".")[0]


class _Kept(torch.autograd.Function):
    """Keeps a tensor as autograd keeps what a backward pass needs: with recomputed activations it is recomputed, too.

    Nothing is differentiated through it: it is there for its output's node, which has the tensor in `saved_tensors`.
    """

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return anchor.clone()


def _first_input(args: tuple, kwargs: dict) -> torch.Tensor:
    """Return a layer's input, which its caller may have given by name."""
    return args[0] if args else next(iter(kwargs.values()))


class PerExampleProbe:
    """A context in which one backward pass also yields the statistics of its examples.

    Every loss must depend on one example only. The batch is the first dimension of every layer's input. The gradients
    (`.grad`) may hold those of earlier micro-batches on entry; inner products are with their final values.

    Args:
        batch_size: b, examples in the pass.
        direction: by parameter; inner products are with it instead of the accumulated gradient.
        products: whether to take inner products and the gradient's squared norm.

    Attributes:
        squared_norms: ||g_i||^2 of each example's loss as it enters the differentiated sum, [b], float64.
        inner_products: <g_i, direction>, [b], float64.
        squared_norm: of the accumulated gradient, float64.

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
        self._handles: list = []
        self._uses: dict[nn.Parameter, list[Shares]] = {}
        self._names: dict[nn.Parameter, str] = {}
        self._unreached: set[nn.Parameter] = set()
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
        self.squared_norms = torch.zeros(batch_size, dtype=torch.float64, device=device)
        self.inner_products = torch.zeros_like(self.squared_norms)
        self.squared_norm = torch.zeros((), dtype=torch.float64, device=device)

    @staticmethod
    def _check_supported(path: str, module: nn.Module) -> None:
        kind = _kind(module)
        library = _library(module)
        foreign = kind in _OF_LIBRARIES and library not in _LIBRARIES
        unlike = SUPPORTED_MODULES.get(kind) is _norm_uses and not hasattr(module, "weight")
        if kind not in SUPPORTED_MODULES or foreign or unlike:
            known = ", ".join(SUPPORTED_MODULES)
            raise UnsupportedModuleError(
                f"per-example statistics do not know the module '{path}' of class {kind} of {library} (known: {known})"
            )
        if isinstance(module, nn.Embedding) and (
            module.sparse or module.scale_grad_by_freq or module.max_norm is not None
        ):
            raise UnsupportedModuleError(
                f"per-example statistics need the embedding '{path}' to be dense, without max_norm and "
                f"scale_grad_by_freq"
            )

    def __enter__(self) -> "PerExampleProbe":
        for path, module in self._layers:
            self._handles.append(module.register_forward_hook(self._forward_hook(path), with_kwargs=True))
            if isinstance(module, nn.Embedding):
                hook = module.register_forward_pre_hook(self._expand_shared_index, with_kwargs=True)
                self._handles.append(hook)
        self._watch_gradients()
        return self

    def _watch_gradients(self) -> None:
        self._unreached.update(self._names)
        for parameter in self._names:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))

    @torch.no_grad()
    def __exit__(self, *exception) -> None:
        if self._with_products:  # earlier micro-batches may have reached what this one did not
            for parameter in self._names:
                if parameter in self._unreached and parameter.grad is not None:
                    self.squared_norm += parameter.grad.square().sum()
        self._unreached.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._uses.clear()

    def _expand_shared_index(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Look up positions, [1, T] for the whole batch, for every example."""
        index = _first_input(args, kwargs)
        if index.shape[0] == 1 and self.batch_size > 1:
            return (index.expand(self.batch_size, *index.shape[1:]),), {}
        return None

    def _forward_hook(self, path: str):
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: torch.Tensor) -> None:
            if not (torch.is_grad_enabled() and output.requires_grad):
                return
            x = _first_input(args, kwargs)
            looks_up = isinstance(module, nn.Embedding)
            # Indices of one dimension may be the positions of all examples.
            if x.shape[0] != self.batch_size or (looks_up and x.dim() == 1):
                hint = "; give it positions.expand_as(tokens), or labels.unsqueeze(1)" if looks_up else ""
                raise UnsupportedModuleError(
                    f"per-example statistics need an input [{self.batch_size} examples, ...], for an embedding of two "
                    f"dimensions or more, but '{path}' got {tuple(x.shape)}{hint}"
                )
            kept = _Kept.apply(self._anchor, x.detach())  # before PyTorch 2.13 its node does not live without it
            output.register_hook(lambda delta: self._on_output_gradient(module, *kept.grad_fn.saved_tensors, delta))

        return hook

    def _on_output_gradient(self, module: nn.Module, x: torch.Tensor, delta: torch.Tensor) -> None:
        delta = delta.detach()
        dtype = self._dtype_of(module)
        x = x.to(dtype) if x.is_floating_point() else x
        with torch.autocast(delta.device.type, enabled=False):
            for parameter, shares in SUPPORTED_MODULES[_kind(module)](module, x, delta.to(dtype)):
                if parameter.requires_grad:
                    self._uses.setdefault(parameter, []).append(shares())

    def _dtype_of(self, module: nn.Module) -> torch.dtype:
        return module.weight.dtype

    @torch.no_grad()
    def _on_gradient(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        self._unreached.discard(parameter)
        direction = gradient if self._direction is None else self._direction[parameter]
        self._add(self._names[parameter], self._uses.pop(parameter, ()), direction)
        if self._with_products:
            self.squared_norm += gradient.square().sum()

    def _add(self, name: str, uses: Sequence[Shares], direction: torch.Tensor) -> None:
        joined: dict[type, Shares] = {}
        for use in uses:
            known = joined.get(type(use))
            joined[type(use)] = known.joined(use) if known else use
        if not joined or (Dense in joined and len(joined) > 1):
            raise UnsupportedModuleError(
                f"the parameter '{name}' got a gradient from outside the modules that own it, or an in-place operation "
                f"changed the output of one"
            )
        with torch.autocast(direction.device.type, enabled=False):
            for use in joined.values():
                squares, products = use.squares_and_products(direction, self._with_products)
                self.squared_norms += squares
                self.inner_products += products
            if len(joined) == 2:
                self.squared_norms += 2.0 * cross_term(joined[Outer], joined[Lookup])


def compared_micro_batches(sizes: Sequence[int]) -> set[int]:
    """Return the micro-batches of a step that need inner products.

    The first, whose sum is checked; the last; and for P and R the earliest one that ends after three examples or more.
    """
    early = next((index for index in range(len(sizes)) if sum(sizes[: index + 1]) > 2), 0)
    return {0, early, len(sizes) - 1}


def step_estimate(probes: Sequence[PerExampleProbe]) -> SampleEstimate:
    """Return the estimates of one step with equal weights of all examples; waits for the device.

    Args:
        probes: of the step's micro-batches, in order; those of `compared_micro_batches` have products. With a single
            one P and R stay unknown.

    Raises:
        UnsupportedModuleError: the examples' shares do not add up to the gradient, a part of which therefore did not
            pass through the hooked modules.
    """
    sizes = [probe.batch_size for probe in probes]
    b = sum(sizes)
    compared = sorted(compared_micro_batches(sizes))
    tensors = [probe.squared_norms for probe in probes]
    for index in compared:
        tensors += [probes[index].inner_products, probes[index].squared_norm.reshape(1)]
    numbers = iter(torch.cat(tensors).tolist())
    # Every example entered with weight 1 / b: the probes have g_i / b, and sums of these.
    raw = [next(numbers) for _ in range(b)]
    norms = [number * b**2 for number in raw]
    comparisons = []
    for index in compared:
        n = sum(sizes[: index + 1])
        products = [next(numbers) for _ in range(sizes[index])]
        squared_norm = next(numbers)
        if index == 0:  # the shares have sum <P_i, g> = ||g||^2; by Cauchy-Schwarz rounding is relative to the bound
            bound = math.sqrt(n * math.fsum(raw[:n]) * squared_norm)
            if abs(sum_or_nan(products) - squared_norm) > 0.05 * bound:
                raise UnsupportedModuleError(
                    "the per-example gradients do not add up to the batch gradient. Either a parameter is used outside "
                    "the module that owns it, or an example's loss depends on another example"
                )
        comparisons.append(
            Comparison(
                examples=n,
                squared_norm=squared_norm * (b / n) ** 2,
                total=math.fsum(norms[:n]),
                squared_norms=norms[n - sizes[index] : n],
                inner_products=[product * b**2 / n for product in products],
            )
        )
    part = next((comparison for comparison in comparisons if 2 < comparison.examples < b), None)
    return sample_estimate(comparisons[-1], math.fsum(norm**2 for norm in norms), part)
