"""Tokenizers: the model's own, one by name, or one trained on the run's documents."""

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from utils.config.schema import Config, ConfigError
from utils.text import first_line

logger = logging.getLogger("adloco.dataset")

END_OF_TEXT = "<|endoftext|>"

# A vocabulary of tens of thousands is learned from this much; more only costs memory.
TRAINING_CHARACTERS = 20_000_000
# Training takes time with the square of the longest word, such as a line of DNA: it sees longer ones in pieces.
LONGEST_WORD = 1000


def _byte_level_bpe(documents: Sequence[str], vocab_size: int) -> tuple[Tokenizer, dict[str, str]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer, dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)


def _word_piece(documents: Sequence[str], vocab_size: int) -> tuple[Tokenizer, dict[str, str]]:
    """A tokenizer like BERT's: lower case, words and punctuation apart, [CLS] text [SEP]."""
    special = {
        "pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]",
    }  # fmt: skip
    normalizer = normalizers.BertNormalizer()
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    learner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.normalizer = normalizer
    learner.pre_tokenizer = pre_tokenizer
    # The trainer numbers continuing characters in hash-table order, which differs between processes, and breaks ties
    # by number. As special tokens they get fixed numbers.
    alphabet = sorted(set().union(*(normalizer.normalize_str(document) for document in documents)))
    beforehand = [*special.values(), *(f"##{character}" for character in alphabet if not character.isspace())]
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=beforehand, show_progress=False)
    learner.train_from_iterator(documents, trainer)
    tokenizer = Tokenizer(models.WordPiece(learner.get_vocab(), unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer, special


# The tokenizer to train, by task.
TRAINERS = {"causal_lm": _byte_level_bpe, "classification": _word_piece}


def with_short_words(text: str) -> str:
    """Divide words of more than LONGEST_WORD characters by line breaks, and shorten longer blanks."""
    if len(text) <= LONGEST_WORD:
        return text

    def divided(word: re.Match) -> str:
        return "\n".join(word[0][at : at + LONGEST_WORD] for at in range(0, len(word[0]), LONGEST_WORD))

    # The lookbehind keeps the search from beginning anew at every character of a word.
    text = re.sub(rf"(?<!\S)\S{{{LONGEST_WORD + 1},}}", divided, text)
    return re.sub(rf"(?<!\s)(\s{{{LONGEST_WORD}}})\s+", r"\1", text)


def train_tokenizer(documents: Iterable[str], vocab_size: int, task: str = "causal_lm") -> PreTrainedTokenizerFast:
    """Train a tokenizer on the first TRAINING_CHARACTERS of `documents`: byte-level BPE, or WordPiece for BERT.

    The same documents give the same tokenizer.
    """
    beginning = []
    characters = 0
    for document in documents:
        beginning.append(with_short_words(document))
        characters += len(document)
        if characters >= TRAINING_CHARACTERS:
            break
    tokenizer, special = TRAINERS[task](beginning, vocab_size)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def load_tokenizer(name: str, key: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer by hub name or folder; ConfigError: it cannot be loaded; key: names it in the configuration."""
    if not (Path(name).is_absolute() or Path(name).exists()):
        logger.info(
            "tokenizer %s: read from the hub or its cache; without a network this fails after about a minute, with "
            "HF_HUB_OFFLINE=1 at once",
            name,
        )
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # a damaged file leads to bare Exceptions, KeyErrors and more in the libraries
        raise ConfigError(
            f"{key}: cannot load the tokenizer {name!r}, neither from a local folder nor from the hub: "
            f"{first_line(error)}"
        ) from None


def tokenizer_name(config: Config) -> tuple[str, str] | None:
    """Return the configured tokenizer, else the pretrained model's own, and its key; None: one must be trained."""
    if config.tokenizer is not None:
        return config.tokenizer, "tokenizer"
    if config.model_config.get("pretrained") is True:  # Family.problems has checked the rest
        return config.model_config["name"], "model_config.name"
    return None


def named_tokenizer(config: Config) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of `tokenizer_name`, or return None."""
    named = tokenizer_name(config)
    return None if named is None else load_tokenizer(*named)


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of everything that affects tokenisation; equal for equal tokenizers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Calls leave their truncation and padding behind.
        content = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("truncation", "padding")}
    else:
        content = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    content["end of text"] = tokenizer.eos_token_id
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | os.PathLike) -> None:
    """Write a tokenizer to a folder; OSError: it cannot be written, which the library reports as a plain Exception."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is Exception:
            raise OSError(str(error)) from None
        raise


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows of the embedding: one more than the largest token (vocabularies may have gaps)."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def end_of_text(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that ends a document; ConfigError: the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"tokenizer: {tokenizer.name_or_path!r} has no end-of-text token (eos_token), which joins documents"
        )
    return tokenizer.eos_token_id


def padding(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token to pad with; padding is masked, so any token works."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in candidates if token is not None)


def describe(tokenizer: PreTrainedTokenizerBase, name: str | None = None) -> str:
    """Return name, size and fingerprint for messages."""
    return f"{name or tokenizer.name_or_path} ({len(tokenizer):,} tokens, fingerprint {fingerprint(tokenizer)})"
