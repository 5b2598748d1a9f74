"""The names that a configuration may use, for `python run.py --list` and for completion in a shell (`--completion`).

With the script bash and zsh complete options and keys. The names are in it, so that a press of Tab starts no Python.
Print it again after an update, or with other plugins.
"""

import inspect
import shlex
import sys
import typing
from collections.abc import Iterable
from typing import Any

KINDS = ("methods", "models", "datasets", "policies", "optimizers", "tests")

_SCRIPT = """\
_adloco() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" key="" before="" names=""
    case "$1" in
    *python*)
        [[ "${{COMP_WORDS[1]}}" == *run.py || "${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" == "-m adloco" ]] || return 0 ;;
    esac
    if [[ "$word" == *?=* ]]; then  # zsh: key=value is one word
        key="${{word%%=*}}"
        before="$key="
        word="${{word#*=}}"
    elif [[ "$word" == "=" ]]; then  # bash: three words
        key="${{COMP_WORDS[COMP_CWORD - 1]}}"
        word=""
    elif [[ "${{COMP_WORDS[COMP_CWORD - 1]}}" == "=" ]]; then
        key="${{COMP_WORDS[COMP_CWORD - 2]}}"
    fi
    case "$key" in
    "")
        [[ "$word" == -* ]] && names={options} || names={keys}
        [[ "$word" == -* ]] || compopt -o nospace 2>/dev/null ;;
{choices}
    esac
    COMPREPLY=($(compgen -P "$before" -W "$names" -- "$word"))
}}
if [[ -n "${{ZSH_VERSION-}}" ]]; then
    autoload -Uz compinit bashcompinit
    command -v compdef >/dev/null || compinit -i
    bashcompinit
    complete -o default -o nospace -F _adloco adloco run.py python python3
else
    complete -o default -F _adloco adloco run.py python python3
fi
"""


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


def completion_script(options: Iterable[str]) -> str:
    """Return the script; options: of the command line, such as --config."""
    from utils.config.schema import FIELDS

    choices = {key: choices_of(key) for key in FIELDS}
    return _SCRIPT.format(
        options=shlex.quote(" ".join(options)),
        keys=shlex.quote(" ".join(f"{key}=" for key in FIELDS)),
        choices="\n".join(
            f"    {key}) names={shlex.quote(' '.join(names))} ;;" for key, names in choices.items() if names
        ),
    )
