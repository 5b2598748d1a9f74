"""ClearML: what is reported is the round log, and whatever a server does, the run goes on."""

import dataclasses
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

import run as program
from fabrics.choices import CHOICES
from tests.clearml_server import ClearMLServer
from tests.test_reporting import record_run
from training_logs.clearml_modes import has_credentials, resolved_mode
from training_logs.recording import clearml_process
from training_logs.recording.clearml_process import ClearMLProcess
from training_logs.recording.recorder import RunRecorder
from training_logs.showing.clearml_reporter import Reporter
from training_logs.showing.plots import PLOTS
from training_logs.showing.run_data import read_run
from training_logs.showing.series import mode_switches, step_losses
from utils.config import CLEARML_MODES, ConfigError
from utils.config_reading import parse_config

ROOT = Path(__file__).resolve().parent.parent


# The reporting process has the lowest priority: tests that start several processes would starve it.
pytestmark = pytest.mark.xdist_group("processes")


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("CLEARML_CONFIG_FILE", str(tmp_path_factory.getbasetemp() / "no-clearml.conf"))
    for name in ("CLEARML_API_ACCESS_KEY", "CLEARML_API_SECRET_KEY", "CLEARML_API_HOST"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run that was followed while it went on, offline."""
    environment = dict(os.environ)
    os.environ["CLEARML_CONFIG_FILE"] = str(tmp_path_factory.getbasetemp() / "no-clearml.conf")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clearml_process, "WAIT_SECONDS", 60.0)
            return record_run(tmp_path_factory.mktemp("logs"), clearml="offline", project_name="P", task_name="T")
    finally:
        os.environ.clear()
        os.environ.update(environment)


def session_of(folder: Path) -> zipfile.ZipFile:
    deadline = time.monotonic() + 60
    while not (found := list((folder / "clearml" / "offline").glob("*.zip"))) and time.monotonic() < deadline:
        time.sleep(0.1)
    (path,) = found
    return zipfile.ZipFile(path)


def scalars_of(session: zipfile.ZipFile) -> dict[tuple[str, str], dict[int, float]]:
    scalars: dict[tuple[str, str], dict[int, float]] = {}
    for text in session.read("metrics.jsonl").decode().splitlines():
        for event in json.loads(text):
            if event["type"] == "training_stats_scalar":
                series = scalars.setdefault((event["metric"], event["variant"]), {})
                assert event["iter"] not in series
                series[event["iter"]] = event["value"]
    return scalars


def expected_scalars(run) -> dict[tuple[str, str], dict]:
    """What the round log and the step log say, under the titles of the dashboard."""
    expected: dict[tuple[str, str], dict[int, float]] = {}

    def expect(title, series, step, value):
        if math.isfinite(value):
            expected.setdefault((title, series), {})[int(step)] = pytest.approx(value, rel=1e-6)

    for row in run.rounds:
        series = f"trainer {int(row['trainer_id'])}"
        for column in (
            *("train_loss", "validation_loss", "validation_metric", "requested_batch", "effective_batch"),
            *("micro_batch", "accumulation_steps", "gradient_variance", "gradient_squared_norm", "nodes"),
        ):
            titles = {"train_loss": "training loss", "micro_batch": "micro-batch"}
            expect(titles.get(column, column.replace("_", " ")), series, row["outer_step"], row[column])
        expect("tokens per second", series, row["outer_step"], row["round_tokens"] / row["seconds"])
    for step in range(1, 6):
        rows = [row for row in run.rounds if row["outer_step"] == step]
        expect("run", "best perplexity", step, min(row["validation_metric"] for row in rows))
        expect("run", "communications", step, rows[0]["communications"])
        expect("run", "bytes communicated", step, rows[0]["bytes_communicated"])
        expect("run", "living trainers", step, len(rows))
        expect("run", "total batch", step, sum(row["effective_batch"] for row in rows))
    for trainer in run.trainers:
        for number, loss in zip(*step_losses(run, trainer), strict=True):
            expect("loss per inner step", f"trainer {trainer}", number, loss)
    return expected


def test_the_session_holds_the_round_log_value_by_value(folder):
    assert scalars_of(session_of(folder)) == expected_scalars(read_run(folder))


def test_the_session_holds_config_plots_texts_summary_and_model(folder):
    run, session = read_run(folder), session_of(folder)
    task = json.loads(session.read("task.json"))
    assert (task["name"], task["project_name"]) == ("T", "P")
    assert task["hyperparams"]["config"]["ETA"]["value"] == "0.3"
    log = session.read("log.jsonl").decode()
    for merge in run.merges:
        assert f"merge after round {merge.outer_step}: trainer " in log
    switches = sum(len(mode_switches(run, trainer)) for trainer in run.trainers)
    assert log.count("begins to accumulate gradients in round") == switches > 0
    names = session.namelist()
    for plot in PLOTS:
        assert any(name.endswith(f"plots_{Path(plot).stem}_00000000.png") for name in names), plot
    (summary,) = [name for name in names if name.endswith("summary.json")]
    assert json.loads(session.read(summary))["final_metric"] == run.summary["final_metric"]
    (model,) = task["offline_output_models"]
    expected = (folder / run.summary["best_model"] / "model.safetensors").resolve()
    assert model["weights"]["register_uri"] == expected.as_uri()


def test_a_finished_run_is_sent_by_the_command(folder, tmp_path):
    before = set((folder / "clearml" / "offline").glob("*.zip"))
    result = subprocess.run(
        [sys.executable, "-m", "training_logs.log_processor", str(folder), "--mode", "offline"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    (new,) = set((folder / "clearml" / "offline").glob("*.zip")) - before
    with zipfile.ZipFile(new) as again:
        sent = scalars_of(again)
    new.unlink()
    assert sent == scalars_of(session_of(folder))
    missing = subprocess.run(
        [sys.executable, "-m", "training_logs.log_processor", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert missing.returncode == 2
    assert "not a run folder" in missing.stderr


class _Logger:
    def __init__(self):
        self.scalars = []

    def report_scalar(self, title, series, value, iteration):
        self.scalars.append((title, series, iteration))

    def report_text(self, text, print_console):
        pass


def test_nothing_is_reported_twice_and_inner_steps_only_when_their_round_is_whole(folder):
    logger, run = _Logger(), read_run(folder)
    reporter = Reporter(type("Task", (), {"get_logger": lambda self: logger})())
    for rounds in (1, 1, 3, 5):
        rows = [row for row in run.rounds if row["outer_step"] <= rounds]
        reporter.report(dataclasses.replace(run, rounds=rows), finished=False)
        steps = [scalar for scalar in logger.scalars if scalar[0] == "loss per inner step"]
        assert max((step for _, _, step in steps), default=0) == 3 * (rounds - 1)
    reporter.report(run, finished=True)
    assert len(set(logger.scalars)) == len(logger.scalars)
    assert max(step for title, _, step in logger.scalars if title == "loss per inner step") == 15


def test_ctrl_c_is_for_the_run_alone(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("clearml"))
    process = ClearMLProcess(tmp_path / "run", "offline")
    process._process.send_signal(signal.SIGINT)
    time.sleep(2)
    process._process.send_signal(signal.SIGINT)
    process.close()
    assert process._process.wait(60) == 0


# Modes


def test_auto_is_online_where_there_are_credentials(monkeypatch, tmp_path):
    assert (resolved_mode("auto"), resolved_mode("off"), resolved_mode("offline")) == ("offline", "off", "offline")
    with pytest.raises(ConfigError, match="clearml: online needs credentials: run clearml-init"):
        resolved_mode("online")
    monkeypatch.setenv("CLEARML_API_ACCESS_KEY", "k")
    assert not has_credentials()
    monkeypatch.setenv("CLEARML_API_SECRET_KEY", "s")
    assert resolved_mode("auto") == resolved_mode("online") == "online"
    monkeypatch.delenv("CLEARML_API_ACCESS_KEY")
    (tmp_path / "clearml.conf").write_text('api { credentials { "access_key" = "x" } }')
    monkeypatch.setenv("CLEARML_CONFIG_FILE", str(tmp_path / "clearml.conf"))
    assert resolved_mode("auto") == "online"


def test_off_in_yaml_is_a_word():
    assert parse_config({"number_of_outer_steps": 1, "clearml": False}, (), CHOICES)[0].clearml == "off"
    with pytest.raises(ConfigError, match=f"clearml: must be one of {', '.join(CLEARML_MODES)}, got 'sometimes'"):
        parse_config({"number_of_outer_steps": 1, "clearml": "sometimes"}, (), CHOICES)


def test_online_without_credentials_ends_before_training(tmp_path, capsys):
    arguments = ["--config", str(ROOT / "config.yaml"), "clearml=online", f"log_dir={tmp_path / 'logs'}"]
    assert program.main(arguments) == 2
    assert "error: clearml: online needs credentials" in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()


# Faults


@pytest.fixture
def online(monkeypatch):
    """Credentials for a server at an address of this machine."""

    def use(port: int) -> None:
        for name in ("API", "WEB", "FILES"):
            monkeypatch.setenv(f"CLEARML_{name}_HOST", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("CLEARML_API_ACCESS_KEY", "key")
        monkeypatch.setenv("CLEARML_API_SECRET_KEY", "secret")

    monkeypatch.setattr(clearml_process, "WAIT_SECONDS", 1.0)
    started = []
    original = clearml_process.ClearMLProcess.__init__

    def remember(self, *arguments):
        original(self, *arguments)
        started.append(self._process)

    monkeypatch.setattr(clearml_process.ClearMLProcess, "__init__", remember)
    use.started = started
    yield use
    for process in started:
        process.kill()
        process.wait()


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def warnings_of(folder: Path) -> list[str]:
    summary = json.loads((folder / "model_training_report" / "summary.json").read_text())
    assert (summary["status"], summary["outer_steps"]) == ("completed", 5)
    return [entry["message"] for entry in summary["warnings"] if "ClearML" in entry["message"]]


def test_a_server_is_told_everything_while_the_run_goes_on(online, tmp_path, monkeypatch):
    monkeypatch.setattr(clearml_process, "WAIT_SECONDS", 60.0)
    server, after_two_rounds = ClearMLServer(), []
    online(server.port)
    original = RunRecorder.on_round

    def on_round(self, run, result):
        original(self, run, result)
        if result.outer_step == 2:
            wait_until(lambda: 2 in server.scalars.get(("run", "communications"), {}))
            after_two_rounds.extend(server.scalars)

    monkeypatch.setattr(RunRecorder, "on_round", on_round)
    folder = record_run(tmp_path, clearml="auto")
    server.stop()
    assert warnings_of(folder) == []
    assert ("training loss", "trainer 0") in after_two_rounds
    run = read_run(folder)
    assert server.scalars == expected_scalars(run)
    assert server.uploads == len(PLOTS) + 1
    assert "tasks.completed" in server.names()
    assert server.task["status"] == "completed"
    weights = (folder / run.summary["best_model"] / "model.safetensors").resolve().as_uri()
    assert weights in [body.get("uri") for name, body in server.calls if name == "models.edit"]


def test_a_server_that_disappears_in_the_middle_costs_a_warning(online, tmp_path, monkeypatch):
    server = ClearMLServer()
    online(server.port)
    original = RunRecorder.on_round

    def on_round(self, run, result):
        original(self, run, result)
        if result.outer_step == 3:
            wait_until(lambda: server.scalars)
            server.stop()

    monkeypatch.setattr(RunRecorder, "on_round", on_round)
    (warning,) = warnings_of(record_run(tmp_path, clearml="online"))
    assert server.scalars
    assert "python -m training_logs.log_processor" in warning


def test_a_server_that_refuses_costs_a_warning(online, tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        online(unused.getsockname()[1])
        (warning,) = warnings_of(record_run(tmp_path, clearml="online"))
    assert "python -m training_logs.log_processor" in warning


def test_a_server_that_hangs_costs_a_warning(online, tmp_path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        online(server.getsockname()[1])
        held = []
        accepting = threading.Thread(target=lambda: held.append(server.accept()), daemon=True)
        accepting.start()
        (warning,) = warnings_of(record_run(tmp_path, clearml="auto"))
    assert "ClearML is still sending and goes on in the background for 10 minutes at most" in warning


def test_a_reporter_that_dies_in_the_middle_costs_a_warning(online, tmp_path, monkeypatch):
    original = RunRecorder.on_round

    def kill_in_the_second_round(self, run, result):
        if result.outer_step == 2:
            online.started[0].send_signal(signal.SIGKILL)
            online.started[0].wait()
        return original(self, run, result)

    monkeypatch.setattr(RunRecorder, "on_round", kill_in_the_second_round)
    (warning,) = warnings_of(record_run(tmp_path, clearml="offline"))
    assert "ClearML failed (-9)" in warning
