"""Tokenise C4 once, for any number of runs: python c4/tokenize_c4.py --help; see c4/guide.md.

Writes the folder that `c4_tokenized_path` in a configuration names.
"""

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fabrics.data.c4 import hub_source, local_source
from fabrics.data.documents import MOST_BY_DEFAULT, DatasetError
from fabrics.data.token_store import Recipe, TokenisedSet, tokenised
from fabrics.data.tokenization import describe, load_tokenizer
from fabrics.planning.command import parse_count
from utils.config.schema import ConfigError


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tokenise C4 once, for any number of runs.")
    parser.add_argument(
        "--model_name", default="keeeeenw/MicroLlama", help="hub name or folder of a tokenizer (default: %(default)s)"
    )
    parser.add_argument("--language", default="en", help="configuration of allenai/c4 (default: %(default)s)")
    parser.add_argument(
        "--data_sample_size", type=parse_count, default=1000, help="documents to train on (default: %(default)s)"
    )
    parser.add_argument(
        "--max_length",
        type=parse_count,
        default=512,
        help="sequence length by which the report counts sequences; documents are kept whole (default: %(default)s)",
    )
    parser.add_argument(
        "--output_dir", type=Path, default=Path("tokenized_c4"), help="folder to write (default: %(default)s)"
    )
    for published in ("--streaming", "--create_eval_split"):  # always so
        parser.add_argument(published, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--eval_size",
        type=parse_count,
        help=f"validation documents (default: one in twenty of data_sample_size, at most {MOST_BY_DEFAULT})",
    )
    parser.add_argument("--input", help="local shards (file, folder or glob) instead of the hub")
    return parser.parse_args(arguments)


def report(documents: TokenisedSet, max_length: int) -> None:
    """Print what a set holds and how to use it."""
    metadata = documents.metadata
    print(f"source: {metadata['source']}")
    print(f"tokenizer: {describe(documents.tokenizer, metadata['tokenizer']['name'])}")
    for name, part in metadata["parts"].items():
        print(
            f"{name}: {part['documents']:,} documents, {part['tokens']:,} tokens, "
            f"{part['tokens'] // max_length:,} sequences of {max_length}"
        )
    for reason, entry in metadata["skipped"].items():
        print(f"skipped: {entry['documents']:,} {reason} (first: {entry['first']})")
    print(f"in the configuration: c4_tokenized_path: {documents.folder}")


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if the set is complete, 2 if it cannot be made, 130 if interrupted, to be continued."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    options = parse_arguments(arguments)
    try:
        source = local_source(options.input, options.language) if options.input else hub_source(options.language)
        tokenizer = load_tokenizer(options.model_name, "--model_name")
        recipe = Recipe(source, options.data_sample_size, options.eval_size, tokenizer)
        report(tokenised(options.output_dir, recipe, cache=False), options.max_length)
    except (ConfigError, DatasetError) as error:
        print(f"error: {str(error).replace('val_size:', '--eval_size:')}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: the same command continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
