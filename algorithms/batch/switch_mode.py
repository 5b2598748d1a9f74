"""Switch mode: from a worker's batch to the micro-batches of one inner step (AdLoCo, section 3).

A worker's batch is its part of the requested batch. A plan that accumulates runs exactly this batch, in near-equal
parts: 17 with a max batch of 8 is (6, 6, 5). In the two cases in which the paper runs less, a plan does so, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from algorithms.nodes.balance import batch_shares
from algorithms.registry import Registry


@dataclass(frozen=True)
class ExecutionPlan:
    """The micro-batch sizes of one inner step of one worker; their sum is the effective batch."""

    micro_batches: tuple[int, ...]

    def __post_init__(self):
        if not self.micro_batches or min(self.micro_batches) < 1:
            raise ValueError(f"micro-batches must be positive, got {self.micro_batches}")

    @property
    def effective_batch(self) -> int:
        """Examples of one inner step of one worker."""
        return sum(self.micro_batches)

    @property
    def accumulation_steps(self) -> int:
        """Backward passes of one inner step."""
        return len(self.micro_batches)


def in_parts(plan: ExecutionPlan, parts: int) -> ExecutionPlan:
    """Return a plan of the same examples in at least this number of near-equal micro-batches, if there are enough."""
    if plan.accumulation_steps >= min(parts, plan.effective_batch):
        return plan
    return only_gradient_accumulation(plan.effective_batch, -(-plan.effective_batch // parts))


def only_data_loader(worker_batch: int, max_batch: int, multiplier: int = 2) -> ExecutionPlan:
    """One micro-batch, never more than fits: min(worker_batch, max_batch)."""
    return ExecutionPlan((min(worker_batch, max_batch),))


def only_gradient_accumulation(worker_batch: int, max_batch: int, multiplier: int = 2) -> ExecutionPlan:
    """Exactly `worker_batch` examples, in ceil(worker_batch / max_batch) near-equal micro-batches."""
    parts = -(-worker_batch // max_batch)
    size, larger = divmod(worker_batch, parts)
    return ExecutionPlan((size + 1,) * larger + (size,) * (parts - larger))


def threshold_switch_mode(worker_batch: int, max_batch: int, multiplier: int = 2) -> ExecutionPlan:
    """The paper's switch: accumulate only if the worker's batch exceeds `multiplier` times what fits.

    Between max_batch and multiplier * max_batch one full micro-batch is run, which is less than the worker's batch.
    """
    if worker_batch <= multiplier * max_batch:
        return only_data_loader(worker_batch, max_batch)
    return only_gradient_accumulation(worker_batch, max_batch)


# The values of switch_mode: from a worker's batch, its max batch and the multiplier to a plan.
SwitchMode = Callable[[int, int, int], ExecutionPlan]
SWITCH_MODES: Registry[SwitchMode] = Registry(
    {
        "threshold_switch_mode": threshold_switch_mode,
        "only_gradient_accumulation": only_gradient_accumulation,
        "only_data_loader": only_data_loader,
    }
)


def execution_plans(
    mode: str, requested_batch: int, max_batches: Sequence[int], multiplier: int, speeds: Sequence[float] | None = None
) -> list[ExecutionPlan]:
    """Return each worker's plan for a trainer's requested batch: ceil(B / M) examples through the switch mode.

    Args:
        requested_batch: B, in examples over all M workers.
        speeds: of each worker's node, if the same M ceil(B / M) examples are distributed in proportion to them.
    """
    workers = len(max_batches)
    each = -(-requested_batch // workers)
    shares = [each] * workers if speeds is None else batch_shares(workers * each, tuple(speeds))
    switch = SWITCH_MODES[mode]
    return [switch(share, max_batch, multiplier) for share, max_batch in zip(shares, max_batches, strict=True)]
