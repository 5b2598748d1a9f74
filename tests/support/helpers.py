"""Small models, data and configurations that the tests share."""

import contextlib
import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from algorithms.batch.losses import example_loss_sums, logits_of
from algorithms.batch.per_example import PerExampleProbe
from algorithms.batch.switch_mode import ExecutionPlan
from algorithms.schedule.limits import RoundSchedule
from cluster import Cluster
from fabrics.config_checks import CHECKS
from fabrics.data.examples import Examples, PackedSequences, PaddedSequences, TaskData
from fabrics.data.sampler import DataCursor, Subsets
from fabrics.data.tokenization import train_tokenizer
from fabrics.pool.eval_tool import Evaluation, batch_count, combine, evaluate_batches
from fabrics.training.flat_model import FlatModel
from fabrics.training.inner_loop import accumulate_gradients
from fabrics.training.outer_round import OuterRound
from fabrics.training.worker import Node
from trainers import Trainer
from training_logs.recording.records import Observer
from utils.config.reading import parse_config
from utils.config.schema import Config
from utils.distributed.processes import Processes

CPU = torch.device("cpu")
VOCABULARY = 61
T = TypeVar("T")


# Checks types and names, not whether values go together.
NAMES_ONLY = dataclasses.replace(CHECKS, problems=(), warnings=lambda config: [])


def make_config(**values) -> Config:
    """Return the configuration of a small run on the CPU; whether its values go together is not checked."""
    defaults = {
        "number_of_outer_steps": 3,
        "number_of_inner_steps_between_outers": 3,
        "INITIAL_BATCH_SIZE": 4,
        "max_batch_size": 64,
        "sequence_length": 9,
        "learning_rate_for_inner_opt": 0.01,
        "plot_at_end": False,
        "identical_initialisation": False,
    }
    return parse_config(defaults | values, checks=NAMES_ONLY)[0]


class _Angles(nn.Module):
    """Llama's rotary embedding in the type of the model; that of transformers computes in float32."""

    def __init__(self, frequencies: torch.Tensor):
        super().__init__()
        self.frequencies = nn.Buffer(frequencies)

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None] * self.frequencies.to(hidden.dtype).repeat(2)
        return angles.cos(), angles.sin()


def in_one_type(module: nn.Module) -> nn.Module:
    """Replace the parts of Llama that always compute in float32: norms and rotary embedding."""
    for name, child in module.named_children():
        if type(child).__name__ == "LlamaRMSNorm":
            norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=child.weight.dtype)
            setattr(module, name, norm)
        elif type(child).__name__ == "LlamaRotaryEmbedding":
            setattr(module, name, _Angles(child.inv_freq))
        else:
            in_one_type(child)
    return module


_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}


def tiny_llama(seed: int = 0, dtype: torch.dtype = torch.float64, tied: bool = False, **values) -> nn.Module:
    torch.default_generator.manual_seed(seed)
    config = _SIZES | {
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
        "use_cache": False,
    }
    return LlamaForCausalLM(LlamaConfig(**(config | values))).to(dtype)


def tiny_bert(seed: int = 0, dtype: torch.dtype = torch.float64, dropout: float = 0.0, **values) -> nn.Module:
    torch.default_generator.manual_seed(seed)
    config = _SIZES | {
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    return BertForSequenceClassification(BertConfig(**(config | values))).to(dtype)


def language_model(architecture: str, **values) -> nn.Module:
    """Return a small model of an architecture of transformers, in float32 and eval mode."""
    torch.default_generator.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1}
    if architecture not in ("gpt2", "gpt_neox"):
        sizes["num_key_value_heads"] = 2
    if architecture == "gpt2":
        sizes["scale_attn_weights"] = False  # the others divide scores by the root of the width
    else:
        sizes["intermediate_size"] = 24
    tokens = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    config = CONFIG_MAPPING[architecture](**(sizes | tokens | values))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def random_sequences(count: int, length: int = 9, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (count, length), dtype=np.int32)


def padded(texts: Sequence[Sequence[int]], classes: Sequence[int] | None = None, limit: int = 512) -> PaddedSequences:
    """Return token lists as examples, padded with 0: of a classification with `classes`, else of a language model."""
    tokens = np.concatenate([np.asarray(text, dtype=np.int32) for text in texts])
    offsets = np.cumsum([0, *(len(text) for text in texts)])
    return PaddedSequences(tokens, offsets, limit, 0, None if classes is None else np.asarray(classes))


def separable_texts(count: int, seed: int = 0) -> PaddedSequences:
    """Return texts that are easy to classify: class 0 uses the lower half of the vocabulary, class 1 the upper."""
    generator = np.random.default_rng(seed)
    classes = generator.integers(0, 2, count).tolist()
    half = VOCABULARY // 2
    texts = [
        (generator.integers(1, half, generator.integers(3, 9)) + (half if label else 0)).tolist() for label in classes
    ]
    return padded(texts, classes, limit=8)


class LocalProcesses(Processes):
    """The only process of a run, with its nodes."""

    def __init__(self, devices: Sequence[torch.device] = (), nodes_per_device: int = 1):
        super().__init__()
        if devices:
            self.place(devices, nodes_per_device)


def peek(cursor: DataCursor, offset: int, count: int) -> np.ndarray:
    """Return a trainer's next examples from `offset` on; the position stays."""
    (reading,) = cursor.readings(1)
    return reading.places(offset, count)


def reloaded(cursor: DataCursor) -> DataCursor:
    """Return the cursor of a resumed run."""
    fresh = DataCursor(cursor._data, [0], cursor._by_worker)
    fresh.load_state_dict(json.loads(json.dumps(cursor.state_dict())))
    return fresh


def subset_of(cursor: DataCursor) -> np.ndarray:
    """Return all examples of a trainer."""
    return np.concatenate([cursor._data.draw(walk.members) for walk in cursor._walks.values()])


def make_trainer(
    module: nn.Module | FlatModel,
    config: Config,
    examples,
    nodes: int | Sequence[int] = 2,
    max_batch: int = 64,
    trainer_id: int = 0,
    processes: Processes | None = None,
    trainers: int = 1,
) -> Trainer:
    """Return one of `trainers` trainers; nodes: how many workers, or the numbers of their nodes."""
    working = module if isinstance(module, FlatModel) else FlatModel(module, CPU)
    device = working.device
    cursor = DataCursor(Subsets(config.training_seed, len(examples), trainers), [trainer_id])
    parameters = working.parameters.detach().clone()
    numbers = range(nodes) if isinstance(nodes, int) else nodes
    processes = processes or LocalProcesses([device], 8)  # some nodes may join later
    trainer = Trainer(trainer_id, config, parameters, cursor, examples, working, processes)
    trainer.assign_nodes(tuple(Node(number, device, max_batch) for number in numbers))
    return trainer


def evaluate(module: nn.Module, examples, task: str, batch_size: int) -> Evaluation:
    """Evaluate a module on all examples on the CPU."""
    model = FlatModel(module.eval(), CPU)
    return combine([evaluate_batches(model, examples, batch_size, range(batch_count(examples, batch_size)))], task)


def train(trainer: Trainer, rounds: int, inner_steps: int = 3) -> list:
    """Train one trainer without a cluster; return the reports of the rounds."""
    reports = []
    schedule = RoundSchedule(inner_steps, 0.0, 0.0)
    for _ in range(rounds):
        trainer.assign_nodes(trainer.nodes)
        split = trainer.split_work()
        trained = trainer.train_round(split, schedule, lambda: None)
        reports.append(trainer.conclude_round(split, schedule, [trained]))
    return reports


def probed_backward(
    model: FlatModel, examples: Examples, indices: Sequence[int]
) -> tuple[torch.Tensor, PerExampleProbe]:
    """Add the gradient of the mean loss of these examples; return the loss, and their probe."""
    loss, (probe,) = accumulate_gradients(model, examples, ExecutionPlan((len(indices),)), indices, probe=True)
    return loss, probe


def recorded_pseudo_gradients(monkeypatch) -> list[torch.Tensor]:
    """Record x - x_m of every worker that sends a message from now on."""
    found, message = [], OuterRound._message

    def recording(self, index):
        found.append(self.group.shared["parameters"] - self._local[index].parameters)
        return message(self, index)

    monkeypatch.setattr(OuterRound, "_message", recording)
    return found


_DOCUMENTS = [
    "The quick brown fox jumps over the lazy dog.",
    "A cluster owns nodes and trainers; trainers own workers.",
    "Batches grow while the gradient shrinks beside its noise.",
]


@functools.cache
def _tokenizer():
    return train_tokenizer(_DOCUMENTS, 300)


def tiny_data(train: int = 96, validation: int = 16, length: int = 9) -> TaskData:
    """Random sequences over a real, small tokenizer."""
    return TaskData(
        task="causal_lm",
        dataset="random",
        source="random tokens",
        train=PackedSequences(random_sequences(train, length, seed=1)),
        validation=PackedSequences(random_sequences(validation, length, seed=2)),
        tokenizer=_tokenizer(),
        documents={"train": 3, "validation": 1},
    )


TINY_ARCHITECTURE = {
    "preset": "demo",
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def text_of(data: TaskData) -> str:
    """Return the training text as it is read back from packed sequences."""
    rows = data.train.batch(range(len(data.train)), CPU)["input_ids"]
    return data.tokenizer.decode(rows.flatten().tolist())


def tiny_cluster(**values) -> Cluster:
    config = make_config(model_config=TINY_ARCHITECTURE, **values)
    return Cluster(config, tiny_data())


@functools.cache
def _llama_config(vocabulary: int) -> LlamaConfig:
    return LlamaConfig(vocab_size=vocabulary)


class Stack(nn.Module):
    """A language model of two layers that sees one token: a pass takes a fifth of the smallest Llama's.

    No tensor leaves a gap between flat parameters.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(16, bias=False), nn.Linear(16, 24, bias=False), nn.SiLU(), nn.Linear(24, 16, bias=False)
            )
            for _ in range(2)
        )
        self.head = nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return SimpleNamespace(logits=self.head(hidden))


class OneTokenModel(nn.Module):
    """Predicts the next token from one token: the size of TINY_ARCHITECTURE in a third of its time."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.config = _llama_config(vocabulary)
        self.embedding, self.lm_head = nn.Embedding(vocabulary, 16), nn.Linear(16, vocabulary, bias=False)
        self.up, self.down = nn.Linear(16, 61, bias=False), nn.Linear(61, 16, bias=False)
        self.norm = nn.LayerNorm(16, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.lm_head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor, **_) -> SimpleNamespace:
        embedded = self.embedding(input_ids)
        return SimpleNamespace(logits=self.lm_head(self.norm(embedded + self.down(F.silu(self.up(embedded))))))


def build_light(model_type, settings, tokenizer, sequence_length, seed, class_names) -> nn.Module:
    """Stand in for `build_model` with a OneTokenModel."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return OneTokenModel(len(tokenizer))


def light_cluster(**values) -> Cluster:
    """Return a `tiny_cluster` with a OneTokenModel, for tests that do not depend on the model."""
    with patch("fabrics.models.initialisation.build_model", build_light):
        return tiny_cluster(**values)


def budget_settings(trainers: int, **budget) -> dict:
    """A run until a token limit, in which all trainers merge after the second round."""
    return budget | {
        "number_of_initial_trainers": trainers,
        "merge_frequency": 2,
        "merge_count": 4,
        "number_of_outer_steps": None,
        "max_tokens": 6000,
        "eval_every": 99,
        "learning_rate_schedule": "warmup_stable_decay",
        "minimum_learning_rate_ratio": 0.0,
    }


def bits(cluster: Cluster) -> dict[int, bytes]:
    """The bits of each trainer's parameters."""
    return {trainer.id: trainer.parameters.numpy().tobytes() for trainer in cluster.trainers.values()}


def resumed(cluster: Cluster, again: Cluster) -> Cluster:
    """Let another cluster continue from the state of this one, as from a checkpoint; return it."""
    tensors = cluster.tensors()
    state = json.loads(json.dumps(cluster.state_dict()))
    again.load_state_dict(state, lambda group, name: tensors[group][name])
    return again


class Recorder(Observer):
    """An observer that remembers what it is told."""

    def __init__(self):
        self.rounds = []
        self.warnings = []
        self.notes = []
        self.initial = None
        self.steps = 0

    def on_start(self, cluster, initial):
        self.initial = initial

    def on_step(self):
        self.steps += 1

    def on_round(self, cluster, result):
        self.rounds.append(result)

    def note(self, message):
        self.notes.append(message)

    def warn(self, message):
        self.warnings.append(message)


def warnings_of(folder: Path) -> list[str]:
    """Return the first warning of every kind in a run folder's summary."""
    summary = json.loads((folder / "model_training_report" / "summary.json").read_text(encoding="utf-8"))
    return [warning["message"] for warning in summary["warnings"]]


@contextlib.contextmanager
def without_privileges(folder: Path):
    """Make file permissions hold for the superuser too; the parents of `folder` are opened to everybody."""
    if os.geteuid() != 0:
        yield
        return
    for parent in [folder, *folder.parents]:
        if parent.stat().st_uid == 0 and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o055)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def sample_statistics(norms: torch.Tensor, products: torch.Tensor, squared_norm: float) -> SimpleNamespace:
    """Return the statistics of a sample from n_i = ||g_i||^2 and d_i = <g_i, g>, both [b], and ||g||^2."""
    b = len(norms)
    return SimpleNamespace(
        sample_size=b,
        squared_norm=squared_norm,
        variance=(norms.sum().item() - b * squared_norm) / (b - 1) if b > 1 else math.nan,
        inner_product_variance=products.var().item() if b > 1 else math.nan,
        orthogonal_variance=(norms - products**2 / squared_norm).sum().item() / (b - 1) if b > 1 else math.nan,
    )


def example_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of each example over its own targets, [b]; 0 for an example without targets."""
    sums, counts = example_loss_sums(logits, labels)
    return sums / counts.clamp(min=1)


def sequence_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean token loss of a sequence [T], the way of the textbooks: with shifted logits."""
    return F.cross_entropy(model(input_ids=ids[None]).logits[0, :-1], ids[1:])


def flat_gradient(model: nn.Module) -> torch.Tensor:
    """Return the gradient of all trainable parameters, in float64."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad]
    return torch.cat([gradient.double().flatten() for gradient in gradients])


def example_gradients(
    model: nn.Module, rows: Iterable[T], loss: Callable[[nn.Module, T], torch.Tensor]
) -> torch.Tensor:
    """Return the gradient of the loss of each row, one `flat_gradient` each, from one backward pass for each."""
    found = []
    for row in rows:
        model.zero_grad()
        loss(model, row).backward()
        found.append(flat_gradient(model))
    model.zero_grad()
    return torch.stack(found)


def per_example_statistics(model: nn.Module, batch: dict[str, torch.Tensor]) -> SimpleNamespace:
    """Return the statistics of one batch of a Hugging Face model; afterwards it has the gradient of the mean loss."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    labels = batch["labels"]
    b = len(labels)
    model.zero_grad(set_to_none=False)
    with PerExampleProbe(model, batch_size=b) as probe:
        # The sum, not the mean: a factor 1 / b would round differently inside layers that compute in float32 whatever
        # the model's type (Llama's norm), and float64 would agree with single examples to 1e-8 only.
        example_losses(logits_of(model(**inputs)), labels).sum().backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(b)
    return sample_statistics(probe.squared_norms, probe.inner_products / b, probe.squared_norm.item() / b**2)
