"""The decision to compile a model, which a resumed run keeps."""

from pathlib import Path

import pytest

from fabrics.models.compilation import compiles, planned_tokens, worth_compiling
from tests.support.helpers import CPU, light_cluster, make_config
from utils.config.reading import load_config
from utils.config.schema import ConfigError

ROOT = Path(__file__).resolve().parents[2]
LONG = {"number_of_outer_steps": None, "max_tokens": 10**9}


@pytest.mark.parametrize(
    ("parameters", "tokens", "device", "expected"),
    [
        # 33 s to compile; a token takes 33 us, 9 us less then: 4 times 33 s are saved after 14.9M tokens.
        (130_000, 2_000_000, "cpu", False),
        (130_000, 14_000_000, "cpu", False),
        (130_000, 16_000_000, "cpu", True),
        # 62 s; 225 us and 28 us: 9.0M tokens.
        (900_000, 8_500_000, "cpu", False),
        (900_000, 9_500_000, "cpu", True),
        # Gains of less than 5% are too far from what was measured.
        (7_000_000, 100_000_000, "cpu", True),
        (7_100_000, 100_000_000, "cpu", False),
        (300_000_000, 10**12, "cpu", False),
        # GPUs were not measured.
        (130_000, 10**12, "cuda", False),
    ],
)
def test_long_runs_of_small_models_are_worth_compiling(parameters, tokens, device, expected):
    assert worth_compiling(parameters, tokens, device) is expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"number_of_outer_steps": None, "max_tokens": 5000}, 5000),
        ({"number_of_outer_steps": None, "number_of_training_epochs": 2.5}, 2500 * 9),
        # 3 rounds of 3 steps of 2 trainers with 4 examples.
        ({"number_of_initial_trainers": 2}, 3 * 3 * 2 * 4 * 9),
        ({"number_of_initial_trainers": 2, "max_tokens": 600, "number_of_training_epochs": 1}, 600),
    ],
)
def test_tokens_of_a_run_are_those_of_its_first_limit(values, expected):
    assert planned_tokens(make_config(**values), examples=1000) == expected


def test_true_and_false_need_no_estimate():
    for device in ("cpu", "cuda"):
        assert compiles(make_config(compile_model=True), 10, 10, device, True) is True
        assert compiles(make_config(compile_model=False, **LONG), 130_000, 10**9, device, True) is False


def test_without_a_compiler_true_is_refused_and_auto_means_no(monkeypatch):
    assert light_cluster(**LONG).models.compiled
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not light_cluster(**LONG).models.compiled
    with pytest.raises(ConfigError, match=r"compile_model: true needs the C\+\+ compiler no-such-compiler"):
        light_cluster(compile_model=True)


@pytest.mark.parametrize(
    "path", ["config.yaml", *(f"configs/{file.name}" for file in (ROOT / "configs").glob("*.yaml"))]
)
def test_the_demo_is_not_compiled(path):
    """Nor are the other configurations of its model, with all documents."""
    config, _ = load_config(ROOT / path)
    if config.model_config.get("preset") == "demo":
        assert config.compile_model == "auto"
        assert not compiles(config, 131_000, 9_000, "cpu", True)


def test_a_resumed_run_keeps_the_decision():
    """Compilation itself starts with the first step."""
    for first, then in ((LONG, {}), ({}, LONG)):
        begun, resumed, told = light_cluster(**first), light_cluster(**then), light_cluster(compile_model=False, **then)
        assert begun.models.compiled is (first is LONG)
        assert resumed.models.compiled is not begun.models.compiled
        tensors, state = begun.tensors(), begun.state_dict()
        for cluster in (resumed, told):
            cluster.load_state_dict(state, lambda group, name, tensors=tensors: tensors[group][name])
        assert resumed.models.compiled is begun.models.compiled
        assert told.models.compiled is False
        working = (cluster.models[CPU] for cluster in (begun, resumed, told))
        assert [model.compiled for model in working] == [begun.models.compiled, begun.models.compiled, False]
