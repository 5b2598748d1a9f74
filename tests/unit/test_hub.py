"""A hub that is not there, and one whose network fails on the way."""

import socket
import threading
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled

import run as program
from configs import make_samples
from fabrics.data import c4, hub
from fabrics.data.dataset_loader import load_data
from fabrics.data.documents import DatasetError, Skipped, SourceLostError
from fabrics.data.tokenization import load_tokenizer
from tests.support.hub_server import HubServer
from utils.config.schema import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def online(monkeypatch, tmp_path):
    """A function that makes an address the hub's, as if the user had not asked to be offline; nobody waits."""
    import datasets  # takes a second, which other files of tests need not wait

    monkeypatch.setattr("time.sleep", lambda seconds: None)

    def at(url: str) -> None:
        for module in (constants, datasets.config):
            monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)
        for name in ("MAX_RETRIES", "RETRY_INTERVAL"):
            for what in ("READ", "OPEN"):
                key = f"STREAMING_{what}_{name}"
                monkeypatch.setattr(datasets.config, key, getattr(datasets.config, key))
        hub.unreachable.cache_clear()

    yield at
    hub.unreachable.cache_clear()


@pytest.fixture
def closed_port():
    """An address where nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def hub_server(online, tmp_path):
    """C4 on a hub: three shards to train on."""
    (tmp_path / "c4").mkdir()
    make_samples.write_c4(tmp_path / "c4", 600, 60, shards=3)
    with HubServer(tmp_path / "c4", c4.REPOSITORY) as server:
        online(server.url)
        yield server


# A hub that is not there


def test_without_a_network_the_published_configuration_costs_one_line(online, closed_port, capfd, tmp_path):
    online(closed_port)
    asked = []
    hub_asks = hub._ask

    def counted():
        asked.append(1)
        return hub_asks()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "_ask", counted)
        arguments = [f"log_dir={tmp_path}", "processes=1"]
        assert program.main(["--config", str(ROOT / "configs" / "c4_microllama.yaml"), *arguments]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: model_config.name: cannot load the tokenizer 'keeeeenw/MicroLlama', neither from")
    assert f"{closed_port} cannot be reached (" in line
    assert line.endswith("), and it is not in the hub's cache")
    assert asked == [1]


def test_the_hub_is_asked_three_times_and_then_no_more(hub_server):
    hub_server.status = 503
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"cannot be reached \(it answers with status 503\)"):
            load_tokenizer("keeeeenw/MicroLlama", "tokenizer")
    with pytest.raises(DatasetError, match=r"cannot be reached \(it answers with status 503\)"):
        next(c4.hub_source("en", True).train(Skipped()))
    assert hub_server.requests == [("HEAD", "/")] * 3


def test_a_hub_that_never_answers_is_not_waited_for(online, monkeypatch):
    """A name server that is silent, for instance: no time limit of the libraries applies to it."""
    online("http://hub.example")
    monkeypatch.setattr(hub, "SECONDS", 0.01)
    monkeypatch.setattr(hub, "_ask", threading.Event().wait)
    assert hub.unreachable() == "http://hub.example cannot be reached (no answer within 0.01 s)"
    with pytest.raises(OfflineModeIsEnabled):
        hub.get_session().head(f"{constants.ENDPOINT}/")


def test_a_hub_that_answers_is_used(hub_server):
    assert hub.unreachable() is None
    assert not constants.is_offline_mode()


def test_who_asked_to_be_offline_is_not_asked_for(hub_server, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.unreachable() is None
    assert hub_server.requests == []


# A network that fails on the way


@pytest.fixture
def texts(tmp_path, hub_server):
    """What the shards hold, in order."""
    return list(c4.local_source(str(tmp_path / "c4"), "en").train(Skipped()))


def shard_sizes(server) -> list[int]:
    return [path.stat().st_size for path in sorted((server.folder / "en").glob("c4-train*"))]


def broken_and_mended(server, monkeypatch, after: int) -> list[float]:
    """Let the network fail after so many bytes, and work again while it is waited for; the waits of ours."""
    server.bytes_left, waits = after, []

    def mend(seconds):
        if seconds in (901.0, 902.0):
            waits.append(seconds)
            server.bytes_left = 10**12

    monkeypatch.setattr(hub, "WAITS", (901.0, 902.0))
    monkeypatch.setattr("time.sleep", mend)
    return waits


@pytest.mark.parametrize("streaming", [True, False])
def test_a_stream_that_breaks_goes_on_where_it_stopped(hub_server, texts, monkeypatch, caplog, streaming):
    sizes = shard_sizes(hub_server)
    # Streamed, the first shard is read twice: once to see what is in it.
    waits = broken_and_mended(hub_server, monkeypatch, sizes[0] * (1 + streaming) + sizes[1] // 2)
    assert list(c4.hub_source("en", streaming).train(Skipped())) == texts
    assert waits == [901.0]
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("allenai/c4 (en): interrupted at train ")
    assert line.endswith("trying to go on for 30 minutes")


@pytest.mark.parametrize("streaming", [True, False])
def test_a_stream_that_is_lost_is_an_error_of_its_own(hub_server, texts, monkeypatch, streaming):
    monkeypatch.setattr(hub, "WAITS", (0.0, 0.0))
    hub_server.bytes_left = shard_sizes(hub_server)[0] * (1 + streaming) + 100
    read = []
    with pytest.raises(SourceLostError, match=r"allenai/c4 \(en\): lost at train "):
        read.extend(c4.hub_source("en", streaming).train(Skipped()))
    assert read == texts[:200]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_lost_stream_ends_the_run(hub_server, monkeypatch, make_c4, streaming):
    """Another dataset would be other data, and some of this one has been read: the validation part, and a shard."""
    monkeypatch.setattr(hub, "WAITS", (0.0, 0.0))
    validation = next((hub_server.folder / "en").glob("c4-validation*")).stat().st_size
    hub_server.bytes_left = (validation + shard_sizes(hub_server)[0]) * (1 + streaming) + 100
    config = make_c4(c4_streaming=streaming, dataset_fallback="python_docs", vocab_size=470 + streaming)
    with pytest.raises(ConfigError, match=r"dataset: allenai/c4 .*: lost at .*; what was read is kept, and the same"):
        load_data(config)


def test_a_stream_that_never_began_gives_way_to_the_fallback(hub_server, make_c4):
    hub_server.bytes_left = 10
    data = load_data(make_c4(dataset_fallback="python_docs"))
    assert data.dataset == "python_docs"
    assert data.fallback_reason.startswith("hub: allenai/c4 (en): ")


def test_an_error_of_the_data_is_not_tried_again():
    patience = hub.Patience("C4")
    for error in (KeyError("text"), ValueError("not JSON"), FileNotFoundError("shard")):
        assert patience.ends(error, "record 7")


def test_patience_begins_anew_after_progress_and_is_limited(monkeypatch):
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    patience = hub.Patience("C4")
    for _ in hub.WAITS:
        assert not patience.ends(ConnectionError("gone"), "record 7")
    assert patience.ends(ConnectionError("gone"), "record 7")
    patience.progressed()
    assert not patience.ends(TimeoutError(), "record 8")
    assert waits == [*hub.WAITS, hub.WAITS[0]]
