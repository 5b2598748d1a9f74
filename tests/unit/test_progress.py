"""Progress bars: where they are shown, and that they know the remaining time."""

import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tqdm import tqdm

from fabrics.data.documents import Document, Skipped, Source, split
from fabrics.data.partition import labels_by_cluster
from fabrics.data.token_store import TokenisedPart
from training_logs.recording.run_folder import start_logging
from utils import progress
from utils.checkpoint.checkpoint import whole, write_parts
from utils.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def notebook(monkeypatch):
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


def shown(monkeypatch, stream: io.StringIO, rank: int = 0, **how) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("RANK", str(rank))
    assert list(progress_bar(range(4), desc="counting", mininterval=0, **how)) == [0, 1, 2, 3]
    return stream.getvalue()


def test_a_terminal_shows_the_remaining_time_of_the_first_process(monkeypatch):
    assert "2/4 [00:00<00:00" in shown(monkeypatch, Terminal())
    assert shown(monkeypatch, Terminal(), rank=1) == ""
    assert shown(monkeypatch, io.StringIO()) == ""
    assert "2/4 [00:00<00:00" in shown(monkeypatch, io.StringIO(), rank=1, always=True)


@pytest.mark.usefixtures("notebook")
@pytest.mark.filterwarnings("ignore:IProgress not found")
def test_a_notebook_shows_it_as_well(monkeypatch):
    assert "2/4 [00:00<00:00" in shown(monkeypatch, io.StringIO())


def test_downloads_have_bars_in_a_terminal_only(monkeypatch):
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars

    for stream, disabled in ((Terminal(), False), (io.StringIO(), True)):
        enable_progress_bars()
        monkeypatch.setattr(sys, "stderr", stream)
        start_logging()
        assert are_progress_bars_disabled() == disabled


@pytest.mark.parametrize("train_size", [None, 60])
def test_tokenisation_knows_the_number_of_documents(train_size):
    source = Source("", {}, lambda skipped: (Document(f"text {number}", "") for number in range(100)))
    train, validation = split(source, train_size, 10)
    for part in (train, validation):
        assert part.count == len(list(part(Skipped())))


def test_long_work_has_a_bar(monkeypatch, tmp_path):
    stream, path = Terminal(), tmp_path / "worker.safetensors"
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "tqdm", lambda items, **how: tqdm(items, **how | {"delay": 0, "mininterval": 0}))
    documents = TokenisedPart(np.arange(8, dtype=np.uint16), np.arange(0, 9, 2), np.arange(4, dtype=np.uint64))
    labels_by_cluster(documents, 8, 2, 0)
    write_parts(path, {"a": whole(torch.zeros(3)), "b": whole(torch.zeros(1))})
    for bar in ("clustering: 100%", f"writing {path}:  75%"):
        assert bar in stream.getvalue()
