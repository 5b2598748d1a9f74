"""A model and a dataset of your own: a small network learns the handwritten digits that come with scikit-learn.

pip install -r requirements-optional.txt
python run.py --config examples/own_model.yaml
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from fabrics.data.dataset_loader import DATASETS, Dataset
from fabrics.data.examples import TaskData
from fabrics.models.model_family import MODELS, Demands, ModelFamily
from utils.config.schema import Config


class Images:
    """Images of 8 x 8 pixels with their classes."""

    tokens_per_example = 1  # an image counts as one token
    largest = 0  # index of the largest example; here all need the same memory

    def __init__(self, pixels: np.ndarray, classes: np.ndarray):
        self._pixels = torch.from_numpy(pixels).float()
        self._classes = torch.from_numpy(classes)

    def __len__(self) -> int:
        return len(self._classes)

    def batch(self, indices: Sequence[int], device: torch.device) -> dict[str, torch.Tensor]:
        """Return pixels, [b, 64], and labels, [b]."""
        chosen = np.asarray(indices)
        return {"pixels": self._pixels[chosen].to(device), "labels": self._classes[chosen].to(device)}

    def tokens(self, indices: Sequence[int]) -> int:
        return len(indices)


def load(config: Config) -> TaskData:
    """Return 1,437 images to train on and 360 to validate, the same for every seed."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    pixels = digits.data[order] / 16.0 - 0.5
    classes = digits.target[order]
    train = Images(pixels[:1437], classes[:1437])
    validation = Images(pixels[1437:], classes[1437:])
    return TaskData(
        task="classification",
        dataset=config.dataset,
        source="sklearn.datasets.load_digits",
        train=train,
        validation=validation,
        documents={"train": len(train), "validation": len(validation)},
        class_names=tuple(map(str, digits.target_names)),
    )


class Network(nn.Module):
    """A network of the layers for which exact per-example statistics are known: nn.Linear and nn.LayerNorm."""

    def __init__(self, hidden_size: int, classes: int):
        super().__init__()
        self.first = nn.Linear(64, hidden_size)
        self.norm = nn.LayerNorm(hidden_size)
        self.second = nn.Linear(hidden_size, hidden_size)
        self.head = nn.Linear(hidden_size, classes)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return logits, [b, classes]. The arguments are the entries of `Images.batch`, without the labels."""
        hidden = F.gelu(self.norm(self.first(pixels)))
        return self.head(F.gelu(self.second(hidden)))


def build(values: Mapping[str, Any], demands: Demands) -> Network:
    return Network(values["hidden_size"], len(demands.class_names))


DATASETS["digits"] = Dataset("classification", load)
MODELS["digits_network"] = ModelFamily(
    task="classification",
    build=build,
    presets={"demo": {"hidden_size": 32}},
    output_layer=lambda network: network.head,
)
