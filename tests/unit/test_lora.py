"""Adapters: what they compute, what is trained and sent, and the folder that a run leaves."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from cluster import Cluster
from fabrics.config_checks import CHECKS
from fabrics.data.dataset_loader import load_data
from fabrics.data.examples import PackedSequences
from fabrics.models.export import save_model
from fabrics.models.initialisation import flops_per_token
from fabrics.models.lora import LoRA, add_adapters
from fabrics.planning.estimate import Estimate
from fabrics.training.flat_model import FlatModel
from tests.support.chat import chat_tokenizer, small_talk, write_messages
from tests.support.helpers import (
    CPU,
    VOCABULARY,
    Recorder,
    example_gradients,
    example_losses,
    probed_backward,
    random_sequences,
    sequence_loss,
    tiny_llama,
)
from utils.config.reading import parse_config
from utils.config.schema import ConfigError

# Queries and values of tiny_llama: 2 layers, from 16 to 16 and from 16 to 8 elements.
LORA = LoRA(targets=["q_proj", "v_proj"], rank=3, alpha=6.0)
ELEMENTS = 2 * 3 * (16 + 16 + 16 + 8)


def tiny_gpt2() -> nn.Module:
    torch.manual_seed(0)
    values = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "initializer_range": 0.2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **values, **dropout)).to(torch.float64)


# GPT-2's linear layers hold their weights as [in, out].
ARCHITECTURES = {"llama": (tiny_llama, LORA), "gpt2": (tiny_gpt2, LoRA(["c_attn", "mlp.c_proj"], rank=3, alpha=6.0))}


def adapted(architecture: str = "llama", trained: bool = True) -> nn.Module:
    make, lora = ARCHITECTURES[architecture]
    model = make()
    add_adapters(model, lora, 0)
    if trained:
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A folder of a small model with a chat template."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, tie_word_embeddings=True, initializer_range=0.2, **sizes))
    model.save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def make(base, tmp_path):
    def make(**values):
        defaults = {
            "dataset": "messages",
            "text_files": [write_messages(tmp_path / "chat.jsonl", small_talk(200))],
            "model_config": {"name": str(base), "pretrained": True},
            "lora": {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj", "mlp.up_proj"]},
            "number_of_outer_steps": 3,
            "number_of_inner_steps_between_outers": 5,
            "number_of_initial_trainers": 2,
            "learning_rate_for_inner_opt": 0.01,
            "sequence_length": 16,
            "val_size": 20,
            "INITIAL_BATCH_SIZE": 16,
            "max_batch_size": 16,
            "cache_dir": str(tmp_path / "cache"),
        }
        return parse_config(defaults | values, (), CHECKS)[0]

    return make


# Layers


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_adapter_adds_a_product_of_low_rank_and_nothing_at_first(tmp_path, architecture):
    ids = torch.from_numpy(random_sequences(4)).long()
    make, lora = ARCHITECTURES[architecture]
    plain = make()
    expected = plain(ids).logits
    assert adapted(architecture, trained=False)(ids).logits.equal(expected)

    model = adapted(architecture)
    for name, layer in plain.named_modules():
        if name.endswith(tuple(lora.targets)):
            adapter = model.get_submodule(name)
            product = adapter.up.weight.data @ adapter.down.weight.data
            layer.weight.data += 6.0 / 3.0 * (product if architecture == "llama" else product.t())
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-6, atol=1e-6)
    save_model(model, None, tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert {name: tensor.shape for name, tensor in saved.state_dict().items()} == {
        name: tensor.shape for name, tensor in plain.state_dict().items()
    }
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_adapters_equal_those_of_peft(architecture):
    peft = pytest.importorskip("peft")
    make, lora = ARCHITECTURES[architecture]
    model = adapted(architecture)
    other = peft.get_peft_model(make(), peft.LoraConfig(r=3, lora_alpha=6, target_modules=list(lora.targets)))
    other = other.to(torch.float64)
    for name, parameter in other.named_parameters():
        if parameter.requires_grad:
            own = name.removeprefix("base_model.model.").replace(".default", "")
            own = own.replace("lora_A", "down").replace("lora_B", "up")
            parameter.data.copy_(model.get_parameter(own))
    ids = torch.from_numpy(random_sequences(4)).long()
    torch.testing.assert_close(model(ids).logits, other(ids).logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_statistics_are_those_of_the_adapters_gradients(architecture):
    examples = PackedSequences(random_sequences(6))
    _, probe = probed_backward(FlatModel(adapted(architecture), CPU), examples, np.arange(6))
    ids = examples.batch(range(6), CPU)["input_ids"]
    alone = example_gradients(adapted(architecture), ids, sequence_loss).square().sum(1)
    assert (36 * probe.squared_norms).tolist() == pytest.approx(alone.tolist(), rel=1e-6)


def test_frozen_weights_cost_no_gradient():
    whole = flops_per_token(tiny_llama(), 9)
    frozen = sum(layer.weight.numel() for layer in tiny_llama().modules() if isinstance(layer, nn.Linear))
    assert flops_per_token(adapted(), 9) == whole - 2 * frozen + 6 * ELEMENTS


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (["q_porj"], r"no layer q_porj.*did you mean q_proj.*; linear layers: down_proj, gate_proj, k_proj"),
        (["norm"], "model.norm is a LlamaRMSNorm, not a linear layer"),
        (["lm_head"], "lm_head is the output layer, or shares its weight"),
    ],
)
def test_targets_that_cannot_have_adapters_are_named(targets, problem):
    with pytest.raises(ConfigError, match=f"lora.targets: {problem}"):
        add_adapters(tiny_llama(), LoRA(targets=targets), 0)


def test_a_layer_whose_weight_is_read_by_another_is_refused():
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(ConfigError, match=r"lora.targets: the model needs a layer among these as it is: .*weight"):
        add_adapters(MambaForCausalLM(config), LoRA(targets=["out_proj"]), 0)


def test_a_plain_module_has_adapters_as_well():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    add_adapters(model, LoRA(targets=["0"], rank=2), 0)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters() if value.requires_grad}
    assert shapes == {"0.down.weight": (2, 3), "0.up.weight": (4, 2)}


def test_an_embedding_that_is_used_twice_stays_as_it_is():
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})
    model["second"].weight = model["first"].weight
    with pytest.raises(ConfigError, match="second is the output layer, or shares its weight"):
        add_adapters(model, LoRA(targets=["second"]), 0)


# Runs


def test_a_run_trains_and_sends_adapters_and_leaves_a_folder_that_loads(make, base, tmp_path):
    config = make(sampling_method="none", merge_frequency=9)
    data = load_data(config)
    cluster = Cluster(config, data)
    frozen = {
        name: tensor.clone()
        for name, tensor in cluster.model.module.state_dict().items()
        if "down" not in name and "up." not in name
    }
    recorder = Recorder()
    final = cluster.train(recorder)
    # 4 (in + out) of q, v and up in two layers.
    elements = 2 * 4 * ((32 + 32) + (32 + 32) + (32 + 48))
    assert cluster.parameter_count == elements
    # 3 rounds of 2 trainers of 2 workers, each of which sends float32.
    assert cluster.counters.bytes_communicated == 3 * 2 * 2 * 4 * elements
    assert recorder.rounds[-1].evaluations[0].loss < recorder.initial[0].loss - 0.1
    for name, tensor in frozen.items():
        assert cluster.model.module.state_dict()[name].equal(tensor)

    folders = cluster.save_models(tmp_path, recorder)
    for trainer, folder in folders.items():
        saved = AutoModelForCausalLM.from_pretrained(folder).eval()
        batch = data.validation.batch(range(20), CPU)
        with torch.no_grad():
            losses = example_losses(saved(batch["input_ids"]).logits, batch["labels"])
        # Every answer has two tokens, so the mean of means is the mean.
        assert losses.mean().item() == pytest.approx(final[trainer].loss, rel=1e-5)
        before = AutoModelForCausalLM.from_pretrained(base).state_dict()
        changed = {name for name, tensor in saved.state_dict().items() if not tensor.equal(before[name])}
        assert {name.rpartition("layers.")[2][2:] for name in changed} == {
            "self_attn.q_proj.weight",
            "self_attn.v_proj.weight",
            "mlp.up_proj.weight",
        }


def test_the_plan_counts_frozen_weights_once(make, base):
    found = Estimate(make())
    everything = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(base).parameters())
    adapters = 2 * 4 * ((32 + 32) + (32 + 32) + (32 + 48))
    assert found.parameters == adapters
    assert found.memory["parameters of the working model"] == 4 * (everything + adapters)
    assert found.memory["its gradients"] == 4 * adapters


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"lora": {"rank": 4}}, "lora.*targets"),
        ({"lora": {"rank": 0, "targets": ["q_proj"]}}, "lora.rank"),
        ({"lora": {"ranks": 4, "targets": ["q_proj"]}}, "lora.ranks: LoRA has no such parameter.*rank"),
        ({"model_config": {"preset": "demo"}, "tokenizer": "t"}, "lora: needs model_config.pretrained: true"),
        ({"need_to_reinit_output_layers": True}, "need_to_reinit_output_layers: must be false with lora"),
        ({"devices_per_node": 2}, "devices_per_node: must be 1 with lora, got 2"),
        ({"model_type": "bert"}, "lora: needs a language model, got model_type bert"),
    ],
)
def test_what_does_not_go_with_adapters_is_refused_by_key(make, values, problem):
    with pytest.raises(ConfigError, match=problem):
        make(**values)
