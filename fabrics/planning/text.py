"""A plan as text."""

import math
from collections.abc import Iterator

from fabrics.planning.plan import Asked, Batch, Bytes, Plan
from utils.utils import byte_size

_PARTS = {
    "parameters": "parameters of the working model",
    "gradients": "its gradients",
    "moments": "moments of the inner optimiser",
    "trainers": "parameters of the trainers",
    "method_per_trainer": "what the method keeps of each trainer",
    "method_per_worker": "what the method and the encoding keep of each worker",
    "round": "sums of a round",
    "gathered": "what is whole for a moment",
    "activations": "activations (estimated)",
    "logits": "logits (estimated)",
}


def duration(seconds: float) -> str:
    """Seconds with a unit, for people."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2.0 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.3g} s"


def _batch(batch: Batch) -> str:
    steps = f"{batch.micro_batch} x {batch.accumulation_steps}"
    if batch.micro_batch * batch.accumulation_steps * batch.workers != batch.request:
        steps = f"at most {steps}"  # where shares are not equal
    return f"{batch.request:,} examples ({steps} on each of {batch.workers} node{'s' * (batch.workers > 1)})"


def _bytes(sent: Bytes) -> str:
    parts = (("synchronised", sent.synchronised), ("merged", sent.merged), ("redistributed", sent.redistributed))
    return ", ".join(f"{byte_size(count)} {name}" for name, count in parts)


def _memory(plan: Plan, asked: Asked) -> Iterator[str]:
    stays = byte_size(plan.memory.between_rounds)
    yield f"memory of a device: {byte_size(plan.memory.device)}, of which {stays} stay between rounds"
    yield from (f"  {byte_size(size):>9}  {_PARTS[name]}" for name, size in plan.memory.parts.items() if size)
    for name, size in plan.memory.host.items():
        yield f"  {byte_size(size):>9}  in host memory: {_PARTS[name]}"
    if asked.memory is not None:
        yield f"  of {byte_size(asked.memory)}: it fits"


def _whole(plan: Plan) -> Iterator[str]:
    for when, size in plan.whole_bytes.items():
        yield f"whole tensors: devices of an island send each other {byte_size(size)} for {when}"


def _times(plan: Plan) -> Iterator[str]:
    if plan.compute_seconds is not None:
        yield f"computing: {duration(plan.compute_seconds)}, {duration(plan.compute_seconds / plan.rounds)} a round"
    for link in plan.links:
        line = f"over {link.link}: {duration(link.seconds)}, {duration(link.seconds_per_round)} a round"
        if link.communicating is None:
            yield f"{line}, for what is sent alone (--tflops says how long computing takes)"
        else:
            yield f"{line}, {link.communicating:.1%} of it communicating"


def _laws(plan: Plan) -> Iterator[str]:
    laws = plan.expected
    if laws is None:
        return
    constant, *growing = (
        None if law is None else f"{math.ceil(round(law, 6)):,}"  # a round that is cut short is a communication, too
        for law in (laws.constant, laws.linear, laws.geometric, laws.fastest)
    )
    expected = f"{constant} with a batch that stays"
    if laws.linear is None:
        yield f"communications by the laws: {expected}; with one that grows max_requested_batch has to bound it"
        return
    linear, geometric, fastest = growing
    yield (
        f"communications by the laws: {expected}; with one that grows to the largest at the end {linear} (linear) or "
        f"{geometric} (geometric), {fastest} at the fastest"
    )


def text(plan: Plan, asked: Asked) -> str:
    """The plan for people."""
    checkpoints, by_time = plan.checkpoints, ""
    if checkpoints.by_time:
        by_time = f" and {checkpoints.by_time:,} by the clock"
    size = byte_size(checkpoints.first_bytes)
    if checkpoints.last_bytes != checkpoints.first_bytes:
        size += f" at first, {byte_size(checkpoints.last_bytes)} at the end"
    lines = [
        f"parameters: {plan.parameters:,}",
        f"devices: {plan.devices}, {plan.placement.devices_per_node} in each node; {plan.nodes} nodes, "
        f"{plan.trainers} trainers",
        *_memory(plan, asked),
        f"batch at the start: {_batch(plan.start)}",
        f"batch at the cap: {'nothing that is known bounds it' if plan.cap is None else _batch(plan.cap)}",
        f"rounds: {plan.rounds:,}, {plan.tokens:,} tokens, {plan.first_round_tokens:,} in the first round",
        f"checkpoints: {checkpoints.by_rounds:,} by rounds{by_time}, of {size}",
        f"first round: {_bytes(plan.first_round_bytes)}",
        f"last round: {_bytes(plan.last_round_bytes)}",
        f"in all: {_bytes(plan.bytes)}; {plan.communications:,} communications",
        *_whole(plan),
        *_times(plan),
        *_laws(plan),
        *(f"not known: {line}" for line in plan.unknown),
        *(f"warning: {line}" for line in plan.warnings),
    ]
    return "\n".join(lines)
