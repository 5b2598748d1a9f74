"""The ready configurations: the small ones run on data in the real format, the others hold the published values."""

import ast
import dataclasses
import json
import random
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest

from cluster import Cluster
from configs import make_samples
from fabrics.config_checks import CHECKS
from fabrics.data.dataset_loader import load_data
from fabrics.data.documents import Skipped, matching_files, whole_file
from tests.support.helpers import TINY_ARCHITECTURE, Recorder
from tests.support.programs import Programs
from tests.support.runs import summary
from training_logs.showing.run_data import read_table
from utils.config.reading import load_config

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("c4", "aclImdb", "code")  # packages takes longer, and has packages of its own below


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(make_samples.SAMPLES, "code", partial(make_samples.write_code, modules=40))
        make_samples.main(folder, QUICK)
    assert {path.name for path in folder.iterdir()} == set(QUICK)
    return folder


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "samples").write_text("")
    monkeypatch.setattr(sys, "argv", ["make_samples.py", str(tmp_path / "samples"), "--only", "c4"])
    with pytest.raises(SystemExit, match=r"^error: \[Errno 17\] File exists: "):
        runpy.run_path(make_samples.__file__, run_name="__main__")


def run(programs: Programs, config: str, folder: Path, *overrides: str) -> dict:
    places = [f"log_dir={folder}", f"cache_dir={folder}/cache", "clearml=off", "plot_at_end=false", "processes=1"]
    # One layer and half of the training, evaluated at its end.
    less = ["number_of_inner_steps_between_outers=6", "eval_every=7", "model_config.num_hidden_layers=1"]
    programs.run("run.py", "--config", f"configs/{config}", *places, *less, *overrides)
    (report,) = folder.glob("*/model_training_report")
    return summary(report.parent)


def test_c4_microllama_in_small(programs, samples, tmp_path):
    # With half of the training a stricter test is needed for the batch to outgrow the hardware.
    summary = run(programs, "c4_microllama_small.yaml", tmp_path, f"c4_local_path={samples / 'c4'}", "ETA=0.4")
    assert summary["dataset"] == "c4"
    assert summary["documents"] == {"train": 1500, "validation": 100}
    assert (summary["initial_trainers"], summary["final_trainers"], summary["merges"]) == (4, 1, 3)
    assert summary["largest_requested_batch"] > 16
    (log,) = tmp_path.glob("*/model_training_report/training_log.csv")
    assert read_table(log)["accumulation_steps"][-1] > 1
    assert summary["final_metric"] < 0.45 * summary["initial_metric"]


def test_imdb_bert_in_small(programs, samples, tmp_path):
    summary = run(programs, "imdb_bert_small.yaml", tmp_path, f"imdb_local_path={samples / 'aclImdb'}")
    assert (summary["dataset"], summary["metric"]) == ("imdb", "accuracy")
    assert summary["documents"] == {"train": 700, "validation": 160}
    assert (summary["initial_trainers"], summary["final_trainers"], summary["merges"]) == (4, 1, 3)
    assert summary["largest_requested_batch"] > 16
    assert summary["final_metric"] > 0.75


@pytest.mark.parametrize("name", ["published_config.yaml", "published_readme.yaml"])
def test_published_configurations_run_as_the_papers_say(name, cache_dir):
    small = [
        "dataset=python_docs",
        "data_sample_size=50",
        "sequence_length=16",
        "vocab_size=300",
        f"model_config={json.dumps(TINY_ARCHITECTURE | {'tie_word_embeddings': False})}",
        f"cache_dir={cache_dir}",
        "number_of_inner_steps_between_outers=2",
        "number_of_outer_steps=3",
        "max_batch_size=64",
    ]
    config, warnings = load_config(ROOT / "configs" / name, small, CHECKS)
    additions = (config.debias, config.ETA_at_end, config.statistics_smoothing, config.batch_test_confidence)
    assert additions == (False, None, 0.0, 0.0)
    assert (config.batch_test_start, config.max_batch_growth, config.smallest_worker_batch) == (1, None, None)
    (left_open,) = (line for line in warnings if line.startswith("published configuration"))
    assert ("outer_momentum 0.9" in left_open) == (config.distributed_algo == "DiLoCo")
    assert "gradient_clipping 1.0" in left_open
    assert f"inner_optimizer {'adamw' if config.distributed_algo == 'DiLoCo' else 'sgd'}," in left_open
    assert ("merge_frequency 2" in left_open) == (name == "published_readme.yaml")
    assert ('inner_optimizer_config {"betas": [0.9, 0.99]}' in left_open) == (config.distributed_algo == "DiLoCo")
    assert ("inner_optimizer_config" in left_open) == (config.distributed_algo == "DiLoCo")
    assert "identical_initialisation true" in left_open
    cluster = Cluster(config, load_data(config))
    cluster.train(Recorder())
    assert cluster.counters.outer_steps == 3
    assert cluster.merges == 1


def test_a_configuration_of_ones_own_is_not_called_published():
    own = {"sampling_method": "augmented_inner_product_test", "ETA": 0.8, "vartheta": 0.9, "nu": 5.84}
    assert load_config(own | {"max_tokens": 1000}, (), CHECKS)[1] == []
    (line,) = load_config({"lr_inner": 1e-3, "log_file": "log", "max_tokens": 1000}, (), CHECKS)[1]
    assert line.startswith("log_file: has no effect")


def test_a_pretrained_model_leaves_no_initialisation_open():
    _, warnings = load_config(ROOT / "configs" / "published_config.yaml", (), CHECKS)
    (left_open,) = (line for line in warnings if line.startswith("published configuration"))
    assert "identical_initialisation" not in left_open


@pytest.mark.parametrize(
    ("name", "differences"),
    [
        ("c4_microllama.yaml", {"data_sample_size", "val_size", "sequence_length", "autocast"}),
        ("imdb_bert.yaml", {"dataset", "model_type", "model_config", "autocast"}),
    ],
)
def test_configurations_that_follow_the_published_one_differ_as_they_say(name, differences):
    published_config, config = (
        dataclasses.asdict(load_config(ROOT / "configs" / file, (), CHECKS)[0])
        for file in ("published_config.yaml", name)
    )
    # The norm test, and keys that neither it nor AdamW, nor the other dataset, reads.
    elsewhere = {"sampling_method", "vartheta", "nu", "lr_sgd", "project_name", "samples_per_class", "val_size"}
    found = {key for key, value in config.items() if value != published_config[key]}
    assert found - differences <= elsewhere
    assert found >= differences | {"sampling_method"}


def test_samples_are_written_once_and_the_same_everywhere(samples, tmp_path, capsys):
    make_samples.main(samples, QUICK)
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
    assert len(files) == 40
    defined = set()
    for file in files[::2]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                assert ast.get_docstring(node) is None
                defined.add(getattr(node, "name", file.name))
    assert len(defined) > 500
    for name, function in (("ast", "literal_eval"), ("base64", "b64encode"), ("bisect", "bisect_left")):
        assert f"def {function}(" in (samples / "code" / f"{name}.py").read_text(encoding="utf-8")


# The documentation of packages


def prose(seed: int, words: int = 45) -> str:
    """Words in an order that no other seed has; more than 200 characters."""
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefghij", k=draw.randint(4, 9))) for _ in range(words))


def install(folder: Path, name: str, description: str, files: dict[str, str | bytes]) -> None:
    """A distribution as pip leaves it, found while `folder` is on the path."""
    info = f"{name}-1.5.dist-info"
    files = files | {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n\n{description}\n"}
    for file, content in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / info / "RECORD").write_text("".join(f"{file},,\n" for file in (*files, f"{name}/deleted.py")))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder for distributions, in a Python whose own documentation is one document."""
    monkeypatch.setattr(make_samples, "python_documents", lambda: (prose(0),))
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


def written_by(folder: Path, *names: str) -> list[list[str]]:
    """The documents of each package, as a run reads them."""
    folder.mkdir()
    make_samples.write_packages(folder, names)
    found = []
    for name in names:
        files = matching_files([f"{folder}/{name}/*.txt"])
        found.append([text for file in files for text in whole_file(file, Skipped())])
    return found


@pytest.mark.filterwarnings("error")
def test_documents_of_packages_are_prose_and_new(site, tmp_path):
    def module(text: str) -> str:
        return f'def function():\n    """{text}"""\n'

    def beginning(words: int) -> str:
        return " ".join(prose(1).split()[:words])

    kept = {
        "one/module.py": f'raise SystemExit\nclass A:\n    r"""{prose(2)}"""\n    def f():\n        """{prose(3)}"""\n',
        "one/escape.py": module(prose(4) + r" \d"),
        "one/stub.pyi": module(prose(5)),
        "one/latin.py": f"# coding: latin-1\n{module(prose(6) + ' é')}".encode("latin-1"),
        "one/notes.md": f"\n{prose(7)}\n\nA paragraph.\n",
        "one/partly.py": module(f"{beginning(20)} {prose(8)}"),
    }
    left_out = {
        "one/short.py": module(prose(10)[:199]),
        "one/copied.py": module(prose(2).upper() + "."),
        "one/mostly.py": module(f"{beginning(35)} {prose(11, 10)}"),
        "one/standard.py": module(prose(0)),
        "one/broken.py": module(prose(12)) + "def f(:\n",
        "one/bytes.txt": prose(13).encode() + b"\xff",
        "one/numbers.txt": "3.14159 2.71828\n" * 50,
        "one/LICENSE.txt": prose(14),
        "one/legal.py": module(f"{prose(15)}\nAll rights reserved."),
        "one/data.json": prose(16),
        "one-1.5.dist-info/entry_points.txt": prose(17),
        "../bin/script.py": module(prose(18)),
    }
    install(site, "one", f"{prose(1)}\n\nIts second paragraph.", kept | left_out)
    (texts,) = written_by(tmp_path / "packages", "one")
    assert texts[0] == f"{prose(1)}\n\nIts second paragraph."
    expected = [prose(2), prose(3), prose(4) + r" \d", prose(5), prose(6) + " é", f"{prose(7)}\n\nA paragraph."]
    assert sorted(texts[1:]) == sorted([*expected, f"{beginning(20)} {prose(8)}"])


def test_documents_of_packages_are_the_same_wherever_they_are_installed(site, tmp_path, monkeypatch):
    modules = {f"one/{i}.py": f'"""{prose(i)}"""' for i in range(1, 8)}
    other = {"two/a.py": f'"""{prose(3)}"""', "two/b.py": f'"""{prose(9)}"""'}
    for place, files in ((site, modules), (tmp_path / "elsewhere", dict(reversed(modules.items())))):
        install(place, "one", prose(20), files)
        install(place, "two", "short", other)
    first, second = written_by(tmp_path / "packages", "one", "two")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    assert written_by(tmp_path / "again", "one", "two") == [first, second]
    assert sorted(first) == sorted([*map(prose, range(1, 8)), prose(20)])
    assert second == [prose(9)]  # not what one has
