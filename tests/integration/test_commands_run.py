"""Commands of README and docs run, in a copy of the checkout and with less of everything.

Those that a comment before the block says are only parsed do not: it says why.
"""

import functools
import shutil

import pytest
import yaml

from tests.support.blocks import ALL, COMMANDS, copy_of_the_checkout

_SMALL = [
    "number_of_outer_steps=2", "number_of_inner_steps_between_outers=2", "max_tokens=null", "data_sample_size=120",
    "val_size=10", "samples_per_class=10", "sequence_length=16", "vocab_size=300", "model_config.num_hidden_layers=1",
]  # fmt: skip
# What makes a command short: overrides and options that are appended to it, where they win.
LESS = {
    "run.py": [*_SMALL, "clearml=off", "plot_at_end=false"],
    "tests/integration/test_c4_dataset.py": _SMALL,
    "benchmarks/performance/throughput.py": [*_SMALL, "--repeats", "2"],
    "gradient_analysis/gradient_analysis.py": [
        "config=short.yaml", "sample_size=16", "batch_size=4"
    ],
    "c4/tokenize_c4.py": [
        "--model_name", "logs/first/model_weights/trainer_0", "--input", ".cache/samples/c4",
        "--data_sample_size", "50", "--eval_size", "5",
    ],
    "training_logs.log_processor": ["--mode", "offline"],
    "configs/make_samples.py": ["--only", "c4", "aclImdb"],
}  # fmt: skip
SHORT = dict(assignment.split("=") for assignment in _SMALL[:-1]) | {
    "max_tokens": None, "model_config": {"preset": "demo", "num_hidden_layers": 1}, "number_of_outer_steps": 30,
    "number_of_initial_trainers": 1, "nodes_per_gpu": 2, "merge_frequency": 1, "INITIAL_BATCH_SIZE": 2,
    "sampling_method": "none", "eval_every": 15,
    "save_weights_every": 15, "clearml": "off", "plot_at_end": False, "processes": 1,
}  # fmt: skip


def program(words: list[str]) -> str:
    return words[2] if words[1] == "-m" else words[1]


def shortened(words: list[str]) -> list[str]:
    """The command with less of everything; a run that is resumed already has it."""
    more = LESS.get(program(words), [])
    if "--resume" in words:
        more = ["clearml=off"]
    elif program(words) == "run.py" and not any(word.startswith("processes=") for word in words):
        more = [*more, "processes=1"]
    # argparse takes values in one place only: overrides after the last of the command's, options at the end.
    last = max(
        (index for index, word in enumerate(words) if "=" in word[1:] and word[0] != "-"), default=len(words) - 1
    )
    values = [word for word in more if "=" in word]
    return [*words[: last + 1], *values, *words[last + 1 :], *[word for word in more if "=" not in word]]


@pytest.fixture(scope="module")
def start(tmp_path_factory, programs):
    """A function that runs a command in the copy of the checkout."""
    folder = copy_of_the_checkout(tmp_path_factory.mktemp("commands") / "AdLoCo")

    @functools.cache  # several pages say the same
    def run(*words: str) -> None:
        assert words[0] == "python"
        programs.run(*words[1:], cwd=folder)

    run.folder = folder
    return run


@pytest.fixture(scope="module")
def names(start):
    """Two runs, one of them to go on with, and the samples, which commands speak of."""
    start(*shortened(["python", "configs/make_samples.py"]))
    folder = start.folder
    (folder / "short.yaml").write_text(yaml.safe_dump(SHORT))
    start("python", "run.py", "--config", "short.yaml")
    (made,) = (folder / "logs").iterdir()
    made.rename(folder / "logs" / "first")
    shutil.copytree(folder / "logs" / "first", folder / "logs" / "second")
    shutil.rmtree(max((folder / "logs" / "first" / "checkpoints").iterdir()))  # there is something to go on with
    return {"run": "first", "other_run": "second", "id": "0"}


@pytest.mark.parametrize("block", [block for block in COMMANDS if block.mark is None], ids=str)
def test_commands_run(block, start, names):
    for words in block.commands(**names):
        start(*shortened(words))


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "python"], ids=str)
def test_python_runs(block, start, names):
    start("python", "-c", block.code(**names).replace("config.yaml", "short.yaml"))
