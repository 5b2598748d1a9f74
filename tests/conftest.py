"""Fixtures of all tests. Tests use no network, and one thread per process, as they run in parallel."""

import os

# Set before any library reads it, so that no test depends on the hub or waits for it.
os.environ["HF_HUB_OFFLINE"] = "1"
# For the programs that tests start: more threads than cores slow each other down.
os.environ["OMP_NUM_THREADS"] = "1"

import gc
import json
import logging
import signal
import sys
from pathlib import Path

import hypothesis
import pytest

from algorithms.registry import Registry
from fabrics.data import python_docs

# Slow imports are inside fixtures: the process that distributes the tests does not need them.

# Collecting garbage takes a quarter of the time of imports; the tests are imported without it.
gc.disable()
# A shell ignores SIGINT for what it starts in the background, nohup SIGHUP; programs of tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Keep the tests that pytest has rewritten, which takes seconds per process, even with PYTHONDONTWRITEBYTECODE.
sys.dont_write_bytecode = False
# Examples have no time limit: their time depends on how busy the machine is.
hypothesis.settings.register_profile("tests", deadline=None, max_examples=40)
hypothesis.settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, which other tests do not expect, unless only the GPU tests run (make gpu)."""
    if any("test_gpu.py" not in argument for argument in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session")
def programs():
    """Starts programs; tests with this fixture are marked `programs`."""
    from tests.support.programs import Programs

    return Programs()


@pytest.fixture(autouse=True)
def _no_program_outlives_its_test(request):
    yield
    if starts_programs(request.node):
        request.getfixturevalue("programs").end()


def starts_programs(item: pytest.Item) -> bool:
    return "programs" in item.fixturenames


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start programs; run their files first, which are slow, then large files before small."""
    begun_by = set()
    for item in filter(starts_programs, items):
        item.add_marker("programs")
        begun_by.add(item.path)
    sizes = {item.path: item.path.stat().st_size for item in items}
    items.sort(key=lambda item: (item.path not in begun_by, -sizes[item.path], item.path))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Spare the garbage collector everything that is imported by now."""
    gc.freeze()
    gc.set_threshold(200_000)
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk():
    """Files are visible to every reader without fsync; no test needs them to survive a loss of power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def _no_plugin_outlives_its_test(monkeypatch):
    """Remove the names that a test's plugins have registered."""
    added = []
    add = Registry.__setitem__

    def remember(registry, name, value):
        add(registry, name, value)
        added.append((registry, name))

    monkeypatch.setattr(Registry, "__setitem__", remember)
    yield
    for registry, name in added:
        registry.pop(name, None)
    if "utils.config.plugins" in sys.modules:
        sys.modules["utils.config.plugins"]._tried.clear()


@pytest.fixture(autouse=True)
def _no_log_outlives_its_test():
    """Restore the logger of the program, which a run in this process sets up."""
    logger = logging.getLogger("adloco")
    level, propagate, handlers = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.propagate = propagate
    logger.handlers = handlers


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    """One cache for all test processes."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def matrix_ready():
    """The methods and models of tests/support/matrix.py."""
    from tests.support import matrix

    with matrix.ready():
        yield


@pytest.fixture
def no_pixels(monkeypatch):
    """Write figures as empty files: rendering takes longer than small runs do."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **options: path.touch())


@pytest.fixture(scope="session")
def c4_shards(tmp_path_factory):
    """A small copy of the C4 repository on the hub, with real text."""
    from configs import make_samples

    folder = tmp_path_factory.mktemp("c4")
    make_samples.write_c4(folder, 600, 60)
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    from fabrics.data.tokenization import train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(python_docs.python_documents()[:500], 600).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenised_c4(tmp_path_factory, c4_shards, tokenizer_folder):
    from c4 import tokenize_c4

    folder = tmp_path_factory.mktemp("tokenised") / "set"
    arguments = ["--model_name", str(tokenizer_folder), "--input", str(c4_shards), "--output_dir", str(folder)]
    assert tokenize_c4.main([*arguments, "--data_sample_size", "500", "--eval_size", "50"]) == 0
    return folder


@pytest.fixture
def make_c4(cache_dir, tmp_path):
    """Makes a checked configuration with dataset c4 from some values."""
    from fabrics.config_checks import CHECKS
    from utils.config.reading import load_config

    def configured(**values):
        defaults = {
            "dataset": "c4",
            "number_of_outer_steps": 1,
            "plot_at_end": False,
            "data_sample_size": 400,
            "val_size": 40,
            "sequence_length": 32,
            "vocab_size": 500,
            "cache_dir": str(cache_dir),
        }
        path = tmp_path / "config.yaml"
        path.write_text(json.dumps(defaults | {key: str(v) if isinstance(v, Path) else v for key, v in values.items()}))
        return load_config(path, (), CHECKS)[0]

    return configured
