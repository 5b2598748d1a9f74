"""A synchronisation of one's own: DiLoCo whose outer step is as long as the workers agree.

If all differences D_m = x - x_m point the same way, their mean is as long as they are; if they point anywhere, the mean
of M is 1/sqrt(M) as long. The step is that share, ||mean D_m|| / sqrt(mean ||D_m||^2), of the mean, or `floor` of it.

    python run.py plugins=[examples/own_method.py] distributed_algo=Agreement
"""

from dataclasses import dataclass

from algorithms.synchronisation import METHODS
from algorithms.synchronisation.method import Method


class Agreement(Method):
    """x = x - max(floor, agreement) * mean_m D_m."""

    keeps = "replica"  # two exchanges per stop: lengths and differences

    @dataclass(frozen=True)
    class Settings:
        floor: float = 0.1

    def exchange(self, group):
        x = group.shared["parameters"]
        lengths = group.mean(x[:1], "monitor")
        for worker in group.local:
            lengths.add(worker, (worker.here(x) - worker.parameters).square().sum()[None])
        squared = lengths.result()
        delta = group.mean_difference()
        if delta is not None:
            agreement = (delta.square().sum() / squared.clamp_min(1e-30)).sqrt()
            x.sub_(delta * agreement.clamp_min(self.settings.floor))
        for worker in group.local:
            worker.parameters.copy_(worker.here(x))


METHODS["Agreement"] = Agreement
