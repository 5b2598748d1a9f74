"""What a synchronisation method answers, and what it may ask of those who carry it out.

A method says how the workers of a trainer come together: it is one file beside this one, a class with an entry in the
registry (`algorithms.synchronisation`), and knows flat tensors only. A round is cut at the method's stops; between two
of them workers only compute. Tensors that it keeps have names, per trainer or per worker: the common code makes them
(of zeros), saves them, moves them with nodes, merges and drops them, so that a method keeps nothing itself.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal, Protocol

import torch

from algorithms.nodes.balance import turns
from algorithms.nodes.virtual_clock import Sending

Part = Sequence[slice]

# Names of a worker's tensors that are neither its optimiser's nor its method's.
ERROR, COPY = "error", "copy"
# Those of the inner optimisers' states.
MOMENTS = ("step", "exp_avg", "exp_avg_sq", "momentum")

# Keys of the configuration that are a method's to use or not; those of the inner steps are its optimiser's.
OUTER_KEYS = ("learning_rate_for_outer_opt", "outer_momentum", "outer_momentum_at_merge")


@dataclass(frozen=True)
class Block:
    """A tensor of the model and its place in the flat ones. stop: where the next one starts, or the end."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Numbers of the tensor itself; between them and `stop` there may be zeros."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Outer:
    """The values that every outer step knows: learning_rate_for_outer_opt and outer_momentum."""

    learning_rate: float
    momentum: float


@dataclass(frozen=True)
class Event:
    """What the workers of a trainer send each other at one time.

    kind: what for. step: after which inner step of the round. sent, received: bytes of each worker. behind: inner steps
    that it may hide behind, before anybody waits for it. through: whom it goes through, all workers alike (a ring),
    pairs or small groups, or a server, which is no worker's node. by: the numbers of those that send, where the others
    know nothing of it; the bytes are a mean over all workers even so.
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
        """Whether it counts as a communication: a few numbers about gradients or the spread of workers do not."""
        return self.kind not in ("statistics", "monitor")

    @property
    def bytes_per_worker(self) -> float:
        """All that is sent, a server's answers as well, divided by the workers."""
        return self.sent + (self.received if self.through == "server" else 0.0)

    def sending(self, workers: Sequence[int]) -> Sending:
        """The same for a virtual clock; workers: the numbers of those that take part, in order."""
        by = None if self.by is None else tuple(place for place, worker in enumerate(workers) if worker in self.by)
        share = 1.0 if by is None else len(workers) / len(by)
        sent, received = share * self.sent, share * self.received
        return Sending(self.step, sent, received, self.behind, self.through, self.kind, by=by)


@dataclass
class Member:
    """A worker of this process, as a method sees it.

    Attributes:
        index: its number among all workers of the trainer.
        parameters: its own now, flat [n]. But with own copy "replica" they are gone once the next member is there (in
            `members`, all but the last's), and may be written over.
        start: what it began the round with; with own copy "anchor" it is the copy, and writing to it sets the next
            start. Of a method without copies it is the trainer's, wherever that is.
        gradient: of the inner step, flat [n], for methods that exchange gradients.
        state: its named tensors.
    """

    index: int
    parameters: torch.Tensor
    start: torch.Tensor
    gradient: torch.Tensor | None
    state: dict[str, torch.Tensor]

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the trainer, on the worker's device."""
        return tensor.to(self.parameters.device)


class Wholes:
    """Flat tensors for what looks at whole tensors of the model; here these are whole anyway.

    Where the devices of an island share the model each tensor is whole in one of them.

    Attributes:
        blocks: the tensors that are whole here, and where in what `gather` gives.
    """

    def __init__(self, blocks: Sequence[Block]):
        self.blocks = tuple(blocks)

    def gather(self, flat: torch.Tensor) -> torch.Tensor:
        """Of a flat tensor [n] those that are whole here; it may be the flat tensor itself."""
        return flat

    def spread(self, whole: torch.Tensor, flat: torch.Tensor) -> None:
        """Write into a flat tensor [n] what became of that which was gathered of it."""


class Group(Protocol):
    """The workers of a trainer at a stop.

    Whatever it gives is the same in all processes, so that all decide alike. Processes reach a stop's exchanges in
    the same order; a method may branch on nothing that only some of them know.

    Attributes:
        shared: tensors of the trainer by name, flat [n], among them `parameters`; alike in every process.
        values: numbers that the method keeps, by name; alike in every process.
        workers: how many take part, in all processes. weights: of each by number, in the mean; they sum to 1.
        seconds: of each by number, for its inner steps of the round, by the speed of its node; all 0 where speeds do
            not count.
        own_steps: inner steps for which each has time in the round, by number; 0 of those that rest. batches: examples
            of one.
        step_seconds: of an inner step of the fastest, as `seconds`.
        round: of the trainer, counted from 0. step: inner steps of the round that are done. inner_steps: of the round.
        learning_rate: of the last inner step. weight_decay: of all inner steps, for methods that update by themselves.
        message_dtype: type of the numbers of a method's own messages, as communication_dtype says.
        size: of flat tensors of the whole model. Where the devices of an island share it, [n] is what is here of them.
        wholes: for methods that look at whole tensors.
    """

    shared: dict[str, torch.Tensor]
    values: dict[str, float]
    workers: int
    weights: Sequence[float]
    seconds: Sequence[float]
    own_steps: Sequence[int]
    batches: Sequence[int]
    step_seconds: float
    round: int
    step: int
    inner_steps: int
    learning_rate: float
    weight_decay: float
    message_dtype: torch.dtype
    size: int
    wholes: Wholes

    def total(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sum over the devices that share a model of a few numbers that each has of its part; in place."""

    def distance(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Euclidean, of flat tensors of whole models."""

    def sketch(self, flat: torch.Tensor, seed: int, size: int, rows: int) -> torch.Tensor:
        """See algorithms.batch.across_workers.sketch; of a flat tensor of the whole model."""

    def here(self, places: torch.Tensor) -> torch.Tensor:
        """Where in flat tensors those of some places of the whole model's are that are here, in their order."""

    def members(self) -> list[Member]:
        """Those of this process that are not left out; only for methods whose workers keep copies."""

    def mean(
        self,
        give: Callable[[Member], torch.Tensor],
        like: torch.Tensor,
        kind: Literal["synchronisation", "gradient", "parameters", "monitor"] = "synchronisation",
        behind: int = 0,
        part: Part | None = None,
        weights: Mapping[int, float] | None = None,
        numbers: int | None = None,
    ) -> torch.Tensor | None:
        """Weighted mean over all workers of a tensor that each gives, and that may be written over; None with nobody
        left.

        Differences (kind "synchronisation") travel as `communication_dtype` says, with what it lost of the worker's
        last ones; gradients too, without; parameters and the few numbers of a monitor as they are.

        Args:
            like: of the mean's shape, type and device.
            behind: inner steps that may be made before anybody waits for it.
            part: of the flat tensors, that a difference is of; None: the whole.
            weights: of those that send theirs to a server, by number; None: all do, to each other.
            numbers: in the mean, of all devices that share a model; None: as many as `like` has in each, or of a
                monitor, which all know, in one.
        """

    def mean_difference(
        self, part: Part | None = None, behind: int = 0, weights: Mapping[int, float] | None = None
    ) -> torch.Tensor | None:
        """The pseudo-gradient: the mean over all workers of (shared parameters - own), or of a part of it."""

    def deliver(
        self,
        give: Callable[[Member], torch.Tensor],
        size: int,
        to: Callable[[int], Collection[int]] | None = None,
        behind: int = 0,
        through: Literal["all", "groups", "server"] = "all",
        counted: int | None = None,
    ) -> dict[int, torch.Tensor]:
        """Bytes [size] of every worker for others: what came here, or was here, by the number of who sent it.

        to: from a worker to whom its bytes go; None: to all. through: "server" counts once up, and once down.
        counted: bytes of the message of all devices that share a model; None: size.
        """

    def deliver_tensors(
        self,
        give: Callable[[Member], Sequence[torch.Tensor]],
        count: int,
        to: Callable[[int], Collection[int]] | None = None,
        through: Literal["all", "groups", "server"] = "all",
        by: Collection[int] | None = None,
    ) -> dict[int, list[torch.Tensor]]:
        """As `deliver`, so many flat tensors [n] of every worker, as `communication_dtype` says; no error is kept.

        What comes back from a server is one tensor, as it is. by: the numbers of those that send; None: all.
        """

    def server_seconds(self, part: Part | None) -> float:
        """Until such a part is with a server and its answer back, over the link of the configuration."""

    def clipped(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient, scaled down in place as the config says."""

    def update(self, gradient: torch.Tensor) -> None:
        """The inner optimiser's step of the shared parameters with this gradient, clipped as the config says."""

    def generator(self) -> torch.Generator:
        """Random numbers of this place in the run, the same in every process; on the CPU."""


class Method:
    """One way in which workers come together; subclasses say how.

    Attributes:
        Settings: what `synchronisation` may set, a frozen dataclass; its __post_init__ raises ValueError with a line
            "name: what is wrong" for values that are; so does __init__ for what depends on the model.
        inner_optimizer: where the config names none; None: the method itself updates the parameters.
        plain_sgd: whether inner steps have to be x - lr g, so that other optimisers and clipping are refused.
        trainer_state, worker_state: names of flat tensors [n] that are kept besides parameters; see `taken_names`.
        trainer_copies: those of the trainer's that begin as copies of its parameters, in a merge as well; others begin
            as zeros.
        correction: the name of the worker's tensor that is added to its clipped gradient at every inner step, if any.
        own_copy: what workers keep between rounds. "nothing": all start from the shared parameters, and there is one
            stop, at the end. "anchor": each has a start of its own, and there is one stop. "replica": each has
            parameters of its own, which go on from where they are.
        shares_copy: whether the shared parameters are those of the trainer at any time; if not, they become the mean of
            all workers' copies where they are asked for.
        exchanges_gradients: whether it stops in every inner step, with gradients of the shared parameters.
        plannable: whether every round is one communication of as many bytes as `planned` says, so that budgets can
            reckon.
        weighs: whether a worker counts by its examples wherever workers come together, so that they may have shares of
            a batch that differ and change.
        allows_fewer_steps: whether some workers may make fewer inner steps of a round than others. At a stop after n of
            H they are done with as large a part of theirs, rounded down. Never where gradients are exchanged.
        encodings: words of communication_dtype that it knows; None: all.
        delivers: tensors of model size in a worker's message to others (`deliver_tensors`), which processes hold until
            the exchange is over.
        temporaries: from the settings and a trainer's number of workers to how many flat tensors an exchange makes for
            a moment besides the mean, about.
        shards: whether it is right on parts of flat tensors (`devices_per_node`): numbers at different places have
            nothing to do with each other, or the group is asked for what is of all of them.
        whole_tensors: whether it has the group's `wholes` give it what it looks at. Its blocks are those of the whole
            model then, of which each device makes and gets messages about those in `wholes`.
    """

    @dataclass(frozen=True)
    class Settings:
        """None of its own."""

    inner_optimizer: ClassVar[str | None] = "adamw"
    plain_sgd: ClassVar[bool] = False
    trainer_state: tuple[str, ...] = ()
    worker_state: tuple[str, ...] = ()
    trainer_copies: ClassVar[tuple[str, ...]] = ()
    correction: ClassVar[str | None] = None
    own_copy: Literal["nothing", "anchor", "replica"] = "nothing"
    shares_copy: bool = True
    exchanges_gradients: ClassVar[bool] = False
    plannable: ClassVar[bool] = True
    weighs: ClassVar[bool] = True
    allows_fewer_steps: ClassVar[bool] = True
    encodings: ClassVar[tuple[str, ...] | None] = None
    delivers: ClassVar[int] = 0
    temporaries: ClassVar[Callable[..., float]] = staticmethod(lambda settings, workers: 0.0)
    shards: ClassVar[bool] = False
    whole_tensors: ClassVar[bool] = False

    def __init__(self, settings, outer: Outer, blocks: Sequence[Block]):
        self.settings, self.outer, self.blocks = settings, outer, blocks

    @classmethod
    def problems(cls, settings, inner_steps: int, workers: int | None) -> list[str]:
        """What is wrong with rounds of so many inner steps, and so many workers of a trainer where that is known."""
        return []

    @classmethod
    def heard(cls, settings, others: int) -> int:
        """Of how many among so many others a worker gets the message, where it delivers one."""
        return others

    @classmethod
    def outer_keys(cls, settings) -> Collection[str]:
        """Those of `OUTER_KEYS` that make a difference; it is warned of others that are changed."""
        return OUTER_KEYS

    @classmethod
    def fewer_steps(cls, settings) -> bool:
        """Whether workers on slower nodes make fewer inner steps of a round where `balance` is equal."""
        return False

    def planned(self, workers: int, mean: float, message: float, dtype: torch.dtype) -> float:
        """Bytes that so many workers send together in a round, where that is plannable.

        Args:
            mean: bytes of a mean of differences over all parameters, by all. message: of one of them to one other.
            dtype: of the parameters.
        """
        return mean

    @classmethod
    def needs_speeds(cls, settings) -> str:
        """What these parameters cannot do without node_speeds; empty: there is nothing."""
        return ""

    def turns(
        self, own_steps: Mapping[int, int], inner_steps: int, values: Mapping[str, float], travel: Fraction
    ) -> Mapping[int, Sequence[int]]:
        """During which inner steps of a round, from 0, workers make their own, by number, where some make fewer.

        Args:
            own_steps: for which each has time. values: as the round begins.
            travel: of an exchange of everything with a server, in inner steps of the fastest.
        """
        return {worker: turns(own, inner_steps) for worker, own in own_steps.items()}

    def begin(self, group: Group) -> Sequence[int]:
        """The stops of a round that is about to begin, where they depend on more than `stops` is told."""
        return self.stops(group.inner_steps, group.values)

    def stops(self, inner_steps: int, values: Mapping[str, float]) -> Sequence[int]:
        """The inner steps of a round after which `exchange` is called, in order; the last is the round's last."""
        return (inner_steps,)

    def exchange(self, group: Group) -> None:
        """What happens at a stop; shared parameters, state and values change in place."""
        raise NotImplementedError

    def merged(self, values: dict[str, float]) -> None:
        """Change the values, where they have to, after a merge: all workers' copies are the merged parameters now."""

    def lost(self, values: dict[str, float], workers: Collection[int]) -> None:
        """Change the values, where they have to, after a round that lost these workers: new ones take their places."""


def taken_names(method: Method | type[Method], moments: Collection[str]) -> list[str]:
    """What of the method's state has the name of something that is kept anyway, in words.

    moments: names of the inner optimiser's state, which is a worker's; or a trainer's, with gradients exchanged.
    """
    of_trainer, of_worker = (moments, ()) if method.exchanges_gradients else ((), moments)
    taken = {"trainer_state": ("parameters", *of_trainer), "worker_state": (COPY, ERROR, *of_worker)}
    return [
        f"{attribute} has {name!r}, which is kept anyway: give it another name"
        for attribute, names in taken.items()
        for name in getattr(method, attribute)
        if name in names
    ]


def check_names(word: str, method: type[Method]) -> None:
    """Raise ValueError where a method that is being registered has state by a name that is taken."""
    if taken := taken_names(method, () if method.inner_optimizer is None else MOMENTS):
        raise ValueError(f"{word}: {'; '.join(taken)}")


def by_layer(blocks: Sequence[Block]) -> list[list[Block]]:
    """Tensors of no layer, and of each layer as they come: it is the name up to the first part that is a number."""
    layers: dict[tuple[str, ...], list[Block]] = {(): []}
    for block in blocks:
        parts = block.name.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdigit()), -1)
        layers.setdefault(tuple(parts[: number + 1]), []).append(block)
    return list(layers.values())


def take(flat: torch.Tensor, part: Part | None) -> torch.Tensor:
    """A part of a flat tensor: itself where it is the whole, else a copy."""
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
