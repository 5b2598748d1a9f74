"""LoCoDL: local steps of SGD, and random parts of differences now and then (arXiv 2403.04348, Algorithm 1)."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from algorithms.synchronisation.method import Group, Member, Method
from algorithms.synchronisation.random_part import random_part


class LoCoDL(Method):
    """In every inner step, with lr its learning rate and y the shared parameters (there is no shared function g):

        x_m = x_m - lr (grad f_m(x_m) - u_m);  y = y + lr v

    and with probability p, for all workers together, with a compressor C_m and its omega:

        d_m = C_m(x_m - y);  D = (1/2) mean_m d_m;  x_m = (1 - rho) x_m + rho (y + D);  y = y + rho D
        u_m = u_m + r (D - d_m);  v = v + r D;  r = p chi / (lr (1 + 2 omega))

    C_m keeps a random part of k of n numbers, n / k times as large: unbiased, with omega = n / k - 1. All know which,
    so that only values travel, and each of them makes the mean. Kept is -u_m, which is added to gradients.

    Of the paper only the summary was at hand: the equations are from memory, and what they do is derived and tested, in
    exact expectations (tests/unit/test_locodl.py). mean_m u_m + v stays 0, and nothing moves at the minimum of the mean
    function. With a strongly convex g, lr < 2 / L and 2 rho - rho^2 (1 + omega_av) >= chi, omega_av being that of the
    mean of all messages, a sum of squared distances from there shrinks in every step at least as fast as max((1 - lr
    mu)^2, (1 - lr L)^2, 1 - p^2 chi / (1 + 2 omega)). Without g, as here, it does not grow; on quadratics it shrinks
    linearly in the end, now and then a little slower than that. The default rho = chi = 1 / (1 + omega / M) is the
    largest pair of equals that this allows, as messages drawn apart have omega_av = omega / M. u_m and v begin anew
    when workers come, go or are lost, and after a merge; other weights of workers, and AdamW, are not in the theory.
    """

    inner_optimizer = "sgd"
    plain_sgd = True
    temporaries = staticmethod(lambda own, m: max(1 + 3 * own.density * m, (8 + 2 * m) * own.density - 1))
    own_copy = "replica"
    trainer_state = ("control",)
    worker_state = ("correction",)
    correction = "correction"
    plannable = False
    weighs = False
    allows_fewer_steps = False
    encodings = ("float32",)
    shards = True

    @dataclass(frozen=True)
    class Settings:
        """probability: to communicate after an inner step. density: k / n. rho, chi: null: see there."""

        probability: float = 0.1
        density: float = 0.1
        rho: float | None = None
        chi: float | None = None

        def __post_init__(self):
            for name in ("probability", "density", "rho", "chi"):
                if (value := getattr(self, name)) is not None and not 0 < value <= 1:
                    raise ValueError(f"{name}: must be larger than 0 and at most 1, got {value}")

    @classmethod
    def outer_keys(cls, settings) -> tuple[str, ...]:
        return ("outer_momentum_at_merge",)

    def stops(self, inner_steps: int, values: Mapping[str, float]) -> Sequence[int]:
        return range(1, inner_steps + 1)

    def exchange(self, group: Group) -> None:
        shared, generator = group.shared, group.generator()
        if group.values.setdefault("workers", group.workers) != group.workers:
            # Of other workers, or without one, corrections do not cancel any more: all begin anew.
            group.values["workers"] = group.workers
            for tensor in (shared["control"], *(member.state["correction"] for member in group.members())):
                tensor.zero_()
        shared["parameters"].add_(shared["control"], alpha=group.learning_rate)
        if torch.rand((), generator=generator, dtype=torch.float64).item() < self.settings.probability:
            self._communicate(group, generator)

    def _communicate(self, group: Group, generator: torch.Generator) -> None:
        y, control, settings = group.shared["parameters"], group.shared["control"], self.settings
        size = group.size
        count = max(1, round(settings.density * size))
        places = [group.here(random_part(size, count, generator)) for _ in range(group.workers)]
        longest, itemsize = max(1, *map(len, places)), y.element_size()  # of a device that shares a model

        def compressed(member: Member) -> torch.Tensor:
            own, message = member.here(places[member.index]), y.new_zeros(longest, device=member.parameters.device)
            torch.sub(member.parameters[own], member.here(y)[own], out=message[: len(own)]).mul_(size / count)
            return message.view(torch.uint8)

        arrived = {
            worker: message.view(y.dtype)[: len(places[worker])]
            for worker, message in group.deliver(compressed, longest * itemsize, counted=count * itemsize).items()
        }
        if len(arrived) < group.workers:
            return
        half, present = torch.zeros_like(y), math.fsum(group.weights[worker] for worker in arrived)
        for worker, values in arrived.items():
            half.index_add_(0, places[worker].to(y.device), values, alpha=group.weights[worker] / present / 2)
        omega = size / count - 1
        default = 1 / (1 + omega / group.workers)
        rho, chi = settings.rho or default, settings.chi or default
        rate = settings.probability * chi / (group.learning_rate * (1 + 2 * omega))
        ahead = y + half
        for member in group.members():
            member.parameters.lerp_(member.here(ahead), rho)
            correction, own = member.state["correction"], member.here(places[member.index])
            correction.add_(member.here(half), alpha=-rate)
            correction.index_add_(0, own, member.here(arrived[member.index]), alpha=rate)
        y.add_(half, alpha=rho)
        control.add_(half, alpha=rate)

    def merged(self, values: dict[str, float]) -> None:
        values["workers"] = 0

    def lost(self, values: dict[str, float], workers: Collection[int]) -> None:
        self.merged(values)
