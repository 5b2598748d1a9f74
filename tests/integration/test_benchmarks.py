"""The performance benchmarks run, and their memory, FLOPs and bytes are right; timings are not tested."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from algorithms.schedule.limits import RoundSchedule
from benchmarks.performance import scaling, throughput
from cluster import Cluster
from fabrics.models.meta_model import flops_per_token
from tests.support.helpers import make_config, random_sequences, tiny_llama

ROOT = Path(__file__).resolve().parents[2]


def test_throughput_prints_ratios_and_the_memory_formula(cache_dir, capsys):
    overrides = ["number_of_inner_steps_between_outers=2", "sequence_length=16", "model_config.num_hidden_layers=1"]
    overrides += ["model_config.vocab_size=300", "INITIAL_BATCH_SIZE=4"]
    threads = torch.get_num_threads()
    assert throughput.main(["--repeats", "2", f"cache_dir={cache_dir}", f"cpu_threads={threads}", *overrides]) == 0
    output = capsys.readouterr().out
    measured = float(re.search(r"measured +([\d.]+) bytes per parameter", output)[1])
    # 2 trainers and 4 workers: 4 (2 + 1 + 2 * 2 + 2 * 4).
    assert measured == 60.0
    assert "formula  60 =" in output
    for name in ("bare loop", "inner steps", "whole round", "whole round with norm test"):
        assert re.search(rf"^{name} +[\d,]+ +\d+\.\d% +\d\.\d+", output, re.MULTILINE), name
    assert re.findall(r"^  (\d) trainer\(s\): +[\d,]+, \d+\.\d+ of one alone", output, re.MULTILINE) == ["1", "2", "4"]


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


def test_the_bare_loop_and_the_inner_steps_train_to_the_same_parameters(cache_dir):
    config = make_config(
        **throughput.DEFAULTS
        | {
            "sequence_length": 16,
            "model_config": {"preset": "demo", "vocab_size": 2048},
            "cache_dir": str(cache_dir),
            "learning_rate_for_inner_opt": 1e-3,
            "training_seed": 0,
        }
    )
    data = throughput.make_data(config, 2048)
    cluster = Cluster(config, data)
    bare = throughput.BareLoop(config, data, cluster.devices[0])
    trainer = cluster.trainers[0]
    order = trainer.cursor.peek(0, 3 * config.INITIAL_BATCH_SIZE)
    bare.tokens = bare.tokens[torch.from_numpy(order)]
    bare.run(3)
    throughput.inner_steps(trainer, RoundSchedule(3, 0.0, 0.0))
    for own, reference in zip(
        cluster.models[cluster.devices[0]].module.parameters(), bare.model.parameters(), strict=True
    ):
        torch.testing.assert_close(own, reference, rtol=1e-4, atol=1e-5)


def test_scaling_counts_the_bytes_of_every_encoding(programs):
    parts = ["--parts", "synchronisation", "exchange", "--parameters", "400000", "--repeats", "1"]
    done = programs.run("benchmarks/performance/scaling.py", *parts)
    rows = re.findall(
        r"^  (\w+) +(in worker order|one all-reduce) .* ([\d.]+) MB sent in total, ([\d.]+) per process(.*)$",
        done.stdout,
        re.MULTILINE,
    )
    # Two workers: each sends half of its tensor, and half of the mean; in shard groups of two each process half of
    # that.
    expected = [
        ("float32", "in worker order", "3.2"),
        ("float32", "one all-reduce", "3.2"),
        ("bfloat16", "in worker order", "1.6"),
        ("int8", "in worker order", "1.2"),
        ("int4", "in worker order", "1.0"),
    ]
    assert [row[:3] for row in rows] == 2 * expected
    for number, (*_, sent, of_a_process, counted) in enumerate(rows):
        assert float(of_a_process) == pytest.approx(float(sent) / (2 if number < len(expected) else 4), abs=0.05)
        if Path("/proc/self/io").exists():
            assert counted == f", at most {of_a_process} written"


@pytest.mark.usefixtures("programs")
def test_scaling_compares_settings_with_the_first(monkeypatch, capsys, cache_dir):
    small = {"dataset": "text", "text_files": "[README.md]", "text_documents": "blank_lines", "val_size": 4}
    small |= {"sequence_length": 16, "vocab_size": 300, "number_of_inner_steps_between_outers": 1}
    monkeypatch.setattr(scaling, "RUN", scaling.RUN | small | {"cache_dir": cache_dir})
    settings = {name: scaling.SHARD_GROUPS[name] for name in ("1 device", "1 shard group of 2 devices")}
    settings[scaling.BARE] = {}
    scaling.compare("small", settings, scaling.ONE_TRAINER | {"number_of_outer_steps": 1}, 1)
    rows = re.findall(r"^(.*\S) +([\d,]+) +([\d.]+) \(([\d.]+)\)$", capsys.readouterr().out, re.MULTILINE)
    assert [name for name, *_ in rows] == ["1 device", "1 shard group of 2 devices", "bare loop"]
    device, *others = (float(speed.replace(",", "")) for _, speed, *_ in rows)
    ratios = [pytest.approx(other / device, rel=0.01, abs=0.01) for other in others for _ in range(2)]
    expected = [1.0, 1.0, *ratios]  # of speeds that are not rounded
    assert [float(ratio) for _, _, *both in rows for ratio in both] == expected
