"""Agreement of all processes before training.

A process with another configuration or other data would not stop the others. It would spoil the average, or wait for
them in another collective. So what each process has found by itself is gathered. Where it differs, or a process has
failed, all processes raise the same error.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from utils.checkpoint.checkpoint import CheckpointError
from utils.config.plugins import import_plugins
from utils.config.schema import FIELDS, Config, ConfigError
from utils.distributed.processes import Processes

T = TypeVar("T")

# Keys that may differ between machines: where devices, cache and plugins are.
_MAY_DIFFER = ("CUDA_VISIBLE_DEVICES", "devices", "cache_dir", "plugins")
_LONGEST_VALUE = 100


def decided(processes: Processes, decide: Callable[[], T]) -> T:
    """Return the decision of the main process in all processes; ConfigError in all if it fails."""
    return _everybodys(processes, decide if processes.is_main else lambda: None)[0]


def done_by_all(processes: Processes, work: Callable[[], T]) -> T:
    """Return what this process makes of its own work; ConfigError in all processes if one of them fails.

    The work must not itself wait for the other processes.
    """
    result: list[T] = []
    _everybodys(processes, lambda: result.append(work()))
    return result[0]


def _everybodys(processes: Processes, work: Callable[[], T]) -> list[T]:
    answer = None
    problems = None
    try:
        answer = work()
    except ConfigError as error:
        problems = error.problems
    except (CheckpointError, OSError) as error:
        problems = [str(error)]
    gathered = processes.gather((answer, problems))
    failed = {rank: problems for rank, (_, problems) in enumerate(gathered) if problems is not None}
    if 0 in failed:
        raise ConfigError(failed[0])  # most often all processes have the same problem
    if failed:
        raise ConfigError([f"rank {rank}: {problem}" for rank, problems in failed.items() for problem in problems])
    return [answer for answer, _ in gathered]


def difference(statements: Sequence[Mapping[str, object]]) -> str | None:
    """Describe in which names the statements of the processes differ; None if they agree.

    Args:
        statements: values by name, for each rank.
    """
    names = dict.fromkeys(name for statement in statements for name in statement)
    parts = []
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, statement in enumerate(statements):
            ranks.setdefault(_shown(statement.get(name)), []).append(rank)
        if len(ranks) > 1:
            said = ", ".join(f"{value} on {_named(who)}" for value, who in ranks.items())
            parts.append(f"{name}: {said}")
    return "; ".join(parts) if parts else None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def agree(processes: Processes, what: str, statement: Mapping[str, object]) -> None:
    """Check that all processes make the same statement.

    Args:
        processes: those of the run.
        what: the subject of the statement, for the error.
        statement: values by name.

    Raises:
        ConfigError: the statements differ; in all processes.
    """
    found = difference(processes.gather(dict(statement)))
    if found is not None:
        raise ConfigError(f"the processes have different {what}: {found}")


def agree_on_config(processes: Processes, config: Config) -> None:
    """Check that all processes have the same plugins and configuration, except for keys of a machine.

    Raises:
        ConfigError: they differ; in all processes.
    """
    plugins = enumerate(import_plugins(config.plugins))
    statement = {name: getattr(config, name) for name in FIELDS if name not in _MAY_DIFFER}
    statement |= {f"plugins[{index}], {plugin.name}": plugin.sha256 for index, plugin in plugins}
    agree(processes, "configurations", statement)
