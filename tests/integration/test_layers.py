"""Imports point one way: run -> cluster -> trainers -> algorithms, and algorithms stays pure (docs of cluster.py)."""

import ast
import functools
import graphlib
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

from algorithms.synchronisation import METHODS
from utils.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]
# What each layer may import of ours, besides itself.
ALLOWED = {
    "algorithms": set(),
    "utils": {"algorithms"},
    "fabrics": {"algorithms", "utils"},
    "training_logs": {"algorithms", "fabrics", "utils"},
    "trainers": {"algorithms", "fabrics", "training_logs", "utils"},
    "cluster": {"algorithms", "fabrics", "training_logs", "utils", "trainers"},
    "run": {"fabrics", "utils", "trainers", "cluster", "training_logs"},
    # A library and programs of their own, which nothing imports.
    "adloco": {"algorithms", "fabrics", "utils", "run"},
    "c4": {"fabrics", "utils"},
    "gradient_analysis": {"algorithms", "fabrics", "training_logs", "utils", "cluster"},
}
ALLOWED_IN_ALGORITHMS = {
    "torch", "math", "bisect", "fractions", "functools", "heapq", "itertools", "numbers", "statistics", "collections",
    "types", "re", "dataclasses", "typing", "random", "algorithms",
}  # fmt: skip


tree = functools.cache(ast.parse)


@functools.cache
def imports(source: str) -> set[str]:
    """Every module that a source imports when it runs, dotted; `from a import b` counts as a and a.b."""
    found = set()
    types = [
        node
        for node in ast.walk(tree(source))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    only_types = {child for node in types for child in ast.walk(node)}
    for node in ast.walk(tree(source)):
        if node in only_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def sources() -> list[tuple[str, Path]]:
    files = []
    for layer in ALLOWED:
        path = ROOT / layer
        files += (
            [(layer, file) for file in sorted(path.glob("**/*.py"))]
            if path.is_dir()
            else [(layer, path.with_suffix(".py"))]
        )
    return files


def test_imports_point_one_way():
    for layer, file in sources():
        ours = {module.split(".")[0] for module in imports(file.read_text(encoding="utf-8"))} & {*ALLOWED, "benchmarks"}
        assert ours <= ALLOWED[layer] | {layer}, file


def imported_at_first(source: str, modules: set[str]) -> set[str]:
    """The modules of ours that a source imports before anything in it is called."""
    found = set()
    for node in tree(source).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else node.module for name in names}
    return found & modules


def test_modules_do_not_import_each_other_in_a_circle():
    files = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for _, file in sources()}
    modules = {name.removesuffix(".__init__"): file for name, file in files.items()}
    graph = {name: imported_at_first(file.read_text(encoding="utf-8"), {*modules}) for name, file in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_algorithms_are_pure():
    for layer, file in sources():
        if layer == "algorithms":
            found = {name.split(".")[0] for name in imports(file.read_text(encoding="utf-8"))}
            assert found <= ALLOWED_IN_ALGORITHMS, file


def test_only_the_library_and_three_files_import_torch_distributed_and_one_imports_fsdp():
    sharing = "torch.distributed.fsdp", "torch.distributed.tensor"
    for _, file in sources():
        if file.parent != ROOT / "adloco" and file.name not in ("processes.py", "reductions.py", "shard_groups.py"):
            found = {name for name in imports(file.read_text(encoding="utf-8")) if name.startswith("torch.distributed")}
            if file == ROOT / "fabrics" / "sharding" / "sharded_model.py":
                found = {name for name in found if not name.startswith(sharing)} - {"torch.distributed"}
            assert not found, file


@pytest.mark.parametrize("name", METHODS)
def test_a_synchronisation_method_is_one_file(name):
    file = Path(inspect.getsourcefile(METHODS[name]))
    assert file.parent == ROOT / "algorithms" / "synchronisation"
    assert [other for other in METHODS if inspect.getsourcefile(METHODS[other]) == str(file)] == [name]


def methods_named(source: str) -> Counter:
    """The words of the registry of synchronisation methods in a source, comments included."""
    return Counter(re.findall(rf"\b(?:{'|'.join(METHODS)})\b", source))


def test_only_a_synchronisation_methods_own_file_knows_its_name():
    for layer, file in sources():
        if layer in ("trainers", "cluster", "fabrics", "utils", "training_logs"):
            default = {Config().distributed_algo: 1} if file == ROOT / "utils" / "config" / "schema.py" else {}
            assert methods_named(file.read_text(encoding="utf-8")) == default, file


def test_what_is_written_and_what_is_shown_meet_in_the_run_folder_alone():
    for side, other in (("recording", "showing"), ("showing", "recording")):
        for file in (ROOT / "training_logs" / side).glob("*.py"):
            found = imports(file.read_text(encoding="utf-8"))
            assert not any(name.startswith(f"training_logs.{other}") for name in found), file


def test_what_reports_and_draws_beside_a_run_starts_without_pytorch(programs):
    program = """import sys, training_logs.log_processor, training_logs.training_monitoring
print(sorted({"torch", "transformers"} & set(sys.modules)))"""
    assert programs.run("-c", program, fresh=True).stdout.strip() == "[]"
