"""The names that a configuration may use, for `python run.py --list`."""

import inspect
import sys
from typing import Any

KINDS = ("methods", "models", "datasets", "policies", "optimizers", "tests")


def listing(kind: str) -> list[str]:
    """Return the names of a kind, each with the first paragraph of its documentation."""
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
