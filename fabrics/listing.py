"""The names that a configuration may use, for `python run.py --list`."""

import inspect
import sys
import typing
from typing import Any

KINDS = ("methods", "models", "datasets", "policies", "optimizers", "tests")


def listing(kind: str) -> list[str]:
    """Return the names of a kind, each with the first sentence of its documentation."""
    from algorithms.batch.calc_batch import BATCH_TESTS
    from algorithms.nodes.policies import MERGE_POLICIES
    from algorithms.synchronisation import METHODS
    from fabrics.data.dataset_loader import DATASETS
    from fabrics.models.model_family import MODELS
    from fabrics.training.optimizers import INNER_OPTIMIZERS

    described = {
        "methods": {name: _first_paragraph(sys.modules[method.__module__]) for name, method in METHODS.items()},
        "models": {name: f"for {model.task}" for name, model in MODELS.items()},
        "datasets": {name: f"{_first_paragraph(data.load)} For {data.task}." for name, data in DATASETS.items()},
        "policies": {name: _first_paragraph(policy) for name, policy in MERGE_POLICIES.items()},
        "optimizers": {name: _first_paragraph(optimizer) for name, optimizer in INNER_OPTIMIZERS.items()},
        "tests": {name: _first_paragraph(test) if test else "A constant batch." for name, test in BATCH_TESTS.items()},
    }[kind]
    width = max(map(len, described))
    return [f"{name:{width}}  {text}" for name, text in described.items()]


def _first_paragraph(described: Any) -> str:
    text = inspect.getdoc(described) or ""
    return " ".join(text.split("\n\n")[0].split())


def choices_of(key: str) -> list[str]:
    """Return the names that a key may have; auto is explained in its meaning."""
    from fabrics.config_checks import CHOICES
    from utils.config.schema import FIELDS

    return list(CHOICES.get(key, ())) or _literals(FIELDS[key].type)


def _literals(annotation: Any) -> list[str]:
    """Return the names in a Literal type, also inside Annotated or a union."""
    if typing.get_origin(annotation) is typing.Literal:
        return [value for value in typing.get_args(annotation) if value != "auto" and isinstance(value, str)]
    return [value for part in typing.get_args(annotation) for value in _literals(part)]
