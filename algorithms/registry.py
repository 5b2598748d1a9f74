"""A registry: the meaning of each name that a configuration may use. All layers import it."""

from collections import UserDict
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


class Registry(UserDict[str, T]):
    """A dictionary whose names keep their meaning: a plugin may add names, and replace none.

    check: raises ValueError if a value is not valid for its name.
    """

    def __init__(self, values: Mapping[str, T], check: Callable[[str, T], None] | None = None):
        self._check = check
        super().__init__(values)

    def __setitem__(self, name: str, value: T) -> None:
        if name in self:
            raise ValueError(f"{name!r} is registered already")
        if self._check is not None:
            self._check(name, value)
        super().__setitem__(name, value)

    def __ior__(self, other: Mapping[str, T]):
        self.update(other)
        return self
