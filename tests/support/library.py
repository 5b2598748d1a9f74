"""Training loops over adloco.Worker: the one that `train` of run.py is compared with, and a small one."""

import argparse
import os
import sys
from collections.abc import Iterable
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup

import adloco
from algorithms.batch.losses import logits_of
from examples import fine_tune, hugging_face_trainer
from fabrics.config_checks import CHECKS
from fabrics.data.dataset_loader import load_data
from fabrics.models.initialisation import initial_model
from tests.support.helpers import example_losses
from utils.config.reading import parse_config


def train_like_the_program(keys: dict, steps: int, arguments: dict) -> dict:
    """Train the configuration's model on its data in a plain loop; return its parameters and counts."""
    torch.set_num_threads(1)
    config, _ = parse_config(keys, checks=CHECKS)
    data = load_data(config)
    model = initial_model(config, data, 0)
    rate = config.learning_rate_for_inner_opt
    optimizer = torch.optim.AdamW(
        model.parameters(), rate, betas=(0.9, 0.99), weight_decay=config.weight_decay, fused=True
    )
    inner_steps = config.number_of_inner_steps_between_outers
    worker = adloco.Worker(model, optimizer, inner_steps=inner_steps, seed=config.training_seed, **arguments)
    while worker.steps < steps:
        for indices in worker.micro_batches(len(data.train)):
            batch = data.train.batch(indices, torch.device("cpu"))
            labels = batch.pop("labels")
            worker.backward(example_losses(logits_of(model(**batch)), labels))
        worker.step()
    return {
        "parameters": worker.trained_parameters(),
        "communications": worker.communications,
        "bytes_communicated": worker.bytes_communicated,
        "requested_batch": worker.requested_batch,
    }


def train_all_like_the_program(cases: list[tuple[dict, int, dict]]) -> list[dict]:
    return [train_like_the_program(*case) for case in cases]


class Regression:
    """A small model, its data and its worker, the same for every call with the same arguments."""

    def __init__(self, device="cpu", **arguments):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(96, 4, generator=generator)
        self.targets = self.inputs.square().sum(1, keepdim=True) + torch.randn(96, 1, generator=generator)
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        self.inputs, self.targets = self.inputs.to(device), self.targets.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.worker = adloco.Worker(self.model, self.optimizer, **{"inner_steps": 3} | arguments)
        self.predict = self.model

    def losses(self, indices) -> torch.Tensor:
        return (self.predict(self.inputs[indices]) - self.targets[indices]).square().mean(1)

    def train(self, steps: int) -> list[torch.Tensor]:
        while self.worker.steps < steps:
            for indices in self.worker.micro_batches(len(self.inputs)):
                self.worker.backward(self.losses(indices))
            self.worker.step()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def trained_regression(device: str, steps: int, **arguments) -> tuple[int, list[torch.Tensor]]:
    """Return the requested batch and the parameters of this process after some steps."""
    loop = Regression(device, **arguments)
    parameters = loop.train(steps)
    return loop.worker.requested_batch, [parameter.cpu() for parameter in parameters]


def trained_over_nccl(device: str, steps: int, **arguments) -> tuple[int, list[torch.Tensor]]:
    """Return `trained_regression` of a process with a GPU of its own, or one that it shares over nccl."""
    rank = os.environ["RANK"]
    with patch("adloco.worker.identity", lambda device: rank):
        return trained_regression(f"cuda:{int(rank) % torch.cuda.device_count()}", steps, **arguments)


def assert_equal_tensors(expected: Iterable[torch.Tensor], found: Iterable[torch.Tensor]) -> None:
    for first, second in zip(expected, found, strict=True):
        assert torch.equal(first, second)


class Rows(nn.Module):
    """Two matrices, which any optimizer can train, also one for matrices."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Embedding(12, 4, dtype=torch.float64) for _ in range(2))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return (self.first(indices) - 2 * self.second(indices) - 1).square().sum((1, 2))


class Frozen(nn.Module):
    """A model with a frozen layer and a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8).requires_grad_(False)
        self.second = nn.Linear(8, 1)
        self.register_buffer("scale", torch.rand(2))


def begin_with_unlike_processes(interrupted: list[dict], alone: dict) -> dict:
    """Begin with processes that differ; return the tensors of a model, and the errors by name.

    Then continue from the state of one worker for a round; return the first examples, and the state. "wrapped" are the
    errors of models that other parts of PyTorch synchronise.
    """
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo")  # workers use a group that exists
    torch.manual_seed(rank)
    model = Frozen()
    adloco.Worker(model, torch.optim.SGD(model.second.parameters(), lr=0.1))
    found = {
        "tensors": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "errors": {},
        "wrapped": {},
    }

    def attempt(name, work, kind="errors"):
        try:
            work()
        except ValueError as error:
            found[kind][name] = str(error)

    linear = nn.Linear(4 + rank, 1)
    attempt("model, shapes", lambda: adloco.Worker(linear, torch.optim.SGD(linear.parameters(), lr=0.1)))
    small = nn.Linear(4, 1, dtype=(torch.float32, torch.float64)[rank])
    attempt("model, types", lambda: adloco.Worker(small, torch.optim.SGD(small.parameters(), lr=0.1)))
    placed = nn.Linear(4, 1, device=("cpu", "meta")[rank])
    attempt("type of the model's device", lambda: adloco.Worker(placed, torch.optim.SGD(placed.parameters(), lr=0.1)))
    optimizer = (torch.optim.SGD, torch.optim.Adam)[rank]
    attempt("optimizer", lambda: adloco.Worker(model, optimizer(model.second.parameters(), lr=0.1)))
    tensors = torch.optim.SGD(model.second.parameters(), lr=torch.tensor((0.1, 0.2)[rank]))
    attempt("optimizer, rates in tensors", lambda: adloco.Worker(model, tensors))
    order = ([model.second.weight, model.second.bias], [model.second.bias, model.second.weight])[rank]
    groups = torch.optim.SGD([{"params": [parameter]} for parameter in order], lr=0.1)
    attempt("optimizer, groups", lambda: adloco.Worker(model, groups))
    for wrap in (nn.parallel.DistributedDataParallel, fully_shard):
        wrapped = nn.Sequential(wrap(nn.Linear(4, 1)))
        averaged = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        attempt(wrap.__name__, lambda model=wrapped, own=averaged: adloco.Worker(model, own), "wrapped")
    model.first.requires_grad_(rank == 1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    attempt("trainable parameters", lambda: adloco.Worker(model, torch.optim.SGD(trained, lr=0.1)))
    attempt("arguments", lambda: Regression(inner_steps=2 + rank))
    attempt("examples", lambda: next(Regression().worker.micro_batches(90 + rank)))
    attempt("state", lambda: Regression(batch=4).worker.load_state_dict(interrupted[rank]))
    joined = Regression(batch=4)
    joined.worker.load_state_dict(alone)
    found["examples"] = next(joined.worker.micro_batches(96)).tolist()
    joined.train(9)
    found["state"] = joined.worker.state_dict()
    return found


def leave_early() -> None:
    """Exit in one process after 12 of 24 steps, with a worker in a reference cycle."""
    loop = Regression()
    loop.itself = loop
    loop.train(24 - 12 * int(os.environ["RANK"]))
    if os.environ["RANK"] == "1":
        sys.exit(0)


def train_as_the_trainer(options: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Return the parameters of a loop, of the same run by the Trainer, and of one that resumed in the middle.

    The last are those of adapters that the Trainer trains for five steps.
    """
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    examples = fine_tune.sequences(tokenizer, options.text, options.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    batch = adloco.AdaptiveBatch("norm_test", initial=8, max_micro_batch=8, largest=64)
    worker = adloco.Worker(model, optimizer, inner_steps=10, batch=batch, gradient_clipping=1.0)
    rates = get_linear_schedule_with_warmup(optimizer, 10, options.steps)
    while worker.steps < options.steps:
        for indices in worker.micro_batches(len(examples)):
            worker.backward(model(input_ids=examples[indices], labels=examples[indices]).loss)
        worker.step()
        rates.step()
    checkpoint = f"{options.output}/worker_{worker.index}/checkpoint-10"
    of_adapters = {"lora": True, "steps": 5, "output": f"{options.output}_adapters"}
    return [
        worker.trained_parameters(),
        hugging_face_trainer.train(options),
        hugging_face_trainer.train(options, checkpoint),
        hugging_face_trainer.train(argparse.Namespace(**vars(options) | of_adapters)),
    ]
