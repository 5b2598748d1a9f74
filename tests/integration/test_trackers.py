"""Trackers show what the round log says, and no server ends a run."""

import json
import math
import shutil
import sys
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

import run as program
from fabrics.config_checks import CHECKS
from tests.support import tracked
from tests.support.clearml_server import ClearMLServer
from tests.support.programs import LIMIT_SECONDS
from tests.support.runs import before_round, record_run, summary
from training_logs import log_processor
from training_logs.recording.run_folder import check_logs
from training_logs.showing.plots import plots_of
from training_logs.showing.run_data import read_run
from training_logs.trackers import tracker
from training_logs.trackers.clearml import has_credentials, resolved_mode
from training_logs.trackers.tracker import PACKAGES, Tracker, TrackerProcess, tracker_of
from utils.config.reading import parse_config
from utils.config.schema import CLEARML_MODES, Config, ConfigError

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("programs")


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("CLEARML_CONFIG_FILE", str(tmp_path_factory.getbasetemp() / "no-clearml.conf"))
    for name in ("CLEARML_API_ACCESS_KEY", "CLEARML_API_SECRET_KEY", "CLEARML_API_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tracker, "WAIT_SECONDS", LIMIT_SECONDS)  # on a busy machine trackers take long to start


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run that all trackers have followed; that of ClearML is an offline session."""
    trackers = [name for name, package in PACKAGES.items() if find_spec(package)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("CLEARML_CONFIG_FILE", str(tmp_path_factory.getbasetemp() / "no-clearml.conf"))
        patch.setattr(tracker, "WAIT_SECONDS", LIMIT_SECONDS)
        values = {"plot_at_end": True, "clearml": "offline", "project_name": "P", "trackers": trackers}
        folder = record_run(tmp_path_factory.mktemp("logs"), **values)
    assert "clearml: in " in (folder / "training_log.log").read_text().splitlines()[-1]
    return folder


@pytest.fixture
def online(monkeypatch):
    """Use a server at a port of this machine."""

    def use(port: int) -> None:
        for name in ("API", "WEB", "FILES"):
            monkeypatch.setenv(f"CLEARML_{name}_HOST", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("CLEARML_API_ACCESS_KEY", "key")
        monkeypatch.setenv("CLEARML_API_SECRET_KEY", "secret")

    return use


def expected_scalars(run) -> dict[tuple[str, str], dict]:
    """The round log under the titles of the dashboard."""
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
    expect("run", "final perplexity", 5, run.summary["final_metric"])
    return expected


def test_the_session_of_clearml_holds_names_files_and_the_model(folder):
    run = read_run(folder)
    session = tracked.session_of(folder / "clearml")
    task = json.loads(session.read("task.json"))
    assert (task["name"], task["project_name"]) == (folder.name, "P")
    names = session.namelist()
    (summary,) = [name for name in names if name.endswith("summary.json")]
    assert json.loads(session.read(summary))["final_metric"] == run.summary["final_metric"]
    (patch,) = [name for name in names if name.endswith("changes.patch")]
    assert session.read(patch) == b"+1\n"
    (model,) = task["offline_output_models"]
    expected = (folder / run.summary["best_model"] / "model.safetensors").resolve()
    assert model["weights"]["register_uri"] == expected.as_uri()


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import os; os.kill(os.getpid(), 9)", "Slow failed (status -9;"),
        ("raise SystemExit('no such host')", "Slow failed (no such host;"),
        ("import time; time.sleep(600)", "Slow is too slow;"),
    ],
)
def test_a_tracker_that_fails_or_hangs_is_a_warning(tmp_path, monkeypatch, source, problem):
    monkeypatch.setattr(tracker, "_command", lambda *arguments: [sys.executable, "-c", source])
    seconds = 1.0 if "sleep" in source else 60.0
    slow = TrackerProcess("Slow", tmp_path, "online", True)
    warning = slow.finish(seconds)
    assert warning.startswith(problem)
    assert f"python -m training_logs.log_processor {tmp_path} --tracker Slow sends" in warning


def test_the_tracker_of_a_long_run_has_more_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tracker, "_command", lambda *arguments: [sys.executable, "-c", "import sys; sys.stdin.read()"])
    monkeypatch.setattr(tracker, "_BYTES_PER_SECOND", 1)
    rounds = tmp_path / "model_training_report" / "training_log.csv"
    rounds.parent.mkdir()
    rounds.write_text("1" * 60)
    assert TrackerProcess("Slow", tmp_path, "online", True).finish(0.0) is None


def test_a_tracker_whose_run_folder_is_lost_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(tracker, "_command", lambda *arguments: [sys.executable, "-c", "raise SystemExit(2)"])
    (tmp_path / "run").mkdir()
    lost = TrackerProcess("Lost", tmp_path / "run", "online", True)
    shutil.rmtree(tmp_path / "run")
    assert lost.finish(60.0).startswith("Lost failed (status 2;")


def test_trackers_that_hang_are_waited_for_together(tmp_path, monkeypatch):
    monkeypatch.setattr(tracker, "_command", lambda *arguments: [sys.executable, "-c", "import time; time.sleep(600)"])
    slow = [TrackerProcess(name, tmp_path, "online", True) for name in ("one", "two", "three")]
    started = time.monotonic()
    for each in slow:
        each.end()
    assert all("too slow" in each.finish(2.0) for each in slow)
    assert 2.0 <= time.monotonic() - started < 5.0


def test_a_tracker_that_cannot_be_started_is_a_warning(online, tmp_path, monkeypatch):
    online(1)

    def no_memory(*arguments):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(tracker, "_command", no_memory)
    (warning,) = warnings_of(record_run(tmp_path, clearml="online"))
    assert "clearml could not be started: [Errno 12] Cannot allocate memory" in warning


class Listener(Tracker):
    """Remembers what it is told."""

    def __init__(self, folder):
        super().__init__(folder, "offline")
        self.calls = []

    def scalars(self, outer_step, values):
        self.calls.append(outer_step)

    def artifact(self, name, path):
        self.calls.append(name)

    def finish(self, status):
        self.calls.append(status)


def test_a_run_is_followed_until_the_process_that_trains_has_ended(folder, tmp_path, monkeypatch):
    """Rounds 4 and 5 are written meanwhile, and the run is killed before its summary says that it has ended."""
    report_dir = shutil.copytree(folder, tmp_path / "run") / "model_training_report"
    unfinished = {"status": "running", "best_model": None, "final_metric": None}
    (report_dir / "summary.json").write_text(json.dumps(summary(folder) | unfinished))
    log = report_dir / "training_log.csv"
    whole = log.read_text()
    header, *lines = whole.splitlines(True)
    log.write_text("".join([header, *(line for line in lines if int(line.split(",")[0]) <= 3)]))
    looks = []

    def has_ended(pause):
        assert pause == 1.0
        looks.append(1)
        if len(looks) == 2:
            log.write_text(whole)
        return len(looks) == 3

    monkeypatch.setattr(log_processor, "_run_has_ended", has_ended)
    listener = Listener(tmp_path)
    log_processor.send_run(tmp_path / "run", listener, follow=True)
    assert listener.calls == [1, 2, 3, 4, 5, "summary", "changes.patch", "interrupted"]


def test_a_run_folder_that_cannot_be_written_is_one_line(folder, tmp_path, capsys):
    run = shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("clearml"))
    (run / "clearml").write_text("")
    assert log_processor.main([str(run), "--mode", "offline"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: [Errno 17] File exists: ")


def test_a_foreign_folder_uploads_no_file_outside_itself(folder, tmp_path, monkeypatch):
    foreign = shutil.copytree(folder, tmp_path / "run")
    secret = tmp_path / "secret"
    secret.write_text("key")
    path = foreign / "model_training_report" / "summary.json"
    summary = json.loads(path.read_text())
    for patch in (str(secret), "../secret"):
        (invocation,) = summary["invocations"]
        summary |= {"invocations": [invocation | {"patch": patch}], "best_model": str(tmp_path)}
        path.write_text(json.dumps(summary))
        listener = Listener(tmp_path)
        log_processor.send_run(foreign, listener)
        assert listener.calls == [1, 2, 3, 4, 5, 5, "summary", "completed"]  # the final metric is a second call for 5
    (foreign / "model_training_report" / "overview.png").unlink()
    (foreign / "model_training_report" / "overview.png").symlink_to(secret)
    assert "overview" not in log_processor.figures_of(read_run(foreign))
    analysis = tmp_path / "analysis"
    analysis.mkdir()
    (analysis / log_processor.ANALYSIS_SUMMARY).write_text('{"config": {}}')
    (analysis / "deviations.png").write_bytes(b"figure")
    (analysis / "errors.png").symlink_to(secret)
    listener = Listener(tmp_path)
    listener.figure = listener.artifact
    monkeypatch.setattr(log_processor, "tracker_of", lambda *arguments: listener)
    assert log_processor.main([str(analysis)]) == 0
    assert listener.calls == ["deviations", "gradient analysis", "completed"]


@pytest.mark.parametrize("name", PACKAGES)
def test_a_tracker_holds_the_run_value_by_value(programs, folder, tmp_path, name, monkeypatch):
    """After the run, and after it was sent again; also if its folder has received a gradient analysis since."""
    pytest.importorskip(PACKAGES[name])
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = read_run(folder)
    plain = {key: str(value) for key, value in run.config.items() if isinstance(value, str | int | float)}
    copy = shutil.copytree(folder, tmp_path / "run")
    (copy / log_processor.ANALYSIS_SUMMARY).write_text('{"config": {}}')
    programs.run("-m", "training_logs.log_processor", copy, "--tracker", name)
    for store in (folder / name, copy / name):
        found = getattr(tracked, name)(store)
        assert found.scalars == expected_scalars(run)
        assert found.figures == {Path(plot).stem for plot in plots_of(run)}
        words = "".join(found.texts)
        for outer_step in run.merges:
            assert f"merge after round {outer_step}: trainer " in words
        assert {key: str(found.config[key]) for key in plain} == plain


def test_a_folder_that_is_no_run_is_not_sent(tmp_path, capsys):
    assert log_processor.main([str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err


def test_the_id_of_the_run_survives_a_new_store(tmp_path):
    sent = tracker_of("wandb", tmp_path, "offline", False)
    assert sent.known_run() is None
    sent.remember_run("7")
    (sent.clear_store() / "part").write_text("of an attempt that failed")
    assert [path.name for path in sent.clear_store().iterdir()] == ["run.json"]
    assert sent.known_run() == "7"
    assert tracker_of("wandb", tmp_path, "offline", True).known_run() is None


def test_a_missing_package_is_named_before_training(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(tracker.PACKAGES, "wandb", "no_such_package")
    arguments = ["--config", str(ROOT / "config.yaml"), "trackers=[clearml, wandb]", "processes=1"]
    arguments.append(f"log_dir={tmp_path / 'logs'}")
    assert program.main(arguments) == 2
    assert "error: trackers: wandb needs a package: pip install no_such_package" in capsys.readouterr().err


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
    assert parse_config({"number_of_outer_steps": 1, "clearml": False}, (), CHECKS)[0].clearml == "off"
    with pytest.raises(ConfigError, match=f"clearml: must be one of {', '.join(CLEARML_MODES)}, got 'sometimes'"):
        parse_config({"number_of_outer_steps": 1, "clearml": "sometimes"}, (), CHECKS)


def test_online_without_credentials_ends_before_training(tmp_path, capsys):
    arguments = ["--config", str(ROOT / "config.yaml"), "clearml=online", "processes=1", f"log_dir={tmp_path / 'logs'}"]
    assert program.main(arguments) == 2
    assert "error: clearml: online needs credentials" in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()
    check_logs(Config(clearml="online", trackers=[], log_dir=str(tmp_path)), anew=True)  # ClearML receives nothing


# Servers


def warnings_of(folder: Path) -> list[str]:
    found = summary(folder)
    assert (found["status"], found["outer_steps"]) == ("completed", 5)
    return [entry["message"] for entry in found["warnings"] if "clearml" in entry["message"]]


def test_a_server_is_told_everything_while_the_run_goes_on(online, tmp_path, monkeypatch):
    server = ClearMLServer()
    online(server.port)
    before_round(
        monkeypatch, 2, lambda: server.wait_for(lambda: 2 in server.scalars.get(("run", "communications"), {}))
    )
    folder = record_run(tmp_path, clearml="auto", plot_at_end=True)
    server.stop()
    assert warnings_of(folder) == []
    run = read_run(folder)
    assert server.scalars == expected_scalars(run)
    assert server.uploads == len(plots_of(run)) + 2  # the summary and changes.patch
    assert server.task["status"] == "completed"
    weights = (folder / run.summary["best_model"] / "model.safetensors").resolve().as_uri()
    assert weights in [body.get("uri") for name, body in server.calls if name == "models.edit"]


def test_a_run_that_is_sent_again_continues_its_task(programs, online, folder, tmp_path):
    server = ClearMLServer()
    online(server.port)
    resumed = tmp_path / "run"
    shutil.copytree(folder, resumed, ignore=shutil.ignore_patterns("clearml"))
    summary = resumed / "model_training_report" / "summary.json"
    completed = summary.read_text()
    summary.write_text(json.dumps(json.loads(completed) | {"final_metric": None}))
    log = resumed / "model_training_report" / "training_log.csv"
    whole = log.read_text()
    header, *lines = whole.splitlines(True)
    log.write_text("".join([header, *(line for line in lines if int(line.split(",")[0]) <= 3)]))
    send = ["-m", "training_logs.log_processor", resumed]
    programs.run(*send)
    assert max(server.scalars["run", "communications"]) == 3
    log.write_text(whole)
    summary.write_text(completed)
    programs.run(*send)
    assert server.scalars == expected_scalars(read_run(folder))
    assert server.names().count("tasks.create") == 1
    assert server.task["status"] == "completed"
    server.task = {"id": "another"}  # the server has lost that of the run
    programs.run(*send)
    server.stop()
    assert server.names().count("tasks.create") == 2


def test_clearml_kills_no_process_whose_task_is_not_in_progress(programs, tmp_path):
    """A completed task that is continued is not in progress at first."""
    source = f"""
        from pathlib import Path
        from training_logs.trackers.clearml import ClearML
        tracker = ClearML(Path({str(tmp_path)!r}), "offline")
        tracker.start({{}})
        from clearml.backend_interface.task.development.stop_signal import TaskStopSignal
        print("stops:", bool(TaskStopSignal.enabled))
        tracker.finish("completed")
    """
    assert "stops: False" in programs.run("-c", textwrap.dedent(source)).stdout


def test_a_server_that_disappears_in_the_middle_costs_a_warning(online, tmp_path, monkeypatch):
    server = ClearMLServer()
    online(server.port)
    monkeypatch.setattr(tracker, "WAIT_SECONDS", 1.0)

    def disappear():
        server.wait_for(lambda: server.scalars)
        server.stop()

    before_round(monkeypatch, 3, disappear)
    (warning,) = warnings_of(record_run(tmp_path, clearml="online"))
    assert "python -m training_logs.log_processor" in warning
