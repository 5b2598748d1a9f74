"""The flat model: one module per device, through which all workers of the device pass.

Its trainable parameters are views of one flat buffer, and their gradients of another. So a worker's parameters are
loaded, compared, clipped and updated in one operation, whatever the number of layers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from algorithms.batch.gradient_statistics import SampleEstimate
from algorithms.batch.losses import chunked_loss_sums, example_loss_sums, logits_of
from algorithms.batch.per_example import PerExampleProbe, step_estimate
from algorithms.flat import SKETCH_SIZE, Block, sketch
from fabrics.models.attention import body_and_head
from utils.checkpoint.checkpoint import FilePart
from utils.distributed.devices import is_out_of_memory
from utils.distributed.shard_groups import ShardGroup

T = TypeVar("T")

# Tensors start on 64-byte boundaries (of float32), as the allocator would place them; the gaps stay zero.
_ALIGNMENT = 16


def flat_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where tensors with these numbers of elements start in a flat tensor, and the flat tensor's size."""
    offsets = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def flat_blocks(shapes: Mapping[str, tuple[int, ...]], offsets: Sequence[int]) -> tuple[Block, ...]:
    """Return the blocks of a flat tensor; shapes: of the tensors that start at the offsets, by name."""
    return tuple(Block(name, start, shape) for (name, shape), start in zip(shapes.items(), offsets, strict=True))


def shared_state_problem(module: nn.Module) -> str | None:
    """Return what is wrong with a module whose passes change more than its gradients; None: nothing."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats:
            return (
                f"{name} keeps running statistics, which workers would not share; use track_running_stats=False, or a "
                f"layer such as GroupNorm"
            )
    return None


class FlatModel:
    """A module over two flat buffers.

    Args:
        module: its trainable parameters, all of one type, move into the buffers. Frozen ones are the same for all
            workers, and stay where they are.
        autocast: the type that the module computes in (torch.autocast); None: that of its parameters.
        compiled: compile the module, or its body if the loss is computed in chunks; a string is torch.compile's mode.
        loss_chunk_tokens: tokens of each example whose logits exist at a time; None: all.

    Attributes:
        parameters: flat nn.Parameter of all trainable parameters; its `.grad` is the flat gradient.
        compiled: as in the arguments.
        blocks: the places of the trainable parameters in the flat buffers.
        loss_chunk_tokens: as in the arguments.
        compares_devices: whether a probe compares the devices of the shard group instead of examples.
        passes: forward passes so far, a sign that the process makes progress.
        shard_group: the devices that share the module; here one.
        gathered_whole: whether every pass gathers all parameters from the shard group at once.
    """

    shard_group = ShardGroup()
    gathered_whole = False
    compares_devices = False

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        autocast: torch.dtype | None = None,
        compiled: bool | str = False,
        loss_chunk_tokens: int | None = None,
    ):
        self.module = module
        self.device = device
        self.passes = 0
        self.compiled = compiled
        self._autocast = autocast
        self.loss_chunk_tokens = loss_chunk_tokens
        self._called, self._head = (module, None) if loss_chunk_tokens is None else body_and_head(module)
        # CUDA graphs read parameters and gradients at fixed addresses: the flat buffers never move.
        mode = compiled if isinstance(compiled, str) else None
        self._compiled_module = torch.compile(self._called, mode=mode) if compiled else None
        self._compiled_for_any_size = False
        named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        if not named:
            raise ValueError("the model has no trainable parameter")
        if len({parameter.dtype for parameter in named.values()}) != 1:
            raise ValueError("all trainable parameters must have one type")
        self.parameter_count = sum(parameter.numel() for parameter in named.values())
        self._lay_out(named)

    def _lay_out(self, named: Mapping[str, nn.Parameter]) -> None:
        if any(parameter.device != self.device for parameter in named.values()):
            self.module.to(self.device)
        offsets, size = flat_offsets([parameter.numel() for parameter in named.values()])
        dtype = next(iter(named.values())).dtype
        flat = torch.zeros(size, dtype=dtype, device=self.device)
        gradient = torch.zeros_like(flat)
        for parameter, offset in zip(named.values(), offsets, strict=True):
            place = slice(offset, offset + parameter.numel())
            flat[place].copy_(parameter.detach().flatten())
            parameter.data = flat[place].view_as(parameter)
            parameter.grad = gradient[place].view_as(parameter)
        self.parameters = nn.Parameter(flat)
        self.parameters.grad = gradient
        self.blocks = flat_blocks({name: tuple(p.shape) for name, p in named.items()}, offsets)

    @property
    def gradient(self) -> torch.Tensor:
        return self.parameters.grad

    def views(self, flat: torch.Tensor) -> dict[nn.Parameter, torch.Tensor]:
        """Return each trainable parameter's part of a flat tensor, as a view of its shape."""
        trainable = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        blocks = zip(trainable, self.blocks, strict=True)
        return {parameter: flat[block.slice].view(block.shape) for parameter, block in blocks}

    @torch.no_grad()
    def load(self, parameters: torch.Tensor) -> None:
        self.parameters.copy_(parameters)

    # Passes

    def logits(self, batch: Mapping[str, torch.Tensor], eager: bool = False) -> torch.Tensor:
        """Return the module's logits for these arguments; eager: uncompiled, so that hooks of layers run."""
        with self._autocast_context():
            return logits_of(self._run(batch, eager))

    def example_loss_sums(
        self, batch: Mapping[str, torch.Tensor], labels: torch.Tensor, eager: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss of each example and its number of targets, [b] each; batch: as for `logits`."""
        if self._head is None:
            return example_loss_sums(self.logits(batch, eager), labels)
        with self._autocast_context():
            hidden = self._run(batch, eager).last_hidden_state
            return chunked_loss_sums(hidden, self._head, labels, self.loss_chunk_tokens)

    def example_losses(
        self, batch: Mapping[str, torch.Tensor], labels: torch.Tensor, eager: bool = False
    ) -> torch.Tensor:
        """Return the mean loss of each example, [b]; batch: as for `logits`."""
        sums, counts = self.example_loss_sums(batch, labels, eager)
        return sums / counts.clamp(min=1)

    def _run(self, batch: Mapping[str, torch.Tensor], eager: bool) -> Any:
        self.count_pass()
        run = self._called if self._compiled_module is None or eager else self._run_compiled
        return run(**batch)

    def count_pass(self) -> None:
        self.passes += 1

    def _autocast_context(self) -> AbstractContextManager:
        return nullcontext() if self._autocast is None else torch.autocast(self.device.type, self._autocast)

    def _run_compiled(self, **batch: torch.Tensor) -> Any:
        """Run code that is compiled once for any number of examples, and once for a single one.

        It is compiled for two examples, so that its bits do not depend on the first micro-batch of a process.
        """
        if not self._compiled_for_any_size and len(next(iter(batch.values()))) > 1:
            with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                self._run_dynamic({name: tensor[:2] for name, tensor in batch.items()})
            self._compiled_for_any_size = True
        return self._run_dynamic(batch)

    def _run_dynamic(self, batch: Mapping[str, torch.Tensor]) -> Any:
        for tensor in batch.values():
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return self._compiled_module(**batch)

    @contextmanager
    def evaluating(self, parameters: torch.Tensor) -> Iterator[None]:
        """Let the module have these parameters, and be in eval mode."""
        self.load(parameters)
        was_training = self.module.training
        self.module.eval()
        try:
            yield
        finally:
            self.module.train(was_training)

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Return the result of passes, or None if the device ran out of memory.

        The caller never sees the error, which would keep the tensors of the failed pass alive.
        """
        try:
            return work()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        return None

    def probe(self, examples: int, products: bool) -> PerExampleProbe:
        """Return the probe of a backward pass; products: as in PerExampleProbe."""
        return PerExampleProbe(self.module, batch_size=examples, products=products)

    def estimate(self, probes: Sequence, examples: int) -> SampleEstimate:
        """Return the statistics of a step; its probes, one per micro-batch, and its gradient are still there."""
        return step_estimate(probes)

    # What the devices of a shard group do together, and what each has. Here the device is alone.

    def local_slice(self, examples: int) -> tuple[slice, float]:
        """Return this device's examples of a micro-batch, and their weight in the mean.

        Every device makes the pass, so it has at least one example; its weight may be 0.
        """
        return slice(0, examples), 1.0

    def local_batches(self, batches: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Return the batches that this device evaluates, and those that it only passes, as often as the others."""
        return batches, ()

    def norm(self, flat: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(flat)

    def distance(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.dist(a, b)

    def sketch(self, flat: torch.Tensor, seed: int, size: int = SKETCH_SIZE, rows: int = 1) -> torch.Tensor:
        """Return the sketch of a flat tensor; see algorithms.flat.sketch."""
        return sketch(flat, seed, size, rows)

    def flatten(self, module: nn.Module) -> torch.Tensor:
        """Return the flat parameters of a module of the same architecture, which cannot be used afterwards."""
        return FlatModel(module, self.device).parameters.detach()

    def checkpoint_tensors(
        self, groups: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> dict[str, dict[str, torch.Tensor | FilePart]]:
        """Return groups of tensors by reference as a checkpoint takes them: as parts of files if devices share them."""
        return {name: dict(tensors) for name, tensors in groups.items()}

    def local_part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this device's part of a tensor as a checkpoint holds it."""
        return tensor

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the module's state with whole tensors on the first device of the shard group; empty on the others.

        All devices of the group call this together. Tied parameters are one tensor.
        """
        return self.module.state_dict()
