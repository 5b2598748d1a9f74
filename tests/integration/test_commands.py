"""Commands, configurations and Python of README and docs: files, options, keys and imports are there."""

import re

import pytest
import yaml

from benchmarks.compare.spec import ComparisonSpec
from fabrics.config_checks import CHECKS
from tests.support.blocks import ALL, COMMANDS, PAGES, check, commands_in_sentences
from utils.config.reading import parse_config

HARDWARE = {"name": "GPU", "t_min": 0.01, "t_example": 0.002}
NETWORK = {"name": "1 Gb/s", "bits_per_second": 1e9, "latency": 1e-3}


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_commands_are_known(block):
    for words in block.commands():
        check(words)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_in_sentences_are_known(path):
    for words in commands_in_sentences(path):
        check(words)


def test_every_block_is_of_a_kind_that_tests_know():
    """Blocks without a language are what programs print, and plans of folders."""
    assert {block.language for block in ALL} == {"", "bash", "yaml", "python"}
    for block in ALL:
        assert block.language or not re.match(r"(python|make|pip|torchrun) ", block.text), block
        assert block.mark is None or block.language == "bash", block


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "yaml"], ids=str)
def test_configurations_are_known(block):
    values = yaml.safe_load(block.text)
    if "methods" in values:  # a part of a comparison
        whole = {"title": "", "question": "", "seeds": [1], "hardware": [HARDWARE], "networks": [NETWORK]}
        ComparisonSpec.model_validate(whole | {"reference": values["methods"][0]["name"]} | values)
    else:
        parse_config({"max_tokens": 1} | values, checks=CHECKS)
