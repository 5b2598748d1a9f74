"""LoCoDL, with equations from memory: local SGD steps and compressed differences now and then (arXiv 2403.04348).

Only the paper's summary was available. Tests check that with these equations workers with different quadratics reach
the minimum of their mean (tests/unit/test_locodl.py).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from algorithms.flat import random_elements
from algorithms.synchronisation.group import Group
from algorithms.synchronisation.method import Capabilities, Method, require


@dataclass(frozen=True)
class LoCoDL(Method):
    """In every inner step, with lr its learning rate and y the shared parameters (there is no shared function g):

        x_m = x_m - lr (grad f_m(x_m) - u_m);  y = y + lr v

    and with probability p, for all workers together, with a compressor C_m and its omega:

        d_m = C_m(x_m - y);  D = (1/2) mean_m d_m;  x_m = (1 - rho) x_m + rho (y + D);  y = y + rho D
        u_m = u_m + r (D - d_m);  v = v + r D;  r = p chi / (lr (1 + 2 omega))

    C_m keeps k random elements of n, multiplied by n / k: unbiased, with omega = n / k - 1. All workers know which, so
    that only values are sent, and each worker computes the mean. "correction" is -u_m, which is added to gradients;
    "control" is v. mean_m u_m + v stays 0, and nothing moves at the minimum of the mean function.

    Theory. With a strongly convex g, lr < 2 / L and 2 rho - rho^2 (1 + omega_av) >= chi, with omega_av that of the mean
    of all messages, a sum of squared distances from the minimum shrinks in every step at least as fast as
    max((1 - lr mu)^2, (1 - lr L)^2, 1 - p^2 chi / (1 + 2 omega)). Without g, as here, it does not grow; on quadratics
    it shrinks linearly in the end, sometimes slightly slower than that. The default rho = chi = 1 / (1 + omega / M) is
    the largest pair of equals that this allows, as independent messages have omega_av = omega / M. Unequal weights of
    workers, and AdamW, are outside the theory.

    A lone worker sends nothing: C_m keeps everything, omega = 0. u_m and v are zero at the first inner step
    after workers join, leave or are lost, and after a merge. Before a merge, and before workers leave, an exchange
    without C_m and with rho = 1 is made: y = y + (1/2) mean_m (x_m - y).

    Attributes:
        probability: p.
        density: k / n.
    """

    probability: float = 0.1
    density: float = 0.1

    keeps = "replica"
    state = ("control",)
    worker_state = ("correction",)

    def __post_init__(self):
        require(self, "larger than 0 and at most 1", lambda value: 0 < value <= 1, "probability", "density")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            inner_optimizer="sgd",
            correction="correction",
            encodings=("float32",),
            outer_keys=(),
            one_exchange=False,
            weighted=False,
            temporaries=max(1.0, 8 * self.density - 1),
            temporaries_per_worker=3 * self.density,
        )

    def stops(self, group: Group) -> Sequence[int]:
        if group.values.get("workers") != len(group.weights):
            # With other workers corrections no longer cancel.
            group.values["workers"] = len(group.weights)
            group.shared["control"].zero_()
            for worker in group.local_workers:
                worker.state["correction"].zero_()
        return range(1, group.clock.inner_steps + 1)

    def settle(self, group: Group) -> None:
        delta = group.mean_pseudo_gradient()
        if delta is not None:
            group.shared["parameters"].sub_(delta, alpha=0.5)

    def exchange(self, group: Group) -> None:
        shared = group.shared
        generator = group.clock.generator()
        shared["parameters"].add_(shared["control"], alpha=group.inner.learning_rate)
        if torch.rand((), generator=generator, dtype=torch.float64).item() < self.probability:
            self._communicate(group, generator)

    def _communicate(self, group: Group, generator: torch.Generator) -> None:
        if group.inner.learning_rate == 0.0:  # a warm-up of the library's user: nothing has moved
            return
        y = group.shared["parameters"]
        workers = len(group.weights)
        size = group.model.parameter_count
        count = size if group.lone else max(1, round(self.density * size))
        omega = size / count - 1
        positions = [random_elements(group.model.blocks, size, count, generator) for _ in range(workers)]
        arrived = self._exchange_messages(group, positions)
        if len(arrived) < workers:
            return
        half = torch.zeros_like(y)
        for index, values in arrived.items():
            half.index_add_(0, positions[index].to(y.device), values, alpha=0.5 / workers)
        rho = chi = 1 / (1 + omega / workers)
        rate = self.probability * chi / (group.inner.learning_rate * (1 + 2 * omega))
        target = y + half
        for worker in group.local_workers:
            worker.parameters.lerp_(worker.to_device(target), rho)
            correction = worker.state["correction"]
            correction.add_(worker.to_device(half), alpha=-rate)
            own = worker.to_device(positions[worker.index])
            correction.index_add_(0, own, worker.to_device(arrived[worker.index]), alpha=rate)
        y.add_(half, alpha=rho)
        group.shared["control"].add_(half, alpha=rate)

    def _exchange_messages(self, group: Group, positions: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return every worker's C_m(x_m - y) at its positions, by number."""
        y = group.shared["parameters"]
        count = len(positions[0])
        factor = group.model.parameter_count / count
        messages = group.messages(count * y.element_size())
        for worker in group.local_workers:
            own = worker.to_device(positions[worker.index])
            message = (worker.parameters[own] - worker.to_device(y)[own]).mul_(factor)
            messages.add(worker, message.view(torch.uint8))
        return {index: message.view(y.dtype) for index, message in messages.result().items()}

    def restarted(self, values: dict[str, float], workers: Collection[int] | None) -> None:
        values["workers"] = 0
