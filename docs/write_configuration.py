"""Writes docs/configuration.md, the page of all configuration keys: python docs/write_configuration.py.

Names, types, defaults, choices and meanings come from the keys in utils/config/schema.py and
utils/config/run_keys.py alone, and a test compares the page with them.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fabrics.config_checks import CHOICES
from utils.config.reading import value_schema
from utils.config.schema import FIELDS, Config

PAGE = Path(__file__).resolve().parent / "configuration.md"

_INTRODUCTION = """\
# Configuration

<!-- Written by docs/write_configuration.py from the keys in utils/; a test compares. Not to be edited by hand. -->

To change what a run does, write a YAML file with the keys that differ from the defaults below and name it, or give
keys on the command line, nested ones with dots; the command line wins:

```bash
python run.py --config configs/c4_microllama_small.yaml ETA=1.5 model_config.hidden_size=128 max_tokens=200000
```

Without `--config` the file is [config.yaml](../config.yaml), the demo. Every run folder holds its `config.yaml` with
all defaults filled in. Unknown keys, wrong types and impossible values end the program before any work, all of them
at once, one line each. Text like `1e-5` or `"2e-5"` counts as the number it is. `null` means what the meaning column
says. Names of the published code's configuration are [understood as well](published_code.md).
"""

SECTIONS = {
    "plugins": "Code of one's own",
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
        words = ", ".join(f"`{choice}`" for choice in CHOICES[name])
        return words if getattr(Config(), name) is not None else f"{words} or null"
    return _describe(value_schema(name))


def page() -> str:
    """The whole page, as Markdown."""
    lines = [_INTRODUCTION.rstrip()]
    for name, field in FIELDS.items():
        if name in SECTIONS:
            lines += [
                "",
                f"## {SECTIONS[name]}",
                "",
                "| key | meaning | default | allowed |",
                "| --- | --- | --- | --- |",
            ]
        default = json.dumps(getattr(Config(), name))
        lines.append(f"| `{name}` | {field.metadata['meaning']} | `{default}` | {allowed(name)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
