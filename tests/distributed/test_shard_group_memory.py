"""Nodes of several devices: the models that they start from, and the max batch that is measured."""

import pytest
import torch

from tests.support import shard_group_memory


@pytest.fixture(scope="module")
def together(programs, tmp_path_factory):
    folder = shard_group_memory.write_pretrained(tmp_path_factory.mktemp("shard_group_memory"))
    programs.torchrun(2, "tests/support/shard_group_memory.py", folder)
    return torch.load(folder / "results.pt", weights_only=True) | {"folder": folder}


def test_the_max_batch_of_a_shard_group_is_what_its_smallest_device_has_room_for(together):
    """Half of the examples and of the memory for each of two, which share the one that the test has."""
    small, large = together["measured"]
    assert large == pytest.approx(2 * small, rel=0.05)
    assert small % 2 == 0
    assert small == pytest.approx(
        shard_group_memory.measured(shard_group_memory.alone(), shard_group_memory.FREE), rel=0.05
    )


@pytest.mark.parametrize("name", shard_group_memory.INITIAL)
def test_models_that_the_first_device_sends_have_the_numbers_of_whole_ones(together, name):
    """To the bit: of two trainers with different seeds; tied, frozen, recast and pretrained ones, and buffers, too."""
    expected = shard_group_memory.initial(name, shard_group_memory.alone(), together["folder"])
    found = together["initial"][name]
    for what in ("working", "trainers"):
        assert found[what].keys() == expected[what].keys()
        for key, tensor in expected[what].items():
            assert torch.equal(found[what][key], tensor), key
