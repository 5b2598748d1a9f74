"""Plugins: the names that they register, their errors, their record in a run; models of a plugin; and the examples."""

import dataclasses
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import run as program
from algorithms.batch.calc_batch import BATCH_TESTS, BatchTestParameters
from algorithms.batch.gradient_statistics import GradientStatistics
from algorithms.nodes.policies import MERGE_POLICIES
from algorithms.registry import Registry
from algorithms.synchronisation import METHODS
from fabrics.config_checks import CHECKS
from fabrics.data.dataset_loader import load_data
from fabrics.models.export import save_model
from fabrics.models.initialisation import initial_model
from fabrics.models.model_family import MODELS, ModelFamily, build_model, reinitialise_output_layer
from fabrics.planning.estimate import Estimate, Resources
from fabrics.planning.memory_choice import with_chosen_memory
from fabrics.training.flat_model import FlatModel
from fabrics.training.optimizers import WorkerOptimizer
from gradient_analysis.gradient_analysis import AnalysisConfig, resolve_model
from tests.support.helpers import make_config, tiny_data, warnings_of
from tests.support.runs import summary
from tests.support.threads import refusals, together
from training_logs.recording.provenance import Code, Invocations, Origin
from utils.config import plugins
from utils.config.plugins import Plugin, import_plugins
from utils.config.reading import dump_config, load_config, parse_config
from utils.config.resume import resumed_config
from utils.config.schema import ConfigError
from utils.distributed import processes
from utils.distributed.processes import agree_on_config

ROOT = Path(__file__).resolve().parents[2]
POLICY = """\
from algorithms.nodes.policies import MERGE_POLICIES

MERGE_POLICIES["all_together"] = lambda requests, count: list(requests)
"""
BATCH_TEST = """\
from algorithms.batch.calc_batch import BATCH_TESTS


def doubled(statistics, parameters, batch):
    return 2 * batch


BATCH_TESTS["doubled"] = doubled
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file to the working directory and returns its name."""
    monkeypatch.chdir(tmp_path)

    def written(text: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text(text)
        return name

    return written


def parsed(*plugins: str, **values):
    return parse_config({"max_tokens": 1, "plugins": list(plugins)} | values, (), CHECKS)[0]


def problems(*plugins: str, **values) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parsed(*plugins, **values)
    return error.value.problems


# Names


def test_the_names_of_a_plugin_are_known_only_with_it(write):
    names = {"merging_policy": "all_together", "sampling_method": "doubled"}
    assert [line.split(":")[0] for line in problems(**names)] == ["sampling_method", "merging_policy"]
    parsed(write(POLICY), write(BATCH_TEST, "test.py"), **names)
    assert MERGE_POLICIES["all_together"]({0: 1, 1: 2, 2: 1}, 2) == [0, 1, 2]
    (line,) = problems(merging_policy="al_together")
    assert line.endswith("did you mean all_together?")


def test_lists_have_the_names_of_plugins(write, capsys):
    assert program.main(["--list", "tests", f"plugins=[{write(BATCH_TEST)}]"]) == 0
    assert "doubled" in [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert program.main(["--list", "tests", "plugins=[other.py]"]) == 2
    assert "plugins: cannot read" in capsys.readouterr().err


def test_a_configuration_keeps_the_absolute_paths_of_plugins(write, tmp_path, monkeypatch):
    config = parsed(write(POLICY), merging_policy="all_together")
    assert config.plugins == [str(tmp_path / "mine.py")]
    (tmp_path / "kept.yaml").write_text(dump_config(config))
    monkeypatch.chdir("/")
    assert load_config(tmp_path / "kept.yaml", (), CHECKS)[0] == config


def test_a_file_is_imported_once_by_whatever_path(write, tmp_path):
    name = write("import sys\nsys.imports = getattr(sys, 'imports', 0) + 1\n")
    (tmp_path / "link.py").symlink_to(name)
    try:
        for _ in range(2):
            parsed(name, f"./{name}", str(tmp_path / name), "link.py")
        assert sys.imports == 1
    finally:
        del sys.imports
    assert not list(tmp_path.glob("__pycache__"))


def test_a_registered_name_keeps_its_meaning():
    registry = Registry({"a": 1})
    for add in (
        lambda: registry.__setitem__("a", 2),
        lambda: registry.update(b=3, a=2),
        lambda: registry.__ior__({"a": 2}),
    ):
        with pytest.raises(ValueError, match="'a' is registered already"):
            add()
    assert registry == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("registry", "code", "problem"),
    [
        ("INNER_OPTIMIZERS", "class Mine: pass", "must be a class that inherits from InnerOptimizer"),
        ("INNER_OPTIMIZERS", "class Mine(InnerOptimizer): pass", "the class Mine needs the decorator @dataclass"),
        ("INNER_OPTIMIZERS", "@frozen\nclass Mine(InnerOptimizer): x: float", "every parameter needs a default"),
        ("METHODS", "class Mine: pass", "must be a class that inherits from Method"),
        ("METHODS", "@frozen\nclass Mine(Method): x: float", "every parameter needs a default"),
        ("METHODS", 'class Mine(Method): worker_state = ("copy",)', "worker_state has 'copy', which is kept anyway"),
        ("METHODS", 'class Mine(Method): worker_state = ("exp_avg",)', "worker_state has 'exp_avg', which is kept"),
        ("METHODS", 'class Mine(Method): state = ("velocity", "parameters")', "state has 'parameters', which is kept"),
        (
            "METHODS",
            'class Mine(Method): state, capabilities = ("step",), Capabilities(exchanges_gradients=True)',
            "state has 'step', which is kept anyway: give it another name",
        ),
        ("DATASETS", "def Mine(config): return None", "must be a Dataset"),
        ("MODELS", "class Mine: pass", "must be a ModelFamily"),
    ],
)
def test_what_cannot_be_one_is_refused_where_it_is_registered(write, registry, code, problem):
    imports = (
        "from dataclasses import dataclass\n"
        "frozen = dataclass(frozen=True)\n"
        "from algorithms.synchronisation import METHODS\n"
        "from algorithms.synchronisation.method import Capabilities, Method\n"
        "from fabrics.data.dataset_loader import DATASETS\n"
        "from fabrics.models.model_family import MODELS\n"
        "from fabrics.training.optimizers import INNER_OPTIMIZERS, InnerOptimizer\n"
    )
    text = f"{imports}{code}\n{registry}['mine'] = Mine\n"
    (line,) = problems(write(text))
    assert line.startswith(f"plugins: mine.py, line {text.count(chr(10))}: ValueError: mine: {problem}")


# Files that fail


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1\n\nundefined\n", "mine.py, line 3: NameError: name 'undefined' is not defined"),
        ("def f():\n    raise ValueError('two\\nlines')\n\nf()\n", "mine.py, line 2: ValueError: two lines"),
        ("import json\n\njson.loads('{')\n", "mine.py, line 3: JSONDecodeError: Expecting property name enclosed in"),
        ("x = (\n", "mine.py, line 1: SyntaxError: '(' was never closed"),
        ("import no_such_module\n", "mine.py, line 1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("import sys\nsys.exit(3)\n", "mine.py, line 2: SystemExit: 3"),
        (
            "from algorithms.nodes.policies import MERGE_POLICIES\nMERGE_POLICIES['worst_with_worst'] = None\n",
            "mine.py, line 2: ValueError: 'worst_with_worst' is registered already",
        ),
    ],
)
def test_a_failing_plugin_is_one_error_with_file_and_line(write, text, problem):
    (line,) = problems(write(text), merging_policy="of the plugin")
    assert line.startswith(f"plugins: {problem}")


def test_all_failing_plugins_are_reported(write, tmp_path):
    assert problems("none.py", write("1 / 0\n")) == [
        f"plugins: cannot read {tmp_path}/none.py: No such file or directory",
        "plugins: mine.py, line 1: ZeroDivisionError: division by zero",
    ]


# Runs


def test_all_processes_must_have_the_same_plugins(write, monkeypatch):
    config = make_config(plugins=[write(POLICY)])
    (plugin,) = import_plugins(config.plugins)
    together(2, lambda process: agree_on_config(process, config))

    def agreed(process):
        monkeypatch.setattr(processes, "import_plugins", lambda paths: [found[len(asked)], asked.append(0)][:1])
        agree_on_config(process, config)

    found, asked = [plugin, Plugin("/elsewhere/mine.py", "f" * 64)], []
    assert sorted(refusals(2, agreed))[0].startswith(
        "the processes have different configurations: plugins[0], mine.py: '"
    )


def test_a_run_of_two_processes_records_its_plugins_and_is_resumed_elsewhere(programs, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    mine = tmp_path / "mine.py"
    mine.write_text(BATCH_TEST)
    values = {
        "number_of_outer_steps": 3, "number_of_inner_steps_between_outers": 2, "clearml": "off", "plot_at_end": "false",
        "save_weights_every": 1, "sampling_method": "doubled", "processes": 2,
        "plugins": f"[mine.py, {ROOT}/examples/own_model.py]",
    }  # fmt: skip
    words = [f"{key}={value}" for key, value in values.items()]
    programs.run(ROOT / "run.py", "--config", f"{ROOT}/examples/own_model.yaml", *words, cwd=tmp_path)
    (folder,) = (tmp_path / "logs").iterdir()

    (begun,) = summary(folder)["invocations"]
    assert [Path(plugin["path"]) for plugin in begun["plugins"]] == [mine, ROOT / "examples" / "own_model.py"]
    assert begun["processes"] == 2

    mine.write_text(BATCH_TEST + "# changed\n")
    longer = ["number_of_outer_steps=4", "processes=1"]
    programs.run(ROOT / "run.py", "--resume", folder, *longer, cwd=tmp_path / "elsewhere")
    before, now = (entry["plugins"][0]["sha256"][:16] for entry in summary(folder)["invocations"])
    assert before != now
    assert warnings_of(folder) == [
        f"plugins: mine.py has changed since the run was last started: SHA-256 {before} then, {now} now"
    ]


def test_only_changed_plugins_have_a_warning(tmp_path):
    entries = []

    def changed(*plugins: Plugin) -> list[str]:
        origin = Origin("python run.py", "", Code("unknown", None), [], plugins)
        invocations = Invocations(tmp_path, origin, entries)
        warnings = invocations.changed_plugins()
        invocations.begin(1)
        entries[:] = invocations.entries
        return warnings

    one, other = Plugin("/a/one.py", "1" * 64), Plugin("/a/other.py", "2" * 64)
    assert changed(one) == []
    assert changed(Plugin("/moved/one.py", "1" * 64)) == []
    assert changed(one, other) == [
        "plugins: other.py has changed since the run was last started: SHA-256 none then, 2222222222222222 now"
    ]


def test_no_plugin_is_imported_for_a_wrong_configuration(write, tmp_path):
    name = write("open('imported', 'w').close()")
    assert problems(name, ETA=-1) == ["ETA: should be greater than 0, got -1"]
    assert not (tmp_path / "imported").exists()
    parsed(name, ETA=1)
    assert (tmp_path / "imported").exists()


@pytest.mark.parametrize("place", ["logs/run", "logs", ""])
def test_code_that_came_with_a_run_folder_is_imported_on_request_only(tmp_path, monkeypatch, place):
    """Inside it, beside it, or by a relative path."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "logs" / "run"
    folder.mkdir(parents=True)
    file = tmp_path / place / "theirs.py" if place else Path("theirs.py")
    file.write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()")
    (folder / "config.yaml").write_text(f"{{plugins: [{file}], max_tokens: 1}}")
    (folder / "model_training_report").mkdir()
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    said = f"plugins: {file} came with {folder}: to run that code, name it on the command line, plugins=[{file}]"
    for refused in (
        lambda: resumed_config(folder, ["max_tokens=2"], True, CHECKS),
        lambda: resolve_model(AnalysisConfig(config=None, model=str(folder / "model"))),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            refused()
        assert not (tmp_path / "imported").exists()
    resumed_config(folder, [f"plugins=[{file}]"], False, CHECKS)
    assert (tmp_path / "imported").exists()


def test_a_moved_plugin_is_given_by_its_new_path(write, tmp_path):
    folder = tmp_path / "logs" / "run"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(parsed(write(POLICY), merging_policy="all_together")))
    Path("mine.py").rename("moved.py")
    plugins._tried.clear()  # as in another process
    MERGE_POLICIES.pop("all_together")
    with pytest.raises(ConfigError, match=f"plugins: cannot read {tmp_path}/mine.py"):
        resumed_config(folder, (), False, CHECKS)
    config, warnings = resumed_config(folder, ["plugins=[moved.py]"], False, CHECKS)
    assert (config.plugins, config.merging_policy, warnings) == ([f"{tmp_path}/moved.py"], "all_together", [])


# Models that are plain nn.Modules


@pytest.fixture
def digits():
    """The configuration of examples/own_model.py."""
    return load_config(ROOT / "examples" / "own_model.yaml", [f"plugins=[{ROOT}/examples/own_model.py]"], CHECKS)[0]


def build(config, seed: int = 0, **settings) -> nn.Module:
    names = [str(digit) for digit in range(10)]
    return build_model(config.model_type, config.model_config | settings, None, 128, seed, names)


def test_a_module_is_saved_with_its_architecture_and_loads_again(digits, tmp_path):
    module = build(digits, hidden_size=12)
    save_model(module, None, tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]
    again = build_model(
        digits.model_type, {"name": str(tmp_path / "model"), "pretrained": True}, None, 128, 1, "0123456789"
    )
    pixels = torch.rand(3, 64)
    assert torch.equal(again(pixels), module(pixels))
    assert not torch.equal(build(digits, 1, hidden_size=12)(pixels), module(pixels))
    with pytest.raises(ConfigError, match=r"model_config\.name: cannot load .*size mismatch"):
        build(digits, preset=None, name=str(tmp_path / "model"), pretrained=True, hidden_size=13)
    with pytest.raises(ConfigError, match=r"model_config\.name: cannot load 'none'"):
        build(digits, preset=None, name="none", pretrained=True)
    with pytest.raises(ConfigError, match=r"model_config\.name: names weights .* which pretrained: true loads"):
        build(digits, preset=None, name=str(tmp_path / "model"))


def test_the_settings_of_a_plain_module_are_checked_against_its_presets(digits):
    family = MODELS[digits.model_type]
    assert family.problems({"preset": "demo", "hidden_size": 5}) == []
    assert family.problems({"preset": "large", "hiden_size": 5, "hidden_size": 0, "pretrained": True}) == [
        "model_config.name: pretrained: true needs the name of a hub model or a local folder",
        "model_config.preset: must be one of demo, got 'large'",
        "model_config.hiden_size: not an architecture value of this model; did you mean hidden_size?",
        "model_config.hidden_size: must be a positive integer, got 0",
    ]


def test_an_estimate_of_a_plain_module_states_its_assumptions(digits, monkeypatch, tmp_path):
    """Also of one that is loaded, whose weights are not read."""
    config = dataclasses.replace(digits, number_of_training_epochs=None, number_of_outer_steps=2)
    save_model(build(config), None, tmp_path / "digits")
    loaded = {"name": str(tmp_path / "digits"), "pretrained": True}
    for settings in (config.model_config, loaded):
        found = Estimate(dataclasses.replace(config, model_config=settings))
        assert any("classes of the data: assumed to be 2" in line for line in found.assumptions)

    class Words(nn.Module):
        def __init__(self, settings, demands):
            super().__init__()
            self.embedding = nn.Embedding(len(demands.tokenizer), 4)

        def forward(self, input_ids):
            return self.embedding(input_ids) @ self.embedding.weight.T

    monkeypatch.setitem(MODELS, "words", ModelFamily("causal_lm", Words))
    values = {"model_type": "words", "model_config": {}, "vocab_size": 400, "sampling_method": "none"}
    plan = Estimate(make_config(**values))
    assert plan.parameters == 1600
    assert any("vocabulary: 400 tokens" in line for line in plan.assumptions)
    _, choice = with_chosen_memory(make_config(**values, memory="auto"), Resources(1, 10**9), on_gpus=False)
    assert choice.endswith("for micro-batches of 4, activations not counted")
    tokenizer = tiny_data().tokenizer
    save_model(build_model("words", {}, tokenizer, 9, 0), tokenizer, tmp_path / "words")
    values["model_config"] = {"name": str(tmp_path / "words"), "pretrained": True}
    assert Estimate(make_config(**values)).parameters == 4 * len(tokenizer)


def test_the_output_layer_of_a_plain_module_is_reinitialised(digits):
    module = build(digits)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    reinitialise_output_layer(digits.model_type, module, 7)
    changed = {name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"head.weight", "head.bias"}


def test_a_model_with_running_statistics_is_refused(digits, monkeypatch):
    def build(values, demands):
        return nn.Sequential(nn.Linear(64, 10), nn.BatchNorm1d(10))

    monkeypatch.setitem(MODELS, "normalised", ModelFamily("classification", build))
    config = dataclasses.replace(digits, model_type="normalised", model_config={})
    with pytest.raises(ConfigError, match=r"^model_type: 1 keeps running statistics"):
        initial_model(config, load_data(config), 0)


def test_a_model_for_text_needs_a_tokenizer():
    with pytest.raises(ConfigError, match="model_type: this model reads text, and the dataset has no tokenizer"):
        build_model("bert", {"preset": "demo"}, None, 9, 0)
    assert build_model("bert", {"preset": "demo"}, tiny_data().tokenizer, 9, 0)


# The examples


def test_the_example_network_learns_the_digits(programs, tmp_path):
    places = [f"log_dir={tmp_path}", "clearml=off", "plot_at_end=false", "processes=1", "number_of_training_epochs=4"]
    programs.run("run.py", "--config", "examples/own_model.yaml", *places)
    (folder,) = tmp_path.iterdir()
    found = summary(folder)
    assert (found["metric"], found["initial_trainers"], found["final_trainers"]) == ("accuracy", 2, 1)
    assert found["initial_metric"] < 0.2
    assert found["final_metric"] > 0.85
    places = [f"output_dir={tmp_path}/analysis", "sample_size=32", "batch_size=4"]
    programs.run("gradient_analysis/gradient_analysis.py", f"model={folder}", *places)
    analysis = json.loads(next((tmp_path / "analysis").glob("*.json")).read_text())
    assert (analysis["parameters"], analysis["sample"]) == (found["parameters"], 32)


def test_the_notebook_trains_plots_and_generates_text(programs, tmp_path, cache_dir):
    """Its code cells run in order, with a shorter run."""
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in notebook["cells"] if cell["cell_type"] == "code")
    less = {"max_tokens": 6000, "data_sample_size": 100, "number_of_inner_steps_between_outers": 1}
    less |= {"log_dir": str(tmp_path), "cache_dir": str(cache_dir), "plot_at_end": False}
    (tmp_path / "notebook.py").write_text("\n".join(cells).replace("max_tokens=400_000", f"**{less}"))
    environment = os.environ | {"MPLBACKEND": "Agg"}
    said = programs.run(tmp_path / "notebook.py", env=environment, cwd=ROOT / "examples")
    assert "everything about the run is in " in said.stdout
    assert "\nReturn the" in said.stdout


def test_the_example_batch_test_on_paper():
    parsed(str(ROOT / "examples" / "own_batch_test.py"), sampling_method="gradient_diversity")
    test, settings = BATCH_TESTS["gradient_diversity"], BatchTestParameters(eta=1.0, theta=1.0, nu=1.0)
    # Gradients (3, 0) and (1, 2): the mean is (2, 1), V = 4 and ||G||^2 = 5 - 4 / 2, so that B = 1 + 4 / 3.
    assert test(GradientStatistics(2, squared_norm=3.0, variance=4.0), settings, 2) == 3
    assert test(GradientStatistics(2, squared_norm=0.0, variance=4.0), settings, 2) is None
    # Two standard errors below 4 the variance is 2.
    unsure = GradientStatistics(2, squared_norm=3.0, variance=4.0, variance_error=1.0)
    assert test(unsure, BatchTestParameters(1.0, 1.0, 1.0, confidence=2.0), 2) == 2


def test_the_example_method_on_paper():
    file = ROOT / "examples" / "own_method.py"
    config = parsed(str(file), distributed_algo="Agreement", synchronisation={"floor": 0.05})
    method = METHODS["Agreement"](floor=0.05)
    members = [SimpleNamespace(parameters=torch.tensor(own), to_device=lambda x: x) for own in ([1.0, 0.0], [0.0, 1.0])]
    shared, added = {"parameters": torch.zeros(2)}, []
    mean = SimpleNamespace(add=lambda worker, value: added.append(value), result=lambda: (added[0] + added[1]) / 2)
    group = SimpleNamespace(shared=shared, local_workers=members, mean=lambda like, kind: mean)
    group.mean_pseudo_gradient = lambda: torch.tensor([-0.5, -0.5])
    method.exchange(group)
    # Two differences of length 1 at right angles: their mean has length 1/sqrt(2), and the step is that share of it.
    expected = torch.full((2,), 0.5 / 2**0.5)
    torch.testing.assert_close(shared["parameters"], expected)
    for member in members:
        torch.testing.assert_close(member.parameters, expected)
    assert config.distributed_algo == "Agreement"


LION = str(ROOT / "examples" / "own_optimizer.py")


def test_the_example_optimizer_is_lion_as_published():
    config = parsed(LION, inner_optimizer="lion", inner_optimizer_config={"betas": [0.8, 0.95], "weight_decay": 0.3})
    model = FlatModel(torch.nn.Linear(3, 2), torch.device("cpu"))
    optimizer = WorkerOptimizer(model, config)
    x = model.parameters.detach().double()
    m = torch.zeros_like(x)
    generator = torch.Generator().manual_seed(0)
    for learning_rate in (0.01, 0.02, 0.005):
        g = torch.randn(x.shape, generator=generator)
        model.gradient.copy_(g)
        optimizer.step(learning_rate)
        # Algorithm 2 of arXiv 2302.06675, line by line.
        c = 0.8 * m + 0.2 * g
        x = x - learning_rate * (torch.sign(c) + 0.3 * x)
        m = 0.95 * m + 0.05 * g
    torch.testing.assert_close(model.parameters.double(), x, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(optimizer.state_dict()["lion_momentum"].double(), m, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"beta": 1}, "inner_optimizer_config.beta: lion has no such parameter"),
        ({"weight_decay": -1}, "inner_optimizer_config.weight_decay: must not be negative, got -1"),
        ({"betas": [0.9]}, r"inner_optimizer_config.betas\[1\]: is missing"),
    ],
)
def test_wrong_parameters_of_an_optimizer_are_refused(values, problem):
    with pytest.raises(ConfigError, match=problem):
        parsed(LION, inner_optimizer="lion", inner_optimizer_config=values)
