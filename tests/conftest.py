"""No network, and one thread per test process: tests run in parallel, and small tensors gain nothing from more."""

import os

# Before any library reads it: no test may depend on the hub, nor wait for it.
os.environ["HF_HUB_OFFLINE"] = "1"
# For the programs that tests start: with more threads than cores PyTorch waits for itself.
os.environ["OMP_NUM_THREADS"] = "1"

import functools
import gc
import json
import signal
import sys
from pathlib import Path

import hypothesis
import pytest

from algorithms.registry import Registry
from fabrics.data import documents

# What takes seconds to import is imported where it is used: the process that hands out the tests needs none of it.

# Whoever starts the tests in the background of a shell has SIGINT ignored, which programs would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Rewriting the assertions of all tests takes each process some seconds: what pytest has rewritten is kept, also where
# PYTHONDONTWRITEBYTECODE says otherwise.
sys.dont_write_bytecode = False
# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")
# Reading the documentation of Python takes seconds.
documents.standard_library_docstrings = functools.cache(documents.standard_library_docstrings)


@pytest.fixture(scope="session")
def programs():
    """What starts programs; its tests are marked `programs`."""
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
    """Mark the tests that start programs, and begin with the files that have them.

    They are the long ones; the others after them, large files before small ones, fill what is left of every process.
    """
    begun_by = set()
    for item in filter(starts_programs, items):
        item.add_marker("programs")
        begun_by.add(item.path)
    sizes = {item.path: item.path.stat().st_size for item in items}
    items.sort(key=lambda item: (item.path not in begun_by, -sizes[item.path], item.path))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported stays: the garbage collector need not look through it again and again, nor so often."""
    gc.freeze()
    gc.set_threshold(200_000)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _nobody_waits_for_the_disk():
    """What is written is there for every reader at once; that it outlives a loss of power, no test asks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def _plugins_are_forgotten(monkeypatch):
    """The words that a test's plugins have added are there for that test alone."""
    added, add = [], Registry.__setitem__

    def remember(registry, word, value):
        add(registry, word, value)
        added.append((registry, word))

    monkeypatch.setattr(Registry, "__setitem__", remember)
    yield
    for registry, word in added:
        registry.pop(word, None)
    if "utils.config.plugins" in sys.modules:
        sys.modules["utils.config.plugins"]._tried.clear()


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    """One for all test processes, as for all runs of a user."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def c4_shards(tmp_path_factory):
    """A repository of C4, as the hub has it, of real text."""
    from configs import make_samples

    folder = tmp_path_factory.mktemp("c4")
    make_samples.write_c4(folder, 600, 60)
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    from fabrics.data.tokenization import train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(documents.python_documents()[:500], 600).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenised_c4(tmp_path_factory, c4_shards, tokenizer_folder):
    from c4 import tokenize_c4

    folder = tmp_path_factory.mktemp("tokenised") / "set"
    arguments = ["--model_name", str(tokenizer_folder), "--input", str(c4_shards), "--output_dir", str(folder)]
    assert tokenize_c4.main([*arguments, "--data_sample_size", "500", "--create_eval_split", "--eval_size", "50"]) == 0
    return folder


@pytest.fixture
def make_c4(cache_dir, tmp_path):
    """A function from values to a checked configuration with dataset c4."""
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
