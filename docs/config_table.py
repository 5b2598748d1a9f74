"""Prints the README's table of configuration keys: python docs/config_table.py.

The table is made from utils/config.py alone, and a test compares it with the README.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster import CHOICES
from utils.config import FIELDS, Config
from utils.config_reading import value_schema

SECTIONS = {
    "training_seed": "Devices and seed",
    "log_dir": "Logs",
    "dataset": "Dataset",
    "model_type": "Model",
    "number_of_outer_steps": "Length of the run: the first limit that is reached ends it",
    "nodes_per_gpu": "Cluster",
    "learning_rate_for_inner_opt": "Optimisers",
    "INITIAL_BATCH_SIZE": "Batch",
    "switch_mode": "Switch mode and memory",
    "merging_policy": "Merging",
    "eval_every": "Evaluation",
}

_BOUNDS = {"exclusiveMinimum": "> ", "minimum": ">= ", "exclusiveMaximum": "< ", "maximum": "<= "}
_TYPES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true, false", "object": "mapping"}


def _describe(schema: dict) -> str:
    if "anyOf" in schema:
        return " or ".join(_describe(part) for part in schema["anyOf"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "")
    if kind == "null":
        return "null"
    if kind == "array":
        count = schema.get("minItems")
        exactly = f"{count} of: " if count and count == schema.get("maxItems") else ""
        return f"list of {exactly}{_describe(schema['items'])}"
    if "pattern" in schema:
        return "`cpu`, `cuda`, `cuda:N`"
    bounds = [f"{sign}{schema[name]:g}" for name, sign in _BOUNDS.items() if name in schema]
    return " ".join([_TYPES[kind], ", ".join(bounds)]).strip()


def allowed(name: str) -> str:
    """The values that a key may have, in words."""
    if name in CHOICES:
        return ", ".join(f"`{choice}`" for choice in CHOICES[name])
    return _describe(value_schema(name))


def table() -> str:
    """The whole table, as Markdown."""
    lines = []
    for name, field in FIELDS.items():
        if name in SECTIONS:
            lines += [
                "",
                f"**{SECTIONS[name]}**",
                "",
                "| key | meaning | default | allowed |",
                "| --- | --- | --- | --- |",
            ]
        default = json.dumps(getattr(Config(), name))
        lines.append(f"| `{name}` | {field.metadata['meaning']} | `{default}` | {allowed(name)} |")
    return "\n".join(lines).strip()


if __name__ == "__main__":
    print(table())
