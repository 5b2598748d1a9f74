"""C4, from raw shards to perplexity: tests, and a check of anybody's own configuration.

    python tests/integration/test_c4_dataset.py [--config PATH] [key=value ...]

loads the C4 source that the configuration names, decodes its tokens back to text, looks for documents that are in both
parts, and computes the perplexity of the configured model. Without --config it
checks configs/c4_microllama_small.yaml, which needs no network.
"""

import argparse
import logging
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from configs import make_samples
from fabrics.config_checks import CHECKS
from fabrics.data import token_store
from fabrics.data.c4 import c4_documents
from fabrics.data.dataset_loader import task_data
from fabrics.data.documents import DatasetError, document_hash
from fabrics.data.examples import PackedSequences
from fabrics.data.token_store import TokenisedPart, TokenisedSet, encode
from fabrics.models.model_family import build_model
from tests.support.helpers import evaluate
from utils.config.reading import load_config
from utils.config.schema import Config, ConfigError

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")

# The check


def part_documents(part: TokenisedPart, count: int | None = None):
    """The tokens of the first documents, end-of-text excluded."""
    for index in range(len(part) if count is None else min(count, len(part))):
        yield part.tokens[part.offsets[index] : part.offsets[index + 1] - 1]


def decoded_exactly(documents: TokenisedSet, part: TokenisedPart, count: int) -> tuple[int, int, int]:
    """Return how many of the first documents decode to the text that was tokenised, and to a text of the same tokens.

    Returns:
        number of documents; of those that decode to their text, by its hash; of those that decode to the same tokens.
    """
    exact = stable = total = 0
    for index, tokens in enumerate(part_documents(part, count)):
        text = documents.tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False)
        (again,) = encode(documents.tokenizer, [text])
        exact += document_hash(text) == part.hashes[index]
        stable += again[:-1].tolist() == tokens.tolist()
        total += 1
    return total, exact, stable


def in_both(documents: TokenisedSet) -> int:
    """Return how many training documents have the tokens of a validation document."""
    held_out = {tokens.tobytes() for tokens in part_documents(documents.validation)}
    progress = tqdm(part_documents(documents.train), "comparing parts", len(documents.train), disable=None)
    return sum(tokens.tobytes() in held_out for tokens in progress)


def check(config: Config) -> list[str]:
    """Print what is found; the problems."""
    problems = []
    documents = c4_documents(config)
    data = task_data(config, documents)
    vocabulary = len(data.tokenizer)
    print(f"source: {data.source}")
    print(
        f"documents: {data.documents['train']:,} to train on in {len(data.train):,} sequences of up to "
        f"{config.sequence_length} tokens, {data.documents['validation']:,} to validate on in {len(data.validation):,}"
    )
    for part_name, part in (("train", documents.train), ("validation", documents.validation)):
        total, exact, stable = decoded_exactly(documents, part, 200)
        print(f"decoding {part_name}: {exact} of {total} documents give back their exact text, {stable} their tokens")
        if max(exact, stable) < total:
            problems.append(f"{part_name}: {total - max(exact, stable)} documents cannot be decoded")
    first = next(part_documents(documents.train)).tolist()
    print(f"the first training document begins: {documents.tokenizer.decode(first)[:80]!r}")
    both = in_both(documents)
    print(f"documents in both parts: {both}")
    if both:
        problems.append(f"{both} training documents are validation documents as well")
    model = build_model(
        config.model_type, config.model_config, data.tokenizer, config.sequence_length, config.training_seed
    )
    validation = PackedSequences(documents.validation.packed(config.sequence_length)[:64])
    result = evaluate(model, validation, "causal_lm", config.eval_batch_size)
    state = "pretrained" if config.model_config.get("pretrained") is True else "untrained"
    print(f"perplexity of the {state} model on {len(validation)} validation sequences: {result.metric:.2f}")
    if not 1.0 < result.metric < 100 * vocabulary:
        problems.append(f"the model's perplexity is {result.metric}")
    return problems


def main(arguments: list[str] | None = None) -> int:
    """0: all is well; 1: a check failed; 2: the source or the model cannot be loaded."""
    small = ROOT / "configs" / "c4_microllama_small.yaml"
    parser = argparse.ArgumentParser(description="Check that a configuration's C4 is loaded as it should be.")
    parser.add_argument("--config", type=Path, default=small, help="default: configs/c4_microllama_small.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that win over the file's")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        config, _ = load_config(options.config, options.overrides, CHECKS)
        if config.dataset != "c4":
            raise ConfigError(f"dataset: this checks c4, {options.config} has {config.dataset}")
        if options.config == small and config.c4_local_path and not Path(config.c4_local_path).exists():
            make_samples.main(Path(config.c4_local_path).parent, ("c4",))
        problems = check(config)
    except (ConfigError, DatasetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for problem in problems:
        print(f"FAILED: {problem}")
    if not problems:
        print("all is well")
    return 1 if problems else 0


# Tests


def test_the_check_finds_all_well_where_it_is(tokenised_c4, make_c4, capsys):
    assert check(make_c4(c4_tokenized_path=tokenised_c4)) == []
    output = capsys.readouterr().out
    assert "decoding train: 200 of 200 documents give back their exact text, 200 their tokens" in output
    assert "documents in both parts: 0" in output


def test_the_check_finds_what_is_wrong(tokenised_c4, make_c4, tmp_path, capsys):
    """Tokens of another document, and a validation document among the training documents."""
    broken = tmp_path / "set"
    shutil.copytree(tokenised_c4, broken)
    tokens = np.fromfile(broken / "train" / "tokens.bin", np.uint16)
    offsets = np.fromfile(broken / "train" / "offsets.bin", np.int64)
    other = np.fromfile(broken / "validation" / "tokens.bin", np.uint16)
    ends = np.fromfile(broken / "validation" / "offsets.bin", np.int64)
    leaked = other[ends[3] : ends[4]]
    tokens = np.concatenate([leaked, tokens[offsets[1] :]])
    offsets[1:] += len(leaked) - offsets[1]
    tokens.tofile(broken / "train" / "tokens.bin")
    offsets.tofile(broken / "train" / "offsets.bin")
    sums = "".join(f"{digest}  {name}\n" for name, digest in token_store._checksums(broken).items())
    (broken / "SHA256SUMS").write_text(sums)
    assert check(make_c4(c4_tokenized_path=broken)) == ["1 training documents are validation documents as well"]
    assert "decoding train: 199 of 200 documents give back their exact text" in capsys.readouterr().out


if __name__ == "__main__":
    sys.exit(main())
