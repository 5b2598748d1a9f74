"""A program that knows the installed package only: two processes train, save, and resume. Prints a line of JSON."""

import json
import sys

import torch
from torch import nn

import adloco


def begin() -> tuple[nn.Module, adloco.Worker]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    batch = adloco.AdaptiveBatch(initial=4, max_micro_batch=4, largest=16)
    return model, adloco.Worker(model, torch.optim.AdamW(model.parameters(), lr=1e-2), inner_steps=10, batch=batch)


def train(model: nn.Module, worker: adloco.Worker, steps: int) -> dict:
    inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
    while worker.steps < steps:
        for indices in worker.micro_batches(len(inputs)):
            worker.backward((model(inputs[indices]) - inputs[indices].sum(1, keepdim=True)).square().mean(1))
        worker.step()
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    return {"loss": loss.item(), "communications": worker.communications, "weights": model.weight.tolist()}


def train_and_resume() -> list[dict]:
    first = begin()
    half = train(*first, 30)
    path = f"state{first[1].index}.pt"
    torch.save(first[1].state_dict(), path)
    whole = train(*first, 60)
    resumed = begin()
    resumed[1].load_state_dict(torch.load(path))
    return [half, whole, train(*resumed, 60)]


if __name__ == "__main__":
    results = adloco.launch(train_and_resume, processes=2)
    tops = ("algorithms", "fabrics", "utils", "training_logs", "run", "cluster", "trainers")
    print(json.dumps({"results": results, "file": adloco.__file__, "others": sorted({*tops} & {*sys.modules})}))
