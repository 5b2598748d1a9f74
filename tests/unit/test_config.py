"""The configuration: types, aliases, overrides, YAML, and all problems at once."""

import dataclasses
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fabrics.config_checks import CHECKS
from utils.config.reading import ALIASES, IGNORED, dump_config, load_config, parse_config, yaml_value
from utils.config.schema import FIELDS, Config, ConfigError
from utils.distributed.devices import resolve_devices

ROOT = Path(__file__).resolve().parents[2]


def problems(raw, overrides=()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config({"number_of_outer_steps": 2} | raw, overrides, CHECKS)
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


def keys_of(lines: list[str]) -> list[str]:
    return [line.split(":")[0] for line in lines]


def test_the_published_readme_block_gives_typed_values():
    path = ROOT / "configs" / "published_readme.yaml"
    config, warnings = load_config(path)
    given = yaml.safe_load(path.read_text())
    assert keys_of(warnings) == [name for name in given if name in IGNORED]
    assert len(warnings) == 4
    expected = {name: value for name, value in given.items() if name not in IGNORED} | {
        "learning_rate_for_inner_opt": 1e-5,  # YAML 1.1 reads 1e-5 as a string
        "learning_rate_for_outer_opt": 1e-4,
    }
    for name, value in expected.items():
        assert getattr(config, name) == value, name
        assert type(getattr(config, name)) is (float if name == "number_of_training_epochs" else type(value)), name


def test_the_published_config_has_a_key_that_is_read_as_meant():
    config, warnings = load_config(ROOT / "configs" / "published_config.yaml")
    assert config.model_config == {"name": "keeeeenw/MicroLlama", "pretrained": True}
    assert any("pretrained=True" in warning for warning in warnings)


def test_without_cuda_a_run_is_on_the_cpu_with_a_warning(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    devices, warnings = resolve_devices(["cuda:1"])
    assert devices == [torch.device("cpu")]
    assert warnings == ["devices: ['cuda:1'] requested, but CUDA is not available: running on the CPU"]
    assert resolve_devices(None) == ([torch.device("cpu")], [])
    assert resolve_devices(["cpu"]) == ([torch.device("cpu")], [])


def test_cuda_is_not_initialised_before_CUDA_VISIBLE_DEVICES_is_set(programs):
    """CUDA reads the variable once, when it is initialised."""
    program = """
import torch
def refuse(*_, **__):
    raise AssertionError("CUDA was initialised too early")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda.current_device = refuse
from run import fast_imports
with fast_imports():
    import training_logs.recording.recorder
    from fabrics.config_checks import CHECKS
    from utils.config.reading import load_config
load_config("config.yaml", ["CUDA_VISIBLE_DEVICES=1"], CHECKS)
assert not torch.cuda.is_initialized()
"""
    programs.run("-c", program, fresh=True)


def test_devices_are_counted_among_the_visible_ones(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    both = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert resolve_devices(None) == (both, [])
    assert resolve_devices(["cuda", "cuda:1"]) == (both, [])
    with pytest.raises(ValueError, match="cuda:2 requested, but only 2 are visible"):
        resolve_devices(["cuda:2"])
    with pytest.raises(ValueError, match="every device once"):
        resolve_devices(["cuda", "cuda:0"])


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_every_alias_means_its_key(alias, name):
    config, _ = parse_config({alias: 2} | ({} if name == "number_of_outer_steps" else {"number_of_outer_steps": 3}))
    assert getattr(config, name) == 2 != getattr(Config(), name)


def test_a_key_and_its_alias_together_are_a_problem():
    (line,) = problems({"ETA": 1, "lr_inner": 1, "learning_rate_for_inner_opt": 2})
    assert line.startswith("learning_rate_for_inner_opt: given twice, as lr_inner ")


def test_overrides_win_and_reach_nested_keys():
    config, _ = parse_config(
        {"number_of_outer_steps": 1, "model_config": {"preset": "demo", "hidden_size": 8}},
        ["num_outer_steps=7", "ETA=1e-1", "model_config.hidden_size=16", "devices=[cpu]", "max_batch_size=null"],
    )
    assert (config.number_of_outer_steps, config.ETA, config.devices) == (7, 0.1, ["cpu"])
    assert config.model_config == {"preset": "demo", "hidden_size": 16}
    assert parse_config({"max_tokens": 1}, ["model_config.hidden_size=16"])[0].model_config == {
        "preset": "demo",
        "hidden_size": 16,
    }


def test_an_override_of_preset_or_name_replaces_the_other():
    named, _ = parse_config({"max_tokens": 1}, ["model_config.name=a", "model_config.hidden_size=8"])
    assert named.model_config == {"name": "a", "hidden_size": 8}
    preset, _ = parse_config({"max_tokens": 1, "model_config": {"name": "a"}}, ["model_config.preset=demo"])
    assert preset.model_config == {"preset": "demo"}
    null, _ = parse_config({"max_tokens": 1, "model_config": {"name": "a"}}, ["model_config.preset=null"])
    assert null.model_config == {"name": "a", "preset": None}


@pytest.mark.parametrize("name", ["2024_01_15", "2024-01-15", "1.10", "1:30", "007"])
def test_numbers_and_dates_for_a_text_are_taken_as_they_are_written(name, tmp_path):
    expected = dataclasses.replace(Config(), run_name=name, project_name=name, max_tokens=1000)
    texts = {"run_name": name, "project_name": name, "max_tokens": "1_000"}
    assert parse_config({}, [f"{key}={text}" for key, text in texts.items()])[0] == expected
    (tmp_path / "config.yaml").write_text("".join(f"{key}: {text}\n" for key, text in texts.items()))
    assert load_config(tmp_path / "config.yaml")[0] == expected


def test_overrides_leave_the_given_mapping_as_it_is():
    given = {"number_of_outer_steps": 1, "synchronisation": {}}
    config, _ = parse_config(given, ["synchronisation.fragments=2"])
    assert (config.synchronisation, given["synchronisation"]) == ({"fragments": 2}, {})
    given["synchronisation"] = MappingProxyType({"overlap": 1})  # cannot be copied by copy.deepcopy
    config, _ = parse_config(given, ["synchronisation.fragments=2"])
    assert config.synchronisation == {"overlap": 1, "fragments": 2}


def test_all_problems_are_reported_at_once_one_line_each():
    wrong = {
        "ETA": "much",
        "INITIAL_BATCH_SIZE": 0,
        "nodes_per_gpu": -1,
        "max_tokens": 2**63,
        "training_seed": 2**64,
        "merge_frequency": 1.5,
        "merge_count": True,
        "padding_percentage": 1.2,
        "outer_momentum": 1.0,
        "learning_rate_for_outer_opt": float("inf"),
        "number_of_inner_steps_between_outers": None,
        "debias": "perhaps",
        "dataset": "python_doc",
        "inner_optimizer": "moun",
        "switch_mode": True,
        "node_schedule": [],
        "participants": 0,
        "collective_timeout_minutes": 1e13,
        "cpu_threads": 3 * 10**9,
        "vocab_size": 10**25,
        "number_of_initial_trainers": 129,
        "learning_rate_for_inner_opt": 1e300,
        "run_name": "a\0b",
    }
    unknown = {"learnig_rate_for_inner_opt": 1, "eta": 0.5, "seed": 1, "learning_rate": 1, "adam_betas": 1}
    found = problems(unknown | {"devices": ["tpu:0"], "node_speeds": [1, 0]} | wrong, ["zzzz"])
    others = ["zzzz", *unknown, "devices[0]", "node_speeds[1]"]
    assert sorted(keys_of(found)) == sorted([*others, *wrong])
    meant = {line.split(":")[0]: line[:-1].split("did you mean ")[1] for line in found if "did you mean" in line}
    assert meant == {
        "learnig_rate_for_inner_opt": "learning_rate_for_inner_opt",
        "eta": "ETA",
        "seed": "training_seed",
        "learning_rate": "learning_rate_for_inner_opt or learning_rate_for_outer_opt or learning_rate_schedule",
        "dataset": "python_docs",
        "inner_optimizer": "muon",
    }
    for name, value in wrong.items():
        assert any(line.startswith(f"{name}: ") and f"got {value!r}" in line for line in found), name
    assert all(line.count("got ") <= 1 for line in found)
    assert "devices[0]: must be cpu, cuda, or one GPU such as cuda:0, got 'tpu:0'" in found
    assert "switch_mode: should be a valid string, got True; YAML reads on, off, yes and no as true and false" in found


TOKENS = {"max_tokens": 10**6, "number_of_outer_steps": None}
FIXED = {"sampling_method": "none"}
SPEEDS = TOKENS | {"node_speeds": [1, 1, 0.5, 0.25]}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"number_of_outer_steps": None}, ["number_of_outer_steps"]),
        ({"dataset": "text"}, ["text_files"]),
        ({"dataset": "messages"}, ["text_files"]),
        ({"dataset": "imdb"}, ["model_type"]),
        ({"data_split": "sources", "data_shares": 3}, ["data_shares"]),
        ({"dataset": "messages", "text_files": ["x"], "data_split": "sources"}, ["data_split"]),
        ({"statistics_estimator": "across_devices"}, ["statistics_estimator"]),
        ({"INITIAL_BATCH_SIZE": 9, "max_requested_batch": 8}, ["max_requested_batch"]),
        ({"batch_schedule": [[0.5, 16]]}, ["batch_schedule"]),
        (FIXED | {"batch_schedule": [[0.5, 16], [0.5, 32]]}, ["batch_schedule"]),
        (FIXED | {"batch_schedule": [[0.5, 16], [0.6, 0]]}, ["batch_schedule"]),
        (FIXED | {"batch_schedule": [[1.1, 16]]}, ["batch_schedule"]),
        (FIXED | {"batch_schedule": [[0.1, 9.5]]}, ["batch_schedule"]),
        (FIXED | {"batch_schedule": [[0.5]]}, ["batch_schedule"]),
        (FIXED | {"batch_schedule": "0:8 1M:16"}, ["batch_schedule"]),
        (FIXED | {"batch_schedule": "0:8 1M:16", "max_tokens": 10**7, "number_of_outer_steps": 9}, ["batch_schedule"]),
        (
            FIXED
            | {"batch_schedule": "0:8 1M:16", "max_tokens": 10**7, "number_of_outer_steps": None}
            | {"time_budget": 60, "node_speeds": [1, 1, 1, 1]},
            ["batch_schedule"],
        ),
        (FIXED | {"batch_schedule": "sesaw", "max_tokens": 10**6, "number_of_outer_steps": None}, ["batch_schedule"]),
        (FIXED | {"batch_schedule": "1M:16", "max_tokens": 10**6, "number_of_outer_steps": None}, ["batch_schedule"]),
        (FIXED | {"batch_schedule": "seesaw"}, ["batch_schedule"]),
        (
            FIXED
            | {"batch_schedule": "seesaw", "learning_rate_schedule": "cosine", "minimum_learning_rate_ratio": 0.5},
            ["minimum_learning_rate_ratio"],
        ),
        (FIXED | {"batch_schedule": [[0, 8]], "INITIAL_BATCH_SIZE": 4}, ["batch_schedule"]),
        (
            {"smallest_worker_batch": 5, "statistics_estimator": "across_workers", "INITIAL_BATCH_SIZE": 9},
            ["smallest_worker_batch"],
        ),
        (
            {"smallest_worker_batch": 4, "statistics_estimator": "across_workers", "INITIAL_BATCH_SIZE": 8}
            | {"sampling_method": "inner_product_test"},
            ["smallest_worker_batch"],
        ),
        (TOKENS | {"communication_budget": 9, "byte_budget": 10**9}, ["communication_budget, byte_budget"]),
        ({"byte_budget": 10**9}, ["byte_budget", "number_of_outer_steps"]),
        (TOKENS | {"time_budget": 60}, ["time_budget"]),
        (TOKENS | {"time_budget": 60, "link": "1Gb/s", "deterministic": True}, ["deterministic"]),
        (SPEEDS | {"time_budget": 60, "byte_budget": 10**9}, ["byte_budget, time_budget"]),
        (SPEEDS | {"objective": "time", "number_of_initial_trainers": 1}, ["objective"]),
        (SPEEDS | {"objective": "time", "time_budget": 60}, ["number_of_initial_trainers"]),
        (SPEEDS | {"link": "fast"}, ["link"]),
        (TOKENS | {"node_speeds": []}, ["node_speeds"]),
        (
            {"max_tokens": 9, "balance": "batch", "deterministic": True, "number_of_inner_steps_between_outers": 1},
            ["deterministic", "number_of_inner_steps_between_outers"],
        ),
        (SPEEDS | {"balance": "batch", "smallest_worker_batch": 4}, ["smallest_worker_batch"]),
        ({"node_schedule": [[0.1, 4]]}, ["node_schedule"]),
        ({"node_schedule": [[0, 4], [0.5, 8], [0.5, 2]]}, ["node_schedule"]),
        ({"node_schedule": [[0, 4], [0.5, 0]]}, ["node_schedule"]),
        (TOKENS | {"node_schedule": [[0, 4]], "communication_budget": 9}, ["node_schedule"]),
        (TOKENS | {"participants": 0.5, "communication_budget": 9}, ["participants"]),
        ({"message_loss": 0.1, "statistics_estimator": "across_workers"}, ["statistics_estimator"]),
        ({"distributed_algo": "Synchronous", "offload_outer_state": True}, ["offload_outer_state"]),
        ({"distributed_algo": "FDA", "offload_outer_state": True}, ["offload_outer_state"]),
        ({"distributed_algo": "Synchronous", "offload_moments": True}, ["offload_moments"]),
        ({"distributed_algo": "NoLoCo", "communication_dtype": "int8"}, ["communication_dtype"]),
        (
            {"distributed_algo": "SparseLoCo", "gradient_clipping": None, "communication_dtype": "bfloat16"},
            ["communication_dtype"],
        ),
        ({"distributed_algo": "LoCoDL", "inner_optimizer": "adamw"}, ["inner_optimizer", "gradient_clipping"]),
    ],
)
def test_values_that_do_not_go_together_are_refused(values, expected):
    assert keys_of(problems(values)) == expected


def test_workers_that_no_test_compares_need_not_be_at_the_same_parameters():
    values = FIXED | {"number_of_outer_steps": 1, "message_loss": 0.1, "statistics_estimator": "across_workers"}
    assert not parse_config(values)[0].compares_workers


def test_a_run_has_the_budget_that_is_given():
    assert parse_config({"number_of_outer_steps": 2})[0].budget is None
    assert parse_config(TOKENS | {"time_budget": 60, "link": "1Gb/s"})[0].budget == "time_budget"
    # On a virtual clock it ends the run, without other limits, and the run has the same bits each time.
    simulated = {"time_budget": 60, "node_speeds": [1, 1], "number_of_outer_steps": None, "deterministic": True}
    assert parse_config(simulated)[0].simulates_time_budget


# YAML


def test_a_merged_key_may_be_given_again():
    text = "a: &a {x: 1, y: 2}\nb: [{c: {<<: *a, x: 3}}]"
    assert yaml_value(text) == {"a": {"x": 1, "y": 2}, "b": [{"c": {"x": 3, "y": 2}}]}


def aliases(count: int, repetitions: int) -> str:
    """Return YAML of lists of aliases of the list before."""
    first = "a0: &a0 [x]\n"
    return first + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * repetitions)}]\n" for n in range(1, count))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 20_000,
        "[" * 200_000 + "]" * 200_000,
        aliases(10, 10),
        aliases(3000, 1),
        "a: &a [1, *a]",
        f"a: &a {'x' * 10_000}\nb: [{', '.join(['*a'] * 10_000)}]",
    ],
    ids=["deep", "deep and closed", "ten to the tenth", "a chain", "an alias of itself", "many aliases"],
)
def test_yaml_of_strangers_neither_crashes_nor_fills_the_memory(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"not valid YAML: (nested|an alias|too many)"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"^model_config: value is not valid YAML"):
        parse_config({}, [f"model_config={text}"])


@pytest.mark.parametrize(("assignment", "unit"), [("byte_budget=60MB", "Bytes"), ("time_budget=2h", "Seconds")])
def test_a_number_with_a_unit_is_refused_with_the_unit_of_the_key(assignment, unit):
    (line,) = problems({}, [assignment])
    assert line.startswith(assignment.split("=")[0])
    assert line.split("meaning: ")[1].startswith(unit)


def test_a_leading_zero_is_not_base_eight():
    assert parse_config({}, ["number_of_outer_steps=010"])[0].number_of_outer_steps == 10
    overrides = ["number_of_outer_steps=1", "model_config.hidden_size=0_64"]
    assert parse_config({}, overrides)[0].model_config["hidden_size"] == 64


@pytest.mark.parametrize(("key", "text"), [("max_tokens", "12:30"), ("time_budget", "1:30.5")])
def test_a_colon_is_not_base_sixty(key, text):
    with pytest.raises(ConfigError, match=rf"^{key}: .*got '{text}'"):
        parse_config({}, [f"{key}={text}"])


@pytest.mark.parametrize("text", ["2026-02-31", "!!bool maybe", "!!timestamp now", "9" * 5000, "0x" + "f" * 5000])
def test_a_value_that_is_not_of_its_yaml_type_is_a_problem(text):
    with pytest.raises(ConfigError, match=r"^ETA: "):
        parse_config({}, [f"ETA={text}"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [", "not valid YAML"),
        ("- 1\n- 2", "must be a mapping"),
        ("just words", "must be a mapping"),
        ("ETA: 0.5\nmax_tokens: 1\nETA: 0.7", "not valid YAML: ETA is given twice .*line 3, column 1"),
        ("model_config: {hidden_size: 64, hidden_size: 32}", "hidden_size is given twice"),
        ("ETA: \xff", "not UTF-8 text"),
    ],
)
def test_a_file_that_is_not_a_configuration_is_refused(tmp_path, text, expected):
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=expected):
        load_config(path)


def test_a_colon_without_a_space_is_a_problem():
    with pytest.raises(ConfigError, match=r"^model_config: YAML needs a space after each colon, got {name:tiny}$"):
        parse_config({}, ["model_config={name:tiny}"])


@settings(max_examples=15)
@example({"number_of_outer_steps": 1, "gradient_clipping": 1e-30})
@given(
    st.fixed_dictionaries(
        {
            "number_of_outer_steps": st.integers(1, 10**6),
            "learning_rate_for_inner_opt": st.floats(1e-12, 1e6),
            "gradient_clipping": st.none() | st.floats(1e-300, 10.0),
            "debias": st.booleans(),
            "log_dir": st.text(min_size=1).filter(lambda text: text.isprintable()),
        }
    )
)
def test_a_written_configuration_reads_back_equal(values):
    """Also for a reader of YAML 1.1, which takes 1e-5 for text."""
    config, _ = parse_config(values)
    written = dump_config(config)
    assert "!!float" not in written  # it stays readable
    read = yaml.load(written, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    assert [read[name] for name in values] == list(values.values())
    assert parse_config(read)[0] == config


def test_values_of_a_script_have_the_types_of_yaml():
    values = {
        "model_config": {"name": Path("a"), "pretrained": True, "rms_norm_eps": np.float64(1e-5)},
        "inner_optimizer_config": {"betas": (0.9, 0.95)},
        "lora": MappingProxyType({"targets": ("q_proj",)}),
    }
    config, _ = parse_config({"max_tokens": 1, **values})
    assert config.model_config == {"name": "a", "pretrained": True, "rms_norm_eps": 1e-5}
    assert parse_config(yaml.safe_load(dump_config(config)))[0] == config


def test_every_key_has_a_meaning_and_a_valid_default():
    for name, field in FIELDS.items():
        assert len(field.metadata["meaning"]) > 10, name
    defaults = dataclasses.asdict(Config()) | {"number_of_outer_steps": 1}
    assert parse_config(defaults, checks=CHECKS)[0] == Config(number_of_outer_steps=1)


@pytest.mark.parametrize(
    "path", [ROOT / "config.yaml", *sorted((ROOT / "configs").glob("*.yaml"))], ids=lambda p: p.name
)
def test_shipped_configurations_are_valid(path):
    config, _ = load_config(path, (), CHECKS)
    assert config.number_of_outer_steps or config.number_of_training_epochs or config.max_tokens
