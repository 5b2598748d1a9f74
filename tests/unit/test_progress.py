"""Progress bars: where they are shown, and that they know the remaining time."""

import io
import sys
from types import SimpleNamespace

import pytest

from fabrics.data.documents import Document, Skipped, Source
from fabrics.data.held_out import split
from training_logs.recording.run_folder import start_logging
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
