"""The ready configurations: the small ones run on data in the real format, the others hold the published values."""

import ast
import json
from pathlib import Path

import pytest

from configs import make_samples
from fabrics.choices import CHECKS, CHOICES
from tests.programs import Programs
from utils.config_reading import load_config

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    make_samples.main(folder)
    return folder


def run(programs: Programs, config: str, folder: Path, *overrides: str) -> dict:
    places = [f"log_dir={folder}", f"cache_dir={folder}/cache", "clearml=off", "plot_at_end=false", "processes=1"]
    # Half of the training, evaluated at its end.
    less = ["number_of_inner_steps_between_outers=6", "eval_every=7"]
    programs.run("run.py", "--config", f"configs/{config}", *places, *less, *overrides)
    (path,) = folder.glob("*/model_training_report/summary.json")
    return json.loads(path.read_text())


def test_c4_microllama_in_small(programs, samples, tmp_path):
    summary = run(programs, "c4_microllama_small.yaml", tmp_path, f"c4_local_path={samples / 'c4'}")
    assert (summary["dataset"], summary["dataset_fallback_reason"]) == ("c4", None)
    assert summary["documents"] == {"train": 1500, "validation": 100}
    assert (summary["initial_trainers"], summary["final_trainers"], summary["merges"]) == (4, 1, 3)
    assert summary["largest_requested_batch"] > 16
    assert summary["last_accumulation_steps"] > 1
    assert summary["final_metric"] < 0.45 * summary["initial_metric"]


def test_imdb_bert_in_small(programs, samples, tmp_path):
    summary = run(programs, "imdb_bert_small.yaml", tmp_path, f"imdb_local_path={samples / 'aclImdb'}")
    assert (summary["dataset"], summary["metric"]) == ("imdb", "accuracy")
    assert summary["documents"] == {"train": 700, "validation": 160}
    assert (summary["initial_trainers"], summary["final_trainers"], summary["merges"]) == (4, 1, 3)
    assert summary["largest_requested_batch"] > 16
    assert summary["final_metric"] > 0.75
    assert set(summary["final_classes"]) == {"neg", "pos"}
    for scores in summary["final_classes"].values():
        assert scores["examples"] == 80
        assert scores["f1"] > 0.7


@pytest.mark.parametrize("name", ["c4_microllama.yaml", "imdb_bert.yaml"])
def test_the_published_values(name):
    config, warnings = load_config(ROOT / "configs" / name, (), CHOICES, CHECKS)
    assert warnings == []
    assert (config.number_of_initial_trainers, config.nodes_per_gpu) == (4, 4)
    assert (config.number_of_outer_steps, config.number_of_inner_steps_between_outers) == (20, 200)
    assert (config.learning_rate_for_inner_opt, config.learning_rate_for_outer_opt) == (2e-5, 0.5)
    assert (config.INITIAL_BATCH_SIZE, config.ETA, config.merge_frequency) == (1, 0.8, 2)


def test_samples_are_written_once_and_the_same_everywhere(samples, tmp_path, capsys):
    make_samples.main(samples)
    assert capsys.readouterr().out.count("there already") == 3
    for name, write in (("c4", make_samples.write_c4), ("aclImdb", make_samples.write_imdb)):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    written = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert len(written) > 1000
    for path in written:
        assert (samples / path.relative_to(tmp_path)).read_bytes() == path.read_bytes()


def test_code_is_real_and_has_no_docstring(samples):
    files = sorted((samples / "code").glob("*.py"))
    assert len(files) > 100
    defined = set()
    for file in files[::4]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                assert ast.get_docstring(node) is None
                defined.add(getattr(node, "name", file.name))
    assert len(defined) > 1000
    for name, function in (("textwrap", "dedent"), ("random", "shuffle"), ("bisect", "bisect_left")):
        assert f"def {function}(" in (samples / "code" / f"{name}.py").read_text(encoding="utf-8")
