"""No network, and one thread per test process: tests run in parallel, and small tensors gain nothing from more."""

import os

# Before any library reads it: no test may depend on the hub, nor wait for it.
os.environ["HF_HUB_OFFLINE"] = "1"
# For the programs that tests start: with more threads than cores PyTorch waits for itself.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")
