"""A flat model whose parameters are sharded over the devices of a node, with FSDP2 (`fully_shard`).

Each layer of the model is one FSDP2 group: it is gathered for its forward and its backward pass only. What is in no
layer belongs to the root. A device keeps some rows of every parameter, of its gradient, and so of all state that lives
between rounds. As in a whole model, the parameters are one flat buffer and the gradients another: FSDP2's shards are
views of them.

FSDP2 takes a shard as it is where all devices have equally many rows. Where rows run out, the last devices' shards are
padded copies, which are filled from the flat buffer before each pass. Only PyTorch's public interface is used.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from algorithms.batch.gradient_statistics import GradientMoments, SampleEstimate, across_devices_estimate
from algorithms.batch.losses import logits_of
from algorithms.batch.per_example import PerExampleProbe
from algorithms.flat import SKETCH_SIZE, Block, inner_product, sketch
from fabrics.training.flat_model import FlatModel, flat_blocks, flat_offsets
from fabrics.training.worker import TrainingError
from utils.checkpoint.checkpoint import FilePart
from utils.distributed.devices import share_of
from utils.distributed.shard_groups import ShardGroup, reduce_scatter

T = TypeVar("T")

# Division of a model over the devices of a node: layers that are gathered one by one, and rows of tensors


def layers_of(module: nn.Module, in_list: bool = False) -> list[nn.Module]:
    """Return the modules in a model's outermost lists, once each, except those without submodules.

    A container in a list, which has no forward of its own, stands for its entries. in_list: the module is one.
    """
    found: list[nn.Module] = []
    for child in module.children():
        has_forward = type(child).forward is not nn.Module.forward
        if isinstance(child, nn.ModuleList | nn.ModuleDict) and not (in_list and has_forward):
            found += layers_of(child, in_list or isinstance(child, nn.ModuleList))
        elif not in_list:
            found += layers_of(child)
        elif next(child.children(), None) is not None:
            found.append(child)
    return list(dict.fromkeys(found))


def sharded_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers that share no parameter with the rest of the model: a tied parameter belongs to the root."""
    layers = layers_of(module)
    inside = {child: number for number, layer in enumerate(layers) for child in layer.modules()}
    users: dict[nn.Parameter, set[int]] = {}
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            users.setdefault(parameter, set()).add(inside.get(child, -1))
    return [layer for layer in layers if all(len(users[parameter]) == 1 for parameter in layer.parameters())]


def _linear_parts(module: nn.Module) -> list[nn.Module]:
    """Return the largest parts of a module that have parameters of linear layers only; GPT-2 calls these Conv1D."""
    owners = [child for child in module.modules() if next(child.parameters(recurse=False), None) is not None]
    if owners and all(type(owner).__name__ in ("Linear", "Conv1D") for owner in owners):
        return [module]
    return [part for child in module.children() for part in _linear_parts(child)]


def sharded_parts(module: nn.Module) -> list[list[nn.Module]]:
    """Return for each sharded layer the parts that autocast casts, and that are gathered together in its type."""
    parts = [_linear_parts(layer) for layer in sharded_layers(module)]
    return [of_layer for of_layer in parts if of_layer]


def gathered_elements(module: nn.Module) -> int:
    """Return the largest number of elements of a node's model that one device holds whole at a time.

    The root stays whole during a pass. Of the layers there are two (the next one is gathered ahead) and one gradient.
    """
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in sharded_layers(module)]
    root = sum(parameter.numel() for parameter in module.parameters()) - sum(layers)
    return root + max(3 * max(layers, default=0), root)


@dataclass(frozen=True)
class ShardLayout:
    """Some tensors, one after the other, of which each device has some rows.

    Every device has equally many elements of a tensor: where rows run out, zeros follow.

    Attributes:
        wholes: the place of each tensor in whole flat tensors.
        places: the place of each tensor's part in a device's flat tensors, the same on all devices.
    """

    wholes: tuple[Block, ...]
    whole_size: int
    places: tuple[slice, ...]
    size: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], devices: int) -> "ShardLayout":
        """Lay out tensors with these names and shapes over n devices, as FSDP2 cuts them."""
        starts, whole_size = flat_offsets([math.prod(shape) for shape in shapes.values()])
        lengths = [-(-shape[0] // devices) * math.prod(shape[1:]) for shape in shapes.values()]
        offsets, size = flat_offsets(lengths)
        places = tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))
        return cls(flat_blocks(shapes, starts), whole_size, places, size)

    @property
    def lengths(self) -> list[int]:
        """Elements of each tensor on a device."""
        return [place.stop - place.start for place in self.places]

    def parts(self, index: int) -> Iterator[tuple[slice, slice]]:
        """Yield for each tensor the rows of the device `index`: in whole flat tensors, and in the device's own."""
        for whole, place, length in zip(self.wholes, self.places, self.lengths, strict=True):
            first = min(index * length, whole.size)
            last = min(first + length, whole.size)
            yield slice(whole.start + first, whole.start + last), slice(place.start, place.start + last - first)

    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """Return the part of a whole flat tensor that the device `index` has."""
        flat = tensor.new_zeros(self.size)
        for theirs, own in self.parts(index):
            flat[own] = tensor[theirs]
        return flat


# Statistics of a shared pass


class ShardedProbe(PerExampleProbe):
    """The PerExampleProbe of a shared pass; afterwards all devices have the statistics of all examples."""

    def __init__(self, model: "ShardedModel", examples: int, products: bool):
        own, share = model.local_slice(examples)
        super().__init__(model.module, batch_size=own.stop - own.start, products=products)
        self._model = model
        self._own = own
        self._counts = share > 0.0
        self._examples = examples
        # A module's parameter is another tensor while it is gathered.
        self._gathered: dict[str, nn.Parameter] = {}
        self._full_names = {
            (module, name): self._names[parameter]
            for _, module in self._layers
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad
        }

    def _watch_gradients(self) -> None:
        """Do nothing: gradients are looked at after the pass, when they are summed over the devices."""

    def _on_output_gradient(self, module: nn.Module, x: torch.Tensor, delta: torch.Tensor) -> None:
        # A layer's output is that of its last module, whose hook comes before FSDP2's.
        self._model.unshard(module)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                self._gathered[self._full_names[module, name]] = parameter
        super()._on_output_gradient(module, x, delta)

    def _dtype_of(self, module: nn.Module) -> torch.dtype:
        return self._model.parameters.dtype  # layers may be gathered in a smaller one

    def __exit__(self, *exception) -> None:
        try:
            if exception[0] is None:
                self._conclude()
        finally:  # a device may run out of memory here
            super().__exit__(*exception)

    @torch.no_grad()
    def _conclude(self) -> None:
        if self._with_products:
            for block, gradient in self._model.gather(self._model.gradient):
                self._add_uses(block.name, gradient)
                self.squared_norm += gradient.square().sum()
        else:
            for name, parameter in self._gathered.items():
                self._add_uses(name, parameter)
        numbers = self.squared_norms.new_zeros(2, self._examples)
        if self._counts:
            numbers[0, self._own] = self.squared_norms
            numbers[1, self._own] = self.inner_products
        self.squared_norms, self.inner_products = self._model.shard_group.sum(numbers)
        self.batch_size = self._examples

    def _add_uses(self, name: str, against: torch.Tensor) -> None:
        uses = self._uses.pop(self._gathered.get(name), ())
        if uses:
            self._add(name, uses, against)


class DeviceProbe:
    """The gradient of each device in a shared pass; afterwards all devices have its statistics."""

    def __init__(self, model: "ShardedModel", examples: int):
        devices = model.shard_group.size
        self._model = model
        self._batches = [len(share_of(range(examples), device, devices)) for device in range(devices)]
        self._products = torch.zeros(2, devices, dtype=torch.float64, device=model.device)

    def __enter__(self) -> "DeviceProbe":
        self._model.gradient_sum.probe = self
        return self

    def __exit__(self, *exception) -> None:
        self._model.gradient_sum.probe = None
        if exception[0] is None:
            self._model.shard_group.sum(self._products)

    def add(self, gradients: torch.Tensor, total: torch.Tensor) -> None:
        """Add some elements of the gradients of all devices, [devices, elements], and of their sum, [elements]."""
        for device, gradient in enumerate(gradients):
            self._products[0, device] += inner_product(gradient, gradient)
            self._products[1, device] += inner_product(gradient, total)

    def moments(self, examples: int) -> tuple[list[GradientMoments], list[int]]:
        """Return the moments of the devices that had some of the step's examples, and how many each had."""
        batches = [batch for batch in self._batches if batch]
        # Devices without examples have zero gradients: the mean over the others is the sum through their number.
        squares, products = (self._products[:, : len(batches)] * examples**2).tolist()
        whole = sum(products)
        devices = len(batches)
        moments = [
            GradientMoments(square, product / devices, whole / devices**2)
            for square, product in zip(squares, products, strict=True)
        ]
        return moments, batches


# The model


class ShardedModel(FlatModel):
    """The flat model of one device of a node; all devices of the node build it and run its passes together.

    All flat tensors are this device's parts. A flat tensor as it is with the model on one device is called whole.

    Args:
        module: the whole model on the CPU, on the first device; its architecture on the meta device, on the others.
        shard_group: the devices of the node.
        autocast: the type that passes compute in. Then the linear parts of each layer are a group, gathered in that
            type, so that no other copy of them is made; the rest of a layer belongs to the root and keeps its type.

    Raises:
        ValueError: the module cannot be sharded.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        shard_group: ShardGroup,
        autocast: torch.dtype | None = None,
    ):
        self.shard_group = shard_group
        super().__init__(module, device, autocast)

    # Construction

    def _lay_out(self, named: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in self.module.named_parameters():
            if parameter.dim() == 0:
                raise ValueError(f"the parameter {name} is a single number, which cannot be sharded")
        dtype = next(iter(named.values())).dtype
        wholes = self._take_parameters()
        self._broadcast_buffers()
        self._shard(dtype)
        self._fill(dtype, wholes)

    def _take_parameters(self) -> dict[str, torch.Tensor]:
        """Move the module's parameters to the meta device; return their values by name, on the first device."""
        named = dict(self.module.named_parameters())
        empty = {
            parameter: nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            for parameter in named.values()
        }
        for child in self.module.modules():
            for name, parameter in list(child.named_parameters(recurse=False, remove_duplicate=False)):
                setattr(child, name, empty[parameter])
        return {name: parameter.detach() for name, parameter in named.items()} if self.shard_group.index == 0 else {}

    def _broadcast_buffers(self) -> None:
        """Give all devices the first one's buffers, and its tensors that are plain attributes of modules."""
        for child in self.module.modules():
            plain = {name: value for name, value in vars(child).items() if isinstance(value, torch.Tensor)}
            for name, tensor in [*child.named_buffers(recurse=False, remove_duplicate=False), *plain.items()]:
                setattr(child, name, self.shard_group.broadcast(tensor.detach(), self.device))

    def _shard(self, dtype: torch.dtype) -> None:
        mesh = self.shard_group.mesh
        if self._autocast is None:
            groups = sharded_layers(self.module)
            policy = MixedPrecisionPolicy()
        else:
            groups = sharded_parts(self.module)
            policy = MixedPrecisionPolicy(self._autocast, reduce_dtype=dtype, cast_forward_inputs=False)
        self.gathered_whole = not groups
        for group in groups:
            fully_shard(group, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        # FSDP2 looks for tensors in the output; this hook comes before its own.
        self.module.register_forward_hook(_logits_if_hidden)
        # By default the root stays gathered after a forward pass: after an evaluation it would keep old parameters.
        fully_shard(self.module, mesh=mesh, reshard_after_forward=True)
        self.gradient_sum = GradientSum(self.shard_group)
        self._owners: dict[nn.Module, FSDPModule] = {}
        for child in self.module.modules():  # the root comes first, and layers replace it as owners of their parts
            if isinstance(child, FSDPModule):
                child.set_custom_reduce_scatter(self.gradient_sum)
                child.set_gradient_divide_factor(1.0)  # a sum: examples have their weights already
                child.set_force_sum_reduction_for_comms(True)
                self._owners |= dict.fromkeys(child.modules(), child)

    @torch.no_grad()
    def _fill(self, dtype: torch.dtype, wholes: dict[str, torch.Tensor]) -> None:
        """Make the flat buffers, fill them from the first device's whole parameters, and make them FSDP2's shards."""
        empty = dict(self.module.named_parameters())
        trainable = {name: parameter for name, parameter in empty.items() if parameter.requires_grad}
        shapes = {name: tuple(parameter.shape) for name, parameter in trainable.items()}
        self._layout = ShardLayout.of(shapes, self.shard_group.size)
        flat = torch.zeros(self._layout.size, dtype=dtype, device=self.device)
        gradient = torch.zeros_like(flat)
        places = dict(zip(trainable, self._layout.places, strict=True))
        shards: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in empty.items():
            if name in places:
                part = flat[places[name]]
            else:
                (length,) = ShardLayout.of({name: tuple(parameter.shape)}, self.shard_group.size).lengths
                part = torch.zeros(length, dtype=parameter.dtype, device=self.device)
            self.shard_group.scatter(wholes.pop(name, None), part)
            shard = nn.Parameter(_as_shard(part, parameter), requires_grad=name in places)
            if name in places:
                shard.grad = _as_shard(gradient[places[name]], parameter)
            shards[parameter] = shard
        # Tied parameters have several names and one shard.
        named = self.module.named_parameters(remove_duplicate=False)
        self.module.load_state_dict({name: shards[parameter] for name, parameter in named}, strict=False, assign=True)
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, place in places.items():
            local = self.module.get_parameter(name).to_local()
            part = flat[place][: local.numel()]
            if local.numel() and local.data_ptr() != part.data_ptr():
                self._copies.append((local, part.view_as(local)))
        self.parameters = nn.Parameter(flat)
        self.parameters.grad = gradient
        shapes = {name: tuple(shards[parameter].to_local().shape) for name, parameter in trainable.items()}
        self.blocks = flat_blocks(shapes, [place.start for place in self._layout.places])

    @torch.no_grad()
    def _update_copies(self) -> None:
        for copy, part in self._copies:
            copy.copy_(part)

    # Passes

    def logits(self, batch: Mapping[str, torch.Tensor], eager: bool = False) -> torch.Tensor:
        self.count_pass()
        self._update_copies()
        with self.shard_group.explaining(), self._autocast_context():
            return logits_of(self.module(**batch))

    def attempt(self, work: Callable[[], T]) -> T | None:
        """See FlatModel. The other devices are in the middle of the pass, so it cannot be made smaller."""
        done = super().attempt(work)
        if done is None:
            raise TrainingError(
                f"max_batch_size: {self.device}, device {self.shard_group.index} of a node of {self.shard_group.size}, "
                f"ran out of memory; lower max_batch_size or sequence_length, or raise devices_per_node"
            )
        return done

    def probe(self, examples: int, products: bool) -> ShardedProbe | DeviceProbe:
        return DeviceProbe(self, examples) if self.compares_devices else ShardedProbe(self, examples, products)

    def estimate(self, probes: Sequence, examples: int) -> SampleEstimate:
        if not self.compares_devices:
            return super().estimate(probes, examples)
        squared_norm = self.shard_group.sum(inner_product(self.gradient, self.gradient)).item() * examples**2
        return across_devices_estimate([probe.moments(examples) for probe in probes], squared_norm)

    def unshard(self, module: nn.Module) -> None:
        """Gather the parameters of the group that a module is in, unless they are gathered."""
        if isinstance(next(module.parameters(recurse=False)), DTensor):
            self._owners[module].unshard()

    # What the devices of the node do together

    def local_slice(self, examples: int) -> tuple[slice, float]:
        own = share_of(range(examples), self.shard_group.index, self.shard_group.size)
        return (slice(own[0], own[-1] + 1), len(own) / examples) if own else (slice(0, 1), 0.0)

    def local_batches(self, batches: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        size = self.shard_group.size
        own = batches[self.shard_group.index :: size]
        most = -(-len(batches) // size)
        return own, batches[: most - len(own)]

    def norm(self, flat: torch.Tensor) -> torch.Tensor:
        return self.shard_group.sum(torch.linalg.vector_norm(flat).square()).sqrt()

    def distance(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.norm(a - b)

    def sketch(self, flat: torch.Tensor, seed: int, size: int = SKETCH_SIZE, rows: int = 1) -> torch.Tensor:
        """Sketch the whole vector: consecutive rows of a parameter are consecutive there as well."""
        found = torch.zeros(rows * size, dtype=flat.dtype, device=flat.device)
        for theirs, own in self._layout.parts(self.shard_group.index):
            found += sketch(flat[own], seed, size, rows, theirs.start)
        return self.shard_group.sum(found)

    def flatten(self, module: nn.Module | None) -> torch.Tensor:
        """See FlatModel. The module is None on all devices but the first, which sends them their parts."""
        flat = torch.zeros_like(self.parameters.data)
        trainable = [None] * len(self._layout.places)
        if module is not None:
            trainable = [parameter.detach() for parameter in module.parameters() if parameter.requires_grad]
        for parameter, place in zip(trainable, self._layout.places, strict=True):
            self.shard_group.scatter(parameter, flat[place])
        return flat

    def gather(self, flat: torch.Tensor) -> Iterator[tuple[Block, torch.Tensor]]:
        """Yield the tensors of a flat tensor whole, one after the other."""
        for whole, place in zip(self._layout.wholes, self._layout.places, strict=True):
            yield whole, self.shard_group.gather(flat[place]).flatten()[: whole.size].view(whole.shape)

    # Checkpoints and saved models

    def local_part(self, tensor: torch.Tensor) -> torch.Tensor:
        layout = self._layout
        return layout.part(tensor, self.shard_group.index) if tensor.shape == (layout.whole_size,) else tensor

    def checkpoint_tensors(self, groups: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, FilePart]]:
        return {group: {name: self._file_part(own[name]) for name in own} for group, own in groups.items()}

    def _file_part(self, tensor: torch.Tensor) -> FilePart:
        layout = self._layout
        if tensor.shape != (layout.size,):  # all devices have it
            return FilePart(tensor, tuple(tensor.shape), ((0, slice(None)),) if self.shard_group.index == 0 else ())
        pieces = ((theirs.start, own) for theirs, own in layout.parts(self.shard_group.index))
        return FilePart(tensor, (layout.whole_size,), tuple(pieces))

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        self._update_copies()
        state = self.module.state_dict(keep_vars=True)
        whole = {}
        with self.shard_group.explaining():
            for tensor in dict.fromkeys(state.values()):  # tied parameters once
                gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if self.shard_group.index == 0:
                    whole[tensor] = gathered.cpu()
        return {name: whole[tensor] for name, tensor in state.items()} if whole else {}


class GradientSum:
    """The reduction of gradients that FSDP2 calls (`set_custom_reduce_scatter`); a probe may look at its input."""

    def __init__(self, shard_group: ShardGroup):
        self.probe: DeviceProbe | None = None
        self._shard_group = shard_group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        if self.probe is None:
            return reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        gradients = self._shard_group.exchange(input_tensor)
        torch.sum(gradients, 0, out=output_tensor)
        self.probe.add(gradients, output_tensor)


def _as_shard(part: torch.Tensor, like: DTensor) -> DTensor:
    """Return a padded flat part of a tensor as the shard of a device, without copying it."""
    rows = part.view(-1, *like.shape[1:])[: len(like.to_local())]
    return DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _logits_if_hidden(module: nn.Module, arguments: tuple, output: Any) -> Any:
    """Return a module's output, or its logits if FSDP2 would not find the tensors in it."""
    return output if isinstance(output, torch.Tensor | dict | tuple | list) else logits_of(output)
