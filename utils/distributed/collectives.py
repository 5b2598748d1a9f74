"""Collectives that are counted, so that who breaks off in the middle of a pass can still make those that are left.

Collectives wait for everybody. A device that runs out of memory would leave the others waiting; it makes the pass once
more with next to nothing in it, without the collectives that it has made already, and so joins the others where it left
them. Every pass over the same model makes the same ones in the same order.
"""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Collectives:
    """Those of one pass after the other.

    Attributes:
        made: since the pass began, those that were skipped among them.
    """

    def __init__(self):
        self.begin()

    def begin(self, skipped: int = 0) -> None:
        """A pass begins, whose first `skipped` collectives are not to be made: their results are whatever is there."""
        self.made, self._skipped = 0, skipped

    def make(self, collective: Callable[[], T]) -> T | None:
        """Make the next one, unless it is skipped."""
        result = collective() if self.made >= self._skipped else None
        self.made += 1
        return result
