"""The synchronisation methods that average everything at once, against independent implementations of their papers."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from algorithms.synchronisation import METHODS
from algorithms.synchronisation.flat import Block
from fabrics.config_checks import CHECKS
from fabrics.training.method_config import method_of
from tests.support import oracles
from tests.support.helpers import make_config
from tests.support.synchronising import assert_equals_oracle
from utils.config.reading import parse_config

ROOT = Path(__file__).resolve().parents[2]
_BLOCKS = [Block(f"layers.{layer}.weight", 16 * layer, 16 * layer + 16, (4, 4)) for layer in range(3)]
_WORKING = SimpleNamespace(blocks=_BLOCKS)


def test_diloco():
    assert_equals_oracle(lambda problem: oracles.diloco(problem, lr=0.7, momentum=0.9))


def test_local_sgd():
    assert_equals_oracle(oracles.local_sgd, distributed_algo="LocalSGD")


def test_synchronous_training():
    assert_equals_oracle(oracles.synchronous, distributed_algo="Synchronous")


@pytest.mark.parametrize("name", METHODS)
def test_the_page_of_methods_has_what_each_keeps(name):
    """By tensors of model size beside parameters and moments, with its default values; and a config in three lines."""
    method = method_of(make_config(distributed_algo=name), _WORKING)
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    kept = len(method.state), len(method.worker_state) + (method.keeps != "shared")
    assert f"| {name} | {kept[0]} | {kept[1]} |" in page.splitlines()
    section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert re.search(r"\bSen(t|ds)\b", section)
    assert re.search(r"\bKe(pt|eps)\b", section)
    (lines,) = re.findall(r"^```yaml\n(.*?)^```$", section, re.M | re.S)
    assert len(lines.splitlines()) == 3
    config, warnings = parse_config({"max_tokens": 1} | yaml.safe_load(lines), (), CHECKS)
    assert (config.distributed_algo, warnings) == (name, [])
