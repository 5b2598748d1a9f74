"""The interface of a synchronisation method: how the workers of a trainer come together.

A method is one file beside this one: a class with an entry in the registry (`algorithms.synchronisation`), written over
flat tensors. A round is cut at the method's stops; between two stops workers only compute. The loop that carries a
method out is `fabrics.training.outer_round`; what a method sees of it is `algorithms.synchronisation.group.Group`.

A method keeps nothing itself. Its tensors have names, per trainer or per worker: the common code creates them (zeros),
saves them, moves them with nodes, merges and drops them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

import torch

from algorithms.nodes.balance import turns
from algorithms.nodes.virtual_clock import Sending

if TYPE_CHECKING:
    from algorithms.synchronisation.group import Group, LocalWorker

Part = Sequence[slice]

# Worker tensors that belong neither to the optimizer nor to the method.
ERROR = "error"
COPY = "copy"
# Names in the states of inner optimizers.
MOMENTS = ("step", "exp_avg", "exp_avg_sq", "momentum")

# Configuration keys that a method may read or not.
OUTER_KEYS = ("learning_rate_for_outer_opt", "outer_momentum")


@dataclass(frozen=True)
class Block:
    """A tensor of the model and its place in the flat ones. stop: the start of the next one, or the end."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements of the tensor itself; up to `stop` zeros may follow."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Outer:
    """The keys that outer steps read.

    Attributes:
        learning_rate: learning_rate_for_outer_opt.
        momentum: outer_momentum.
        weight_decay: that of the inner steps, for methods that update the parameters themselves.
    """

    learning_rate: float
    momentum: float
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Event:
    """What the workers of a trainer send each other at one time.

    Attributes:
        kind: the purpose.
        step: the inner step of the round after which it happens.
        sent: bytes that each worker sends, a mean over all workers.
        received: bytes that each worker receives, likewise.
        behind: inner steps that may be made before anybody waits for it.
        through: all workers alike (a ring), pairs or small groups, or a server, which is no worker's node.
        by: the workers that send, by number, if the others take no part; None: all.
    """

    kind: str
    step: int
    sent: float
    received: float
    behind: int = 0
    through: Literal["all", "groups", "server"] = "all"
    by: tuple[int, ...] | None = None

    @property
    def communicates(self) -> bool:
        """True if it counts as a communication, unlike a few statistics of gradients or of the workers' variance."""
        return self.kind not in ("statistics", "monitor")

    @property
    def bytes_per_worker(self) -> float:
        """All bytes sent, a server's answers included, divided by the workers."""
        return self.sent + (self.received if self.through == "server" else 0.0)

    def sending(self, workers: Sequence[int]) -> Sending:
        """Return the event for a virtual clock; workers: the numbers of the participants, in order."""
        by = None if self.by is None else tuple(place for place, worker in enumerate(workers) if worker in self.by)
        share = 1.0 if by is None else len(workers) / len(by)
        sent, received = share * self.sent, share * self.received
        return Sending(self.step, sent, received, self.behind, self.through, self.kind, by=by)


class Wholes:
    """Whole tensors of the model out of flat ones; with one device per node they are whole already.

    If several devices share the model, each tensor is whole on one of them.

    Attributes:
        blocks: the tensors that are whole here, and their places in the result of `gather`.
    """

    def __init__(self, blocks: Sequence[Block]):
        self.blocks = tuple(blocks)

    def gather(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the tensors of `blocks` out of a flat tensor [n]; it may be the flat tensor itself."""
        return flat

    def spread(self, whole: torch.Tensor, flat: torch.Tensor) -> None:
        """Write gathered tensors, which may have changed, back into a flat tensor [n]."""


@dataclass(frozen=True)
class Capabilities:
    """Facts about a method that configuration checks, budgets, unequal nodes and shard groups read.

    Attributes:
        inner_optimizer: the default inner optimizer; None: the method updates the parameters itself.
        plain_sgd: inner steps must be x - lr g; other optimizers and clipping are refused.
        exchanges_gradients: the method stops at every inner step, with gradients of the shared parameters. Without an
            inner optimizer these are clipped already.
        averages_copies: the trainer's parameters are the mean of its workers' copies, computed when they are needed.
        copies: names in `state` that start as copies of the parameters, after a merge as well; others start as zeros.
        correction: the worker tensor added to the clipped gradient at every inner step.
        encodings: the values of communication_dtype that it supports; None: all.
        outer_keys: the `OUTER_KEYS` that it reads.
        one_exchange: every round is one communication of known size, so that budgets can plan.
        weighs: workers count by their examples, so that their batches and inner steps may differ.
        fewer_steps: workers on slower nodes make fewer inner steps of a round, also with `balance: equal`.
        needs_speeds: what the settings need node_speeds for; empty: nothing.
        message_tensors: model-sized tensors in a worker's message, which processes hold until the exchange is over.
        recipients: how many workers receive a message; None: all.
        temporaries: model-sized tensors that an exchange allocates besides the mean.
        temporaries_per_worker: the same, for each worker of the trainer.
        shards: it is correct on a device's part of flat tensors (`devices_per_node`): it works element by element, or
            asks the group's model for what needs all parts.
    """

    inner_optimizer: str | None = "adamw"
    plain_sgd: bool = False
    exchanges_gradients: bool = False
    averages_copies: bool = False
    copies: tuple[str, ...] = ()
    correction: str | None = None
    encodings: tuple[str, ...] | None = None
    outer_keys: tuple[str, ...] = OUTER_KEYS
    one_exchange: bool = True
    weighs: bool = True
    fewer_steps: bool = False
    needs_speeds: str = ""
    message_tensors: int = 0
    recipients: int | None = None
    temporaries: float = 0.0
    temporaries_per_worker: float = 0.0
    shards: bool = False


class Method:
    """A synchronisation method.

    A subclass implements `message` and `apply`, or `exchange` if its workers keep replicas.

    Attributes:
        Settings: the keys of `synchronisation`, a frozen dataclass. Its __post_init__ raises ValueError("name: what is
            wrong"); so does __init__ for what depends on the model.
        capabilities: facts about the method; `configured` may change them.
        state: names of the trainer's flat tensors [n] besides the parameters.
        worker_state: names of each worker's flat tensors [n].
        keeps: the parameters of a worker between rounds. "shared": it starts from the trainer's. "anchor": it has a
            starting point of its own. "replica": it goes on from where it is, and the round may have several stops.
    """

    @dataclass(frozen=True)
    class Settings:
        """No settings."""

    capabilities: Capabilities = Capabilities()
    state: tuple[str, ...] = ()
    worker_state: tuple[str, ...] = ()
    keeps: Literal["shared", "anchor", "replica"] = "shared"

    def __init__(self, settings: Any, outer: Outer, blocks: Sequence[Block]):
        self.settings = settings
        self.outer = outer
        self.blocks = blocks
        self.capabilities = self.configured(settings)

    @classmethod
    def configured(cls, settings: Any) -> Capabilities:
        """Return the capabilities with these settings."""
        return cls.capabilities

    @classmethod
    def problems(cls, settings: Any, inner_steps: int, workers: int | None) -> list[str]:
        """Return what is wrong with rounds of so many inner steps, and with this number of workers if it is known."""
        return []

    # A round

    def stops(self, group: "Group") -> Sequence[int]:
        """Return the inner steps after which workers come together, in order; the last is the round's last.

        More than one needs replicas. Not asked of methods that exchange gradients.
        """
        return (group.inner_steps,)

    def incoming(self, group: "Group"):
        """Return the accumulator of the workers' messages at this stop: `group.mean`, `.messages` or `.tensors`."""
        return group.mean()

    def message(self, worker: "LocalWorker", group: "Group") -> Any:
        """Return a worker's contribution at this stop, which is added to `incoming`."""
        raise NotImplementedError

    def apply(self, group: "Group", result: Any) -> None:
        """Change the shared parameters, state and values in place; result: of `incoming`, never empty."""
        raise NotImplementedError

    def exchange(self, group: "Group") -> None:
        """Come together at a stop, for methods with replicas, whose workers have all arrived."""
        raise NotImplementedError

    # Hooks that few methods need

    def merged(self, values: dict[str, float]) -> None:
        """Change the values after a merge: all copies are the merged parameters now."""

    def lost(self, values: dict[str, float], workers: Collection[int]) -> None:
        """Change the values after a round that lost these workers: new ones take their places."""

    def bytes_per_round(self, workers: int, mean: float, message: float, dtype: torch.dtype) -> float:
        """Return the bytes that all workers together send in a round, if that is one exchange.

        Args:
            mean: bytes of a mean of all parameters, by all workers.
            message: bytes of one model-sized tensor to one other worker.
            dtype: of the parameters.
        """
        return mean

    def turns(
        self, own_steps: Mapping[int, int], inner_steps: int, values: Mapping[str, float], travel: Fraction
    ) -> Mapping[int, Sequence[int]]:
        """Return during which inner steps of a round, from 0, each worker makes its own, if some make fewer.

        Args:
            own_steps: how many each worker has time for, by number.
            values: as the round begins.
            travel: inner steps of the fastest worker until a server has answered.
        """
        return {worker: turns(own, inner_steps) for worker, own in own_steps.items()}


def taken_names(method: Method | type[Method], moments: Collection[str]) -> list[str]:
    """Return one line per name in the method's state that is taken already.

    moments: names of the inner optimizer's state, which is the trainer's if gradients are exchanged, else a worker's.
    """
    of_trainer: Collection[str] = moments if method.capabilities.exchanges_gradients else ()
    of_worker: Collection[str] = () if method.capabilities.exchanges_gradients else moments
    taken = {"state": ("parameters", *of_trainer), "worker_state": (COPY, ERROR, *of_worker)}
    return [
        f"{attribute} has {name!r}, which is kept anyway: give it another name"
        for attribute, names in taken.items()
        for name in getattr(method, attribute)
        if name in names
    ]


def check_names(word: str, method: type[Method]) -> None:
    """Raise ValueError if a method that is being registered has state under a name that is taken."""
    if taken := taken_names(method, () if method.capabilities.inner_optimizer is None else MOMENTS):
        raise ValueError(f"{word}: {'; '.join(taken)}")


def by_layer(blocks: Sequence[Block]) -> list[list[Block]]:
    """Return the tensors outside all layers, then those of each layer: its name ends with its first number."""
    layers: dict[tuple[str, ...], list[Block]] = {(): []}
    for block in blocks:
        parts = block.name.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdigit()), -1)
        layers.setdefault(tuple(parts[: number + 1]), []).append(block)
    return list(layers.values())


def take(flat: torch.Tensor, part: Part | None) -> torch.Tensor:
    """Return a copy of a part of a flat tensor, or the tensor itself for None."""
    return flat if part is None else torch.cat([flat[place] for place in part])


def put(flat: torch.Tensor, part: Part | None, values: torch.Tensor) -> None:
    """Write a part of a flat tensor."""
    if part is None:
        flat.copy_(values)
        return
    begin = 0
    for place in part:
        end = begin + place.stop - place.start
        flat[place] = values[begin:end]
        begin = end
