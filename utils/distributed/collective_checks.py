"""What all processes of a run must have in common before any work: said by each, compared by all.

A process that trains with another configuration or other data would not stop the others: it would spoil the average,
or wait for them in another collective for ever. So whatever a process found out by itself is gathered; where it
differs, or somebody could not do it, every process raises the same error.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from utils.checkpoint.checkpoint import CheckpointError
from utils.config.plugins import import_plugins
from utils.config.schema import FIELDS, Config, ConfigError
from utils.distributed.processes import Processes

T = TypeVar("T")

# What is a machine's own: where its devices, its cache and its plugins are.
_MAY_DIFFER = ("CUDA_VISIBLE_DEVICES", "devices", "cache_dir", "plugins")
_LONGEST_VALUE = 100


def decided(processes: Processes, decide: Callable[[], T]) -> T:
    """What the main process decides, in all of them; ConfigError in all of them where it cannot."""
    return _everybodys(processes, decide if processes.is_main else lambda: None)[0]


def done_by_all(processes: Processes, work: Callable[[], T]) -> T:
    """What this process makes of its part of something; ConfigError in all of them where one cannot do it.

    The work must not itself wait for the other processes.
    """
    result: list[T] = []
    _everybodys(processes, lambda: result.append(work()))
    return result[0]


def _everybodys(processes: Processes, work: Callable[[], T]) -> list[T]:
    answer, problems = None, None
    try:
        answer = work()
    except ConfigError as error:
        problems = error.problems
    except (CheckpointError, OSError) as error:
        problems = [str(error)]
    gathered = processes.gather((answer, problems))
    failed = {rank: problems for rank, (_, problems) in enumerate(gathered) if problems is not None}
    if 0 in failed:
        raise ConfigError(failed[0])  # in the words of one process: most often all have the same problem
    if failed:
        raise ConfigError([f"rank {rank}: {problem}" for rank, problems in failed.items() for problem in problems])
    return [answer for answer, _ in gathered]


def difference(statements: Sequence[Mapping[str, object]]) -> str | None:
    """In what the processes' statements differ, and who says what; None where they do not.

    statements: of every rank, values by what they are of.
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
    """Go on where all processes make the same statement.

    what: of what it is, for the error.

    Raises:
        ConfigError: somebody's differs; in all processes.
    """
    found = difference(processes.gather(dict(statement)))
    if found is not None:
        raise ConfigError(f"the processes have different {what}: {found}")


def agree_on_config(processes: Processes, config: Config) -> None:
    """Go on where all processes have the same configuration, but for what is a machine's own, and the same plugins.

    Raises:
        ConfigError: somebody's differs; in all processes.
    """
    plugins = enumerate(import_plugins(config.plugins))
    statement = {name: getattr(config, name) for name in FIELDS if name not in _MAY_DIFFER}
    statement |= {f"plugins[{index}], {plugin.name}": plugin.sha256 for index, plugin in plugins}
    agree(processes, "configurations", statement)
