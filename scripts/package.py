"""The step of `pip install .` that puts the whole program below `adloco`.

A checkout has its packages at the top level, so that `python run.py` needs no installation. Installed, names such as
`utils` would collide with those of other projects. So the wheel holds them inside `adloco`, and their imports say so:
`from utils.files import ...` becomes `from adloco.utils.files import ...`. Either way, every module has one name.
"""

import ast
import re
import shutil
from pathlib import Path

from setuptools.command.build_py import build_py

# What moves below adloco. The other programs of a checkout (benchmarks, c4, gradient_analysis) are not installed.
MOVED = ("algorithms", "fabrics", "training_logs", "utils", "cluster.py", "run.py", "trainers.py", "config.yaml")
_NAMES = {name.removesuffix(".py") for name in MOVED}


def moved(source: str) -> str:
    """Return the source of a module with its imports, and the commands in its texts, as in the installed package.

    Raises:
        ValueError: `import a.b` of one of our modules, which would bind another name; `from a import b` works.
    """
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module.split(".")[0] in _NAMES:
            lines[node.lineno - 1] = lines[node.lineno - 1].replace("from ", "from adloco.", 1)
        elif isinstance(node, ast.Import) and any(alias.name.split(".")[0] in _NAMES for alias in node.names):
            if ast.unparse(node).removeprefix("import ") not in _NAMES:
                raise ValueError(f"line {node.lineno}: write from ... import instead of {ast.unparse(node)}")
            lines[node.lineno - 1] = lines[node.lineno - 1].replace("import ", "from adloco import ", 1)
    text = "".join(lines)
    text = text.replace("python run.py", "python -m adloco").replace("_per_node=8 run.py", "_per_node=8 -m adloco")
    return re.sub(r"-m training_logs\b", "-m adloco.training_logs", text)


class BuildPackage(build_py):
    """Copy the checkout's packages below adloco."""

    def run(self) -> None:
        target = Path(self.build_lib, "adloco")
        shutil.rmtree(target, ignore_errors=True)  # of an earlier build
        super().run()
        for path in [*_sources(), *Path("adloco").glob("*.py")]:
            copy = target / (path.name if path.parent.name == "adloco" else path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text(encoding="utf-8")
            copy.write_text(moved(text) if path.suffix == ".py" else text, encoding="utf-8")

    def get_source_files(self) -> list[str]:
        """Return the files of a source distribution."""
        return [*super().get_source_files(), *map(str, _sources()), "scripts/package.py"]


def _sources() -> list[Path]:
    found = []
    for path in map(Path, MOVED):
        found += sorted(path.glob("**/*.py")) if path.is_dir() else [path]
    return found
