"""Agreement of all processes before training.

A process with another configuration or other data would not stop the others: it would spoil the average, or wait for
them in another collective. So the processes compare what each has found by itself. If it differs, or one of them has
failed, all raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from utils.config.plugins import import_plugins
from utils.config.schema import FIELDS, Config, ConfigError

if TYPE_CHECKING:
    from utils.distributed.processes import Processes

T = TypeVar("T")

# Keys that may differ between machines: where devices, cache and plugins are.
_MAY_DIFFER = ("CUDA_VISIBLE_DEVICES", "devices", "cache_dir", "plugins")
_LONGEST_VALUE = 100


def decided(processes: Processes, decide: Callable[[], T]) -> T:
    """Return the main process's decision in all processes; if it fails, raise its ConfigError in all."""
    return _results(processes, decide if processes.is_main else lambda: None)[0]


def done_by_all(processes: Processes, work: Callable[[], T]) -> T:
    """Return the result of work that waits for no other process; if one process fails, raise a ConfigError in all."""
    result: list[T] = []
    _results(processes, lambda: result.append(work()))
    return result[0]


def _results(processes: Processes, work: Callable[[], T]) -> list[T]:
    answer = None
    problems = None
    try:
        answer = work()
    except ConfigError as error:
        problems = error.problems
    except OSError as error:
        problems = [str(error)]
    gathered = processes.gather((answer, problems))
    failed = {rank: problems for rank, (_, problems) in enumerate(gathered) if problems is not None}
    if 0 in failed:
        raise ConfigError(failed[0])  # most often all processes have the same problem
    if failed:
        raise ConfigError([f"rank {rank}: {problem}" for rank, problems in failed.items() for problem in problems])
    return [answer for answer, _ in gathered]


def difference(statements: Sequence[Mapping[str, object]]) -> str | None:
    """Describe the names in which the ranks' statements, values by name, differ; None if they agree."""
    names = dict.fromkeys(name for statement in statements for name in statement)
    parts = []
    for name in names:
        ranks: dict[str, list[str]] = {}
        for rank, statement in enumerate(statements):
            ranks.setdefault(_shortened(statement.get(name)), []).append(str(rank))
        if len(ranks) > 1:
            found = [f"{value} on rank{'s' * (len(by) > 1)} {', '.join(by)}" for value, by in ranks.items()]
            parts.append(f"{name}: {', '.join(found)}")
    return "; ".join(parts) if parts else None


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def agree(processes: Processes, what: str, statement: Mapping[str, object]) -> None:
    """Raise a ConfigError in all processes if their statements differ; what: the subject, for the error."""
    found = difference(processes.gather(dict(statement)))
    if found is not None:
        raise ConfigError(f"the processes have different {what}: {found}")


def agree_on_config(processes: Processes, config: Config) -> None:
    """Raise a ConfigError in all processes if plugins or configurations differ, except for the keys of a machine."""
    statement = {name: getattr(config, name) for name in FIELDS if name not in _MAY_DIFFER}
    for index, plugin in enumerate(import_plugins(config.plugins)):
        statement[f"plugins[{index}], {plugin.name}"] = plugin.sha256
    agree(processes, "configurations", statement)
