"""A working model whose parameters are shared out over the devices of an island, with FSDP2 (fully_shard).

Every layer is a group of its own, which is gathered for its forward and its backward pass alone; what is in no layer
belongs to the root. A device keeps a part of the rows of every parameter, the gradients of these, and so of all that
lives between rounds: its parts are one flat buffer, as a whole model's parameters are elsewhere. What FSDP2 keeps of
them are views of that buffer, and gradients are added up in views of another.

All that is known here of FSDP2's insides is known nowhere else. FSDP2 has no name for them: they are those of the
release that requirements.txt pins.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._common_utils import collect_grad_tensors
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor

from algorithms.batch.across_workers import SKETCH_SIZE, sketch
from algorithms.batch.gradient_statistics import SampleEstimate
from algorithms.batch.losses import logits_of
from algorithms.synchronisation.method import Block
from fabrics.sharding.compiled_layers import CompiledLayers
from fabrics.sharding.device_gradients import DeviceProbe, devices_estimate
from fabrics.sharding.model_layers import (
    gathered_numbers,
    momentary_numbers,
    passing_numbers,
    reduced_numbers,
    sharded_layers,
    sharded_parts,
)
from fabrics.sharding.shard_layout import Layout
from fabrics.sharding.sharded_probe import ShardedProbe
from fabrics.sharding.whole_tensors import WholeTensors, most_whole
from fabrics.training.flat_model import FlatModel, Made, NotKeptError, blocks_of
from fabrics.training.worker import TrainingError
from utils.checkpoint.parts import FilePart
from utils.distributed.collectives import Collectives
from utils.distributed.placement import share_of
from utils.distributed.shard_groups import ProcessIsland

T = TypeVar("T")


class _AllGather(DefaultAllGather):
    """FSDP2's, counted."""

    def __init__(self, collectives: Collectives):
        self._collectives = collectives

    def __call__(self, *arguments, **keywords):
        return self._collectives.make(lambda: DefaultAllGather.__call__(self, *arguments, **keywords))


class _Reduction(DefaultReduceScatter):
    """FSDP2's reduction of a layer's gradients, counted, in which a probe may look at those of the devices.

    probe: it, as long as there is one.
    """

    probe: DeviceProbe | None = None

    def __init__(self, island: ProcessIsland):
        self._island = island

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        if self.probe is None:
            reduce = super().__call__
            return self._island.collectives.make(lambda: reduce(output_tensor, input_tensor, group, op, async_op))
        rows = self._island.exchange(input_tensor)
        torch.sum(rows, 0, out=output_tensor)
        self.probe.add(rows, output_tensor)


class ShardedModel(FlatModel):
    """A working model of one device of an island, which all devices make, and whose passes all make, together.

    Everything flat is this device's part. A flat tensor as it would be with the whole model on one device is called
    whole; the devices' parts, one after the other, are its rows with some zeros.

    Args:
        module: the same in every device, on the CPU or on `device`; parameters on the meta device are made meanwhile.
        device: this one's.
        island: the devices.
        autocast: as in FlatModel. Linear parts of layers are groups then, and gathered in that type, so that no
            other copy of them is made and kept; what else is in a layer belongs to the root, in its own type.
        made: from a parameter on the meta device to its numbers, whole; asked for one after the other.

    Raises:
        ValueError: the module cannot be shared out.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        island: ProcessIsland,
        autocast: torch.dtype | None = None,
        made: Made = torch.Tensor.detach,
    ):
        self.island, self._stands_in, self._made = island, False, made
        self._layers: CompiledLayers | None = None
        super().__init__(module, device, autocast)

    def _lay_out(self, named: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in self.module.named_parameters():
            if parameter.dim() == 0:
                raise ValueError(f"the parameter {name} is a single number, which cannot be shared out")
        dtype = next(iter(named.values())).dtype
        unmade = {name: parameter for name, parameter in self.module.named_parameters() if parameter.is_meta}
        groups, policy = sharded_layers(self.module), MixedPrecisionPolicy()
        if self._autocast is not None:
            groups = sharded_parts(self.module)
            policy = MixedPrecisionPolicy(self._autocast, reduce_dtype=dtype, cast_forward_inputs=False)
        self._groups = groups
        for group in groups:
            fully_shard(group, mesh=self.island.mesh, reshard_after_forward=True, mp_policy=policy)
        # The root as well: after an evaluation it would keep the parameters that it was evaluated with.
        fully_shard(self.module, mesh=self.island.mesh, reshard_after_forward=True)
        gathering, self.reduction = _AllGather(self.island.collectives), _Reduction(self.island)
        for module in self._fsdp_modules():
            module.set_custom_all_gather(gathering)
            module.set_custom_reduce_scatter(self.reduction)
            module.set_gradient_divide_factor(1.0)  # a sum: examples have their weights already
            module.set_force_sum_reduction_for_comms(True)
        self._owners: dict[nn.Module, FSDPModule] = {}
        for owner in self._fsdp_modules():  # the root comes first
            self._owners |= dict.fromkeys(owner.modules(), owner)
        groups = chain.from_iterable(child._get_fsdp_state()._fsdp_param_groups for child in self._fsdp_modules())
        by_parameter = {held.sharded_param: held for group in groups for held in group.fsdp_params}
        self._adopt(dtype, {name: by_parameter[p] for name, p in self.module.named_parameters()}, unmade)
        del self._made  # and what it remembers

    def _fsdp_modules(self) -> Iterator[FSDPModule]:
        return (child for child in self.module.modules() if isinstance(child, FSDPModule))

    def _adopt(self, dtype: torch.dtype, held_by_name: Mapping, unmade: Mapping[str, torch.Tensor]) -> None:
        """Move FSDP2's parts of the trainable parameters into one flat buffer, and let it add gradients to another.

        unmade: whole parameters on the meta device.
        """
        for name, parameter in unmade.items():
            held = held_by_name[name]
            if not parameter.requires_grad:
                data = torch.zeros(held._sharded_param_data.shape, dtype=parameter.dtype, device=self.device)
                self._make(held, parameter, data)
        self._held = {name: held for name, held in held_by_name.items() if held.sharded_param.requires_grad}
        # As FSDP2 pads them, so that all devices' parts have one length.
        padded = [held._sharded_param_data for held in self._held.values()]
        shapes = {name: tuple(held._orig_size) for name, held in self._held.items()}
        self._layout = Layout.of(shapes, [data.numel() for data in padded])
        flat, gradient = (torch.zeros(self._layout.size, dtype=dtype, device=self.device) for _ in range(2))
        for (name, held), data, place in zip(self._held.items(), padded, self._layout.places, strict=True):
            if name in unmade:
                self._make(held, unmade[name], flat[place])
            else:
                flat[place].copy_(data)
                held._sharded_param_data = flat[place]
                held.sharded_param._local_tensor = self._rows(flat[place], held)
            held.sharded_param.grad = held.to_sharded_dtensor(self._rows(gradient[place], held))
        self.parameters = nn.Parameter(flat)
        self.parameters.grad = gradient
        shapes = {name: tuple(held.sharded_size) for name, held in self._held.items()}
        self.blocks = blocks_of(shapes, [place.start for place in self._layout.places], self._layout.size)
        self.whole_blocks, self.wholes = self._layout.wholes, WholeTensors(self._layout, self.island)

    def _make(self, held, parameter: torch.Tensor, data: torch.Tensor) -> None:
        """Give FSDP2 its part of a parameter that was on the meta device; data: where it is to be, zeros."""
        rows = self._rows(data, held)
        first = self.island.index * held.padded_sharded_param_size[0]
        rows.copy_(self._made(parameter)[first : first + len(rows)])
        held._sharded_param_data = data
        held.sharded_param = nn.Parameter(held.to_sharded_dtensor(rows), requires_grad=parameter.requires_grad)
        held._setattr_on_modules(held.sharded_param)

    @staticmethod
    def _rows(data: torch.Tensor, held) -> torch.Tensor:
        """This device's rows in its padded part of a parameter."""
        return data.view(held.padded_sharded_param_size).narrow(0, 0, held.sharded_size[0])

    def views(self, flat: torch.Tensor) -> dict[nn.Parameter, torch.Tensor]:
        raise NotImplementedError("a device of several has parts of parameters only")

    def trained(self) -> list[nn.Parameter]:
        """See FlatModel; flat, what is here of the module's."""
        found = []
        for place in self._layout.places:
            found.append(nn.Parameter(self.parameters.data[place]))
            found[-1].grad = self.gradient[place]
        return found

    def whole_tensors(self, numbers: Sequence[int]) -> WholeTensors:
        """For flat tensors that hold those of `blocks` with these numbers alone, laid out as all are."""
        return WholeTensors(self._layout.among(numbers), self.island)

    # Passes

    def logits(self, batch: Mapping[str, torch.Tensor], hooked: bool = False) -> torch.Tensor:
        self._compute(self.compiled and not hooked)
        with self.island.explaining(), self._computing():
            output = self.module(**batch)
            logits = logits_of(output)
            if not any(tensor is logits for tensor in collect_grad_tensors(output)):
                # FSDP2 does not look into every object, and would not know when the backward pass begins.
                self.module._get_fsdp_state()._register_pre_backward_hook(logits)
            return logits

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
        with self.island.explaining(), super().evaluating(parameters) as module:
            yield module

    def attempt(self, work: Callable[[], T]) -> T | None:
        """See FlatModel; all devices get the same: None where one of them had not the memory.

        Raises:
            TrainingError: this one has not the memory for a single example.
        """
        self.island.collectives.begin()
        done = super().attempt(work)
        if done is None:
            self._stand_in(work)
        return done if self.island.least(int(done is not None)) else None

    def _stand_in(self, work: Callable[[], T]) -> None:
        """Make what is left of a pass that this device broke off, lest the others wait; nothing of it is used."""
        self.module.reset_iter_state()
        for held in self._held.values():
            if hasattr(held, "_unsharded_param"):
                held._unsharded_param.grad = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.island.collectives.begin(skipped=self.island.collectives.made)
        self._stands_in = True
        try:
            made = super().attempt(work)
        finally:
            self._stands_in = False
            self.island.collectives.begin()
        if made is None:
            raise TrainingError(
                f"one example does not fit into the memory of {self.device}, device {self.island.index} of its island; "
                f"use a smaller model or sequence_length, or more devices_per_node"
            )

    def probe(self, examples: int, products: bool) -> ShardedProbe | DeviceProbe:
        return DeviceProbe(self, examples) if self.within_island else ShardedProbe(self, examples, products)

    def estimate(self, probes: Sequence, examples: int) -> SampleEstimate:
        return devices_estimate(self, probes, examples) if self.within_island else super().estimate(probes, examples)

    def unshard(self, module: nn.Module) -> None:
        """Gather the parameters of the layer that a module is in, where they are not yet."""
        if isinstance(next(module.parameters(recurse=False)), DTensor):
            self._owners[module].unshard()

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """See FlatModel: those of layers that are whole for a moment."""
        parts = (held._unsharded_param for held in self._held.values() if hasattr(held, "_unsharded_param"))
        return any(part.untyped_storage()._cdata == storage._cdata for part in parts)

    @property
    def momentary_bytes(self) -> int:
        """See FlatModel; what is between passes alone is never there together with it."""
        compared = reduced_numbers(self.whole_blocks) if self.within_island else 0
        whole = most_whole([self.whole_blocks[number].size for number in self.looked_at], self.island.size)
        gathered, still = gathered_numbers(self.whole_blocks, self.module)
        numbers = momentary_numbers(passing_numbers(gathered, compared, still), whole, self.whole_copies)
        return numbers * self.parameters.element_size()

    def gathered(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every trainable parameter as modules have it while it is gathered, after a pass, by name."""
        return ((name, held._unsharded_param) for name, held in self._held.items())

    # Together with the other devices

    def share(self, examples: int) -> tuple[slice, float]:
        if self._stands_in:
            return slice(0, 1), 0.0
        own = share_of(range(examples), self.island.index, self.island.size)
        return (slice(own[0], own[-1] + 1), len(own) / examples) if own else (slice(0, 1), 0.0)

    def turns(self, batches: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        own, most = batches[self.island.index :: self.island.size], -(-len(batches) // self.island.size)
        return own, batches[: most - len(own)]

    def norm(self, flat: torch.Tensor) -> torch.Tensor:
        return self.island.sum(torch.linalg.vector_norm(flat).square()).sqrt()

    def distance(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.norm(a - b)

    @property
    def whole_size(self) -> int:
        return self._layout.whole_size

    def here(self, places: torch.Tensor) -> torch.Tensor:
        wholes, lengths = self._layout.wholes, torch.tensor(self._layout.lengths)
        starts, sizes = (torch.tensor([getattr(whole, name) for whole in wholes]) for name in ("start", "size"))
        firsts = torch.tensor([place.start for place in self._layout.places])
        numbers = torch.searchsorted(starts, places, right=True) - 1
        within = places - starts[numbers]
        offsets = within - self.island.index * lengths[numbers]
        own = (within < sizes[numbers]) & (offsets >= 0) & (offsets < lengths[numbers])
        return (firsts[numbers] + offsets)[own]

    def sketch(self, flat: torch.Tensor, seed: int, size: int = SKETCH_SIZE, rows: int = 1) -> torch.Tensor:
        """That of the whole vector: rows of a parameter that follow each other do so there as well."""
        found = torch.zeros(rows * size, dtype=flat.dtype, device=flat.device)
        for theirs, own in self._layout.parts(self.island.index):
            found += sketch(flat[own], seed, size, rows, theirs.start)
        return self.island.sum(found)

    def flat_of(self, module: nn.Module, made: Made = torch.Tensor.detach) -> torch.Tensor:
        flat = torch.zeros_like(self.parameters.data)
        trainable = (parameter for parameter in module.parameters() if parameter.requires_grad)
        parts = self._layout.parts(self.island.index)
        for whole, (theirs, own), parameter in zip(self._layout.wholes, parts, trainable, strict=True):
            flat[own] = made(parameter).flatten()[theirs.start - whole.start : theirs.stop - whole.start]
        return flat

    def _layout_of(self, name: str) -> Layout:
        """Of a flat tensor with this name in its group."""
        return self._layout.among(self.packed[name]) if name in self.packed else self._layout

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        layout = self._layout_of(name)
        return layout.part(tensor, self.island.index) if tensor.shape == (layout.whole_size,) else tensor

    def gather(self, flat: torch.Tensor) -> Iterator[tuple[Block, torch.Tensor]]:
        """Every parameter's part of a whole flat tensor, one after the other, in its shape."""
        return self._layout.gather(flat, self.island)

    def kept(self, groups: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, FilePart]]:
        return {group: {name: self._kept(name, own[name]) for name in own} for group, own in groups.items()}

    def _kept(self, name: str, tensor: torch.Tensor) -> FilePart:
        layout = self._layout_of(name)
        if tensor.shape != (layout.size,):  # all devices have it
            return FilePart(tensor, tuple(tensor.shape), ((0, slice(None)),) if self.island.index == 0 else ())
        pieces = ((theirs.start, own) for theirs, own in layout.parts(self.island.index))
        return FilePart(tensor, (layout.whole_size,), tuple(pieces))

    @torch.no_grad()
    def state(self, keep: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu) -> dict[str, torch.Tensor]:
        held, keeps, problem = self.module.state_dict(keep_vars=True), self.island.index == 0, None
        whole: dict[torch.Tensor, torch.Tensor] = {}
        with self.island.explaining():
            for tensor in dict.fromkeys(held.values()):
                gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
                if keeps and problem is None:
                    try:
                        whole[tensor] = keep(gathered)
                    except Exception as error:  # the others go on
                        problem = f"{type(error).__name__}: {error}"
                        whole.clear()
        if problem is not None:
            raise NotKeptError(problem)
        return {name: whole[tensor] for name, tensor in held.items()} if keeps else {}
