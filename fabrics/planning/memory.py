"""What a device has to hold: one formula, of what a run keeps and where it is asked to keep it."""

import dataclasses
from dataclasses import dataclass, field

from fabrics.models.meta_model import StepSizes
from fabrics.sharding.checks import looked_at_whole, whole_copies
from fabrics.sharding.model_layers import gathered_numbers, passing_numbers, reduced_numbers
from fabrics.sharding.whole_tensors import most_whole
from fabrics.training.flat_model import WorkingModel
from fabrics.training.method_config import method_of
from fabrics.training.optimizers import INNER_OPTIMIZERS, inner_optimizer_name
from fabrics.training.worker import personal_tensors
from utils.config.schema import Config


@dataclass(frozen=True)
class Placement:
    """Where and how a run keeps its tensors: keys of the configuration; one that it lacks has the default here.

    on_host: the memory of the devices is the host's, as they are CPUs: nothing can be moved out of it.
    """

    devices_per_node: int = 1
    outer_state: str = "device"
    idle_moments: str = "device"
    activation_checkpointing: bool = False
    on_host: bool = False

    @classmethod
    def of(cls, config: Config) -> "Placement":
        """That which the configuration asks for."""
        asked = cls(**{entry.name: getattr(config, entry.name, entry.default) for entry in dataclasses.fields(cls)})
        if not config.devices or any(name.partition(":")[0] != "cpu" for name in config.devices):
            return asked
        return dataclasses.replace(asked, outer_state="device", idle_moments="device", on_host=True)


@dataclass(frozen=True)
class Kept:
    """What a run keeps of a model between rounds, in numbers, as long as nothing is sharded.

    flat: of a flat tensor, gaps included. moments: of the inner optimiser's state, of every worker or every trainer
    (`trainers_moments`). per_trainer, per_worker: flat tensors that the method and the encoding keep, by name.
    gathered, compared: see `passing_numbers`. looked_at: the sizes of tensors that somebody needs whole.
    whole_copies: how many times these are there at a time. itemsize: bytes of a number. frozen: parameters that stay.
    still: of those that are gathered, see `passing_numbers`.
    """

    flat: int
    moments: int
    trainers_moments: bool
    per_trainer: tuple[str, ...]
    per_worker: tuple[str, ...]
    gathered: int = 0
    compared: int = 0
    looked_at: tuple[int, ...] = ()
    whole_copies: int = 0
    itemsize: int = 4
    frozen: int = 0
    still: int = 0

    @classmethod
    def of(cls, config: Config, working: WorkingModel) -> "Kept":
        """That of a run; the working model may be on the meta device."""
        method, kind = method_of(config, working), inner_optimizer_name(config)
        state = {} if kind is None else INNER_OPTIMIZERS[kind].state(working, "meta")
        gathered, still = gathered_numbers(working.blocks, working.module)
        return cls(
            flat=working.parameters.numel(),
            moments=sum(tensor.numel() for tensor in state.values()),
            trainers_moments=method.exchanges_gradients,
            per_trainer=tuple(method.trainer_state),
            per_worker=personal_tensors(config, method),
            gathered=gathered,
            compared=reduced_numbers(working.blocks) if config.statistics_within_island else 0,
            looked_at=tuple(working.blocks[number].size for number in looked_at_whole(config, working)),
            whole_copies=whole_copies(config),
            itemsize=working.parameters.element_size(),
            frozen=sum(tensor.numel() for tensor in working.module.parameters() if not tensor.requires_grad),
            still=still,
        )

    def state_bytes(self, trainers: int, workers: int) -> int:
        """What a checkpoint of so many of them holds."""
        owners = trainers if self.trainers_moments else workers
        flat = trainers * (1 + len(self.per_trainer)) + workers * len(self.per_worker)
        return self.itemsize * (flat * self.flat + owners * self.moments)


def whole_bytes(numbers: int, itemsize: int, devices: int) -> int:
    """What the devices of an island, together, send each other to have so many numbers of whole tensors, and in parts
    again."""
    return 2 * itemsize * (devices - 1) * numbers // devices


@dataclass(frozen=True)
class Load:
    """What works on a device, or on the devices of an island together.

    processes: each has a working model. trainers, workers: all that have tensors there, summed over the processes.
    round_tensors: flat ones that a round needs besides (`fabrics.pool.node_pool.round_tensors`), likewise.
    micro_batch: examples of the largest one. evaluated: examples of an evaluation batch, which no island shares out.
    """

    trainers: int
    workers: int
    round_tensors: float = 0
    micro_batch: int = 0
    evaluated: int = 0
    processes: int = 1


@dataclass(frozen=True)
class Memory:
    """Bytes of one device, part by part; and of its share of host memory, where something is kept there.

    parameters, gradients: of the working models. moments: of the inner optimisers. trainers: x of every trainer.
    method_per_trainer, method_per_worker: what the synchronisation method keeps, by all of them. round: sums and what
    is on its way, beyond what of activations and logits is not there then. activations, logits: of the largest
    micro-batch, of an evaluation batch, or, on islands, of what statistics of examples hold of a micro-batch,
    whichever is most.
    gathered: what is whole for a moment, layers in passes or tensors for who needs them whole, beyond what of these two
    is not there then.
    """

    parameters: int
    gradients: int
    moments: int
    trainers: int
    method_per_trainer: int
    method_per_worker: int
    round: int
    gathered: int
    activations: int
    logits: int
    host: dict[str, int] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, int]:
        """By name, of the device alone."""
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self) if entry.name != "host"}

    @property
    def device(self) -> int:
        """All that is there at one time, at most."""
        return sum(self.parts.values())

    @property
    def between_rounds(self) -> int:
        """What lives on: tensors of a run whose devices are not busy."""
        return self.device - self.round - self.gathered - self.activations - self.logits


def _step_bytes(step: StepSizes, examples: int, recomputed: bool, sharded: bool) -> list[tuple[int, int]]:
    """Activations and logits of so many examples on one device, in every moment in which most may be there.

    sharded: layers are gathered, and with autocast in its type: no copy of their weights is made besides.
    """
    cast = step.layer_casts if sharded else 0
    activations, logits = examples * step.activations, examples * step.logits
    if not recomputed:  # what autocast makes of the weights lives as long as activations do
        return [(activations + step.fixed - cast, logits)]
    inputs, again = examples * step.layers * step.boundary, step.recomputed
    if again is None:  # the inputs of all layers, and one layer at a time
        return [(min(activations, inputs + activations // step.layers) + step.fixed - cast, logits)]
    outside, tied = inputs + examples * again.outside, 0 if sharded else again.tied
    return [
        # The forward pass ends: autocast keeps what it makes of weights until then.
        (inputs + again.forward.most(examples) + step.fixed - cast, 0),
        (outside + step.fixed - cast, examples * again.logits),
        # The loss is differentiated: of layers there is nothing but their inputs.
        (outside + again.fixed, logits),
        # The last layer is made again, for its gradients. Those of the head wait for those of embeddings it is tied to.
        (inputs + again.layer.most(examples) + tied - cast // step.layers, 0),
        (3 * tied, 0),  # both, and their sum
    ]


def _evaluation_bytes(step: StepSizes, examples: int, fixed: int) -> tuple[int, int]:
    """Activations, of one layer at a time, and logits with their logarithms, of so many examples; no gradients."""
    return examples * (step.activations // step.layers) + fixed, examples * step.logits * 2 // 3


def _gathered_bytes(kept: Kept, devices: int, activations: int, logits: int) -> int:
    """What is whole for a moment, beyond what of these is gone by then.

    When layers have gradients, of the logits their gradient alone is left, a third; and between passes, when whole
    tensors are looked at, nothing of all that.
    """
    passing = kept.itemsize * passing_numbers(kept.gathered, kept.compared, kept.still)
    whole = kept.itemsize * kept.whole_copies * most_whole(kept.looked_at, devices)
    return max(0, passing - (logits - logits // 3), whole - activations - logits)


def device_memory(kept: Kept, step: StepSizes | None, load: Load, placement: Placement) -> Memory:
    """The memory of a device of a run.

    With P numbers in a flat tensor, N devices in an island, t trainers and w workers on it, and p processes, in float32
    and with AdamW: 4 P / N (2 p + t (1 + method's per trainer) + w (2 + method's per worker) + round's), then
    activations and logits of ceil(micro-batch / N) examples, and, where N > 1, what else is whole for a moment.
    Parameters that stay are there once in every process, shared out likewise.

    With another `parameter_dtype` all of it is as many times as large. `outer_state: cpu` moves what trainers keep, and
    the sum of a round, to the host: of x what a worker's difference is made with is there once more, after its passes.
    `idle_moments: cpu` moves the moments of all workers of a process but the one whose turn it is.

    Args:
        step: None where what a step keeps is not known: activations and logits are 0 then.
    """
    devices = placement.devices_per_node
    sizes = kept.flat, kept.moments, kept.frozen
    flat, moments, frozen = (-(-numbers // devices) * kept.itemsize for numbers in sizes)
    owners = load.trainers if kept.trainers_moments else load.workers
    here = min(owners, load.processes) if placement.idle_moments == "cpu" and not kept.trainers_moments else owners
    trainers, methods = load.trainers * flat, load.trainers * len(kept.per_trainer) * flat
    away, sums = placement.outer_state == "cpu", round(min(load.round_tensors, load.processes) * flat)
    host = {"moments": (owners - here) * moments}
    host |= {"trainers": trainers * away, "method_per_trainer": methods * away, "round": sums * away}
    passes = [(0, 0)]
    if step is not None:
        examples, sharded = -(-load.micro_batch // devices), devices > 1
        fixed = step.fixed - (step.layer_casts if sharded else 0)  # the others are among what is gathered
        passes = _step_bytes(step, examples, placement.activation_checkpointing, sharded)
        passes += [_evaluation_bytes(step, load.evaluated, fixed)] if load.evaluated else []
        # When a probed pass ends, logits and activations are gone but for what of them the probe holds.
        passes += [(examples * step.probed + fixed, 0)] if sharded and step.probed else []
    needs = [(*each, _gathered_bytes(kept, devices, *each) if devices > 1 else 0) for each in passes]
    activations, logits, gathered = max(needs, key=sum)
    in_round = round(load.round_tensors * flat)
    if away:
        in_round -= min(sums, load.processes * (activations + logits + gathered))
    return Memory(
        parameters=load.processes * (flat + frozen),
        gradients=load.processes * flat,
        moments=here * moments,
        trainers=0 if away else trainers,
        method_per_trainer=0 if away else methods,
        method_per_worker=load.workers * len(kept.per_worker) * flat,
        round=in_round,
        gathered=load.processes * gathered,
        activations=load.processes * activations,
        logits=load.processes * logits,
        host={name: size for name, size in host.items() if size},
    )


def largest_micro_batch(kept: Kept, step: StepSizes, load: Load, placement: Placement, budget: float, most: int) -> int:
    """Examples of the largest micro-batch that fits into so many bytes of a device, at most `most`; 0: none does."""

    def fits(examples: int) -> bool:
        return device_memory(kept, step, dataclasses.replace(load, micro_batch=examples), placement).device <= budget

    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
