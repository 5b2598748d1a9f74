"""The one module of a device through which all its replicas pass.

Its trainable parameters are views of one flat buffer and their gradients of another, so that a replica is
loaded, differenced, clipped and stepped with a single operation each, whatever its number of layers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from algorithms.batch.gradient_statistics import SampleEstimate
from algorithms.batch.losses import logits_of
from algorithms.batch.per_example import PerExampleProbe, step_estimate
from algorithms.flat import SKETCH_SIZE, Block, FullTensors, sketch
from utils.checkpoint.tensor_file import FilePart
from utils.distributed.devices import is_out_of_memory
from utils.distributed.shard_groups import ShardGroup

T = TypeVar("T")

# Every tensor starts on a 64-byte boundary (of float32), as the allocator would have placed it; the gaps stay zero.
_ALIGNMENT = 16


def laid_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each of some tensors with so many numbers begins in a flat one that holds them, and how long that is."""
    offsets, size = [], 0
    for each in sizes:
        offsets.append(size)
        size += -(-each // _ALIGNMENT) * _ALIGNMENT
    return offsets, size


def blocks_of(shapes: Mapping[str, tuple[int, ...]], offsets: Sequence[int], size: int) -> tuple[Block, ...]:
    """The blocks of a flat tensor of this size in which tensors of these shapes begin at these offsets."""
    stops = [*offsets[1:], size]
    return tuple(
        Block(name, start, stop, shape)
        for (name, shape), start, stop in zip(shapes.items(), offsets, stops, strict=True)
    )


class StateDictError(Exception):
    """A tensor of a model's state could not be kept; says why."""


class FlatModel:
    """A module over two flat buffers.

    Args:
        module: its trainable parameters, all of one floating type, are moved into the buffers. Frozen ones stay
            where they are: they are the same for every replica.
        device: where the module and the buffers live.
        autocast: type that the module computes in (torch.autocast); None: that of its parameters.
        compiled: as the attribute.

    Attributes:
        compiled: whether the module runs through torch.compile; it may change at any time.
        optimizer_slot: see `fabrics.training.offload`; None: each worker has its moments on the device.
        module: the nn.Module to call.
        parameters: flat nn.Parameter of all trainable parameters; its `.grad` is the flat gradient.
        parameter_count: trainable numbers in it, without the gaps.
        blocks: where each trainable parameter is in the flat buffers.
        full_tensors: for methods that need the shapes of the model's tensors.
        shard_group: the devices that share the module; here there is one.
        compares_devices: True if a probe compares these devices instead of examples; it may change at any time.
    """

    shard_group = ShardGroup()
    compares_devices = False

    def __init__(
        self, module: nn.Module, device: torch.device, autocast: torch.dtype | None = None, compiled: bool = False
    ):
        self.module, self.device = module, device
        self._autocast = autocast
        self.compiled = compiled
        self._compiled: Callable | None = None
        self._serves_all = False
        self.optimizer_slot: Any = None
        named = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if not named:
            raise ValueError("the model has no trainable parameter")
        if len({p.dtype for p in named.values()}) != 1:
            raise ValueError("all trainable parameters must have one type")
        self.parameter_count = sum(p.numel() for p in named.values())
        self._lay_out(named)

    def _lay_out(self, named: Mapping[str, nn.Parameter]) -> None:
        """Move the module to the device and its trainable parameters into flat buffers."""
        self.module.to(self.device)
        trainable = list(named.values())
        offsets, size = laid_out([p.numel() for p in trainable])
        flat = torch.zeros(size, dtype=trainable[0].dtype, device=self.device)
        gradient = torch.zeros_like(flat)
        for parameter, offset in zip(trainable, offsets, strict=True):
            end = offset + parameter.numel()
            flat[offset:end].copy_(parameter.detach().flatten())
            parameter.data = flat[offset:end].view_as(parameter)
            parameter.grad = gradient[offset:end].view_as(parameter)
        self.parameters = nn.Parameter(flat)
        self.parameters.grad = gradient
        self.blocks = blocks_of({name: tuple(p.shape) for name, p in named.items()}, offsets, size)
        self.full_tensors = FullTensors(self.blocks)

    @property
    def gradient(self) -> torch.Tensor:
        """The flat gradient."""
        return self.parameters.grad

    def trainable(self) -> list[nn.Parameter]:
        """The trainable parameters of the module, one for each of `blocks`."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def views(self, flat: torch.Tensor) -> dict[nn.Parameter, torch.Tensor]:
        """Each trainable parameter's part of a flat vector laid out as `parameters`, as a view of its shape."""
        start, size = self.parameters.data_ptr(), self.parameters.element_size()
        places = {p: (p.data_ptr() - start) // size for p in self.module.parameters() if p.requires_grad}
        return {p: flat[place : place + p.numel()].view_as(p) for p, place in places.items()}

    @torch.no_grad()
    def load(self, parameters: torch.Tensor) -> None:
        """Become the replica with these flat parameters."""
        self.parameters.copy_(parameters)

    def _computing(self) -> AbstractContextManager:
        return nullcontext() if self._autocast is None else torch.autocast(self.device.type, self._autocast)

    def logits(self, batch: Mapping[str, torch.Tensor], hooked: bool = False) -> torch.Tensor:
        """The module's logits for these keyword arguments; hooked: layers have hooks, which a compiled module skips."""
        with self._computing():
            return logits_of((self._run_compiled if self.compiled and not hooked else self.module)(**batch))

    def _run_compiled(self, **batch: torch.Tensor) -> Any:
        """Through code that serves any number of examples; a single one has code of its own.

        It is made for two examples, lest its bits follow the first micro-batch that a process has.
        """
        if self._compiled is None:
            self._compiled = torch.compile(self.module)
        if not self._serves_all and len(next(iter(batch.values()))) > 1:
            with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                self._run_dynamic({name: tensor[:2] for name, tensor in batch.items()})
            self._serves_all = True
        return self._run_dynamic(batch)

    def _run_dynamic(self, batch: Mapping[str, torch.Tensor]) -> Any:
        for tensor in batch.values():
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return self._compiled(**batch)

    @contextmanager
    def evaluating(self, parameters: torch.Tensor) -> Iterator[nn.Module]:
        """The module with these parameters, in eval mode and without gradients, for the length of the context."""
        self.load(parameters)
        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad(), self._computing():
                yield self.module
        finally:
            self.module.train(was_training)

    def attempt(self, work: Callable[[], T]) -> T | None:
        """What it returns, or None where a device that makes these passes has not the memory.

        Whoever asks is out of the error's reach: one that is looked after keeps the tensors of the pass alive.
        """
        try:
            return work()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        return None

    def probe(self, examples: int, products: bool) -> PerExampleProbe:
        """The probe of a backward pass over so many examples; products: as PerExampleProbe has them."""
        return PerExampleProbe(self.module, batch_size=examples, products=products)

    def estimate(self, probes: Sequence, examples: int) -> SampleEstimate:
        """What the probes of a step of so many examples say, one of each micro-batch; its gradient is there still."""
        return step_estimate(probes)

    # What devices that share a module do together; alone there is nothing to do.

    def local_slice(self, examples: int) -> tuple[slice, float]:
        """Which of so many examples of a pass this device has, and their share in the mean over all of them.

        There is always one, for the pass to be made; it may count for nothing.
        """
        return slice(0, examples), 1.0

    def local_batches(self, batches: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Which of some batches this device evaluates, and one that it passes besides, so that all pass as many."""
        return batches, ()

    def norm(self, flat: torch.Tensor) -> torch.Tensor:
        """Euclidean norm of a flat vector laid out as `parameters`."""
        return torch.linalg.vector_norm(flat)

    def distance(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Euclidean, likewise."""
        return torch.dist(a, b)

    def sketch(self, flat: torch.Tensor, seed: int, size: int = SKETCH_SIZE, rows: int = 1) -> torch.Tensor:
        """See algorithms.flat.sketch."""
        return sketch(flat, seed, size, rows)

    @property
    def whole_size(self) -> int:
        """Of flat tensors as they are with one device per node."""
        return len(self.parameters)

    def local_places(self, places: torch.Tensor) -> torch.Tensor:
        """Where in this device's flat tensors those of some places of such whole ones are that it has, in their order.

        Those in gaps between the model's tensors may be left out.
        """
        return places

    def flatten(self, module: nn.Module) -> torch.Tensor:
        """The trainable parameters of a module of the same architecture, flat; the module is used up."""
        return FlatModel(module, self.device).parameters.detach()

    def checkpoint_tensors(
        self, groups: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> dict[str, dict[str, torch.Tensor | FilePart]]:
        """Groups of tensors as a checkpoint takes them, by reference: on shard groups, of which parts these are.

        Those of the shape of `parameters` are laid out like them.
        """
        return {name: dict(tensors) for name, tensors in groups.items()}

    def local_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What this device has of a tensor as it is with one device per node, by its name in its group."""
        return tensor

    def full_state_dict(
        self, keep: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu
    ) -> dict[str, torch.Tensor]:
        """The module's state by name, whole, in the shard group's first device, empty in others.

        All of the shard group ask together; tied parameters are one tensor.

        Args:
            keep: on shard groups, what to do with a tensor, which is gone when the next one comes.

        Raises:
            StateDictError: `keep` failed; when all have been asked for.
        """
        return self.module.state_dict()
