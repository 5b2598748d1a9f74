"""What a round measures for the batch test that it ends with."""

from dataclasses import dataclass
from typing import Literal

from algorithms.batch.across_workers import MINIMUM_WORKERS, SKETCH_SIZE
from algorithms.batch.calc_batch import NEED_INNER_PRODUCTS
from utils.config.schema import Config


@dataclass(frozen=True)
class Measures:
    """What a round measures for the batch test that it ends with.

    probes: micro-batches that a probed step has at least, whether for its examples or for the devices of a shard
    group; 0:
    none is probed. compared: what of the workers' gradients
    is held against each other.
    """

    probes: int = 0
    compared: Literal["nothing", "gradient", "sketch"] = "nothing"

    def numbers(self, parameters: int) -> int:
        """How many numbers of each worker go into that, with a model of so many parameters."""
        return {"nothing": 0, "gradient": parameters, "sketch": SKETCH_SIZE}[self.compared]


def measures(config: Config, workers: int, tested: bool, together: bool) -> Measures:
    """What a round of so many workers measures.

    tested: whether a batch test follows. together: whether all workers begin it with the same parameters; if not, what
    their gradients say beside each other is not noise alone.
    """
    if not tested:
        return Measures()
    if config.compares_devices:
        return Measures(probes=1)
    if config.compares_workers:
        return Measures(compared="gradient" if workers > 1 else "nothing")
    probes = 2 if config.sampling_method in NEED_INNER_PRODUCTS else 1
    return Measures(probes, "sketch" if together and workers >= MINIMUM_WORKERS else "nothing")
