"""Per-example statistics of a model that is shared out over the devices of an island.

Modules see whole parameters and the examples of their device, so that a layer's input and the gradient of its output
say what they say elsewhere. The gradient of all examples is nowhere whole during the backward pass: it is gathered
afterwards, one parameter after the other, and inputs and output gradients of all layers are held until then.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn

from algorithms.batch.per_example import PerExampleProbe

if TYPE_CHECKING:
    from fabrics.sharding.sharded_model import ShardedModel


class ShardedProbe(PerExampleProbe):
    """As PerExampleProbe, of a pass that the devices of an island make together; afterwards all know the same.

    Args:
        working: of this device.
        examples: of the pass, in all devices.
        products: as in PerExampleProbe.
    """

    def __init__(self, working: "ShardedModel", examples: int, products: bool):
        own, share = working.share(examples)
        super().__init__(working.module, batch_size=own.stop - own.start, products=products)
        self._working, self._own, self._counts, self._examples = working, own, share > 0.0, examples

    def _watch_gradients(self) -> None:
        """They are looked at when all are there."""

    def _on_output_gradient(self, module: nn.Module, x: torch.Tensor, delta: torch.Tensor) -> None:
        # The output of a layer is that of its last module, whose hook comes before FSDP2's.
        self._working.unshard(module)
        super()._on_output_gradient(module, x, delta)

    def _dtype_of(self, module: nn.Module) -> torch.dtype:
        return self._working.parameters.dtype  # layers may be gathered in a smaller one

    def __exit__(self, *exception) -> None:
        try:
            if exception[0] is None:
                self._conclude()
        finally:  # a device may run out of memory in that, and goes on with less
            super().__exit__(*exception)

    @torch.no_grad()
    def _conclude(self) -> None:
        gradients = self._working.gather(self._working.gradient) if self._with_products else None
        for name, parameter in self._working.gathered():
            gradient = parameter if gradients is None else next(gradients)[1]
            if uses := self._uses.pop(parameter, ()):
                self._add(name, uses, gradient)
            if gradients is not None:
                self._squared_norm += gradient.square().sum()
        numbers = self._squared_norms.new_zeros(2, self._examples)
        if self._counts:
            numbers[0, self._own], numbers[1, self._own] = self._squared_norms, self._inner_products
        self._squared_norms, self._inner_products = self._working.island.sum(numbers)
        self.batch_size = self._examples
