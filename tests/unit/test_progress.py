"""Progress bars: where they are shown, and that they know the remaining time."""

import io
import sys
from types import SimpleNamespace

import pytest

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
