"""The gradient analysis against numbers on paper, loops over single examples, and synthetic gradients."""

import contextlib
import io
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn
from torch.profiler import ProfilerActivity, profile

import run as program
from algorithms.batch.gradient_statistics import GradientStatistics
from algorithms.batch.losses import IGNORE_INDEX
from configs.make_samples import write_imdb
from fabrics.training.flat_model import FlatModel
from gradient_analysis import gradient_analysis
from gradient_analysis.gradient_analysis import (
    AnalysisConfig,
    analyse,
    last_request,
    parse_analysis_config,
    resolve_model,
)
from gradient_analysis.gradients import (
    Gradients,
    draw_batches,
    requests,
)
from tests.support.helpers import CPU, in_one_type, padded, separable_texts, tiny_bert, tiny_llama
from tests.support.runs import error_lines, rows_of
from utils.config.schema import ConfigError

ROOT = Path(__file__).resolve().parents[2]


class TwoLogits(nn.Module):
    """Logits w x of one input for two classes, and no bias."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 2, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.layer.weight.zero_()

    def forward(self, x):
        return type("Output", (), {"logits": self.layer(x)})


class Points:
    """Examples (x, class)."""

    largest = 0

    def __init__(self, points):
        self.points = points

    def __len__(self):
        return len(self.points)

    def batch(self, indices, device):
        chosen = [self.points[index] for index in indices]
        return {
            "x": torch.tensor([[x] for x, _ in chosen], dtype=torch.float64),
            "labels": torch.tensor([label for _, label in chosen]),
        }


# At w = 0 both classes have probability 1/2: g_i = x (1/2 - [c = 0], 1/2 - [c = 1]) = (x/2) (-1, 1) or (x/2) (1, -1).
# x c:  2 0 -> (-1, 1);  2 1 -> (1, -1);  4 1 -> (2, -2);  4 1 -> (2, -2).   F = (1, -1).
PAPER = Points([(2.0, 0), (2.0, 1), (4.0, 1), (4.0, 1)])


def on_paper(micro_batch=2) -> Gradients:
    gradients = Gradients(FlatModel(TwoLogits(), CPU), PAPER, np.arange(4), micro_batch)
    gradients.compute_full()
    return gradients


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4])
def test_gradients_of_a_linear_model_on_paper(micro_batch):
    gradients = on_paper(micro_batch)
    assert gradients.full[gradients.full != 0].tolist() == [1.0, -1.0]
    assert gradients.loss == pytest.approx(math.log(2))
    assert gradients.squared_norm == 2.0
    first = gradients.of_batch(np.array([0, 1]))  # (0, 0)
    assert (first.deviation, first.norm) == (pytest.approx(2**0.5), 0.0)
    assert math.isnan(first.cosine)
    other = gradients.of_batch(np.array([0, 2, 3]))  # (1, -1)
    assert (other.deviation, other.norm, other.cosine) == pytest.approx((0.0, 2**0.5, 1.0))
    opposite = gradients.of_batch(np.array([0]))
    assert (opposite.deviation, opposite.cosine) == pytest.approx((8**0.5, -1.0))
    # n_i = 2, 2, 8, 8 and d_i = -2, 2, 4, 4. V = (20 - 4 * 2) / 3; the d_i have mean 2: P = (16 + 0 + 4 + 4) / 3.
    found = gradients.example_statistics()
    assert found.variance == pytest.approx(4.0)
    assert found.inner_product_variance == pytest.approx(8.0)
    assert found.squared_norm == pytest.approx(2.0 - 4.0 / 4)


@pytest.mark.parametrize("kind", ["llama", "tied llama", "bert", "padded llama"])
def test_gradients_equal_a_loop_over_single_examples(kind):
    texts = separable_texts(13)
    if "llama" in kind:
        lengths = [9] * 13 if kind != "padded llama" else list(range(3, 16))
        generator = np.random.default_rng(0)
        texts = padded([generator.integers(1, 61, length).tolist() for length in lengths])

    def make():
        return tiny_bert() if kind == "bert" else in_one_type(tiny_llama(tied=kind == "tied llama"))

    model = make().eval()
    singles = []
    for index in range(13):
        batch = texts.batch([index], CPU)
        labels = batch["labels"]
        length = int((batch["attention_mask"] if kind == "bert" else labels != IGNORE_INDEX).sum())
        logits = model(input_ids=batch["input_ids"][:, :length]).logits
        model.zero_grad()
        loss = (
            F.cross_entropy(logits, labels) if kind == "bert" else F.cross_entropy(logits[0, :-1], labels[0, 1:length])
        )
        loss.backward()
        singles.append([p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in model.parameters()])
    flat = torch.stack([torch.cat([part.flatten() for part in single]) for single in singles])
    full = flat.mean(0)
    working = FlatModel(make(), CPU)
    gradients = Gradients(working, texts, np.arange(13), micro_batch=5)
    gradients.compute_full()
    tolerance = {"rtol": 1e-10, "atol": 1e-14}
    own = torch.cat([view.flatten() for view in working.views(gradients.full).values()])
    torch.testing.assert_close(own, full, **tolerance)
    chosen = np.array([1, 4, 5, 6, 7, 9, 12])
    batch = gradients.of_batch(chosen)
    mean = flat[chosen].mean(0)
    expected = ((mean - full).norm().item(), mean.norm().item(), F.cosine_similarity(mean, full, dim=0).item())
    assert (batch.deviation, batch.norm, batch.cosine) == pytest.approx(expected, rel=1e-10)
    found = gradients.example_statistics()
    products = flat @ full
    assert found.variance == pytest.approx((flat - full).square().sum().item() / 12, rel=1e-10)
    assert found.inner_product_variance == pytest.approx(products.var().item(), rel=1e-8)
    scales = []
    for left_out in range(13):
        others = flat[[index for index in range(13) if index != left_out]]
        variance = others.var(0).sum()
        scales.append(variance / (others.mean(0).square().sum() - variance / 12))
    jackknife = (12 * torch.stack(scales).var(correction=0)).sqrt()
    assert gradients.noise_scale_error == pytest.approx(jackknife.item(), rel=1e-6)


def test_batches_allocate_no_tensor_of_model_size(monkeypatch):
    monkeypatch.setattr("gradient_analysis.gradients._CHUNK", 64)
    texts, working = separable_texts(20), FlatModel(tiny_bert(dtype=torch.float32), CPU)
    gradients = Gradients(working, texts, np.arange(20), 8)

    def vectors_made(work) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            work()
        return sum(event.self_cpu_memory_usage >= working.parameters.nbytes for event in recorded.events())

    gradients.compute_full()
    assert vectors_made(lambda: gradients.of_batch(np.arange(10))) == 0
    assert vectors_made(gradients.example_statistics) == 1  # the full gradient in the parameters' type


# Functions of numbers


def test_batches_repeat_no_example():
    generator = np.random.default_rng(0)
    indices = np.arange(10, 30)
    batches = draw_batches(indices, 6, generator)
    assert len(batches) == 3
    assert len(set(np.concatenate(batches)) & set(indices)) == 18


def test_requests_on_paper():
    statistics = GradientStatistics(100, 3.6, 40.0, inner_product_variance=32.0, overlap=0.0)
    rows = requests(statistics, 10, {"eta": 0.5, "vartheta": 0.5, "nu": 0.5})
    # Plain: 40 / (eta^2 (3.6 + 4)); 32 / (0.25 * 3.6^2); (40 - 32/3.6) / (0.25 * 3.6).
    assert {(test, value): request for test, factor, value, request in rows if value == 0.5 * factor}.items() >= {
        ("norm_test", 0.5): 22,
        ("norm_test", 2.0): 2,
        ("norm_test, debias", 0.5): 45,
        ("norm_test, debias", 2.0): 3,
        ("inner_product_test, debias", 0.5): 10,
        ("orthogonality, debias", 0.5): 35,
    }.items()


# The whole


@pytest.fixture(scope="module")
def analysed(tmp_path_factory, cache_dir):
    """Run folder, output folder and printed text of the script on a small run's model."""
    folder = tmp_path_factory.mktemp("analysis")
    settings = [
        *("dataset=python_docs", "data_sample_size=300", "val_size=20", "sequence_length=16", "vocab_size=300"),
        *("number_of_outer_steps=1", "number_of_inner_steps_between_outers=2", f"cache_dir={cache_dir}"),
        *(f"log_dir={folder / 'logs'}", "clearml=off", "number_of_initial_trainers=2", "processes=1"),
        "plot_at_end=false",
    ]
    assert program.main(settings) == 0
    (run,) = (folder / "logs").iterdir()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        asked = [f"model={run}", "sample_size=64", f"output_dir={folder / 'out'}"]
        assert gradient_analysis.main(asked) == 0
    return run, folder / "out", printed.getvalue()


def test_the_script_writes_figures_tables_and_a_summary(analysed):
    run, output, printed = analysed
    summary = json.loads((output / "gradient_analysis.json").read_text())
    report = run / "model_training_report"
    best = json.loads((report / "summary.json").read_text())["best_model"]
    assert summary["model"] == str(run / best)
    assert summary["sample"] == 64
    assert (output / "deviations.png").stat().st_size > 10_000
    batches = rows_of(output / "batches.csv")
    deviations = [float(row["deviation"]) for row in batches]
    assert len(batches) == 8
    assert summary["deviation"]["mean"] == pytest.approx(np.mean(deviations))
    # The batches partition the sample, so the mean of their gradients is the full gradient.
    norms = np.array([float(row["norm"]) for row in batches])
    full = summary["full_gradient_norm"]
    assert np.mean(norms**2) == pytest.approx(full**2 + np.mean(np.square(deviations)), rel=1e-4)
    cosines = [(d**2 - n**2 - full**2) / (-2 * n * full) for d, n in zip(deviations, norms, strict=True)]
    assert [float(row["cosine"]) for row in batches] == pytest.approx(cosines, rel=1e-3)
    expected = summary["variance"] / 8 * (1 - 8 / 64)
    assert np.mean(np.square(deviations)) == pytest.approx(expected, rel=0.5)
    assert summary["noise_scale"] == pytest.approx(summary["variance"] / (full**2 - summary["variance"] / 64))
    assert f"noise scale V / (||F||^2 - V / 64): {summary['noise_scale']:,.4g} examples (standard error " in printed
    assert summary["noise_scale_error"] > 0
    # The run's own eta, at its end, is among the requests.
    requested = {
        (row["test"], float(row["parameter"])): int(row["request"]) for row in rows_of(output / "requests.csv")
    }
    assert requested["norm_test, debias", 1.4] == math.ceil(summary["noise_scale"] / 1.4**2)
    own = f"{requested['norm_test, debias', 1.4]:,} examples, the test of the configuration"
    assert f"  norm_test, debias, eta 1.4: {own}\n" in printed
    last = {row["trainer_id"]: row["next_requested_batch"] for row in rows_of(report / "training_log.csv")}
    assert (summary["test"], str(summary["request_of_run"])) == ("norm_test, debias", last[best.split("_")[-1]])
    assert f"the run itself requests {last[best.split('_')[-1]]} at its end" in printed


def bert_analysis(folder: Path) -> AnalysisConfig:
    write_imdb(folder / "aclImdb", 40, 10)
    config = folder / "config.yaml"
    config.write_text(
        f"{{dataset: imdb, imdb_local_path: {folder / 'aclImdb'}, model_type: bert, sequence_length: 16, "
        f"vocab_size: 400, number_of_outer_steps: 1, sampling_method: none, debias: true, "
        f"model_config: {{preset: demo, num_hidden_layers: 1}}}}"
    )
    return AnalysisConfig(config=str(config), sample_size=20, batch_size=4, output_dir=str(folder / "o"))


def test_bert_is_analysed(tmp_path, cache_dir, no_pixels, capsys):
    output = analyse(bert_analysis(tmp_path))
    summary = json.loads((output / "gradient_analysis.json").read_text())
    assert summary["model"] == "untrained"
    assert (summary["test"], summary["request_of_run"]) == ("none", None)
    assert summary["loss"] == pytest.approx(math.log(2), rel=0.1)
    assert "the configuration has no batch test (sampling_method: none)" in capsys.readouterr().out


def test_a_loss_that_is_not_a_number_is_refused_and_nothing_is_written(tmp_path, cache_dir, monkeypatch):
    monkeypatch.setattr(
        Gradients, "compute_full", lambda gradients: vars(gradients).update(loss=math.nan, squared_norm=1.0)
    )
    with pytest.raises(ConfigError, match="model: its loss on these examples, or the gradient, is NaN"):
        analyse(bert_analysis(tmp_path))
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=/no/such/folder"], "model: no such folder: /no/such/folder"),
        (["model=tests"], "model: must be a model folder or a run folder"),
        (["config=none.yaml"], "none.yaml: cannot read the configuration"),
        (["config=FILE", "sample_size=1000000"], "sample_size: the train part has"),
        (["sample_size=2"], "sample_size: should be greater than or equal to 3, got 2"),
        (
            ["config=FILE", "sample_size=8", "batch_size=9"],
            "batch_size: must be at most the 8 examples of the sample, got 9",
        ),
        (["--config", "config.yaml"], "config.yaml: the configuration of a run, not of an analysis"),
        (["bach_size=8"], "bach_size: unknown key; did you mean batch_size"),
        (["part=test"], "part: should be 'train' or 'validation', got 'test'"),
        (["device=tpu", "sample_size=8"], "device: "),
        (["eta=[1"], "error: eta: value is not valid YAML: [1"),
        (["model=\udcff"], "error: model: must be UTF-8 text, got '\\udcff'"),
    ],
)
def test_wrong_input_is_one_error_line(overrides, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "FILE").write_text("{number_of_outer_steps: 1, data_sample_size: 50}")
    overrides = [override.replace("FILE", str(tmp_path / "FILE")) for override in overrides]
    assert gradient_analysis.main([f"output_dir={tmp_path / 'out'}", *overrides]) == 2
    (error,) = error_lines(capsys)
    assert message in error
    assert not (tmp_path / "out").exists()


def test_warnings_about_the_training_configuration_are_printed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = tmp_path / "config.yaml"
    config.write_text("distributed_algo: LocalSGD\nouter_momentum: 0.5\nnumber_of_outer_steps: 1\ndata_sample_size: 50")
    asked = [f"config={config}", "device=cuda:7", "sample_size=8", "batch_size=9"]
    assert gradient_analysis.main([f"output_dir={tmp_path / 'out'}", *asked]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("warning: devices: ['cuda:7'] requested, but CUDA is not available")
    assert lines[1].startswith(f"warning: {config}: ")
    assert lines[-1].startswith("error: batch_size: must be at most the 8 examples")


def test_a_model_without_per_example_gradients_is_refused_before_the_work(analysed, tmp_path, monkeypatch):
    run, _, _ = analysed
    monkeypatch.setattr(gradient_analysis, "initial_model", lambda *_: nn.Sequential(nn.Bilinear(2, 2, 2)))
    monkeypatch.setattr(gradient_analysis, "Gradients", None)
    with pytest.raises(ConfigError, match=r"^model: cannot be analysed: .*'0' of class Bilinear of torch \([^;]*$"):
        analyse(AnalysisConfig(model=str(run), sample_size=8, output_dir=str(tmp_path)))


def test_a_run_folder_stands_for_its_best_model_and_its_own_configuration(analysed):
    run, _, _ = analysed
    training, model = resolve_model(AnalysisConfig(model=str(run)))
    assert training.sequence_length == 16
    assert training.model_config == {"name": str(model), "pretrained": True}
    one = run / "model_weights" / "trainer_1"
    assert resolve_model(AnalysisConfig(model=str(one)))[1] == one


def test_adapters_are_analysed_before_they_are_merged(analysed, tmp_path, capsys):
    run, _, _ = analysed
    model = run / "model_weights" / "trainer_0"
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["model_config"] = {"name": str(model), "pretrained": True}
    values["lora"] = {"rank": 2, "targets": ["q_proj"]}
    asked = tmp_path / "lora.yaml"
    asked.write_text(yaml.safe_dump(values))
    counts = []
    for folder in (None, str(model)):
        config = AnalysisConfig(model=folder, config=str(asked))
        training, _ = resolve_model(config)
        counts.append(gradient_analysis._load(config, training, CPU)[1].parameter_count)
    hidden = 64  # of the demo, with two layers
    assert counts[0] == 2 * 2 * (hidden + hidden) < counts[1]
    assert "warning: lora: adapters are merged" in capsys.readouterr().err
    config = AnalysisConfig(config=str(asked), sample_size=8, batch_size=2, output_dir=str(tmp_path / "o"))
    assert json.loads((analyse(config) / "gradient_analysis.json").read_text())["model"] == str(model)


def test_a_run_without_a_batch_test_has_no_request(analysed, tmp_path):
    run, _, _ = analysed
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    model = folder / json.loads((folder / "model_training_report" / "summary.json").read_text())["best_model"]
    assert last_request(model) >= 1
    values = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(values | {"sampling_method": "none"}))
    assert last_request(model) is None


def test_a_given_configuration_wins_over_that_of_the_run(analysed, tmp_path):
    run, _, _ = analysed
    model = tmp_path / "checkout" / "models" / "trainer_0"
    shutil.copytree(run / "model_weights" / "trainer_0", model)
    shutil.copy(run / "config.yaml", tmp_path / "checkout" / "config.yaml")  # a configuration, but not of a run
    asked = tmp_path / "asked.yaml"
    asked.write_text("{sequence_length: 48, number_of_outer_steps: 1}")
    for folder in (model, run):
        assert resolve_model(AnalysisConfig(model=str(folder), config=str(asked)))[0].sequence_length == 48
    with pytest.raises(ConfigError, match=r"^config: "):
        resolve_model(AnalysisConfig(model=str(model), config=None))


def test_the_shipped_configuration_is_the_defaults():
    path = ROOT / "gradient_analysis" / "config_analyze_gradient.yaml"
    assert parse_analysis_config(path, []) == AnalysisConfig()


def test_keys_have_the_types_of_those_of_runs(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("{model: 2024, cpu_threads: 2}")
    assert parse_analysis_config(path, []).model == "2024"
    with pytest.raises(ConfigError) as raised:
        parse_analysis_config(path, ["seed=true", "cpu_threads=99999999999", 'output_dir="a\\0b"'])
    assert [line.partition(":")[0] for line in raised.value.problems] == ["seed", "cpu_threads", "output_dir"]


def test_a_run_without_a_final_model_is_an_error(analysed, tmp_path):
    run, _, _ = analysed
    without_models = shutil.ignore_patterns("checkpoints", "model_weights")
    folder = Path(shutil.copytree(run, tmp_path / "run", ignore=without_models))
    path = folder / "model_training_report" / "summary.json"
    summary = json.loads(path.read_text())
    del summary["best_model"]
    path.write_text(json.dumps(summary))
    made = {
        "": "start it again",
        "checkpoints/round_00001": "resume it",
        "model_weights": "resume it, or name a folder in",
    }
    for name, advice in made.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        with pytest.raises(ConfigError, match=rf"no final model \(status: completed\); {advice}"):
            resolve_model(AnalysisConfig(model=str(folder)))
