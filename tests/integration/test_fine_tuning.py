"""The recipe of docs/fine_tuning.md, with a small model on small talk."""

import shlex

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

import cluster  # noqa: F401 (fills registries; a test puts back what it adds)
import run as program
from tests.support.blocks import ROOT
from tests.support.chat import NUMBERS, chat_tokenizer, small_talk, write_messages


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a small Mistral with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes["num_key_value_heads"] = 1
    MistralForCausalLM(MistralConfig(vocab_size=len(NUMBERS), initializer_range=0.2, **sizes)).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


def recipe(number: int, model, data) -> list[str]:
    """Return the words of a command of the page, with a small model and small data."""
    commands = [line for line in (ROOT / "docs/fine_tuning.md").read_text().splitlines() if line.startswith("python")]
    words = shlex.split(commands[number])[2:]
    found = [word.replace("path/to/model", str(model)) for word in words]
    found = [word.replace("chat.jsonl", str(data)).replace("notes.txt", str(data)) for word in found]
    assert found != words
    return found


def answers_loss(folder, count: int) -> float:
    """Return the mean loss of a model on the answers of small talk: the last two of seven tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor(chat_tokenizer().apply_chat_template(small_talk(count))["input_ids"])
    with torch.no_grad():
        logits = model(ids).logits[:, 4:6]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 5:].flatten()).item()


def test_the_recipe_teaches_a_model_to_answer(model, tmp_path):
    """The folder of the run answers better than the model, and a run that is interrupted writes the same one."""
    data = write_messages(tmp_path / "chat.jsonl", small_talk(80))
    quick = [
        "learning_rate_for_inner_opt=0.01",
        "sequence_length=16",
        "processes=1",
        "clearml=off",
        "plot_at_end=false",
    ]
    arguments = [
        *recipe(0, model, data),
        *quick,
        "max_batch_size=16",
        "number_of_training_epochs=20",
        "learning_rate_schedule=constant",
    ]
    where = [f"log_dir={tmp_path}", "run_name=whole"]
    assert program.main([*arguments, *where]) == 0
    (folder,) = (tmp_path / "whole" / "model_weights").glob("trainer_*")
    assert answers_loss(folder, 80) < answers_loss(model, 80) - 0.5

    where = [f"log_dir={tmp_path}", "run_name=stopped"]
    assert program.main([*arguments, *where, "number_of_outer_steps=2"]) == 0
    assert program.main(["--resume", str(tmp_path / "stopped"), "number_of_outer_steps=null"]) == 0
    (resumed,) = (tmp_path / "stopped" / "model_weights").glob("trainer_*")
    weights = "model.safetensors"
    assert (resumed / weights).read_bytes() == (folder / weights).read_bytes()


def test_the_recipe_trains_on_text(model, tmp_path):
    data = tmp_path / "notes.txt"
    data.write_text("\n\n".join(f"w{number} w{number + 1} <end> " * 20 for number in range(20)))
    quick = ["sequence_length=16", "processes=1", "clearml=off", "plot_at_end=false"]
    where = [
        f"log_dir={tmp_path}",
        "run_name=text",
        "max_batch_size=16",
        "INITIAL_BATCH_SIZE=4",
        f"cache_dir={tmp_path}",
    ]
    assert program.main([*recipe(1, model, data), *quick, *where, "lora.rank=2"]) == 0
