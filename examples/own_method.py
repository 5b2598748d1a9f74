"""A synchronisation method of your own: DiLoCo with a shorter outer step where the workers disagree.

The mean of M differences D_m = x - x_m is as long as they are if all have the same direction, and 1/sqrt(M) as long if
they are orthogonal. The step is the mean times that ratio, ||mean D_m|| / sqrt(mean ||D_m||^2), at least `floor`.

    python run.py plugins=[examples/own_method.py] distributed_algo=Agreement
"""

from dataclasses import dataclass

from algorithms.synchronisation import METHODS
from algorithms.synchronisation.method import Capabilities, Method


@dataclass(frozen=True)
class Agreement(Method):
    """x = x - max(floor, agreement) * mean_m D_m."""

    floor: float = 0.1  # a key of `synchronisation`

    keeps = "replica"  # two exchanges per stop: lengths and differences
    capabilities = Capabilities(one_exchange=False)  # so budgets refuse it

    def exchange(self, group):
        x = group.shared["parameters"]
        lengths = group.mean(x[:1], "monitor")
        for worker in group.local_workers:
            lengths.add(worker, (worker.to_device(x) - worker.parameters).square().sum()[None])
        squared = lengths.result()
        delta = group.mean_pseudo_gradient()
        if delta is not None:
            agreement = (delta.square().sum() / squared.clamp_min(1e-30)).sqrt()
            x.sub_(delta * agreement.clamp_min(self.floor))
        for worker in group.local_workers:
            worker.parameters.copy_(worker.to_device(x))


METHODS["Agreement"] = Agreement
