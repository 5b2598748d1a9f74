"""Conversations to fine-tune on: JSON lines of chat messages in the tokenizer's chat template.

A line is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}. A
conversation is one example, and its targets are the tokens of the assistant's answers. Where an answer begins and ends
is read off the template: it is what the template writes beyond the earlier messages and the assistant's opening, the
token that ends a turn included.
"""

import dataclasses
import json
import logging
from collections.abc import Iterator, Sequence, Set
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from fabrics.data.documents import (
    EMPTY,
    DatasetError,
    Document,
    Documents,
    Skipped,
    Source,
    document_hash,
    file_identities,
    matching_files,
    numbered_lines,
    split,
)
from fabrics.data.examples import PaddedSequences, TaskData
from fabrics.data.token_store import TokenisedPart, cached_arrays, content_digest
from fabrics.data.tokenization import describe, fingerprint, named_tokenizer, padding
from utils.config.schema import Config, ConfigError
from utils.progress import progress_bar
from utils.text import counted, first_line

logger = logging.getLogger("adloco.dataset")

Messages = list[dict[str, str]]

# Today, in templates that write the date: the date that Llama's writes where it knows none.
_DATE = datetime(2024, 7, 26)


def conversations(files: Sequence[Path], skipped: Skipped) -> Iterator[Document]:
    """Yield each line's messages as JSON, with its place as origin; DatasetError: a line has no answer to learn."""
    for file in files:
        for number, line in numbered_lines(file):
            place = f"{file}:{number}"
            if not line.strip():
                skipped.add(EMPTY, place)
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # no JSON, not UTF-8, or nested too deeply
                raise DatasetError(f"{place}: not JSON: {error}") from None
            yield Document(json.dumps(_messages(record, place)), place)


def _messages(record: object, place: str) -> Messages:
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise DatasetError(f'{place}: must be an object with a list "messages"')
    for number, message in enumerate(messages, 1):
        texts = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise DatasetError(f'{place}: message {number} must have a "role" and a "content", both texts')
    weights = [message.get("weight") for message in messages if message["role"] == "assistant"]
    if any(weight not in (None, 1) for weight in weights):
        raise DatasetError(f'{place}: an answer has a "weight" other than 1; all answers are learned alike')
    if record.get("tools") or any(message.get("tool_calls") for message in messages):
        raise DatasetError(f'{place}: has "tools" or "tool_calls"; only the texts of messages are read')
    if not any(message["role"] == "assistant" for message in messages):
        raise DatasetError(f'{place}: no message has the role "assistant", whose answers are learned')
    if messages[0]["role"] == "assistant":
        raise DatasetError(f"{place}: begins with an answer; put a message of another role before it")
    # JSON can express half a surrogate pair, UTF-8 cannot: it becomes a question mark.
    return [
        {key: message[key].encode("utf-8", "replace").decode("utf-8") for key in ("role", "content")}
        for message in messages
    ]


def written(tokenizer: PreTrainedTokenizerBase, messages: Messages, **options: bool) -> str:
    """Return messages as the chat template writes them; ValueError: it refuses them."""
    try:
        # A run that resumes on another day reads the same text.
        return tokenizer.apply_chat_template(messages, tokenize=False, strftime_now=_DATE.strftime, **options)
    except TemplateError as error:
        raise ValueError(f"the chat template refuses these messages: {first_line(error)}") from None


def check_opening(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a ConfigError for a chat template that opens answers with a text, but not when it is asked for one."""
    question = [{"role": "user", "content": "question"}]
    try:
        plain = written(tokenizer, question)
        asked = written(tokenizer, question, add_generation_prompt=True)
        whole = written(tokenizer, [*question, {"role": "assistant", "content": "ANSWER"}])
    except ValueError:  # a template with other demands, which its conversations meet
        return
    opening, found, _ = whole.removeprefix(asked).partition("ANSWER")
    if asked == plain and found and opening.strip():
        raise ConfigError(
            f"tokenizer: its chat template ignores add_generation_prompt, so that {opening!r}, with which it opens "
            f"answers, would be learned as well"
        )


def answers_in(tokenizer: PreTrainedTokenizerBase, messages: Messages, text: str, end: int) -> list[tuple[int, int]]:
    """Return the range of characters of each answer that begins before `end` in the text of all messages."""
    answers = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = written(tokenizer, messages[:number], add_generation_prompt=True)
        if len(before) >= end:
            break
        after = written(tokenizer, messages[: number + 1])
        if not (after.startswith(before) and text.startswith(after)):
            raise ValueError(
                f"the chat template writes the messages up to {number + 1} differently when others follow, so that "
                f"the answer cannot be separated; split the conversation there"
            )
        answers.append((len(before), len(after)))
    return answers


def encode(
    documents: Documents,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    skipped: Skipped,
    name: str,
    held_out: Set[int] = frozenset(),
) -> tuple[TokenisedPart, np.ndarray]:
    """Tokenise conversations, cut at `limit` tokens; skip those without an answer in these.

    held_out: hashes of texts that are skipped: templates may write different messages alike.

    Return the part, and for each of its tokens whether it holds characters of an answer.
    """
    parts = []
    targets = []
    hashes = []
    special = tokenizer.all_special_tokens
    for document in progress_bar(documents(skipped), desc=f"tokenising {name} conversations", leave=False):
        messages = json.loads(document.text)
        if any(token in message["content"] for token in special for message in messages):
            skipped.add("with a special token in a message", document.origin)
            continue
        try:
            text = written(tokenizer, messages)
            # The template has written the special tokens. Without `verbose` no warning of long texts, cut below.
            encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            starts, ends = np.array(encoded["offset_mapping"]).reshape(-1, 2)[:limit].T
            answers = answers_in(tokenizer, messages, text, ends.max(initial=0))
        except ValueError as error:
            raise DatasetError(f"{document.origin}: {error}") from None
        if document_hash(text) in held_out:
            skipped.add("the same text as a validation conversation", document.origin)
            continue
        target = np.zeros(len(starts), dtype=bool)
        for begin, end in answers:
            target |= (starts < end) & (ends > begin)
        if not target[1:].any():  # the first token is predicted from nothing
            skipped.add("without an answer within sequence_length", document.origin)
            continue
        parts.append(np.array(encoded["input_ids"][:limit], dtype=np.int32))
        targets.append(target)
        hashes.append(document_hash(text))
    if not parts:
        raise ConfigError(f"sequence_length: no {name} conversation has an answer within {limit} tokens: {skipped}")
    part = TokenisedPart(np.concatenate(parts), np.cumsum([0, *map(len, parts)]), np.array(hashes, dtype=np.uint64))
    return part, np.concatenate(targets)


_ARRAYS = ("tokens", "offsets", "hashes", "targets")


def _encoded(config: Config, source: Source, tokenizer: PreTrainedTokenizerBase) -> dict[str, np.ndarray]:
    """Tokenise both parts: the arrays of each, and what was skipped, as JSON."""
    skipped = Skipped()
    arrays = {}
    train, validation = split(source, config.data_sample_size, config.val_size)
    held_out = frozenset()
    for name, documents in (("validation", validation), ("training", train)):
        part, targets = encode(documents, tokenizer, config.sequence_length, skipped, name, held_out)
        held_out = frozenset(part.hashes.tolist())
        for kind, values in zip(_ARRAYS, (part.tokens, part.offsets, part.hashes, targets), strict=True):
            arrays[f"{name}_{kind}"] = values
    return arrays | {"skipped": np.array(json.dumps(dataclasses.asdict(skipped)))}


def load_messages(config: Config) -> TaskData:
    """`dataset: messages`: the user's own conversations, of which the answers are learned."""
    files = matching_files(config.text_files, (".jsonl", ".jsonl.gz"), subfolders=True)
    tokenizer = named_tokenizer(config)
    if tokenizer is None:
        raise ConfigError(
            "tokenizer: dataset messages needs one with a chat template; name it, or the model that it belongs to with "
            "pretrained: true"
        )
    if not tokenizer.chat_template or not tokenizer.is_fast:
        missing = "has no chat template" if tokenizer.is_fast else "is not fast"
        raise ConfigError(f"tokenizer: {tokenizer.name_or_path} {missing}, which dataset messages needs (docs/data.md)")
    check_opening(tokenizer)
    source = Source(
        name=f"{counted(len(files), 'file')} of messages ({', '.join(config.text_files)})",
        identity={"messages": file_identities(files)},
        train=partial(conversations, files),
    )
    length = config.sequence_length
    sizes = [config.data_sample_size, config.val_size]
    special = {role: str(tokens) for role, tokens in tokenizer.special_tokens_map.items()}
    written_by = [fingerprint(tokenizer), tokenizer.chat_template, special, tokenizer.all_special_tokens]
    identity = [source.identity, sizes, length, written_by]
    arrays = cached_arrays(config, identity, lambda: _encoded(config, source, tokenizer))
    skipped = Skipped(**json.loads(str(arrays["skipped"])))
    parts = []
    examples = []
    for name in ("training", "validation"):
        tokens, offsets, hashes, targets = (arrays[f"{name}_{kind}"] for kind in _ARRAYS)
        parts.append(TokenisedPart(tokens, offsets, hashes))
        examples.append(PaddedSequences(tokens, offsets, length, padding(tokenizer), targets=targets))
    train_part, validation_part = parts
    data = TaskData(
        task="causal_lm",
        dataset="messages",
        source=source.name,
        train=examples[0],
        validation=examples[1],
        tokenizer=tokenizer,
        documents={"train": len(train_part), "validation": len(validation_part)},
        skipped=skipped.counts,
        content=content_digest(parts, tokenizer),
    )
    logger.info(
        "data: %s; %s training conversations of %s tokens, %s of them in answers; %s validation conversations; "
        "tokenizer %s",
        source.name,
        f"{len(train_part):,}",
        f"{len(train_part.tokens):,}",
        f"{arrays['training_targets'].sum():,}",
        f"{len(validation_part):,}",
        describe(tokenizer),
    )
    if skipped.counts:
        logger.info("skipped conversations: %s", skipped)
    return data
