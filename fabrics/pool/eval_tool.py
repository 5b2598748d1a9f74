"""Evaluation: mean loss and the task's metric on held-out examples, in batches, padding excluded."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from algorithms.batch.losses import example_loss_sums, logits_of
from algorithms.registry import Registry
from fabrics.data.examples import Examples
from fabrics.models.attention import unmasked


@dataclass(frozen=True)
class ClassScores:
    """How well one class is found, each between 0 and 1; what nothing was counted for is 0.

    precision: share of what was taken for the class that is of it. recall: share of the class that was found. f1:
    their harmonic mean. examples: how many of the class there are.
    """

    precision: float
    recall: float
    f1: float
    examples: int


@dataclass(frozen=True)
class Evaluation:
    """loss: mean over predicted targets, in nats. metric: perplexity, or accuracy between 0 and 1.

    classes: the scores of each class; empty for a language model. shares: the same on the validation examples of each
    share of the data, None where a share has none; empty where there are no shares.
    """

    loss: float
    metric: float
    classes: tuple[ClassScores, ...] = ()
    shares: tuple["Evaluation | None", ...] = ()


@dataclass(frozen=True)
class Metric:
    """How a task is judged. value: from (mean loss, share of correct targets) to the metric."""

    name: str
    higher_is_better: bool
    decimals: int
    value: Callable[[float, float], float]


def _perplexity(loss: float, correct: float) -> float:
    return math.exp(loss) if loss < 700.0 else math.inf


METRICS = Registry(
    {
        "causal_lm": Metric("perplexity", False, 2, _perplexity),
        "classification": Metric("accuracy", True, 4, lambda loss, correct: correct),
    }
)


def class_scores(confusion: torch.Tensor) -> tuple[ClassScores, ...]:
    """The scores of each class from counts [true class, predicted class]."""
    found = confusion.diagonal().tolist()
    rows, columns = confusion.sum(1).tolist(), confusion.sum(0).tolist()
    return tuple(
        ClassScores(
            precision=hits / predicted if predicted else 0.0,
            recall=hits / true if true else 0.0,
            f1=2 * hits / (true + predicted) if true + predicted else 0.0,
            examples=int(true),
        )
        for hits, true, predicted in zip(found, rows, columns, strict=True)
    )


@dataclass(frozen=True)
class EvaluationPart:
    """Sums over some batches of the evaluation examples; small enough to send to everybody.

    sums: per batch the sum of the losses of its targets and how many targets it has. confusion: counts of
    [true class, predicted class]; None for a language model. shares: the same of each share's examples.
    """

    sums: dict[int, tuple[float, float]]
    confusion: torch.Tensor | None
    shares: tuple["EvaluationPart", ...] = ()

    @classmethod
    def joined(cls, parts: Sequence["EvaluationPart"]) -> "EvaluationPart":
        """Several parts, of different batches, as one."""
        sums = {number: pair for part in parts for number, pair in part.sums.items()}
        confusions = [part.confusion for part in parts if part.confusion is not None]
        shares = tuple(cls.joined(own) for own in zip(*(part.shares for part in parts if part.shares), strict=True))
        return cls(sums, torch.stack(confusions).sum(0) if confusions else None, shares)


@dataclass(frozen=True)
class BegunBatches:
    """Batches that a device is evaluating. sums: [batches, 2] there; confusion: likewise, or None."""

    numbers: Sequence[int]
    sums: torch.Tensor
    confusion: torch.Tensor | None

    def wait(self) -> EvaluationPart:
        """The sums, when the device has them."""
        values = {number: tuple(pair) for number, pair in zip(self.numbers, self.sums.tolist(), strict=True)}
        return EvaluationPart(values, None if self.confusion is None else self.confusion.cpu())


def batch_count(examples: Examples, batch_size: int) -> int:
    """Batches that the examples make."""
    return -(-len(examples) // batch_size)


@torch.no_grad()
def begin_batches(
    module: nn.Module, examples: Examples, batch_size: int, device: torch.device, batches: Sequence[int]
) -> BegunBatches:
    """Evaluate a module (in eval mode) on some batches of the examples, without waiting for the device."""
    sums = torch.zeros(len(batches), 2, dtype=torch.float64, device=device)
    confusion: torch.Tensor | None = None
    for row, number in enumerate(batches):
        start = number * batch_size
        batch = examples.batch(range(start, min(start + batch_size, len(examples))), device)
        labels = batch.pop("labels")
        with unmasked(module, batch):
            logits = logits_of(module(**batch))
        losses, counts = example_loss_sums(logits, labels)
        sums[row, 0] = losses.sum(dtype=torch.float64)
        sums[row, 1] = counts.sum()
        if labels.dim() == 1:
            classes = logits.shape[-1]
            if confusion is None:
                confusion = torch.zeros(classes, classes, dtype=torch.int64, device=device)
            cells = labels * classes + logits.argmax(-1)
            confusion.view(-1).scatter_add_(0, cells, torch.ones_like(cells))
    return BegunBatches(batches, sums, confusion)


def combined(parts: Iterable[EvaluationPart], task: str) -> Evaluation:
    """The evaluation that these parts make up together.

    The loss is the sum of the losses of all predicted targets divided by their number (not a mean of batch means),
    summed in the order of the batches whoever evaluated them.

    Raises:
        ValueError: there is nothing to predict in the examples.
    """
    return _evaluation(EvaluationPart.joined(list(parts)), task)


def _evaluation(part: EvaluationPart, task: str) -> Evaluation:
    loss, count = (sum(part.sums[number][entry] for number in sorted(part.sums)) for entry in (0, 1))
    if count == 0:
        raise ValueError("the evaluation examples hold no target to predict")
    scores, correct = (), 0.0
    if part.confusion is not None:
        scores, correct = class_scores(part.confusion), part.confusion.trace().item() / count
    shares = tuple(_evaluation(share, task) if share.sums else None for share in part.shares)
    return Evaluation(loss / count, METRICS[task].value(loss / count, correct), scores, shares)


def evaluate(module: nn.Module, examples: Examples, task: str, batch_size: int, device: torch.device) -> Evaluation:
    """Evaluate a module (in eval mode) on all of `examples`; see `combined`."""
    everything = range(batch_count(examples, batch_size))
    return combined([begin_batches(module, examples, batch_size, device, everything).wait()], task)
