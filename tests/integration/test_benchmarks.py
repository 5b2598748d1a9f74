"""The performance benchmarks run, and their memory, FLOPs and bytes are right; timings are not tested."""

import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Gemma4TextConfig, MambaConfig, MixtralConfig

from benchmarks.performance import throughput
from cluster import Cluster
from fabrics.models.initialisation import flops_per_token
from tests.support.helpers import make_config, peek, random_sequences, tiny_bert, tiny_llama


def test_the_overhead_is_printed_as_ratios_to_the_bare_loop(cache_dir, capsys):
    overrides = ["number_of_inner_steps_between_outers=2", "sequence_length=16", "model_config.num_hidden_layers=1"]
    overrides += ["model_config.vocab_size=300", "INITIAL_BATCH_SIZE=4", f"cpu_threads={torch.get_num_threads()}"]
    assert throughput.main(["--repeats", "2", "--cpu-time", f"cache_dir={cache_dir}", *overrides]) == 0
    rows = re.findall(r"^(\w.*\S) +[\d,]+ +(\d\.\d{3})$", capsys.readouterr().out, re.MULTILINE)
    measured = ["inner steps", "whole round", "whole round with norm test"]
    assert [name for name, _ in rows] == [
        "bare loop",
        "loop over adloco.Worker",
        *measured,
    ]
    assert rows[0][1] == "1.000"


def test_model_flops_equal_those_that_pytorch_counts():
    """PyTorch counts all pairs of tokens in attention; the masked half of them is not counted here."""
    model = tiny_llama(dtype=torch.float32)
    model.config._attn_implementation = "eager"
    ids, length = torch.from_numpy(random_sequences(3, 12)).long(), 12
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.sum().backward()
    width = model.config.num_attention_heads * (model.config.hidden_size // model.config.num_attention_heads)
    masked = 6 * model.config.num_hidden_layers * width * length
    assert counter.get_total_flops() == pytest.approx(ids.numel() * (flops_per_token(model, length) + masked), rel=1e-6)


def test_attention_without_a_causal_mask_is_of_all_pairs():
    """Bert's last linear layers see one token of a text; they count as if they saw all 12."""
    model = tiny_bert(dtype=torch.float32)
    model.config._attn_implementation = "eager"
    ids = torch.from_numpy(random_sequences(3, 12)).long()
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.sum().backward()
    last = model.bert.pooler.dense.weight.numel() + model.classifier.weight.numel()
    expected = ids.numel() * (flops_per_token(model, 12) - 6 * last) + 3 * 6 * last
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("config", "width"),
    [
        (MixtralConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=3), 3 * 16),  # its head_dim is None
        (
            Gemma4TextConfig(
                num_attention_heads=2,
                num_hidden_layers=2,
                layer_types=["sliding_attention", "full_attention"],
                head_dim=8,
                global_head_dim=32,
            ),
            2 * (8 + 32),
        ),
        (MambaConfig(), 0),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_the_flops_of_attention_follow_the_heads_of_every_layer(config, width):
    model = torch.nn.Linear(4, 5)
    model.config = config
    assert flops_per_token(model, 9) == 6 * 20 + 6 * width * 9


def test_the_bare_loop_and_the_inner_steps_train_to_the_same_parameters(cache_dir):
    config = make_config(
        **throughput.OVERHEAD
        | {
            "sequence_length": 16,
            "number_of_inner_steps_between_outers": 3,
            "model_config": {"preset": "demo", "vocab_size": 2048},
            "cache_dir": str(cache_dir),
            "learning_rate_for_inner_opt": 1e-3,
            "training_seed": 0,
        }
    )
    data = throughput.make_data(config)
    cluster = Cluster(config, data)
    bare = throughput.BareLoop(config, data, cluster.model.device)
    order = peek(cluster.trainers[0].cursor, 0, 3 * config.INITIAL_BATCH_SIZE)
    bare.tokens = bare.tokens[torch.from_numpy(order)]
    bare.run(3)
    throughput.inner_steps(cluster)
    for own, reference in zip(cluster.model.module.parameters(), bare.model.parameters(), strict=True):
        torch.testing.assert_close(own, reference, rtol=1e-4, atol=1e-5)
