"""A tokenizer with a chat template whose tokens can be counted by hand, and files of conversations."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["<end>", "<pad>", "<user>", "<assistant>", "<system>", *(f"w{number}" for number in range(25))]
NUMBERS = {word: number for number, word in enumerate(WORDS)}
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer in which every word between spaces is a token."""
    tokenizer = Tokenizer(models.WordLevel(NUMBERS, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", chat_template=TEMPLATE
    )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write_messages(path: Path, conversations: list) -> str:
    """Write one conversation per line, and return the path."""
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return str(path)


def small_talk(count: int) -> list:
    """Return conversations whose answer is the word after that of the question."""
    return [[user(f"w{number % 20} w{number // 20 % 20}"), assistant(f"w{number % 20 + 1}")] for number in range(count)]
