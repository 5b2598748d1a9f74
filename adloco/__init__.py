"""AdLoCo as a library: low-communication training inside your own loop. `docs/library.md` begins with an example."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adloco.local_processes import launch
    from adloco.worker import AdaptiveBatch, Worker

__all__ = ["AdaptiveBatch", "Worker", "launch"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import PyTorch with the first use: `python -m adloco` prints its first line, and reports draw, without it."""
    if name not in __all__:
        raise AttributeError(f"module 'adloco' has no attribute {name!r}")
    module = "adloco.local_processes" if name == "launch" else "adloco.worker"
    return getattr(import_module(module), name)
