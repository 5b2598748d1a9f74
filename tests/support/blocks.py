"""The fenced blocks of README and docs, and what can be said about a command without running it."""

import argparse
import compileall
import importlib.util
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import yaml
from packaging.requirements import Requirement

from fabrics.config_checks import CHECKS
from gradient_analysis.gradient_analysis import parse_analysis_config
from tests.support.programs import command
from training_logs.trackers.tracker import PACKAGES
from utils.config.reading import load_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "c4" / "guide.md"]

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", flags=re.MULTILINE | re.DOTALL
)
_MARK = re.compile(r"<!-- parsed in tests, not run: (?P<why>[^>]+) -->\n+ *$")
# Their overrides are keys of a run's configuration.
_TAKES_KEYS = ("run.py", "benchmarks/performance/throughput.py", "tests/integration/test_c4_dataset.py")


@dataclass(frozen=True)
class Block:
    """A fenced block: where it is, what language its fence names, and why tests do not run it, if they do not."""

    page: str
    line: int
    language: str
    text: str
    mark: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def code(self, **names: str) -> str:
        """The text, with what `names` has for each `<name>`."""
        return re.sub(r"<(\w+(?: \w+)?)>", lambda match: names.get(match[1].replace(" ", "_"), match[1]), self.text)

    def commands(self, **names: str) -> list[list[str]]:
        """The words of each command."""
        commands = []
        for line in self.code(**names).replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while "&&" in words:
                commands.append(words[: words.index("&&")])
                words = words[words.index("&&") + 1 :]
            commands.append(words)
        return [words for words in commands if words]


def blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        mark = _MARK.search(text[: match.start()])
        line = text.count("\n", 0, match.start()) + 1
        name = path.relative_to(ROOT).as_posix()
        found.append(Block(name, line, match["language"], match["text"], mark and mark["why"]))
    return found


def commands_in_sentences(path: Path) -> list[list[str]]:
    """The words of what stands in backquotes and begins like a command."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    return [shlex.split(span) for span in re.findall(r"`((?:python|make|pip|torchrun) [^`\n]+)`", text)]


ALL = [block for path in PAGES for block in blocks(path)]
COMMANDS = [block for block in ALL if block.language == "bash"]


class _Parsed(BaseException):
    """Instead of what a program does once it has understood its arguments."""


def options_of(words: list[str]) -> argparse.Namespace | None:
    """Return the options of `python SCRIPT ...` or `python -m MODULE ...`, as its parser reads them; None: no parser.

    Raises:
        SystemExit: the parser refuses them.
    """
    module = words[1] == "-m"
    program, arguments = words[2 if module else 1], words[3 if module else 2 :]
    path = Path(importlib.util.find_spec(program).origin) if module else ROOT / program
    if "ArgumentParser" not in path.read_text(encoding="utf-8"):
        return None

    def stopping(original):
        def stop(parser, given=None, namespace=None):
            raise _Parsed(original(parser, arguments if given is None else given, namespace))

        return stop

    parser = argparse.ArgumentParser
    with (
        mock.patch.object(parser, "parse_args", stopping(parser.parse_args)),
        mock.patch.object(parser, "parse_intermixed_args", stopping(parser.parse_intermixed_args)),
        mock.patch.object(sys, "argv", [program, *arguments]),
        mock.patch.object(sys, "path", [*sys.path]),
    ):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except _Parsed as parsed:
            return parsed.args[0]
    raise AssertionError(f"{program} ends before it reads its arguments")


def _check_lm_eval(words: list[str]) -> None:
    """Options and tasks are known."""
    from lm_eval._cli import HarnessCLI

    with mock.patch.object(sys, "argv", words):
        options = HarnessCLI().parse_args()
    tasks = {
        yaml.safe_load(path.read_text(encoding="utf-8"))["task"]
        for path in (ROOT / options.include_path).glob("*.yaml")
    }
    assert {*options.tasks} <= tasks


def check(words: Iterable[str]) -> None:
    """Files exist, options and configuration keys are known.

    Raises:
        SystemExit, AssertionError, ConfigError: something is not.
    """
    words = list(words)
    if words[0] == "make":
        command("make", "-n", *words[1:], cwd=ROOT, check=True)
    elif words[:2] == ["git", "clone"] or words[0] in ("cd", "clearml-init"):
        return  # other programs
    elif words[0] == "lm_eval":
        _check_lm_eval(words)
    elif words[:3] == ["pip", "install", "-r"]:
        for line in (ROOT / words[3]).read_text(encoding="utf-8").splitlines():
            requirement = line.partition("#")[0].strip()
            if requirement and not requirement.startswith("-"):
                Requirement(requirement)
    elif words == ["pip", "install", "."]:
        assert (ROOT / "pyproject.toml").exists()
    elif words[:2] == ["pip", "install"]:
        assert {*words[2:]} <= {*PACKAGES.values(), "peft"}
    elif words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(words[1:])
        check(["python", options.training_script, *options.training_script_args])
    else:
        assert words[0] == "python", f"no test knows how to check {words[0]}"
        options = options_of(words)
        if words[1] in _TAKES_KEYS:
            path = str(getattr(options, "config", None) or "config.yaml")
            theirs = path == "my.yaml" or path.startswith("logs/")  # stands for a configuration of the reader's
            load_config(ROOT / ("config.yaml" if theirs else path), options.overrides, CHECKS)
        elif words[1] == "gradient_analysis/gradient_analysis.py":
            parse_analysis_config(options.config, options.overrides)


def copy_of_the_checkout(folder: Path) -> Path:
    """Everything that git would have, without what programs have written since; compiled once for all of them."""
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()]
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", *ignored))
    compileall.compile_dir(folder, rx=re.compile(r"/tests/"), quiet=1)
    return folder
