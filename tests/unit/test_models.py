"""Model families: architectures, initialisation, pretrained folders, the flat model, and models on disk."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    GPT2Config,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from fabrics.data.examples import PackedSequences
from fabrics.data.tokenization import load_tokenizer
from fabrics.models.export import save_model
from fabrics.models.initialisation import check_architecture, meta_model
from fabrics.models.model_family import build_model, is_pretrained, reinitialise_output_layer
from fabrics.training.flat_model import FlatModel
from tests.support.helpers import (
    CPU,
    TINY_ARCHITECTURE,
    example_gradients,
    make_config,
    probed_backward,
    sequence_loss,
    tiny_bert,
    tiny_data,
    tiny_llama,
)
from utils.config.schema import ConfigError


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_data().tokenizer


def saved(folder: Path, tokenizer, model_type: str = "microllama") -> dict:
    """Save a small model; return the model_config that loads it."""
    save_model(build_model(model_type, {"preset": "demo"}, tokenizer, 9, 3), tokenizer, folder)
    return {"name": str(folder), "pretrained": True}


def test_microllama_has_the_published_architecture(tokenizer):
    with torch.device("meta"):
        model = build_model("microllama", {"name": "keeeeenw/MicroLlama"}, tokenizer, 2048, 0)
    config = model.config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (1024, 5632, 12)
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (16, 4, 32000)
    assert (config.max_position_embeddings, config.rms_norm_eps, config.tie_word_embeddings) == (2048, 1e-5, False)
    # Counted by hand: 2 * 32000 * 1024 + 12 * (2.5 * 1024^2 + 3 * 1024 * 5632 + 2 * 1024) + 1024.
    assert sum(p.numel() for p in model.parameters()) == 304_636_928


def test_numbers_with_an_exponent_are_numbers_in_nested_values_too():
    rope = {"rope_type": "default", "rope_theta": "1e6"}  # as YAML 1.1 reads them
    model, _ = meta_model(make_config(model_config={"preset": "demo", "rms_norm_eps": "1e-6", "rope_parameters": rope}))
    assert (model.config.rms_norm_eps, model.config.rope_parameters["rope_theta"]) == (1e-6, 1e6)


def test_demo_models_are_small_and_have_the_tokenizers_vocabulary(tokenizer):
    for model_type in ("microllama", "bert"):
        model = build_model(model_type, {"preset": "demo"}, tokenizer, 128, 0)
        assert model.config.vocab_size == len(tokenizer)
        assert sum(p.numel() for p in model.parameters()) < 1_000_000
        assert model.training


def test_a_vocabulary_with_gaps_has_an_embedding_for_its_largest_token():
    words = Tokenizer(models.WordLevel({"<eos>": 0, "far": 500}, unk_token="<eos>"))
    gaps = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    assert build_model("microllama", {"preset": "demo"}, gaps, 9, 0).config.vocab_size == 501
    with pytest.raises(ConfigError, match=r"model_config\.vocab_size: the model has 2 tokens, the tokenizer 501"):
        build_model("microllama", {"preset": "demo", "vocab_size": 2}, gaps, 9, 0)


def test_initialisation_depends_on_the_seed_alone(tokenizer):
    def weights(seed):
        return torch.cat(
            [p.flatten() for p in build_model("microllama", TINY_ARCHITECTURE, tokenizer, 9, seed).parameters()]
        )

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = weights(5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert torch.equal(weights(5), first)
    assert not torch.equal(weights(6), first)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"preset": "gigantic"}, "model_config.preset: "),
        ({"preset": "demo", "name": "keeeeenw/MicroLlama"}, "give preset or name, got demo and keeeeenw/MicroLlama"),
        ({"preset": ["demo"]}, r"preset: must be a text, got \['demo'\]"),
        ({"name": 5, "pretrained": True}, "name: must be a text, got 5"),
        ({"name": ""}, "name: must be a text, got ''"),
        ({"hiden_size": 8}, "model_config.hiden_size: .*did you mean hidden_size"),
        ({"pretrained": "yes"}, "model_config.pretrained: "),
        ({"pretrained": True}, "model_config.name: "),
        ({"name": "/no/such/folder", "pretrained": True}, "model_config.name: cannot load '/no/such/folder'"),
        ({"name": "/no/such/folder"}, "model_config.name: cannot load '/no/such/folder'"),
        ({"vocab_size": 10}, "model_config.vocab_size: "),
        ({"max_position_embeddings": 4}, "sequence_length: "),
        (
            {"hidden_size": 10, "num_attention_heads": 3},
            r"cannot build this architecture: The hidden size \(10\) is not",
        ),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "model_config: cannot build this architecture"),
        ({"hidden_act": "nope"}, "model_config: cannot build this architecture: 'nope'"),
        ({"num_hidden_layers": 0}, "model_config.num_hidden_layers: "),
        ({"dtype": "bfloat16"}, "model_config.dtype: not an architecture value"),
        ({"eos_token_id": 7}, "model_config.eos_token_id: not an architecture value"),
        ({"hidden_size": "wide"}, "model_config.hidden_size: "),
        ({"attention_dropout": 1}, "model_config.attention_dropout: must be at least 0 and below 1, got 1"),
        ({"attention_dropout": -0.5}, "model_config.attention_dropout: "),
        ({"rms_norm_eps": float("nan")}, "model_config.rms_norm_eps: must be a number of at most 1e38, got nan"),
        ({"hidden_size": 10**350}, "model_config.hidden_size: "),
    ],
)
def test_a_bad_model_config_is_refused_by_key(tokenizer, settings, problem):
    with pytest.raises(ConfigError, match=problem):
        build_model("microllama", settings, tokenizer, 9, 0)


@pytest.mark.parametrize(
    ("model_type", "auto_class"),
    [("microllama", AutoModelForCausalLM), ("bert", AutoModelForSequenceClassification)],
)
def test_a_saved_folder_is_a_pretrained_model(tokenizer, tmp_path, model_type, auto_class):
    model = build_model(model_type, {"preset": "demo", "num_hidden_layers": 1}, tokenizer, 9, 3)
    working = FlatModel(model, CPU)
    save_model(model, tokenizer, tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    settings = {"name": str(tmp_path), "pretrained": True}
    assert is_pretrained(settings)
    again = build_model(model_type, settings, load_tokenizer(str(tmp_path), "name"), 9, 99)
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name
    assert auto_class.from_pretrained(tmp_path).config.num_hidden_layers == 1
    assert AutoTokenizer.from_pretrained(tmp_path)("a cluster")["input_ids"] == tokenizer("a cluster")["input_ids"]
    assert working.parameter_count == sum(p.numel() for p in again.parameters())
    # The folder is also an architecture to initialise.
    fresh = build_model(model_type, {"name": str(tmp_path)}, tokenizer, 9, 4)
    assert fresh.config.num_hidden_layers == 1
    assert not torch.equal(next(fresh.parameters()), next(model.parameters()))


def test_a_pretrained_model_ends_texts_with_the_token_of_another_tokenizer(tokenizer, tmp_path):
    model = build_model("microllama", {"preset": "demo"}, tokenizer, 9, 3)
    model.generation_config.eos_token_id = [5, 6]
    save_model(model, tokenizer, tmp_path)
    settings = {"name": str(tmp_path), "pretrained": True}
    assert build_model("microllama", settings, tokenizer, 9, 3).generation_config.eos_token_id == tokenizer.eos_token_id
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(6)
    assert build_model("microllama", settings, tokenizer, 9, 3).generation_config.eos_token_id == [5, 6]
    tokenizer.eos_token = None  # as conversations may have it
    assert build_model("microllama", settings, tokenizer, 9, 3).generation_config.eos_token_id == [5, 6]


SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        Qwen2Config(**SMALL, num_key_value_heads=1, max_position_embeddings=32),
        MistralConfig(**SMALL, num_key_value_heads=1, max_position_embeddings=32),
        Qwen3Config(**SMALL, num_key_value_heads=1, head_dim=8, max_position_embeddings=32),
    ],
    ids=lambda config: config.model_type,
)
def test_a_language_model_of_any_architecture_is_loaded_tested_and_saved(tokenizer, tmp_path, config):
    """The norms of its examples' gradients are those of one backward pass for each."""
    config.vocab_size = len(tokenizer)
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    config.initializer_range = 0.2
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "model")
    settings = {"name": str(tmp_path / "model"), "pretrained": True}
    loaded = build_model("causal_lm", settings, tokenizer, 9, 0)
    examples = PackedSequences(np.random.default_rng(0).integers(0, len(tokenizer), (4, 9)))
    ids = examples.batch(range(4), CPU)["input_ids"]
    assert loaded(ids).logits.equal(model.train()(ids).logits)

    by_hand = example_gradients(loaded, ids, sequence_loss).square().sum(1)
    working = FlatModel(loaded, CPU)
    _, probe = probed_backward(working, examples, np.arange(4))
    assert (16 * probe.squared_norms).tolist() == pytest.approx(by_hand.tolist(), rel=1e-4)

    save_model(loaded, tokenizer, tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert type(again) is type(model)
    assert again(ids).logits.equal(model.eval()(ids).logits)
    # Without pretrained weights, and for an estimate, the folder is an architecture.
    fresh = build_model("causal_lm", {"name": settings["name"]}, tokenizer, 9, 4)
    assert type(fresh) is type(model)
    with pytest.raises(ConfigError, match="sequence_length: the model takes at most 32 tokens, got 33"):
        build_model("causal_lm", settings, tokenizer, 33, 0)


def test_values_for_generation_that_the_library_refuses_to_save_stay_with_the_model(tokenizer, tmp_path):
    save_model(build_model("microllama", {}, tokenizer, 128, 0), tokenizer, tmp_path / "model")
    file = "generation_config.json"
    values = json.loads((tmp_path / "model" / file).read_text()) | {"temperature": 0.9, "do_sample": False}
    (tmp_path / "model" / file).write_text(json.dumps(values))
    model = build_model("microllama", {"name": str(tmp_path / "model"), "pretrained": True}, tokenizer, 128, 0)
    save_model(model, tokenizer, tmp_path / "again")
    assert json.loads((tmp_path / "again" / file).read_text()) == values
    assert model.generation_config.temperature == 0.9


@pytest.mark.parametrize("is_pretrained", [True, False])
def test_a_model_that_sees_the_tokens_to_predict_is_no_language_model(tokenizer, tmp_path, is_pretrained):
    sizes = {**SMALL, "vocab_size": len(tokenizer), "max_position_embeddings": 32}
    for is_decoder in (True, False):
        settings = {"name": str(tmp_path / str(is_decoder)), "pretrained": is_pretrained}
        AutoModelForCausalLM.from_config(BertConfig(**sizes, is_decoder=is_decoder)).save_pretrained(settings["name"])
        if is_decoder:
            build_model("causal_lm", settings, tokenizer, 9, 0)
    with pytest.raises(
        ConfigError, match=r"^model_config\.name: this bert model sees the tokens that it is to predict"
    ):
        build_model("causal_lm", settings, tokenizer, 9, 0)


def test_a_model_of_any_architecture_needs_a_name_and_has_its_values(tokenizer):
    with pytest.raises(ConfigError, match=r"model_config\.name: this model type needs the name"):
        build_model("causal_lm", {}, tokenizer, 9, 0)
    with pytest.raises(ConfigError, match=r"model_config\.hidden_size: not an architecture value of this model type"):
        build_model("causal_lm", {"name": "a", "hidden_size": 8}, tokenizer, 9, 0)
    with pytest.raises(ConfigError, match=r"model_config\.preset: must be null: .* no presets, got 'demo'"):
        build_model("causal_lm", {"name": "a", "preset": "demo"}, tokenizer, 9, 0)


def test_a_model_of_few_tokens_is_checked_and_planned_without_its_tokenizer():
    config = make_config(model_config={"preset": "demo", "vocab_size": 30})
    check_architecture(config)
    assert meta_model(config)[0].config.vocab_size == 30


def test_another_family_under_that_name_is_refused(tokenizer, tmp_path):
    settings = saved(tmp_path, tokenizer, "bert")
    with pytest.raises(ConfigError, match="is a bert model, not llama; model_type: causal_lm takes"):
        build_model("microllama", settings, tokenizer, 9, 0)


def test_damaged_weights_are_refused(tokenizer, tmp_path):
    settings = saved(tmp_path, tokenizer)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ConfigError, match=r"^model_config\.name: cannot load"):
        build_model("microllama", settings, tokenizer, 9, 0)


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    save_file(change(weights), folder / "model.safetensors", metadata={"format": "pt"})


def without(part: str):
    return lambda weights: {name: tensor for name, tensor in weights.items() if part not in name}


@pytest.mark.parametrize(
    ("model_type", "change", "lacking"),
    [
        ("microllama", without("layers.1.mlp"), r"model\.layers\.1\.mlp\.down_proj\.weight and 2 other tensors"),
        ("causal_lm", lambda weights: {f"net.{name}": tensor for name, tensor in weights.items()}, "lm_head"),
        ("bert", without("layer.0.output.dense.bias"), r"bert\.encoder\.layer\.0\.output\.dense\.bias$"),
    ],
)
def test_weights_that_lack_a_part_are_refused(tokenizer, tmp_path, model_type, change, lacking):
    settings = saved(tmp_path, tokenizer, "bert" if model_type == "bert" else "microllama")
    change_weights(tmp_path, change)
    with pytest.raises(ConfigError, match=rf"^model_config\.name: the weights of '{tmp_path}' lack {lacking}"):
        build_model(model_type, settings, tokenizer, 9, 0)


def test_a_classifier_may_lack_its_head_and_weights_that_are_not_used_are_named(tokenizer, tmp_path, caplog):
    settings = saved(tmp_path / "bert", tokenizer, "bert")
    change_weights(tmp_path / "bert", without("classifier"))
    build_model("bert", settings, tokenizer, 9, 0)
    settings = saved(tmp_path / "llama", tokenizer) | {"num_hidden_layers": 1}
    with caplog.at_level("WARNING", "adloco.models"):
        build_model("microllama", settings, tokenizer, 9, 0)
    assert "not used of" in caplog.text
    assert "model.layers.1." in caplog.text


def test_weights_that_are_not_numbers_are_refused(tokenizer, tmp_path):
    settings = saved(tmp_path, tokenizer)
    change_weights(tmp_path, lambda weights: weights | {"model.norm.weight": weights["model.norm.weight"] * torch.nan})
    with pytest.raises(ConfigError, match=r"^model_config\.name: the model's logits are NaN or infinite"):
        build_model("causal_lm", settings, tokenizer, 9, 0)


def test_weights_of_a_quantised_model_are_refused_and_its_architecture_is_not(tokenizer, tmp_path):
    settings = saved(tmp_path, tokenizer)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ConfigError, match="is quantised; train the model"):
        build_model("microllama", settings, tokenizer, 9, 0)
    model = build_model("microllama", settings | {"pretrained": False}, tokenizer, 9, 0)
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("is_pretrained", [True, False])
@pytest.mark.parametrize("values", [{"num_attention_heads": 5}, {"hidden_act": "unknown"}, {"dtype": "unknown"}])
def test_an_impossible_config_of_a_folder_is_one_line(tokenizer, tmp_path, is_pretrained, values):
    settings = saved(tmp_path, tokenizer) | {"pretrained": is_pretrained}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | values))
    with pytest.raises(ConfigError, match=r"cannot load|cannot build"):
        build_model("microllama", settings, tokenizer, 9, 0)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"sequence_length": 4096}, "sequence_length: the model takes at most"),
        ({"loss_chunk_tokens": 8, "model_type": "bert", "dataset": "imdb"}, "loss_chunk_tokens: must be null"),
        ({"activation_checkpointing": True}, "activation_checkpointing: must be false"),
    ],
)
def test_what_does_not_fit_a_pretrained_model_is_found_before_the_data_are_read(
    tokenizer, tmp_path, monkeypatch, values, problem
):
    monkeypatch.setattr(LlamaForCausalLM, "supports_gradient_checkpointing", False)
    settings = saved(tmp_path, tokenizer, values.get("model_type", "microllama"))
    config = make_config(model_config=settings, **values)
    with pytest.raises(ConfigError, match=f"^{problem}"):
        check_architecture(config)


def test_the_output_layer_is_reinitialised_by_seed(tokenizer):
    model = build_model("bert", {"preset": "demo"}, tokenizer, 9, 3)
    model.classifier.bias.data.fill_(1.0)
    body = model.bert.embeddings.word_embeddings.weight.clone()
    reinitialise_output_layer("bert", model, 1)
    first = model.classifier.weight.clone()
    bound = (6 / (first.shape[0] + first.shape[1])) ** 0.5
    assert first.abs().max() <= bound
    assert first.std().item() == pytest.approx(bound / 3**0.5, rel=0.2)
    assert model.classifier.bias.abs().sum() == 0
    assert torch.equal(model.bert.embeddings.word_embeddings.weight, body)
    reinitialise_output_layer("bert", model, 2)
    assert not torch.equal(model.classifier.weight, first)


def test_tied_tensors_are_saved_once_and_empty_ones_apart(tmp_path):
    model = tiny_llama(tied=True)
    FlatModel(model, CPU)
    for name, columns in (("none", 3), ("nothing", 5)):
        model.register_buffer(name, torch.empty(0, columns))
    save_model(model, None, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_tensor(name).shape) for name in file.keys()}  # noqa: SIM118
        embedding = file.get_tensor("model.embed_tokens.weight")
    assert (shapes["none"], shapes["nothing"]) == ((0, 3), (0, 5))
    assert torch.equal(embedding, model.lm_head.weight)
    assert "lm_head.weight" not in shapes
    assert shapes.keys() == set(model.state_dict()) - {"lm_head.weight"}


def test_a_tied_output_layer_cannot_be_reinitialised(tokenizer):
    model = build_model("microllama", {"preset": "demo"}, tokenizer, 9, 3)
    with pytest.raises(ConfigError, match="tied to its embedding"):
        reinitialise_output_layer("microllama", model, 1)


@pytest.mark.parametrize("make", [tiny_llama, tiny_bert, lambda: tiny_llama(tied=True)])
def test_a_flat_model_consists_of_views_of_two_buffers(make):
    model, reference = make(), make()
    working = FlatModel(model, CPU)
    for parameter, original in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter, original)
        for view, buffer in ((parameter, working.parameters), (parameter.grad, working.gradient)):
            assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    ids = torch.arange(2, 12).view(2, 5)
    model.eval()(input_ids=ids).logits.square().mean().backward()
    reference.eval()(input_ids=ids).logits.square().mean().backward()
    for parameter, original in zip(model.parameters(), reference.parameters(), strict=True):
        expected = torch.zeros_like(original) if original.grad is None else original.grad
        torch.testing.assert_close(parameter.grad, expected)
    # The gaps between tensors stay zero, so norms over the buffer are norms over the gradient.
    assert working.gradient.norm().item() == pytest.approx(
        torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None]).norm().item()
    )


def test_evaluating_restores_the_mode():
    working = FlatModel(tiny_llama().train(), CPU)
    with working.evaluating(torch.zeros_like(working.parameters)):
        assert not working.module.training
        assert working.module.lm_head.weight.abs().sum() == 0
    assert working.module.training


# Models on disk


def test_a_model_is_written_from_a_given_state_as_from_its_own(tmp_path):
    model = tiny_llama(tied=True)
    tensors = {parameter: parameter.detach().clone() for parameter in model.parameters()}
    given = {name: tensors[parameter] for name, parameter in model.state_dict(keep_vars=True).items()}
    save_model(model, None, tmp_path / "given", given)
    save_model(model, None, tmp_path / "own")
    for path in (tmp_path / "own").iterdir():
        assert path.read_bytes() == (tmp_path / "given" / path.name).read_bytes()
