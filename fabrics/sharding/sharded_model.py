"""A flat model whose parameters are sharded over the devices of a node, with FSDP2 (fully_shard).

Every layer is a group of its own, gathered for its forward and its backward pass alone; what is in no layer belongs to
the root. A device keeps some rows of every parameter, the gradients of these, and so of all that lives between rounds:
its parts are one flat buffer, as the parameters of a whole model are elsewhere. FSDP2's shards are views of that
buffer, and gradients are added up in views of another.

FSDP2 has no public name for what makes its shards such views. The attributes used here are those of the release that
requirements.txt pins, and are used in this file alone.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from algorithms.batch.across_workers import (
    SKETCH_SIZE,
    GradientMoments,
    across_devices_estimate,
    inner_product,
    sketch,
)
from algorithms.batch.gradient_statistics import SampleEstimate
from algorithms.batch.losses import logits_of
from algorithms.batch.per_example import PerExampleProbe
from algorithms.synchronisation.method import Block, Wholes
from fabrics.sharding.layers import CompiledLayers, sharded_layers, sharded_parts
from fabrics.sharding.shard_layout import ShardLayout
from fabrics.training.flat_model import FlatModel, StateDictError, blocks_of
from fabrics.training.worker import TrainingError
from utils.checkpoint.parts import FilePart
from utils.distributed.placement import share_of
from utils.distributed.shard_groups import ShardGroup

T = TypeVar("T")


class _Reduction:
    """Reduction of a layer's gradients, in which a probe may look at those of the devices; FSDP2 calls it.

    Attributes:
        probe: it, while there is one.
    """

    def __init__(self, group: ShardGroup):
        self.probe: DeviceProbe | None = None
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        if self.probe is None:
            return dist.reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        rows = self._group.exchange(input_tensor)
        torch.sum(rows, 0, out=output_tensor)
        self.probe.add(rows, output_tensor)


def _visible(module: nn.Module, arguments: tuple, output: Any) -> Any:
    """The output of a module, or its logits where FSDP2 would not find the tensors in it."""
    return output if isinstance(output, torch.Tensor | dict | tuple | list) else logits_of(output)


class ShardedModel(FlatModel):
    """The flat model of one device of a node; all devices of the node build it, and run its passes, together.

    Everything flat is this device's part. A flat tensor as it would be with the whole model on one device is called
    whole; the devices' parts, one after the other, are its rows with some zeros.

    Args:
        module: the whole model on the CPU in the first device; its architecture on the meta device in the others.
        device: this one's.
        shard_group: the devices of the node.
        autocast: as in FlatModel. Linear parts of layers are groups then, and gathered in that type, so that no
            other copy of them is made and kept; what else is in a layer belongs to the root, in its own type.

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
        self._layers: CompiledLayers | None = None
        super().__init__(module, device, autocast)

    def _lay_out(self, named: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in self.module.named_parameters():
            if parameter.dim() == 0:
                raise ValueError(f"the parameter {name} is a single number, which cannot be sharded")
        dtype = next(iter(named.values())).dtype
        wholes = self._take_parameters()
        self._spread_buffers()
        groups = sharded_layers(self.module)
        policy = MixedPrecisionPolicy()
        if self._autocast is not None:
            groups = sharded_parts(self.module)
            policy = MixedPrecisionPolicy(self._autocast, reduce_dtype=dtype, cast_forward_inputs=False)
        self._groups = groups
        for group in groups:
            fully_shard(group, mesh=self.shard_group.mesh, reshard_after_forward=True, mp_policy=policy)
        # Before FSDP2's own hook on the output, which looks for tensors.
        self.module.register_forward_hook(_visible)
        # The root as well: after an evaluation it would keep the parameters that it was evaluated with.
        fully_shard(self.module, mesh=self.shard_group.mesh, reshard_after_forward=True)
        self.reduction = _Reduction(self.shard_group)
        for module in self._fsdp_modules():
            module.set_custom_reduce_scatter(self.reduction)
            module.set_gradient_divide_factor(1.0)  # a sum: examples have their weights already
            module.set_force_sum_reduction_for_comms(True)
        self._owners: dict[nn.Module, FSDPModule] = {}
        for owner in self._fsdp_modules():  # the root comes first
            self._owners |= dict.fromkeys(owner.modules(), owner)
        groups = chain.from_iterable(child._get_fsdp_state()._fsdp_param_groups for child in self._fsdp_modules())
        by_parameter = {held.sharded_param: held for group in groups for held in group.fsdp_params}
        self._adopt(dtype, {name: by_parameter[p] for name, p in self.module.named_parameters()}, wholes)

    def _take_parameters(self) -> dict[str, torch.Tensor]:
        """Move the module's parameters to the meta device; return the whole ones by name, in the first device.

        Raises:
            ValueError: the devices have modules of different architectures.
        """
        named = dict(self.module.named_parameters())
        described = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in named.items()]
        checksum = zlib.crc32(repr(described).encode())
        if self.shard_group.least(checksum) != -self.shard_group.least(-checksum):
            raise ValueError("the model has another architecture in the first device than in others")
        empty = {
            parameter: nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            for parameter in named.values()
        }
        for child in self.module.modules():
            for name, parameter in list(child.named_parameters(recurse=False, remove_duplicate=False)):
                setattr(child, name, empty[parameter])
        return {name: parameter.detach() for name, parameter in named.items()} if self.shard_group.index == 0 else {}

    def _spread_buffers(self) -> None:
        """Give all devices the first one's buffers, and tensors that modules have as plain attributes."""
        for child in self.module.modules():
            plain = {name: value for name, value in vars(child).items() if isinstance(value, torch.Tensor)}
            for name, tensor in [*child.named_buffers(recurse=False, remove_duplicate=False), *plain.items()]:
                setattr(child, name, self.shard_group.broadcast(tensor.detach(), self.device))

    def _fsdp_modules(self) -> Iterator[FSDPModule]:
        return (child for child in self.module.modules() if isinstance(child, FSDPModule))

    def _adopt(self, dtype: torch.dtype, held_by_name: Mapping, wholes: dict[str, torch.Tensor]) -> None:
        """Fill FSDP2's shards, those of trainable parameters in one flat buffer; let it add gradients to another.

        wholes: the whole parameters, in the first device; one at a time travels and is let go.
        """
        self._held = {name: held for name, held in held_by_name.items() if held.sharded_param.requires_grad}
        # As FSDP2 pads them, so that all devices' parts have one length.
        lengths = [held._sharded_param_data.numel() for held in self._held.values()]
        shapes = {name: tuple(held._orig_size) for name, held in self._held.items()}
        self._layout = ShardLayout.of(shapes, lengths)
        flat = torch.zeros(self._layout.size, dtype=dtype, device=self.device)
        gradient = torch.zeros_like(flat)
        places = dict(zip(self._held, self._layout.places, strict=True))
        for name, held in held_by_name.items():
            if name in places:
                data = flat[places[name]]
            else:
                data = torch.zeros(held._sharded_param_data.shape, dtype=held.sharded_param.dtype, device=self.device)
            self.shard_group.scatter(wholes.pop(name, None), data)
            held._sharded_param_data = data
            shard = held.to_sharded_dtensor(self._rows(data, held))
            held.sharded_param = nn.Parameter(shard, requires_grad=name in places)
            held._setattr_on_modules(held.sharded_param)
            if name in places:
                held.sharded_param.grad = held.to_sharded_dtensor(self._rows(gradient[places[name]], held))
        self.parameters = nn.Parameter(flat)
        self.parameters.grad = gradient
        shapes = {name: tuple(held.sharded_size) for name, held in self._held.items()}
        self.blocks = blocks_of(shapes, [place.start for place in self._layout.places], self._layout.size)
        self.wholes = Wholes(())  # no tensor is whole here

    @staticmethod
    def _rows(data: torch.Tensor, held) -> torch.Tensor:
        """This device's rows in its padded part of a parameter."""
        return data.view(held.padded_sharded_param_size).narrow(0, 0, held.sharded_size[0])

    def views(self, flat: torch.Tensor) -> dict[nn.Parameter, torch.Tensor]:
        raise NotImplementedError("a device of several has parts of parameters only")

    # Passes

    def logits(self, batch: Mapping[str, torch.Tensor], hooked: bool = False) -> torch.Tensor:
        self._compute(self.compiled and not hooked)
        with self.shard_group.explaining(), self._computing():
            return logits_of(self.module(**batch))

    def _compute(self, compiled: bool) -> None:
        """Let passes from now on run through compiled layers or not: those parts that nothing is gathered for within,
        as code that is made in pieces follows the first micro-batch."""
        if compiled and self._layers is None:
            self._layers = CompiledLayers(self._groups)
        if self._layers is not None:
            self._layers.on = compiled

    @contextmanager
    def evaluating(self, parameters: torch.Tensor) -> Iterator[nn.Module]:
        self._compute(False)
        with self.shard_group.explaining(), super().evaluating(parameters) as module:
            yield module

    def attempt(self, work: Callable[[], T]) -> T | None:
        """See FlatModel; the other devices are in the middle of the pass, so it cannot be made smaller.

        Raises:
            TrainingError: this device ran out of memory.
        """
        done = super().attempt(work)
        if done is None:
            raise TrainingError(
                f"max_batch_size: {self.device}, device {self.shard_group.index} of a node of {self.shard_group.size}, "
                f"ran out "
                f"of memory; lower max_batch_size or sequence_length, or raise devices_per_node"
            )
        return done

    def probe(self, examples: int, products: bool) -> "ShardedProbe | DeviceProbe":
        return DeviceProbe(self, examples) if self.compares_devices else ShardedProbe(self, examples, products)

    def estimate(self, probes: Sequence, examples: int) -> SampleEstimate:
        return devices_estimate(self, probes, examples) if self.compares_devices else super().estimate(probes, examples)

    def unshard(self, module: nn.Module) -> None:
        """Gather the parameters of the layer that a module is in, where they are not yet."""
        if isinstance(next(module.parameters(recurse=False)), DTensor):
            self._owners[module].unshard()

    def gathered(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every trainable parameter as modules have it while it is gathered, after a pass, by name."""
        return ((name, held._unsharded_param) for name, held in self._held.items())

    # Together with the other devices

    def local_slice(self, examples: int) -> tuple[slice, float]:
        own = share_of(range(examples), self.shard_group.index, self.shard_group.size)
        return (slice(own[0], own[-1] + 1), len(own) / examples) if own else (slice(0, 1), 0.0)

    def local_batches(self, batches: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        own, most = batches[self.shard_group.index :: self.shard_group.size], -(-len(batches) // self.shard_group.size)
        return own, batches[: most - len(own)]

    def norm(self, flat: torch.Tensor) -> torch.Tensor:
        return self.shard_group.sum(torch.linalg.vector_norm(flat).square()).sqrt()

    def distance(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.norm(a - b)

    @property
    def whole_size(self) -> int:
        return self._layout.whole_size

    def local_places(self, places: torch.Tensor) -> torch.Tensor:
        wholes, lengths = self._layout.wholes, torch.tensor(self._layout.lengths)
        starts, sizes = (torch.tensor([getattr(whole, name) for whole in wholes]) for name in ("start", "size"))
        firsts = torch.tensor([place.start for place in self._layout.places])
        numbers = torch.searchsorted(starts, places, right=True) - 1
        within = places - starts[numbers]
        offsets = within - self.shard_group.index * lengths[numbers]
        own = (within < sizes[numbers]) & (offsets >= 0) & (offsets < lengths[numbers])
        return (firsts[numbers] + offsets)[own]

    def sketch(self, flat: torch.Tensor, seed: int, size: int = SKETCH_SIZE, rows: int = 1) -> torch.Tensor:
        """That of the whole vector: rows of a parameter that follow each other do so there as well."""
        found = torch.zeros(rows * size, dtype=flat.dtype, device=flat.device)
        for theirs, own in self._layout.parts(self.shard_group.index):
            found += sketch(flat[own], seed, size, rows, theirs.start)
        return self.shard_group.sum(found)

    def flatten(self, module: nn.Module | None) -> torch.Tensor:
        """See FlatModel; None in all devices but the first, which sends them their parts."""
        flat = torch.zeros_like(self.parameters.data)
        trainable = [None] * len(self._held)
        if module is not None:
            trainable = [parameter.detach() for parameter in module.parameters() if parameter.requires_grad]
        for parameter, place in zip(trainable, self._layout.places, strict=True):
            self.shard_group.scatter(parameter, flat[place])
        return flat

    def local_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        layout = self._layout
        return layout.part(tensor, self.shard_group.index) if tensor.shape == (layout.whole_size,) else tensor

    def gather(self, flat: torch.Tensor) -> Iterator[tuple[Block, torch.Tensor]]:
        """Every parameter's part of a whole flat tensor, one after the other, in its shape."""
        return self._layout.gather(flat, self.shard_group)

    def checkpoint_tensors(self, groups: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, FilePart]]:
        return {group: {name: self._kept(own[name]) for name in own} for group, own in groups.items()}

    def _kept(self, tensor: torch.Tensor) -> FilePart:
        layout = self._layout
        if tensor.shape != (layout.size,):  # all devices have it
            return FilePart(tensor, tuple(tensor.shape), ((0, slice(None)),) if self.shard_group.index == 0 else ())
        pieces = ((theirs.start, own) for theirs, own in layout.parts(self.shard_group.index))
        return FilePart(tensor, (layout.whole_size,), tuple(pieces))

    @torch.no_grad()
    def full_state_dict(
        self, keep: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu
    ) -> dict[str, torch.Tensor]:
        held, keeps, problem = self.module.state_dict(keep_vars=True), self.shard_group.index == 0, None
        whole: dict[torch.Tensor, torch.Tensor] = {}
        with self.shard_group.explaining():
            for tensor in dict.fromkeys(held.values()):
                gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
                if keeps and problem is None:
                    try:
                        whole[tensor] = keep(gathered)
                    except Exception as error:  # the others go on
                        problem = f"{type(error).__name__}: {error}"
                        whole.clear()
        if problem is not None:
            raise StateDictError(problem)
        return {name: whole[tensor] for name, tensor in held.items()} if keeps else {}


class ShardedProbe(PerExampleProbe):
    """As PerExampleProbe, of a pass that the devices of a shard group make together; afterwards all know the same.

    Args:
        working: of this device.
        examples: of the pass, in all devices.
        products: as in PerExampleProbe.
    """

    def __init__(self, working: "ShardedModel", examples: int, products: bool):
        own, share = working.local_slice(examples)
        super().__init__(working.module, batch_size=own.stop - own.start, products=products)
        self._working, self._own, self._counts, self._examples = working, own, share > 0.0, examples

    def _watch_gradients(self) -> None:
        """They are looked at when all are there."""

    def _on_output_gradient(self, module: nn.Module, x: torch.Tensor, delta: torch.Tensor) -> None:
        # The output of a layer is that of its last module, whose hook comes before FSDP2's.
        self._working.unshard(module)
        super()._on_output_gradient(module, x, delta)

    def _dtype_of(self, module: nn.Module) -> torch.dtype:
        return self._working.parameters.dtype  # layers may be gathered in a smaller one

    def __exit__(self, *exception) -> None:
        try:
            if exception[0] is None:
                self._conclude()
        finally:  # a device may run out of memory in that, and goes on with less
            super().__exit__(*exception)

    @torch.no_grad()
    def _conclude(self) -> None:
        gradients = self._working.gather(self._working.gradient) if self._with_products else None
        for name, parameter in self._working.gathered():
            gradient = parameter if gradients is None else next(gradients)[1]
            if uses := self._uses.pop(parameter, ()):
                self._add(name, uses, gradient)
            if gradients is not None:
                self._squared_norm += gradient.square().sum()
        numbers = self._squared_norms.new_zeros(2, self._examples)
        if self._counts:
            numbers[0, self._own], numbers[1, self._own] = self._squared_norms, self._inner_products
        self._squared_norms, self._inner_products = self._working.shard_group.sum(numbers)
        self.batch_size = self._examples


class DeviceProbe:
    """The devices' gradients beside each other in a pass that they make together; afterwards all know the same.

    Args:
        working: of this device.
        examples: of the pass, in all devices.
    """

    def __init__(self, working: "ShardedModel", examples: int):
        devices = working.shard_group.size
        self._working = working
        self._batches = [len(share_of(range(examples), device, devices)) for device in range(devices)]
        self._products = torch.zeros(2, devices, dtype=torch.float64, device=working.device)

    def __enter__(self) -> "DeviceProbe":
        self._working.reduction.probe = self
        return self

    def __exit__(self, *exception) -> None:
        self._working.reduction.probe = None
        if exception[0] is None:
            self._working.shard_group.sum(self._products)

    def add(self, rows: torch.Tensor, total: torch.Tensor) -> None:
        """rows: [devices, numbers] of some gradient, of each device. total: their sum."""
        for beside, row in enumerate(rows):
            self._products[0, beside] += inner_product(row, row)
            self._products[1, beside] += inner_product(row, total)

    def moments(self, examples: int) -> tuple[list[GradientMoments], list[int]]:
        """Of the devices that had examples, and how many; examples: of the step, in whose mean loss each counts."""
        batches = [batch for batch in self._batches if batch]
        # What devices without one have is zero, so that the mean over the others is the sum through their number.
        squares, products = (self._products[:, : len(batches)] * examples**2).tolist()
        whole, devices = sum(products), len(batches)
        each = [
            GradientMoments(square, product / devices, whole / devices**2)
            for square, product in zip(squares, products, strict=True)
        ]
        return each, batches


def devices_estimate(working: "ShardedModel", probes: list[DeviceProbe], examples: int) -> SampleEstimate:
    """What the devices' gradients say of a step of so many examples, whose gradient the working model has now."""
    gradient = working.gradient
    squared_norm = working.shard_group.sum(inner_product(gradient, gradient)).item() * examples**2
    return across_devices_estimate([probe.moments(examples) for probe in probes], squared_norm)
