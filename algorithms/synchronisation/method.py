"""The interface of a synchronisation method: how the workers of a trainer come together.

A method is one file beside this one: a frozen dataclass of its parameters, written over flat tensors, and an entry in
the registry (`algorithms.synchronisation`). A round is cut at the method's stops; between two stops workers only
compute. `fabrics.training.outer_round` runs a method; what it sees of the workers is `group.Group`. A method object
keeps nothing: its named tensors, per trainer or worker, are created (zeros), saved, moved and merged by common code.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from algorithms.flat import Block
from algorithms.nodes.balance import turns

if TYPE_CHECKING:
    from algorithms.synchronisation.group import Group, LocalWorker

# Worker tensors that belong neither to the optimizer nor to the method.
ERROR = "error"
COPY = "copy"
# Names in the states of inner optimizers.
MOMENTS = ("step", "exp_avg", "exp_avg_sq", "momentum")

# Configuration keys that a method may read or not.
OUTER_KEYS = ("learning_rate_for_outer_opt", "outer_momentum")


def no_problems(inner_steps: int | None, blocks: Sequence[Block] | None) -> list[str]:
    """Accept every number of inner steps and every model."""
    return []


def bytes_of_a_mean(workers: int, mean: float, message: float, blocks: Sequence[Block], dtype: torch.dtype) -> float:
    return mean


def evenly_spread(
    own_steps: Mapping[int, int], inner_steps: int, values: Mapping[str, float], server_steps: Fraction
) -> Mapping[int, Sequence[int]]:
    """Spread the inner steps of slower workers evenly over the round."""
    return {worker: turns(own, inner_steps) for worker, own in own_steps.items()}


@dataclass(frozen=True)
class Capabilities:
    """Facts about a method for configuration checks, budgets, memory, unequal nodes and shard groups.

    Attributes:
        inner_optimizer: the default inner optimizer; None: the method updates the parameters itself.
        exchanges_gradients: it stops at every inner step, with gradients, which are clipped without inner optimizer.
        averages_copies: the trainer's parameters are the mean of its workers' copies, computed when they are needed.
        copies: names in `state` that start as copies of the parameters, after a merge as well; others start as zeros.
        correction: the worker tensor added to the gradient at every inner step, which must be plain SGD's without
            clipping.
        encodings: the values of communication_dtype that it supports; None: all.
        outer_keys: the `OUTER_KEYS` that it reads.
        one_exchange: every round is one communication of known size, so that budgets can plan.
        overlaps: that communication is awaited at the end of the next round only.
        weighted: workers count by their examples, so that their batches and inner steps may differ.
        fewer_steps: workers on slower nodes make fewer inner steps of a round, also with `balance: equal`.
        needs_speeds: the purpose for which node_speeds must be given; empty: none.
        message_tensors: model-sized tensors in a worker's message, which processes hold until the exchange is over.
        recipients: the number of workers that receive a message; None: all.
        temporaries: model-sized tensors that an exchange allocates besides the mean.
        temporaries_per_worker: the same, for each worker of the trainer.
        reads_state_often: it reads the trainer's state more than once in a round, which cannot wait in host memory.
        shards: it is correct on a device's part of flat tensors (`devices_per_node`).
        problems: what is wrong with a number of inner steps per round and a model; None: unknown.
        bytes_per_round: sent by all workers in a round of one exchange, from their number, the bytes of a mean of all
            parameters, those of one model-sized tensor to one other worker, the model and its type.
        active_steps: the inner steps of a round, from 0, during which each worker makes its own, if some make fewer;
            from each one's number of steps, the inner steps of the round, the method's values, and the inner steps
            until a server has answered.
    """

    inner_optimizer: str | None = "adamw"
    exchanges_gradients: bool = False
    averages_copies: bool = False
    copies: tuple[str, ...] = ()
    correction: str | None = None
    encodings: tuple[str, ...] | None = None
    outer_keys: tuple[str, ...] = OUTER_KEYS
    one_exchange: bool = True
    overlaps: bool = False
    weighted: bool = True
    fewer_steps: bool = False
    needs_speeds: str = ""
    message_tensors: int = 0
    recipients: int | None = None
    temporaries: float = 0.0
    temporaries_per_worker: float = 0.0
    reads_state_often: bool = False
    shards: bool = False
    problems: Callable[[int | None, Sequence[Block] | None], list[str]] = no_problems
    bytes_per_round: Callable[[int, float, float, Sequence[Block], torch.dtype], float] = bytes_of_a_mean
    active_steps: Callable[[Mapping[int, int], int, Mapping[str, float], Fraction], Mapping[int, Sequence[int]]] = (
        evenly_spread
    )


@dataclass(frozen=True)
class Method:
    """A synchronisation method.

    The fields of a subclass are its parameters, the keys of `synchronisation`, all with defaults, which __post_init__
    checks (`require`). A subclass implements `message` and `apply`, or `exchange` if its workers keep replicas. An
    attribute that depends on parameters is a property.

    Attributes:
        state: names of the trainer's flat tensors [n] besides the parameters.
        worker_state: names of each worker's flat tensors [n].
        keeps: the parameters of a worker between rounds. "shared": it starts from the trainer's. "anchor": it has a
            starting point of its own. "replica": it continues from its own, and the round may have several stops.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()
    state: ClassVar[tuple[str, ...]] = ()
    worker_state: ClassVar[tuple[str, ...]] = ()
    keeps: ClassVar[Literal["shared", "anchor", "replica"]] = "shared"

    def stops(self, group: "Group") -> Sequence[int]:
        """Return the inner steps after which workers come together, in order; the last is the round's last.

        More than one stop needs replicas. Not called for methods that exchange gradients.
        """
        return (group.clock.inner_steps,)

    def incoming(self, group: "Group"):
        """Return the accumulator of the workers' messages at this stop: `group.mean(...)` or `group.messages(...)`."""
        return group.mean()

    def message(self, worker: "LocalWorker", group: "Group") -> Any:
        """Return a worker's contribution at this stop, which is added to `incoming`."""
        raise NotImplementedError(f"{type(self).__name__} needs `message`")

    def apply(self, group: "Group", result: Any) -> None:
        """Change the shared parameters, state and values in place, from the result of `incoming`, never empty."""
        raise NotImplementedError(f"{type(self).__name__} needs `apply`")

    def exchange(self, group: "Group") -> None:
        """Come together at a stop, for methods with replicas, whose workers have all arrived."""
        raise NotImplementedError(f"{type(self).__name__} needs `exchange`")

    def settle(self, group: "Group") -> None:
        """Apply to the shared parameters what the workers have learned and not sent yet.

        Called before a merge and before workers leave, after which all start from the shared parameters. There is no
        inner step: of `group` the clock and the inner optimizer are missing.
        """

    def restarted(self, values: dict[str, float], workers: Collection[int] | None) -> None:
        """Change the values in place after workers restarted from the shared parameters.

        workers: the workers that a round lost; None: all, after a merge or after workers have left.
        """


def require(method: Method, rule: str, valid: Callable[[Any], bool], *names: str) -> None:
    """Raise ValueError if one of these parameters is neither null nor valid; rule: what it must be."""
    for name in names:
        value = getattr(method, name)
        if value is not None and not valid(value):
            raise ValueError(f"{name}: must be {rule}, got {value}")


def taken_names(method: Method, moments: Collection[str]) -> list[str]:
    """Return one line per name in the method's state that is taken; moments: names in the inner optimizer's state."""
    shared = method.capabilities.exchanges_gradients
    taken = [f"state has {name!r}" for name in method.state if name in ("parameters", *(moments if shared else ()))]
    kept = (COPY, ERROR, *(() if shared else moments))
    taken += [f"worker_state has {name!r}" for name in method.worker_state if name in kept]
    return [f"{problem}, which is kept anyway: give it another name" for problem in taken]


def check_registered(name: str, method: type[Method]) -> None:
    """Raise ValueError if what is being registered is no Method, a parameter has no default, or a name is taken."""
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise ValueError(f"{name}: must be a class that inherits from Method")
    try:
        default = method()
    except TypeError as error:
        raise ValueError(f"{name}: every parameter needs a default: {error}") from None
    if taken := taken_names(default, () if default.capabilities.inner_optimizer is None else MOMENTS):
        raise ValueError(f"{name}: {'; '.join(taken)}")
