"""What data costs: python benchmarks/performance/data.py [--documents N ...] [--sequences N] [--examples N]
[--repeats N] [--folder PATH].

- tokenising: documents per second and peak memory of c4/tokenize_c4.py, for growing numbers of documents. They are
  made from real text (paragraphs of Python's documentation) in the real format, about as long as those of C4.
- opening: time and memory until a tokenised set of so many sequences can be read.
- order: time and memory until a process knows which examples come next, for one of four trainers; and for their merge
  at half an epoch.
- batches: the time to assemble a batch, as a share of a training step of the demo model with it, interleaved.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from configs.make_samples import write_shard
from fabrics.data.documents import python_documents
from fabrics.data.examples import Examples, PackedSequences, PaddedSequences
from fabrics.data.tokenization import fingerprint, padding, train_tokenizer
from fabrics.models.registry import build_model
from utils.utils import write_json_atomically

ROOT = Path(__file__).resolve().parents[2]
_SEQUENCE_LENGTH = 128

# Run in a process of its own, so that its memory is all that is measured.
_OPEN = """
import resource, sys, time
from pathlib import Path
import fabrics.data.examples, fabrics.data.token_store, numpy, psutil
before, started = psutil.Process().memory_info().rss, time.perf_counter()
documents = fabrics.data.token_store.open_tokenised(Path(sys.argv[1]))
examples = fabrics.data.examples.PackedSequences(documents.train.packed(128))
examples.batch(numpy.arange(8) * (len(examples) // 8), fabrics.data.examples.torch.device("cpu"))
print(len(examples), time.perf_counter() - started, psutil.Process().memory_info().rss - before)
"""
_ORDER = """
import sys, time
import psutil
from benchmarks.performance.data import peak_memory
from fabrics.data.sampler import DataCursor, Subsets
count = int(sys.argv[1])
before = psutil.Process().memory_info().rss
subsets = Subsets(0, count, 4)
first, *others = [DataCursor(subsets, trainer) for trainer in range(4)]
for name in ("one of four trainers", "their merge at half an epoch"):
    started = time.perf_counter()
    first.peek(0, 8)
    seconds, used, most = time.perf_counter() - started, psutil.Process().memory_info().rss, peak_memory()
    print(f"order of {count:,} examples, {name}: {seconds:.2f} s, {(used - before) / 1e6:.0f} MB, "
          f"at most {(most - before) / 1e6:.0f} MB")
    for cursor in (first, *others):
        cursor.advance([len(cursor) // 2])
    first.unite(others)
"""
_TOKENISE = """
import sys
sys.argv = sys.argv[1:]
from benchmarks.performance.data import peak_memory
from c4.tokenize_c4 import main
code = main()
print("PEAK", peak_memory())
sys.exit(code)
"""


def peak_memory() -> int:
    """The most bytes that this program has held; getrusage would count what its parent held before it began."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def made_documents(count: int) -> Iterator[str]:
    """Different documents of about 2,000 characters, each of eight real ones."""
    texts = [text for text in python_documents() if len(text) < 2000]
    generator = np.random.default_rng(0)
    for _ in range(count):
        yield "\n\n".join(texts[index] for index in generator.integers(0, len(texts), 8))


def measure_tokenising(folder: Path, counts: list[int]) -> None:
    """Print documents per second and peak memory for each number of documents."""
    print(f"{'documents':>10} {'processes':>10} {'tokens':>12} {'documents/s':>12} {'peak memory':>12}")
    train_tokenizer(python_documents(), 8192).save_pretrained(folder / "tokenizer")
    for count in counts:
        shards = folder / f"shards_{count}"
        shards.mkdir()
        write_shard(shards / "c4-train.00000-of-00001.json.gz", made_documents(count + count // 20))
        for processes in (1, 2):
            arguments = [
                *("--model_name", folder / "tokenizer", "--input", shards, "--data_sample_size", count),
                *("--create_eval_split", "--output_dir", folder / f"set_{count}_{processes}"),
                *("--num_proc", processes),
            ]
            started = time.perf_counter()
            result = subprocess.run(
                [sys.executable, "-c", _TOKENISE, "tokenize_c4.py", *map(str, arguments)],
                cwd=ROOT, capture_output=True, text=True, check=True,
            )  # fmt: skip
            seconds = time.perf_counter() - started
            peak = int(result.stdout.split("PEAK ")[1])
            metadata = json.loads((folder / f"set_{count}_{processes}" / "metadata.json").read_text())
            tokens = sum(part["tokens"] for part in metadata["parts"].values())
            print(f"{count:>10,} {processes:>10} {tokens:>12,} {count / seconds:>12,.0f} {peak / 1e6:>9,.0f} MB")


def write_large_set(folder: Path, sequences: int) -> None:
    """A set of random tokens: opening it costs what opening a real one costs."""
    tokenizer = train_tokenizer(python_documents()[:100], 300)
    folder.mkdir()
    tokenizer.save_pretrained(folder / "tokenizer")
    parts = {"train": sequences * _SEQUENCE_LENGTH, "validation": 100 * _SEQUENCE_LENGTH}
    for name, tokens in parts.items():
        (folder / name).mkdir()
        np.random.default_rng(0).integers(0, 300, tokens, dtype=np.uint16).tofile(folder / name / "tokens.bin")
        ends = np.arange(0, tokens + 1, _SEQUENCE_LENGTH, dtype=np.int64)
        ends.tofile(folder / name / "offsets.bin")
        ends[1:].astype(np.uint64).tofile(folder / name / "hashes.bin")
    metadata = {
        "format": 1,
        "source": "random tokens",
        "dtype": "<u2",
        "tokenizer": {"name": "small", "fingerprint": fingerprint(tokenizer)},
        "parts": {name: {"tokens": tokens, "documents": tokens // _SEQUENCE_LENGTH} for name, tokens in parts.items()},
        "skipped": {},
    }
    write_json_atomically(folder / "metadata.json", metadata)


def measure_opening(folder: Path, sequences: int) -> None:
    """Print how long it takes, and what it costs, until the first batch is read."""
    write_large_set(folder / "large", sequences)
    result = subprocess.run(
        [sys.executable, "-c", _OPEN, str(folder / "large")], cwd=ROOT, capture_output=True, text=True, check=True
    )
    count, seconds, memory = result.stdout.split()
    print(f"opening {int(count):,} sequences: {float(seconds):.3f} s, {int(memory) / 1e6:.1f} MB")


def measure_order(examples: int) -> None:
    """Print what it takes to know the order of so many examples."""
    result = subprocess.run(
        [sys.executable, "-c", _ORDER, str(examples)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    print(result.stdout, end="")


def measure_batches(repeats: int, batch: int = 8) -> None:
    """Print what assembling a batch takes beside a training step of the demo model."""
    tokenizer = train_tokenizer(python_documents(), 2048)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model("microllama", {"preset": "demo"}, tokenizer, _SEQUENCE_LENGTH, 0).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    generator = np.random.default_rng(0)
    count = 100_000
    tokens = generator.integers(0, 2048, count * _SEQUENCE_LENGTH, dtype=np.uint16)
    offsets = np.arange(0, len(tokens) + 1, _SEQUENCE_LENGTH)
    kinds: dict[str, Examples] = {
        "packed": PackedSequences(tokens.reshape(-1, _SEQUENCE_LENGTH)),
        "padded": PaddedSequences(tokens, offsets, _SEQUENCE_LENGTH, padding(tokenizer)),
    }
    for name, examples in kinds.items():
        reading, training = [], []
        for _ in range(repeats):
            indices = generator.integers(0, count, batch)
            started = time.perf_counter()
            values = examples.batch(indices, device)
            reading.append(time.perf_counter() - started)
            started = time.perf_counter()
            labels = values.pop("labels")
            logits = model(**values).logits
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize()
            training.append(time.perf_counter() - started)
        read, step = statistics.median(reading), statistics.median(training)
        print(
            f"{name} batch of {batch} x {_SEQUENCE_LENGTH}: {read * 1e6:.0f} us, {read / step:.2%} of a training step "
            f"({step * 1e3:.1f} ms) on {device}"
        )


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What data costs.")
    parser.add_argument("--documents", type=int, nargs="+", default=[2_000, 50_000], help="numbers to tokenise")
    parser.add_argument("--sequences", type=int, default=1_000_000, help="size of the set to open")
    parser.add_argument("--examples", type=int, default=10_000_000, help="examples to put in order")
    parser.add_argument("--repeats", type=int, default=60, help="batches to assemble")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        measure_tokenising(Path(name), options.documents)
        measure_opening(Path(name), options.sequences)
    measure_order(options.examples)
    measure_batches(options.repeats)


if __name__ == "__main__":
    main()
