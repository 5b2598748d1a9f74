"""Models whose tensors are made again one at a time: the numbers are those of models that are built at once."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fabrics.data.examples import TaskData
from fabrics.models.initialisation import initial_model, unmade_model
from fabrics.models.registry import build_model
from fabrics.sharding import deferred_init
from tests.support.helpers import TINY_ARCHITECTURE, make_config, tiny_data
from utils.config.schema import ConfigError


def _drawn_in_many_ways() -> nn.Module:
    """What one tensor needs of others, numbers that decide what is drawn, views, casts, and a generator of its own."""
    first, second = nn.Linear(40, 50), nn.Linear(50, 50)
    nn.init.orthogonal_(first.weight)
    nn.init.trunc_normal_(second.weight, std=0.7, a=-0.5, b=0.5)
    with torch.no_grad():
        first.weight[3] = second.weight[4, :40] * 2
        second.weight.normal_(generator=torch.Generator().manual_seed(3))
        if first.weight.sum() > second.weight.sum():
            second.bias.uniform_()
        first.bias.copy_(torch.linspace(0, 1, 50))
    second.register_buffer("mask", torch.ones(50, 50).tril())
    first.weight.data = first.weight.data + second.weight.data[:, :40]
    return nn.Sequential(first, nn.Embedding(30, 20, padding_idx=3), second, nn.LSTM(8, 8)).double()


@pytest.mark.parametrize("kept_bytes", [0, 2**26])
def test_every_tensor_is_made_again_as_it_was(monkeypatch, kept_bytes):
    monkeypatch.setattr(deferred_init, "SMALL", 256)
    monkeypatch.setattr(deferred_init, "KEPT_BYTES", kept_bytes)
    torch.manual_seed(5)
    expected, drawn = _drawn_in_many_ways(), torch.rand(3)
    torch.manual_seed(5)
    with deferred_init.Deferred() as noted:
        found = _drawn_in_many_ways()
    assert torch.equal(torch.rand(3), drawn)  # the generator is where it would be
    found = noted.unmade(found)
    unmade = [name for name, parameter in found.named_parameters() if parameter.is_meta]
    assert len(unmade) > 6
    assert {"0.weight", "1.weight", "2.weight"} <= set(unmade)
    for (name, tensor), (_, like) in zip(found.state_dict().items(), expected.state_dict().items(), strict=True):
        assert torch.equal(noted.made(tensor), like), name
        assert noted.made(tensor).dtype == like.dtype


def _computed_of_what_is_read(array: np.ndarray) -> nn.Module:
    """The array is a parameter, and numbers that others are computed of; then it changes, three times."""
    module = nn.Linear(40, 50, bias=False)
    module.weight = nn.Parameter(torch.from_numpy(array))
    module.before = nn.Parameter(module.weight.detach().double())
    with torch.no_grad():
        module.weight[3] = 7.0
    module.after = nn.Parameter(module.weight.detach().double())
    torch.add(module.weight.data, 1, out=module.weight.data)
    module.added = nn.Parameter(module.weight.detach().double())
    torch._foreach_mul_([module.weight.data, module.added.data], 2)
    module.multiplied = nn.Parameter(module.weight.detach().double())
    return module


def test_what_is_read_stays_and_may_change(monkeypatch):
    monkeypatch.setattr(deferred_init, "SMALL", 256)
    monkeypatch.setattr(deferred_init, "KEPT_BYTES", 0)
    array = np.random.default_rng(0).random((50, 40), np.float32)
    expected = _computed_of_what_is_read(array.copy())
    with deferred_init.Deferred(reads=True) as noted:
        found = _computed_of_what_is_read(array)
    found = noted.unmade(found)
    assert all(parameter.is_meta for parameter in found.parameters())
    for (name, tensor), (_, like) in zip(found.state_dict().items(), expected.state_dict().items(), strict=True):
        assert torch.equal(noted.made(tensor), like), name
    assert noted.made(found.weight).data_ptr() == array.ctypes.data


class _Counted:
    """While tensors are forgotten: the most bytes of large ones that were there after an operation, and now."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(deferred_init, "SMALL", 4000)
        monkeypatch.setattr(deferred_init, "KEPT_BYTES", 0)
        forget = deferred_init.Deferred._forget
        self.most = self.now = 0

        def counted(noted, *arguments, **keywords):
            forget(noted, *arguments, **keywords)
            self.now = sum(large.storage.nbytes() for large in noted._large.values())
            self.most = max(self.most, self.now)

        monkeypatch.setattr(deferred_init.Deferred, "_forget", counted)


def test_no_more_than_a_few_tensors_are_there_at_one_time(monkeypatch):
    """Counted after every operation."""
    counted = _Counted(monkeypatch)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 8}
    config = make_config(model_config=TINY_ARCHITECTURE | sizes)
    model, made = unmade_model(config, tiny_data(), 0)
    expected = initial_model(config, tiny_data(), 0)
    largest = max(parameter.numel() for parameter in expected.parameters()) * 4
    assert sum(parameter.numel() for parameter in expected.parameters()) * 4 > 8 * largest
    assert counted.most <= 3 * largest
    assert counted.now == 0
    for found, parameter in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(made(found), parameter)


def _classes() -> TaskData:
    return dataclasses.replace(tiny_data(), task="classification", class_names=("low", "high"))


_PRETRAINED = {
    "as it is": ("microllama", tiny_data, {}, {}),
    "bfloat16, in several files": ("microllama", tiny_data, {"dtype": torch.bfloat16, "max_shard_size": "100KB"}, {}),
    "to float64": ("microllama", tiny_data, {"dtype": torch.bfloat16}, {"parameter_dtype": "float64"}),
    "a new head": ("bert", _classes, {"dtype": torch.float16}, {"need_to_reinit_output_layers": True}),
    "a head that is not there": ("bert", _classes, {"dtype": torch.float16, "of": "base_model"}, {}),
}


def _write(folder: Path, model_type: str, data: TaskData, dtype=torch.float32, of=None, **options) -> None:
    sizes = {"preset": "demo", "hidden_size": 64, "num_hidden_layers": 6}
    model = build_model(model_type, sizes, data.tokenizer, 9, 3, data.class_names).to(dtype)
    (getattr(model, of) if of else model).save_pretrained(folder, **options)


@pytest.mark.parametrize("name", _PRETRAINED)
def test_pretrained_weights_are_read_tensor_by_tensor(monkeypatch, tmp_path, name):
    """The bits of weights that are read at once; a few copies are there at one time, and none of what is as wanted."""
    model_type, make_data, written, values = _PRETRAINED[name]
    data = make_data()
    _write(tmp_path, model_type, data, **written)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == ("max_shard_size" in written)
    model_config = {"name": str(tmp_path), "pretrained": True}
    config = make_config(model_config=model_config, model_type=model_type, **values)
    expected = initial_model(config, data, 1)
    counted = _Counted(monkeypatch)
    model, made = unmade_model(config, data, 1)
    large = [parameter for parameter in expected.parameters() if parameter.nbytes >= deferred_init.SMALL]
    largest = max(parameter.nbytes for parameter in large)
    assert sum(parameter.nbytes for parameter in large) > 6 * largest
    assert counted.most <= (0 if not written else 3 * largest)
    assert counted.now == sum(buffer.nbytes for buffer in model.buffers() if buffer.nbytes >= deferred_init.SMALL)
    assert sum(parameter.is_meta for parameter in model.parameters()) == len(large)
    assert model.state_dict().keys() == expected.state_dict().keys()
    for key, tensor in model.state_dict().items():
        found, like = made(tensor), expected.state_dict()[key]
        assert found.dtype == like.dtype
        assert torch.equal(found, like), key


def test_weights_of_a_plain_module_are_read_tensor_by_tensor(monkeypatch, tmp_path):
    """Those that were drawn before count no more."""
    save_file(nn.Sequential(nn.Linear(100, 90), nn.Linear(90, 80)).state_dict(), tmp_path / "weights")
    counted = _Counted(monkeypatch)
    with deferred_init.Deferred(reads=True) as noted:
        module = nn.Sequential(nn.Linear(100, 90), nn.Linear(90, 80))
        module.load_state_dict(load_file(tmp_path / "weights"))
    module = noted.unmade(module)
    assert counted.most <= 36_000
    assert [name for name, parameter in module.named_parameters() if parameter.is_meta] == ["0.weight", "1.weight"]
    for name, tensor in load_file(tmp_path / "weights").items():
        assert torch.equal(noted.made(module.get_parameter(name)), tensor)


def test_weights_that_do_not_fit_are_named_as_ever(tmp_path):
    _write(tmp_path, "microllama", tiny_data())
    values = {"name": str(tmp_path), "pretrained": True, "intermediate_size": 100}
    config, said = make_config(model_config=values), []
    for read in (initial_model, unmade_model):
        with pytest.raises(ConfigError, match=r"model_config\.name: cannot load") as caught:
            read(config, tiny_data(), 0)
        said.append(str(caught.value))
    assert said[0] == said[1]
