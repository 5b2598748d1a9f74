"""Models whose numbers are made again later, one tensor at a time, and are the same to the bit.

A model is built as ever, but large tensors are forgotten while others are made, and what was done to them is noted,
with the state of the generator where something was drawn. From these notes a tensor is made again whenever it is read:
from the last one that fills all of it, with the generator set back to where it was. So a process never holds more than
a few tensors of a model, and each of them costs being made twice.

Weights that are read from a file are mapped into memory (as safetensors does), and in the system's cache. They are held
as they are: what is computed of them is forgotten and made again like everything else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# Tensors of fewer bytes are kept.
SMALL = 2**17
# So many bytes of others may be there besides those of an operation.
KEPT_BYTES = 2**24
# Operations whose result does not depend on what was in the tensor before.
_FILLING = ("normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_", "log_normal_", "cauchy_")


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(tree: object) -> list[torch.Tensor]:
    return [value for value in tree_leaves(tree) if isinstance(value, torch.Tensor)]


def _filled(operation, args: tuple) -> set[int]:
    """The storage that an operation fills, whatever was there before, if it does."""
    if operation.overloadpacket.__name__ not in _FILLING:
        return set()
    whole = args[0].numel() * args[0].itemsize == args[0].untyped_storage().nbytes()
    return {_place(args[0])} - {_place(tensor) for tensor in _tensors(args[1:])} if whole else set()


def _changed(operation, args: tuple, keywords: dict[str, Any]) -> set[int]:
    """The storages that an operation writes into, by its schema."""
    arguments = operation._schema.arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | keywords
    written = (a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return {_place(tensor) for name in written for tensor in _tensors(given.get(name))}


@dataclass(frozen=True)
class _Note:
    """An operation that made or changed large tensors.

    made, written, filled, read: storages, of large tensors: that are its own; that it changes; of these all numbers;
    on whose numbers it depends. state: of the generator before, where it draws.
    """

    operation: Any
    arguments: tuple
    keywords: dict[str, Any]
    result: Any
    made: set[int]
    written: set[int]
    filled: set[int]
    read: set[int]
    state: torch.Tensor | None


@dataclass
class _Large:
    """The storage of a large tensor, which is empty while it is forgotten."""

    storage: torch.UntypedStorage
    size: int

    @property
    def is_there(self) -> bool:
        return self.storage.nbytes() > 0 or self.size == 0


class Deferred(TorchDispatchMode):
    """While it is entered, large tensors that are made on the CPU are forgotten in turn, the least used first.

    reads: whether large tensors in memory that is not PyTorch's are weights in a file, which stay as they are, but for
        what PyTorch writes into them. Otherwise they are copied, as somebody may change them.
    """

    def __init__(self, reads: bool = False):
        super().__init__()
        self._reads = reads
        self._borrowed: dict[int, list[torch.Tensor]] = {}  # from the storage of such a tensor to those that notes have
        self._notes: list[_Note] = []
        self._large: dict[int, _Large] = {}  # the one that was used last is the last
        # From the storage of a parameter without numbers to it, lest another took its place, and what has been noted.
        self._unmade: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        keywords = kwargs or {}
        given = {_place(tensor) for tensor in _tensors((args, keywords))}
        filled = _filled(operation, args) if given else set()
        for place in given & self._large.keys():
            large = self._large[place] = self._large.pop(place)
            if not large.is_there:
                if place in filled:
                    large.storage.resize_(large.size)
                else:
                    self._remember(place)
        changed = _changed(operation, args, keywords)
        written = changed & self._large.keys()
        seeded = torch.Tag.nondeterministic_seeded in operation.tags
        state = (keywords.get("generator") or torch.default_generator).get_state() if seeded else None
        noted = self._held((args, keywords)) if written else None  # as they are before
        for place in changed & self._borrowed.keys():
            for tensor in self._borrowed.pop(place):
                tensor.data = tensor.clone()
        result = operation(*args, **keywords)
        made = {}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            own = tensor.device.type == "cpu" and storage.resizable()
            if own and _place(tensor) not in given and storage.nbytes() >= SMALL:
                made[_place(tensor)] = _Large(storage, storage.nbytes())
        if made or written:
            self._large |= made
            arguments, options = noted or self._held((args, keywords))
            read = (given & self._large.keys()) - filled
            self._notes.append(
                _Note(operation, arguments, options, result, set(made), written, filled & written, read, state)
            )
            self._forget(KEPT_BYTES, but=given | made.keys())
        return result

    def _held(self, tree: Any) -> Any:
        """Arguments as a note keeps them: of small tensors it has the numbers."""
        return tree_map_only(torch.Tensor, self._held_tensor, tree)

    def _held_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if _place(tensor) in self._large:
            return tensor.detach()
        if not self._is_read(tensor):
            return tensor.clone()
        held = tensor.detach()
        self._borrowed.setdefault(_place(tensor), []).append(held)
        return held

    def _is_read(self, tensor: torch.Tensor) -> bool:
        """Whether it is a large one of a file."""
        storage = tensor.untyped_storage()
        on_host = self._reads and tensor.device.type == "cpu"
        return on_host and storage.nbytes() >= SMALL and not storage.resizable()

    def _forget(self, kept: int, but: set[int]) -> None:
        """Empty large tensors until at most so many bytes are there."""
        there = sum(large.storage.nbytes() for large in self._large.values())
        for place, large in self._large.items():
            if there <= kept:
                return
            if place not in but and large.is_there:
                there -= large.size
                large.storage.resize_(0)

    def _remember(self, place: int) -> None:
        large = self._large[place]
        numbers = self._numbers(place)
        large.storage.resize_(large.size)
        large.storage.copy_(numbers)

    def _numbers(self, place: int) -> torch.UntypedStorage:
        """What is in a large tensor after all that has been noted, made anew."""
        needed, notes = {place}, []
        for note in reversed(self._notes):
            if (note.made | note.written) & needed:
                notes.append(note)
                needed = (needed - note.made - note.filled) | note.read
        storages = {place: torch.UntypedStorage(self._large[place].size)}

        def anew(like: torch.Tensor) -> torch.Tensor:
            if (found := self._large.get(_place(like))) is None:
                return like
            if _place(like) not in storages:
                storages[_place(like)] = torch.UntypedStorage(found.size)
            numbers = torch.empty(0, dtype=like.dtype)
            return numbers.set_(storages[_place(like)], like.storage_offset(), like.shape, like.stride())

        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for note in reversed(notes):
                self._repeat(note, anew)
        return storages[place]

    @staticmethod
    def _repeat(note: _Note, anew: Callable[[torch.Tensor], torch.Tensor]) -> None:
        arguments, keywords = tree_map_only(torch.Tensor, anew, (note.arguments, note.keywords))
        if note.state is not None and keywords.get("generator") is not None:
            keywords = keywords | {"generator": torch.Generator().set_state(note.state)}
        elif note.state is not None:
            torch.set_rng_state(note.state)
        result = note.operation(*arguments, **keywords)
        for found, like in zip(_tensors(result), _tensors(note.result), strict=True):
            if _place(like) in note.made:
                anew(like).copy_(found)

    def unmade(self, module: nn.Module) -> nn.Module:
        """The module, in place, with large parameters on the meta device and all else as it is; `made` makes them."""
        parameters: dict[nn.Parameter, nn.Parameter] = {}
        staying: set[int] = set()
        for child in module.modules():
            for name, parameter in child._parameters.items():
                if parameter is None or not (_place(parameter) in self._large or self._is_read(parameter)):
                    continue
                if parameter not in parameters:
                    empty = torch.empty_like(parameter, device="meta")
                    parameters[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                    self._unmade[_place(empty)] = parameters[parameter], parameter.detach()
                child._parameters[name] = parameters[parameter]
            for tensor in (*child._buffers.values(), *vars(child).values()):
                if isinstance(tensor, torch.Tensor) and (large := self._large.get(_place(tensor))) is not None:
                    staying.add(_place(tensor))
                    if not large.is_there:
                        self._remember(_place(tensor))
        self._forget(0, but=staying)
        return module

    def made(self, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter of such a module with its numbers, on the CPU, for the moment; as it is where it has them."""
        if not parameter.is_meta:
            return parameter.detach()
        _, like = self._unmade[_place(parameter)]
        if _place(like) not in self._large:
            return like
        numbers = torch.empty(0, dtype=like.dtype)
        return numbers.set_(self._numbers(_place(like)), like.storage_offset(), like.shape, like.stride())
