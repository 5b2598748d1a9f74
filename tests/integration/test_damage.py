"""Damage to the files of a run: no completed work is lost, no wrong data is used, and one line names the damage."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import run as program
from tests.support.helpers import warnings_of
from tests.support.runs import assert_same_run, write_config

ROUNDS = 3
NEWEST = f"checkpoints/round_{ROUNDS:05d}"

# The same file of the checkpoint before, or where that is no other file, another one.
SWAPPED = {
    "state.json": "state.json",
    "trainer_0.safetensors": "trainer_0.safetensors",
    "trainer_1_worker_0.safetensors": "trainer_0_worker_0.safetensors",
    "config.yaml": "state.json",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache_dir):
    """A completed run with a checkpoint of every round."""
    folder = tmp_path_factory.mktemp("whole")
    values = {
        "number_of_outer_steps": ROUNDS,
        "number_of_inner_steps_between_outers": 2,
        "number_of_initial_trainers": 2,
        "nodes_per_gpu": 2,
        "data_sample_size": 200,
        "val_size": 10,
        "sampling_method": "none",
        "merge_frequency": 9,
        "save_weights_every": 1,
        "run_name": "whole",
    }
    config = write_config(folder, cache_dir, **values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("utils.checkpoint.checkpoint.KEPT", 9)
        assert program.main(["--config", str(config)]) == 0
    return folder / "logs" / "whole"


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / whole.name))


def flip(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 0x01
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped at the start": lambda path: flip(path, 0.0),
    "flipped in the header": lambda path: flip(path, 0.05),
    "flipped in the middle": lambda path: flip(path, 0.5),
    "flipped at the end": lambda path: flip(path, 0.99),
    "cut": cut,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path: path.write_bytes(b""),
    "junk": lambda path: path.write_bytes(bytes(range(256)) * (path.stat().st_size // 256 + 1)),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "deleted": Path.unlink,
    "a folder": folder_instead,
    "of another file": lambda path: shutil.copy(path.parent.with_name("round_00002") / SWAPPED[path.name], path),
}


def errors(capsys) -> list[str]:
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return [line for line in captured.err.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize(
    "name", ["state.json", "trainer_0.safetensors", "trainer_1_worker_0.safetensors", "config.yaml"]
)
@pytest.mark.parametrize("damage", DAMAGE)
def test_the_checkpoint_before_a_damaged_one_is_used(whole, copy, name, damage):
    DAMAGE[damage](copy / NEWEST / name)
    assert program.main(["--resume", str(copy)]) == 0
    (warning,) = warnings_of(copy)
    assert warning.startswith(f"a checkpoint was passed over: {copy / NEWEST}: ")
    assert name in warning or damage == "of another file"
    assert f"resumed after round {ROUNDS - 1}" in (copy / "training_log.log").read_text()
    assert "Traceback" not in (copy / "training_log.log").read_text()
    assert (copy / "checkpoints" / f"damaged_round_{ROUNDS:05d}").is_dir()
    assert_same_run(copy, whole, besides=("warnings",))
