"""The Trainer of Hugging Face, with a worker: each of its steps is an inner step.

    python examples/hugging_face_trainer.py MODEL TEXT [--lora] [--steps 100] [--output fine_tuned]

Logs, evaluation, callbacks, learning rates and checkpoints are the Trainer's. The worker chooses the examples, and
brings the processes together. Options, and torchrun, as for fine_tune.py.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import adloco
from examples.fine_tune import parse, sequences, with_adapters


class InnerStep(torch.optim.Optimizer):
    """The optimizer that the Trainer sees: its step is the worker's, and its state is the worker's."""

    def __init__(self, worker: adloco.Worker, optimizer: torch.optim.Optimizer):
        super().__init__(optimizer.param_groups, {})
        self.worker = worker
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:
        self.worker.step()

    def state_dict(self) -> dict:
        return self.worker.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.worker.load_state_dict(state)
        self.param_groups = self.optimizer.param_groups  # new ones; schedulers must set their rates


class WorkerTrainer(Trainer):
    """A Trainer of `max_steps` inner steps of a worker."""

    def __init__(self, worker: adloco.Worker, optimizer: torch.optim.Optimizer, **arguments: Any):
        super().__init__(optimizers=(InnerStep(worker, optimizer), None), **arguments)
        self.worker = worker

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader([{}] * self.args.max_steps)  # the worker reads the examples

    def training_step(self, model: torch.nn.Module, inputs: dict, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        losses = []
        for indices in self.worker.micro_batches(len(self.train_dataset)):
            batch = self.data_collator([self.train_dataset[int(index)] for index in indices])
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, self._prepare_inputs(batch))  # mean of equally long examples
            self.worker.backward(loss)
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if self.worker.index > 0:  # Transformers saves a model in the first process of a group only
            torch.save(self.model.state_dict(), Path(output_dir or self.args.output_dir, "pytorch_model.bin"))


def train(options: argparse.Namespace, resume: str | None = None) -> dict:
    """Train, save, and return the trained parameters; resume: a checkpoint of this worker."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    if options.lora:
        model = with_adapters(model)
    examples = [{"input_ids": ids, "labels": ids} for ids in sequences(tokenizer, options.text, options.length)]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.rate)
    batch = adloco.AdaptiveBatch("norm_test", initial=8, max_micro_batch=8, largest=64)
    worker = adloco.Worker(model, optimizer, method="DiLoCo", inner_steps=10, batch=batch, gradient_clipping=1.0)
    # The worker has found the other processes. The Trainer must not: it would average all gradients.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    arguments = TrainingArguments(
        output_dir=f"{options.output}/worker_{worker.index}",
        max_steps=-(-options.steps // 10) * 10,  # whole rounds
        use_cpu=True,  # on a GPU the model must be there before the worker is made
        max_grad_norm=0.0,  # the worker clips
        gradient_accumulation_steps=1,  # and accumulates
        warmup_steps=10,
        logging_steps=10,
        save_steps=10,  # at the end of a round
        save_total_limit=2,
        disable_tqdm=worker.index > 0,
        report_to="none",
    )
    trainer = WorkerTrainer(worker, optimizer, model=model, args=arguments, train_dataset=examples)
    trainer.train(resume_from_checkpoint=resume)
    if worker.index == 0:
        trainer.save_model(options.output)
        tokenizer.save_pretrained(options.output)
    return worker.trained_parameters()


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        train(parse())
    else:
        adloco.launch(train, parse(), processes=2)
