"""What a language model says: continuations of validation texts, to be read beside how the texts really go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from fabrics.data.examples import Examples, TaskData
from fabrics.training.flat_model import FlatModel

if TYPE_CHECKING:
    from cluster import Cluster
    from fabrics.pool.eval_tool import Evaluation
    from training_logs.recording.records import Observer

COUNT = 3
PROMPT_TOKENS = 32
NEW_TOKENS = 40
TEMPERATURE = 0.8
TOP_K = 40
SAMPLING = {"temperature": TEMPERATURE, "top_k": TOP_K}
# Of the validation texts so many are looked at for long ones.
_CANDIDATES = 1000


@dataclass(frozen=True)
class Continuation:
    """The beginning of a text, how the model goes on, and how the text does; as text, special tokens included."""

    prompt: str
    continuation: str
    reference: str


def _chosen(examples: Examples, longest: int, seed: int) -> tuple[list[int], int]:
    """Which texts, and how many of their tokens are the prompt: half of the shortest at most.

    The first in a random order of those that have `longest` tokens in each half; where there are too few of them, the
    longest ones besides.
    """
    order = np.random.default_rng(seed).permutation(len(examples))[:_CANDIDATES].tolist()
    halves = {index: min(examples.tokens([index]) // 2, longest) for index in order}
    chosen = [index for index in sorted(order, key=lambda index: -halves[index])[:COUNT] if halves[index]]
    return chosen, min((halves[index] for index in chosen), default=0)


@torch.no_grad()
def sampled(module: nn.Module, prompts: torch.Tensor, new_tokens: int, seed: int) -> torch.Tensor:
    """Continue token sequences by sampling from the TOP_K likeliest tokens at TEMPERATURE.

    Args:
        module: a causal language model of transformers, in eval mode.
        prompts: [texts, tokens], int64, without padding.
        seed: of the sampling; no global generator is touched, and the numbers are the same on every device.

    Returns:
        [texts, new_tokens], on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens, cache, found = prompts, None, []
    for _ in range(new_tokens):
        output = module(input_ids=tokens, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits, candidates = output.logits[:, -1].float().cpu().topk(min(TOP_K, output.logits.shape[-1]))
        drawn = torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)
        found.append(candidates.gather(1, drawn))
        tokens = found[-1].to(prompts.device)
    return torch.cat(found, 1)


def continuations(
    working: FlatModel, parameters: torch.Tensor, data: TaskData, sequence_length: int, seed: int
) -> list[Continuation]:
    """How a model goes on after the beginnings of COUNT validation texts; nothing where it is no language model.

    A prompt has PROMPT_TOKENS at most, and half of the sequence length; what is said ends with the model's end of text,
    after NEW_TOKENS, or with the sequence length, beyond which nothing was trained.

    Args:
        parameters: flat, of the model; the working model has them afterwards.
        seed: of the choice of texts and of the sampling.
    """
    if data.task != "causal_lm":
        return []
    chosen, length = _chosen(data.validation, min(PROMPT_TOKENS, sequence_length // 2), seed)
    if not chosen:
        return []
    batch = data.validation.batch(chosen, working.device)
    with working.evaluating(parameters) as module:
        new = sampled(module, batch["input_ids"][:, :length], min(NEW_TOKENS, sequence_length - length), seed)
    lengths = [data.validation.tokens([index]) for index in chosen]
    texts = [row[:end] for row, end in zip(batch["input_ids"].tolist(), lengths, strict=True)]

    def text(tokens: list[int]) -> str:
        return data.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def first_document(tokens: list[int]) -> str:
        end = data.tokenizer.eos_token_id
        return text(tokens[: tokens.index(end)] if end in tokens else tokens)

    return [
        Continuation(text(known[:length]), first_document(said), first_document(known[length : length + new.shape[1]]))
        for known, said in zip(texts, new.tolist(), strict=True)
    ]


def best_continuations(cluster: Cluster, final: dict[int, Evaluation], observer: Observer) -> list[Continuation]:
    """How the best model continues validation texts; empty in processes that do not have it."""
    config = cluster.config
    node = cluster.nodes[0]  # of the main process
    parameters = cluster.trainers[cluster.best(final)].parameters_for(node)
    if parameters is None:
        return []
    try:
        working = cluster.models[node.device]
        return continuations(working, parameters, cluster.data, config.sequence_length, config.training_seed)
    except Exception as error:  # memory, or whatever a loaded model or tokenizer raises: the run itself is done
        observer.warn(f"validation texts could not be continued: {type(error).__name__}: {error}")
        return []
