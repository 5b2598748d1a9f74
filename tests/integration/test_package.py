"""The wheel: one top-level package, which does alone what the checkout does."""

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import adloco
from scripts.package import MOVED, moved
from tests.support import tracked
from tests.support.programs import command
from tests.support.runs import PAGE, write_config
from training_logs.showing.run_data import read_run
from training_logs.trackers.tracker import PACKAGES

ROOT = Path(__file__).resolve().parents[2]


def test_moving_changes_imports_and_commands_only():
    source = '"""python run.py"""\nfrom utils import files\nfrom utilities import x\nif x:\n    from run import main\n'
    expected = source.replace("run.py", "-m adloco").replace("utils import", "adloco.utils import")
    assert moved(source) == expected.replace("run import", "adloco.run import")
    assert moved("def f():\n    import cluster\n") == "def f():\n    from adloco import cluster\n"
    with pytest.raises(ValueError, match="line 1: write from"):
        moved("import utils.files\n")


def build(folder: Path) -> Path:
    """Build the wheel from a copy of the sources, without a network."""
    copy = folder / "checkout"
    copy.mkdir()
    for name in (*MOVED, "adloco", "scripts", "pyproject.toml", "README.md", "LICENSE"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copy / name)
    offline = ("--no-build-isolation", "--no-deps", "--no-index")
    built = command(sys.executable, "-m", "pip", "wheel", *offline, "-w", folder, copy)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_alone_trains_a_loop_of_ones_own_and_a_run(programs, tmp_path, cache_dir):
    venv.create(tmp_path / "env", symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env")}))
    packages.joinpath("dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("packages")))
    with zipfile.ZipFile(build(tmp_path)) as wheel:
        information = f"adloco-{adloco.__version__}.dist-info"
        assert {Path(name).parts[0] for name in wheel.namelist()} == {"adloco", information}
        needed = re.findall(r"Requires-Dist: ([\w-]+)>=", wheel.read(f"{information}/METADATA").decode())
        assert needed == re.findall(r"^([\w-]+)==", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
        wheel.extractall(packages)

    def python(*words) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        result = command(tmp_path / "env" / "bin" / "python", *words, cwd=tmp_path, env=environment)
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert Path(python("-c", "import adloco; print(adloco.__file__)").strip()) == packages / "adloco" / "__init__.py"

    # A loop of one's own.
    shutil.copy(ROOT / "examples" / "own_loop.py", tmp_path)
    line = python("own_loop.py").strip()
    assert re.fullmatch(r"accuracy 0\.[89]\d+ after 10 communications \(0\.4 MB\); the batch grew to \d+", line), line

    # The program.
    trackers = ["tensorboard"] if importlib.util.find_spec(PACKAGES["tensorboard"]) else []
    values = PAGE | {"number_of_outer_steps": 2, "processes": 2, "run_name": "run", "trackers": trackers}
    config = write_config(tmp_path, cache_dir, **values)
    output = python("-m", "adloco", "--config", config)
    assert output.startswith("AdLoCo: loading PyTorch ...\n")
    run = tmp_path / "logs" / "run"
    assert read_run(run).summary["outer_steps"] == 2
    if trackers:
        assert [*tracked.tensorboard(run / "tensorboard").scalars["run", "living trainers"]] == [1, 2]


def test_the_module_is_the_program(programs):
    """`python -m adloco` works in a clone, without installation."""
    first = command(sys.executable, "run.py", "--help", cwd=ROOT)
    second = command(sys.executable, "-m", "adloco", "--help", cwd=ROOT)
    assert first.stdout == second.stdout != ""
