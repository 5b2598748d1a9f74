"""LoCoDL: local steps of SGD, and random parts of differences now and then (arXiv 2403.04348, Algorithm 1)."""

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from algorithms.synchronisation.group import Group, LocalWorker
from algorithms.synchronisation.method import Capabilities, Method
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

    capabilities = Capabilities(
        inner_optimizer="sgd",
        plain_sgd=True,
        correction="correction",
        encodings=("float32",),
        outer_keys=(),
        one_exchange=False,
        weighs=False,
        shards=True,
    )
    state = ("control",)
    worker_state = ("correction",)
    keeps = "replica"

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
    def configured(cls, settings: Settings) -> Capabilities:
        density = settings.density
        return dataclasses.replace(
            cls.capabilities, temporaries=max(1.0, 8 * density - 1), temporaries_per_worker=3 * density
        )

    def stops(self, group: Group) -> Sequence[int]:
        return range(1, group.inner_steps + 1)

    def exchange(self, group: Group) -> None:
        shared = group.shared
        generator = group.generator()
        workers = len(group.weights)
        if group.values.setdefault("workers", workers) != workers:
            # With other workers, or without one, corrections no longer cancel: all start at zero again.
            group.values["workers"] = workers
            shared["control"].zero_()
            for worker in group.local:
                worker.state["correction"].zero_()
        shared["parameters"].add_(shared["control"], alpha=group.learning_rate)
        if torch.rand((), generator=generator, dtype=torch.float64).item() < self.settings.probability:
            self._communicate(group, generator)

    def _communicate(self, group: Group, generator: torch.Generator) -> None:
        settings = self.settings
        y = group.shared["parameters"]
        workers = len(group.weights)
        size = group.model.whole_size
        count = max(1, round(settings.density * size))
        places = [group.model.local_places(random_part(size, count, generator)) for _ in range(workers)]
        longest = max(1, *map(len, places))  # devices that share a model hold different amounts
        messages = group.messages(longest * y.element_size(), counted=count * y.element_size())
        for worker in group.local:
            messages.add(worker, self._compressed(worker, y, places[worker.index], longest, size / count))
        arrived = {index: message.view(y.dtype)[: len(places[index])] for index, message in messages.result().items()}
        if len(arrived) < workers:
            return
        half = torch.zeros_like(y)
        present = math.fsum(group.weights[index] for index in arrived)
        for index, values in arrived.items():
            half.index_add_(0, places[index].to(y.device), values, alpha=group.weights[index] / present / 2)
        omega = size / count - 1
        default = 1 / (1 + omega / workers)
        rho = settings.rho or default
        chi = settings.chi or default
        rate = settings.probability * chi / (group.learning_rate * (1 + 2 * omega))
        ahead = y + half
        for worker in group.local:
            worker.parameters.lerp_(worker.here(ahead), rho)
            correction = worker.state["correction"]
            own = worker.here(places[worker.index])
            correction.add_(worker.here(half), alpha=-rate)
            correction.index_add_(0, own, worker.here(arrived[worker.index]), alpha=rate)
        y.add_(half, alpha=rho)
        group.shared["control"].add_(half, alpha=rate)

    @staticmethod
    def _compressed(
        worker: LocalWorker, y: torch.Tensor, places: torch.Tensor, longest: int, factor: float
    ) -> torch.Tensor:
        """C_m(x_m - y) as bytes."""
        own = worker.here(places)
        message = y.new_zeros(longest, device=worker.parameters.device)
        torch.sub(worker.parameters[own], worker.here(y)[own], out=message[: len(own)]).mul_(factor)
        return message.view(torch.uint8)

    def merged(self, values: dict[str, float]) -> None:
        values["workers"] = 0

    def lost(self, values: dict[str, float], workers: Collection[int]) -> None:
        self.merged(values)
