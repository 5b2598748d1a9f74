"""Samples of text: a language model's continuations of validation texts, beside the texts' own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from fabrics.data.examples import TaskData
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


@dataclass(frozen=True)
class Continuation:
    """One sample, as text with special tokens.

    Attributes:
        prompt: the beginning of a validation text.
        continuation: the model's tokens after it.
        reference: the text's own tokens after it.
    """

    prompt: str
    continuation: str
    reference: str


@torch.no_grad()
def sample_tokens(module: nn.Module, prompts: torch.Tensor, new_tokens: int, seed: int) -> torch.Tensor:
    """Continue token sequences by sampling from the TOP_K most likely tokens at TEMPERATURE.

    Args:
        module: a causal language model of transformers, in eval mode.
        prompts: [texts, tokens], int64, without padding.
        seed: seed of the sampling. It uses no global generator, and samples the same on every device.

    Returns:
        [texts, new_tokens], on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = prompts
    cache = None
    sampled = []
    for _ in range(new_tokens):
        output = module(input_ids=tokens, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits, candidates = output.logits[:, -1].float().cpu().topk(min(TOP_K, output.logits.shape[-1]))
        drawn = torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)
        sampled.append(candidates.gather(1, drawn))
        tokens = sampled[-1].to(prompts.device)
    return torch.cat(sampled, 1)


def continuations(working: FlatModel, parameters: torch.Tensor, data: TaskData, seed: int) -> list[Continuation]:
    """Continue the beginnings of COUNT validation texts; empty if the data are not packed texts.

    A prompt has at most PROMPT_TOKENS tokens and half of the sequence length. A continuation ends with the end-of-text
    token, after NEW_TOKENS, or at the sequence length, beyond which nothing was trained.

    Args:
        working: computes the continuations, and holds the parameters afterwards.
        parameters: flat parameters of the model.
        seed: seed of the choice of texts and of the sampling.
    """
    sequence_length = data.validation.tokens_per_example
    if data.task != "causal_lm" or sequence_length is None:
        return []
    length = min(PROMPT_TOKENS, sequence_length // 2)
    new_tokens = min(NEW_TOKENS, sequence_length - length)
    chosen = np.random.default_rng(seed).permutation(len(data.validation))[:COUNT]
    rows = data.validation.batch(chosen, working.device)["input_ids"]
    with working.evaluating(parameters) as module:
        sampled = sample_tokens(module, rows[:, :length], new_tokens, seed)

    def text(tokens: list[int]) -> str:
        return data.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def first_document(tokens: list[int]) -> str:
        end = data.tokenizer.eos_token_id
        return text(tokens[: tokens.index(end)] if end in tokens else tokens)

    found = []
    for row, new in zip(rows.tolist(), sampled.tolist(), strict=True):
        reference = row[length : length + new_tokens]
        found.append(Continuation(text(row[:length]), first_document(new), first_document(reference)))
    return found


def best_continuations(cluster: Cluster, final: dict[int, Evaluation], observer: Observer) -> list[Continuation]:
    """Continue validation texts with the best model; empty in processes that do not have it."""
    node = cluster.nodes[0]  # of the main process
    parameters = cluster.trainers[cluster.validation.best(final)].worker_group.parameters_for(node)
    if parameters is None:
        return []
    try:
        model = cluster.models[node.device]
        return continuations(model, parameters, cluster.data, cluster.config.training_seed)
    except Exception as error:  # of memory, or anything a loaded model or tokenizer raises: the run itself is done
        observer.warn(f"validation texts could not be continued: {type(error).__name__}: {error}")
        return []
