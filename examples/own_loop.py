"""A training loop of your own: two workers classify handwritten digits, and synchronise every 20 steps.

    pip install -r requirements-optional.txt
    python examples/own_loop.py

Under torchrun each process is a worker: torchrun --nproc_per_node=2 examples/own_loop.py
"""

import os
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import adloco


def train(steps: int = 200) -> float:
    """Train, and return the accuracy on the last 297 digits."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = adloco.AdaptiveBatch("norm_test", eta=0.8, initial=16, max_micro_batch=32, largest=256)
    worker = adloco.Worker(model, optimizer, method="DiLoCo", inner_steps=20, batch=batch)

    while worker.steps < steps:
        for indices in worker.micro_batches(1500):
            losses = nn.functional.cross_entropy(model(images[indices]), labels[indices], reduction="none")
            worker.backward(losses)
        worker.step()

    with torch.no_grad():
        accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    if worker.index == 0:
        print(
            f"accuracy {accuracy:.3f} after {worker.communications} communications "
            f"({worker.bytes_communicated / 1e6:.1f} MB); the batch grew to {worker.effective_batch}"
        )
    return accuracy


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        train()
    else:
        adloco.launch(train, processes=2)
