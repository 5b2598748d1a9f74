"""The configuration of a resumed run, compared with the one that the run began with."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.config.reading import Checks, load_config, read_mapping
from utils.config.schema import FIELDS, Config, ConfigError
from utils.files import given_config, has_checkpoint

# Keys that only the start of a run reads: with another value the records would describe a run that never was.
_START = (
    "run_name",
    "dataset",
    "training_seed",
    "number_of_initial_trainers",
    "INITIAL_BATCH_SIZE",
    "identical_initialisation",
    "need_to_reinit_output_layers",
    "single_seed",
)
_LENGTHS = ("number_of_outer_steps", "number_of_training_epochs", "max_tokens")


def _follows_progress(config: Config) -> bool:
    """Return whether rounds depend on the share of the run that is done, and so on the length of the run."""
    return (
        config.learning_rate_schedule != "constant"
        or config.batch_schedule is not None
        or config.budget is not None
        or config.node_schedule is not None
        or (config.sampling_method == "norm_test" and config.ETA_at_end is not None)
    )


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)


def training_changes(before: Config, after: Config) -> list[str]:
    """Return one line for each key whose new value changes how the run trains."""
    return [
        f"{name}: was {_shown(getattr(before, name))}, now {_shown(getattr(after, name))}"
        for name, entry in FIELDS.items()
        if name not in _START
        and getattr(before, name) != getattr(after, name)
        and (entry.metadata["changes_training"] or (name in _LENGTHS and _follows_progress(after)))
        and not (name == "loss_chunk_tokens" and after.loss_chunk_tokens is None and after.memory == "auto")
    ]


def folder_to_resume(resume: str | None, config: str | None, overrides: Sequence[str]) -> str | None:
    """Return the run folder that a command line resumes; None: it starts a run. auto: that of the configuration."""
    if resume != "auto":
        return resume
    asked, _ = load_config(given_config(config), overrides)
    if asked.run_name is None:
        raise ConfigError("run_name: --resume auto needs the name of the run, got null")
    folder = Path(asked.log_dir, asked.run_name)
    return str(folder) if has_checkpoint(folder) else None


def resumed_config(
    folder: Path,
    overrides: Sequence[str],
    force: bool,
    checks: Checks,
    given: str | Path | Mapping | Config | None = None,
) -> tuple[Config, list[str]]:
    """Return the configuration with which a run continues, with overrides, and warnings.

    force: it may train differently.
    given: the configuration that begins or continues the run (--resume auto); None: that of the run folder.
    """
    path = folder / "config.yaml"
    if not folder.exists():
        raise ConfigError(
            f"--resume: {folder} does not exist; a run interrupted before training has left nothing: start it again"
        )
    if not path.exists():
        raise ConfigError(f"--resume: {folder} is not a run folder: it has no config.yaml")
    own = os.path.realpath(folder)
    for parent, folders, files in os.walk(folder):  # unlike rglob, it accepts that a dying process removes folders
        for file in (Path(parent, name) for name in folders + files):
            # In somebody else's folder a link could let the run write to any file. W&B makes links within it.
            if file.is_symlink() and not Path(os.path.realpath(file)).is_relative_to(own):
                raise ConfigError(f"{file}: is a link to {file.readlink()}; a run continues files of its own only")
    # Plugins that have moved are not where the run had them.
    plugins = [override for override in overrides if override.startswith("plugins=")]
    if not plugins:
        check_plugins_of_run(folder)
    before, _ = load_config(path, plugins, checks)
    after, warnings = load_config(path if given is None else given, overrides, checks)
    problems = _changes_of_the_start(before, after)
    if before.log_dir != after.log_dir:
        warnings.append(f"log_dir: has no effect with --resume, the run continues in {folder}")
    if not force:
        changes = training_changes(before, after)
        problems += [f"{change}; that changes how the run trains: --force allows it" for change in changes]
    if problems:
        raise ConfigError(problems)
    return after, warnings


def check_plugins_of_run(folder: Path) -> None:
    """Raise a ConfigError if plugins came with a run folder, which may be somebody else's.

    A run writes the absolute paths of its plugins. The sender of a folder does not know the path that it will have.
    """
    named = read_mapping(folder / "config.yaml").get("plugins") or []
    parent = folder.resolve().parent
    problems = []
    for path in named if isinstance(named, list) else [named]:
        if not Path(str(path)).is_absolute() or Path(str(path)).resolve().is_relative_to(parent):
            problems.append(
                f"plugins: {path} came with {folder}: to run that code, name it on the command line, plugins=[{path}]"
            )
    if problems:
        raise ConfigError(problems)


def _changes_of_the_start(before: Config, after: Config) -> list[str]:
    return [
        f"{name}: cannot change in a run that has begun, was {_shown(getattr(before, name))}, got "
        f"{_shown(getattr(after, name))}"
        for name in _START
        if getattr(before, name) != getattr(after, name)
    ]


def changes_since(checkpoint: Path, config: Config) -> list[str]:
    """Return a warning for each change of how the run trains since a checkpoint was written."""
    before, _ = load_config(checkpoint / "config.yaml")
    if problems := _changes_of_the_start(before, config):
        raise ConfigError(problems)
    return [f"resumed with another {change}" for change in training_changes(before, config)]
