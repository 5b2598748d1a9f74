"""`python run.py --completion`: a script with which bash and zsh complete options and keys.

The names are in the script, so that a press of Tab starts no Python. Print it again after an update, or for plugins.
"""

import shlex
from collections.abc import Iterable

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


def script(options: Iterable[str]) -> str:
    """Return the script; options: of the command line, such as --config."""
    from fabrics.config_checks import CHOICES
    from utils.config.schema import FIELDS

    return _SCRIPT.format(
        options=shlex.quote(" ".join(options)),
        keys=shlex.quote(" ".join(f"{key}=" for key in FIELDS)),
        choices="\n".join(f"    {key}) names={shlex.quote(' '.join(names))} ;;" for key, names in CHOICES.items()),
    )
