"""Models of rounds on the way: the newest stay."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fabrics.models import export
from fabrics.models.export import round_folder
from fabrics.models.registry import save_model
from fabrics.training.flat_model import FlatModel
from tests.support.helpers import Recorder, tiny_cluster, tiny_llama
from utils.distributed.processes import LocalProcesses


def test_the_models_of_all_rounds_that_are_asked_for_stay(tmp_path):
    cluster = tiny_cluster(
        number_of_outer_steps=5, number_of_inner_steps_between_outers=1, number_of_initial_trainers=2, nodes_per_gpu=2,
        sampling_method="none", save_weights_every=2, clearml="off",
    )  # fmt: skip
    cluster.train(Recorder(), tmp_path)
    models = tmp_path / "model_weights"
    assert {path.name for path in models.iterdir()} == {round_folder(models, step).name for step in (2, 4)}
    assert all(list(round_folder(models, step).glob("trainer_*/model.safetensors")) for step in (2, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_tensor_on_disk_has_no_name_there(tmp_path, monkeypatch, dtype):
    """It is the tensor, to the bit, in memory that is not PyTorch's; a small one stays."""
    monkeypatch.setattr(export, "_LARGE_BYTES", 1000)
    tensor = (torch.randn(50, 40) * 100).to(dtype)
    found = export.on_disk(tensor, tmp_path / "models")
    assert torch.equal(found, tensor)
    assert not found.untyped_storage().resizable()
    assert list(tmp_path.rglob("*")) == [tmp_path / "models"]
    assert export.on_disk(tensor[:2], tmp_path).untyped_storage().resizable()


def test_a_tensor_is_on_disk_where_room_cannot_be_taken_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "_LARGE_BYTES", 1000)
    monkeypatch.delattr(os, "posix_fallocate", raising=False)  # as on macOS
    found = export.on_disk(torch.full((500,), 3.0), tmp_path)
    assert not found.untyped_storage().resizable()
    assert found.sum().item() == 1500.0


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not tell a process's descriptors")
def test_tensors_on_disk_keep_no_descriptor(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "_LARGE_BYTES", 1000)
    before = len(os.listdir("/proc/self/fd"))
    found = [export.on_disk(torch.full((500,), float(number)), tmp_path) for number in range(50)]
    assert len(os.listdir("/proc/self/fd")) <= before + 10  # others may open theirs meanwhile
    assert [tensor.sum().item() for tensor in found] == [500.0 * number for number in range(50)]


def test_a_model_of_kept_tensors_is_written_as_any_other(tmp_path):
    """Tied weights once."""
    model = tiny_llama(tied=True)
    tensors = {parameter: export.on_disk(parameter.detach(), tmp_path) for parameter in model.parameters()}
    given = {name: tensors[parameter] for name, parameter in model.state_dict(keep_vars=True).items()}
    save_model(model, None, tmp_path / "given", given)
    save_model(model, None, tmp_path / "own")
    for path in (tmp_path / "own").iterdir():
        assert path.read_bytes() == (tmp_path / "given" / path.name).read_bytes()


class _First(FlatModel):
    """As the first of two devices has it; mapped: files when each model is asked for."""

    shard_group = SimpleNamespace(size=2)

    def __init__(self, module: nn.Module):
        super().__init__(module, torch.device("cpu"))
        self.mapped: list[int] = []

    def state(self, keep):
        maps = Path("/proc/self/maps").read_text().splitlines()
        self.mapped.append(sum("/models/" in line for line in maps))
        return {name: keep(tensor) for name, tensor in self.module.state_dict().items()}


def _refuse(*_arguments, **_keywords) -> None:
    raise OSError("no room")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not tell what is mapped")
@pytest.mark.parametrize("fails", [False, True])
def test_what_is_kept_of_a_model_is_gone_before_the_next(tmp_path, monkeypatch, fails):
    monkeypatch.setattr(export, "_LARGE_BYTES", 1)
    if fails:
        monkeypatch.setattr(export, "save_model", _refuse)
    working = _First(tiny_llama())
    folders, problem = export.save_models(
        tmp_path / "models", range(3), lambda trainer: working.parameters.data.clone(), working, None, LocalProcesses()
    )
    assert working.mapped == [0, 0, 0]
    assert (len(folders), problem is None) == ((0, False) if fails else (3, True))
