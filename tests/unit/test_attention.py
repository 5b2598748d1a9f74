"""Attention without a mask for sequences without padding: the same bits, and no wait of the host."""

import json

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    LlamaForCausalLM,
)

from algorithms.batch.losses import IGNORE_INDEX
from algorithms.batch.per_example import PerExampleProbe
from algorithms.batch.switch_mode import ExecutionPlan
from algorithms.schedule.limits import RoundSchedule
from fabrics.data.examples import PackedSequences
from fabrics.models import attention
from fabrics.models.attention import (
    ARCHITECTURES,
    needs_no_mask,
    repeats_keys,
    unmasked,
    unmasked_name,
)
from fabrics.models.export import save_model
from fabrics.pool.eval_tool import evaluate_batches
from fabrics.training.flat_model import FlatModel
from fabrics.training.inner_loop import InnerLoop, accumulate_gradients, backward
from tests.support.helpers import (
    CPU,
    example_losses,
    language_model,
    make_config,
    make_trainer,
    padded,
    random_sequences,
    tiny_bert,
    tiny_llama,
    train,
)

IDS = torch.from_numpy(random_sequences(3)).long()
PACKED = {"input_ids": IDS}
TEXTS = [[1 + place % 50 for place in range(4 + 6 * (number % 20))] for number in range(60)]  # padded to 64 or 128
# Functions that need a tensor's values, or how many there are, before the program continues: a GPU's host waits.
READING = (
    "item", "tolist", "__bool__", "__float__", "__int__", "__index__", "equal", "is_nonzero", "masked_select",
    "nonzero", "unique",
)  # fmt: skip


class Readings(TorchFunctionMode):
    """Context that notes the functions that read values of a tensor."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        name = getattr(function, "__name__", "")
        self.found += [name] if name in READING else []
        return function(*arguments, **(keywords or {}))


def passed(model) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return logits and gradients of a pass."""
    model.zero_grad()
    logits = model(**PACKED).logits
    logits.square().mean().backward()
    return logits, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(("repeated", "tolerance"), [(False, 0.0), (True, 1e-6)])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_model_without_a_mask_has_the_same_bits_and_reads_no_values(architecture, repeated, tolerance, monkeypatch):
    """Repeated as for float32 on GPUs, grouped keys get a gradient that is summed in another order."""
    monkeypatch.setattr(attention, "repeats_keys", lambda device, dtype: repeated)
    model = language_model(architecture)
    logits, gradients = passed(model)
    assert needs_no_mask(model, PACKED)
    with unmasked(model, PACKED), Readings() as readings:
        found_logits, found_gradients = passed(model)
    assert readings.found == []
    torch.testing.assert_close(found_logits, logits, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found_gradients, gradients, rtol=tolerance, atol=tolerance)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("examples", [PackedSequences(random_sequences(60)), padded(TEXTS)], ids=["packed", "padded"])
def test_inner_steps_and_evaluation_read_no_values(examples):
    """Accumulation, clipping, a warm-up and statistics read no value; an evaluation reads its sums at the end."""
    config = make_config(
        INITIAL_BATCH_SIZE=8, max_batch_size=4, switch_multiplier=1, warmup_steps=3, sampling_method="none"
    )
    trainer = make_trainer(tiny_llama(dtype=torch.float32), config, examples, nodes=1, max_batch=4)
    train(trainer, 1)
    trainer.assign_nodes(trainer.nodes)
    assignment = trainer.assignments(trainer.split_work(), RoundSchedule(5, 0.0, 0.5))[0]
    steps = InnerLoop(trainer.local_workers[0], assignment, trainer.parameters, False, lambda: None)
    working = trainer.local_workers[0].model
    with Readings() as readings:
        working.load(trainer.parameters)
        working.gradient.zero_()
        for _ in range(5):
            steps._step()
        accumulate_gradients(working, examples, ExecutionPlan((4, 4)), np.arange(8), True)
        with working.evaluating(trainer.parameters):
            evaluate_batches(working, examples, 4, [0, 1])
    assert steps.done == 5
    assert readings.found == ["tolist"]


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_right_padding_needs_no_mask_in_causal_attention(architecture):
    """Losses, gradients and statistics are those with a mask over the padding, in every architecture."""
    texts = padded([list(range(1, length)) for length in (3, 9, 14, 30)])
    model = language_model(architecture).double()
    batch = texts.batch(range(4), CPU)
    labels = batch.pop("labels")
    found = []
    for mask in ({}, {"attention_mask": (labels != IGNORE_INDEX).long()}):
        model.zero_grad()
        assert needs_no_mask(model, batch | mask) == (not mask)
        with unmasked(model, batch | mask), PerExampleProbe(model, 4) as probe:
            losses = example_losses(model(**batch, **mask).logits, labels)
            losses.mean().backward()
        gradients = (parameter.grad.clone() for parameter in model.parameters())
        found.append((losses.detach(), probe.squared_norms, probe.inner_products, *gradients))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-14)


def test_only_16_bit_types_have_grouped_queries_on_gpus():
    types = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    assert [repeats_keys("cuda", dtype) for dtype in types] == [True, True, False, False]
    assert not any(repeats_keys("cpu", dtype) for dtype in types)


def test_autocast_decides_whether_grouped_queries_fit(monkeypatch):
    """Rotated queries and keys are float32 until the kernel casts them."""
    asked = []
    monkeypatch.setattr(attention, "repeats_keys", lambda device, dtype: asked.append(dtype))
    for autocast in (None, torch.bfloat16):
        working = FlatModel(tiny_llama(dtype=torch.float32, num_hidden_layers=1), CPU, autocast)
        backward(working, PackedSequences(random_sequences(2)), np.arange(2))
    assert asked == [torch.float32, torch.bfloat16]


def test_only_a_window_narrower_than_the_sequence_is_masked():
    assert not needs_no_mask(language_model("mistral", sliding_window=9), PACKED)
    assert needs_no_mask(language_model("mistral", sliding_window=10), PACKED)
    kinds = ["full_attention", "sliding_attention"]
    windows = {"num_hidden_layers": 2, "use_sliding_window": True, "layer_types": kinds}
    assert not needs_no_mask(language_model("qwen2", sliding_window=4, **windows), PACKED)
    assert needs_no_mask(language_model("qwen2", sliding_window=40, **windows), PACKED)


class Repositioned(LlamaForCausalLM):
    """A derived class that restarts positions within a sequence."""

    def forward(self, input_ids, **others):
        return super().forward(input_ids, position_ids=torch.arange(input_ids.shape[1])[None] % 4, **others)


def test_other_models_keep_their_masks():
    assert not needs_no_mask(tiny_bert(), PACKED)
    assert not needs_no_mask(torch.nn.Linear(2, 2), PACKED)
    assert not needs_no_mask(Repositioned(tiny_llama().config), PACKED)
    model = tiny_llama()
    assert not needs_no_mask(model, PACKED | {"position_ids": torch.arange(9)[None] % 4})
    model.config.is_causal = False
    assert not needs_no_mask(model, PACKED)
    model = tiny_llama(attn_implementation="eager")
    assert not needs_no_mask(model, PACKED)


@pytest.mark.parametrize("interface", [AttentionInterface, AttentionMaskInterface])
def test_a_patched_attention_or_mask_function_is_used(interface, monkeypatch):
    monkeypatch.setitem(interface._global_mapping, "sdpa", lambda *arguments, **keywords: None)
    assert not needs_no_mask(tiny_llama(), PACKED)


def test_the_second_name_is_not_saved_and_an_error_ends_it(tmp_path):
    model = tiny_llama(dtype=torch.float32)
    with unmasked(model, PACKED):
        assert model.config._attn_implementation == unmasked_name()
        save_model(model, None, tmp_path)
    assert unmasked_name() not in json.dumps(json.loads((tmp_path / "config.json").read_text(encoding="utf-8")))
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
    with pytest.raises(MemoryError), unmasked(model, PACKED):
        raise MemoryError
    assert model.config._attn_implementation == "sdpa"
