"""The memory of islands: models made tensor by tensor, devices that run out, and the max batch that is measured."""

import pytest
import torch

from tests.support import island_memory


@pytest.fixture(scope="module")
def together(programs, tmp_path_factory):
    folder = island_memory.write_pretrained(tmp_path_factory.mktemp("island_memory"))
    programs.torchrun(2, "tests/support/island_memory.py", folder)
    return torch.load(folder / "results.pt", weights_only=True) | {"folder": folder}


@pytest.mark.parametrize("name", island_memory.SCENARIOS)
def test_an_island_halves_together_and_goes_on_as_if_it_had_been_given_less(together, name):
    """To the bit; and as a whole device does that runs out of memory, up to the order of summation."""
    limited, given_less = together[name]
    assert limited["max_batches"] == given_less["max_batches"] == [island_memory.SMALL] * island_memory.NODES
    assert limited["tensors"].keys() == given_less["tensors"].keys()
    assert all(torch.equal(tensor, given_less["tensors"][key]) for key, tensor in limited["tensors"].items())
    assert not given_less["warnings"]
    alone = island_memory.run_scenario(name, island_memory.alone())
    assert limited["warnings"] == alone["warnings"]
    assert len(alone["warnings"]) == island_memory.NODES
    assert "node 0 ran out of memory; its max batch is 2 from now on" in alone["warnings"][0]
    torch.testing.assert_close(limited["tensors"], alone["tensors"], rtol=1e-9, atol=1e-9)


def test_the_max_batch_of_an_island_is_what_its_smallest_device_has_room_for(together):
    """Half of the examples and of the memory for each of two, which share the one that the test has."""
    small, large = together["measured"]
    assert large == pytest.approx(2 * small, rel=0.05)
    assert small % 2 == 0
    assert small == pytest.approx(island_memory.measured(island_memory.alone(), island_memory.FREE), rel=0.05)


@pytest.mark.parametrize("name", island_memory.INITIAL)
def test_models_that_are_made_tensor_by_tensor_have_the_numbers_of_whole_ones(together, name):
    """To the bit: of two trainers with different seeds; tied, frozen, recast and pretrained ones, and buffers, too."""
    expected = island_memory.initial(name, island_memory.alone(), together["folder"])
    found = together["initial"][name]
    for what in ("working", "trainers"):
        assert found[what].keys() == expected[what].keys()
        for key, tensor in expected[what].items():
            assert torch.equal(found[what][key], tensor), key
