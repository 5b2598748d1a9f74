"""ClearML: what is reported is the round log, and whatever a server does, the run goes on."""

import contextlib
import fcntl
import json
import math
import shutil
import signal
import socket
import textwrap
import zipfile
from pathlib import Path

import pytest

import run as program
from fabrics.config_checks import CHOICES
from tests.integration.test_reporting import record_run
from tests.support.clearml_server import ClearMLServer
from training_logs.recording import background
from training_logs.recording.recorder import RunRecorder
from training_logs.showing import number_log
from training_logs.showing.plots import PLOTS
from training_logs.showing.run_data import read_run
from training_logs.showing.series import mode_switches, step_losses
from training_logs.trackers import clearml_process
from training_logs.trackers.clearml_modes import has_credentials, resolved_mode
from training_logs.trackers.clearml_process import ClearMLProcess
from training_logs.trackers.clearml_reporter import GrowingMeans, Reporter
from utils.config.reading import parse_config
from utils.config.schema import CLEARML_MODES, ConfigError

ROOT = Path(__file__).resolve().parents[2]


pytestmark = pytest.mark.usefixtures("programs")


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch, tmp_path_factory):
    # With the lowest priority, a machine with other work on it would leave the reporting process nothing.
    monkeypatch.setattr(background, "NICENESS", 0)
    monkeypatch.setenv("CLEARML_CONFIG_FILE", str(tmp_path_factory.getbasetemp() / "no-clearml.conf"))
    for name in ("CLEARML_API_ACCESS_KEY", "CLEARML_API_SECRET_KEY", "CLEARML_API_HOST"):
        monkeypatch.delenv(name, raising=False)


@contextlib.contextmanager
def remembered_processes(patch):
    """The reporting processes that runs start."""
    started, start = [], background.start

    def remember(*arguments, **options):
        started.append(start(*arguments, **options))
        return started[-1]

    patch.setattr(clearml_process.background, "start", remember)
    yield started
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with an offline session."""
    with pytest.MonkeyPatch.context() as patch, remembered_processes(patch) as started:
        patch.setattr(background, "NICENESS", 0)
        patch.setenv("CLEARML_CONFIG_FILE", str(tmp_path_factory.getbasetemp() / "no-clearml.conf"))
        folder = record_run(
            tmp_path_factory.mktemp("logs"), plot_at_end=True, clearml="offline", project_name="P", task_name="T"
        )
        (process,) = started
        log = folder / "training_log.log"
        assert "ClearML: an offline session is being written" in log.read_text().splitlines()[-1]
        assert process.wait() == 0, (folder / "clearml" / "clearml.log").read_text()
        return folder


def session_of(folder: Path) -> zipfile.ZipFile:
    (path,) = (folder / "clearml" / "offline").glob("*.zip")
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
        for number, loss, _ in zip(*step_losses(run, trainer), strict=True):
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
    assert json.dumps("prompt: e\ncontinuation: f\nreference: g")[1:-1] in log
    switches = sum(len(mode_switches(run.of(trainer))) for trainer in run.trainers)
    assert log.count("begins to accumulate gradients in round") == switches > 0
    names = session.namelist()
    for plot in PLOTS:
        assert any(name.endswith(f"plots_{Path(plot).stem}_00000000.png") for name in names), plot
    (summary,) = [name for name in names if name.endswith("summary.json")]
    assert json.loads(session.read(summary))["final_metric"] == run.summary["final_metric"]
    invocation = {name: entry["value"] for name, entry in task["hyperparams"]["invocation 1"].items()}
    assert (invocation["command"], invocation["commit"]) == ("python run.py 'task_name=<i>'", "c0ffee")
    (patch,) = [name for name in names if name.endswith("changes.patch")]
    assert session.read(patch) == b"+1\n"
    (model,) = task["offline_output_models"]
    expected = (folder / run.summary["best_model"] / "model.safetensors").resolve()
    assert model["weights"]["register_uri"] == expected.as_uri()


def test_a_finished_run_is_sent_by_the_command(programs, folder, tmp_path):
    sent, sessions = scalars_of(session_of(folder)), folder / "clearml" / "offline"
    before = set(sessions.iterdir())
    programs.run("-m", "training_logs.log_processor", folder, "--mode", "offline")
    assert scalars_of(session_of(folder)) == sent
    assert not before & set(sessions.iterdir())  # the new session takes the place of the old one
    missing = programs.run("-m", "training_logs.log_processor", tmp_path, status=2)
    assert "not a run folder" in missing.stderr


class _Task:
    """Remembers what it is told."""

    def __init__(self):
        self.scalars, self.flushed = [], 0

    def get_logger(self):
        return self

    def flush(self, wait_for_uploads):
        self.flushed += 1

    def report_scalar(self, title, series, value, iteration):
        self.scalars.append((title, series, iteration, value))

    def report_text(self, text, print_console):
        self.scalars.append(text)


def logs_of(folder: Path) -> dict[str, list[str]]:
    report = folder / "model_training_report"
    return {name: (report / name).read_text().splitlines(True) for name in ("training_log.csv", "step_loss_log.csv")}


def write_up_to(rounds: int, logs: dict[str, list[str]], output: Path) -> None:
    for name, (header, *lines) in logs.items():
        (output / name).write_text("".join([header, *(line for line in lines if int(line.split(",")[0]) <= rounds)]))


@pytest.fixture
def pieces(monkeypatch):
    """The text of logs that is read from now on."""
    read, original = [], number_log.parse_rows
    monkeypatch.setattr(number_log, "parse_rows", lambda text: (read.append(text), original(text))[1])
    return read


def test_every_row_is_read_once_and_nothing_is_reported_twice(folder, tmp_path, pieces):
    task, logs = _Task(), logs_of(folder)
    reporter = Reporter(task, tmp_path, read_run(folder).metric)
    del pieces[:]
    for rounds, shown in ((1, 0), (1, 1), (3, 2), (5, 4)):
        write_up_to(rounds, logs, tmp_path)
        reporter.report(finished=False)
        points = [entry for entry in task.scalars if isinstance(entry, tuple)]
        # A round is whole when the next one is there, or nothing new came since the last look.
        assert max((step for title, _, step, _ in points if title == "training loss"), default=0) == shown
        assert max((step for title, _, step, _ in points if "inner step" in title), default=0) == 3 * shown
    assert reporter.report(finished=False)
    assert not reporter.report(finished=True)
    assert sum(map(len, pieces)) == sum(len("".join(lines)) for _, *lines in logs.values())
    again = _Task()
    Reporter(again, tmp_path, read_run(folder).metric).report(finished=True)
    assert sorted(map(str, task.scalars)) == sorted(map(str, again.scalars))
    assert len(set(map(str, task.scalars))) == len(task.scalars)


def test_what_was_sent_before_a_resume_is_not_sent_again(folder, tmp_path):
    whole, before, after = _Task(), _Task(), _Task()
    metric, logs = read_run(folder).metric, logs_of(folder)
    write_up_to(3, logs, tmp_path)
    reporter = Reporter(before, tmp_path, metric)
    reporter.report(finished=True)
    assert reporter.state_dict() == {"training": 3, "merge": 0, "step_loss": 3}
    write_up_to(5, logs, tmp_path)
    Reporter(after, tmp_path, metric, json.loads(json.dumps(reporter.state_dict()))).report(finished=True)
    Reporter(whole, tmp_path, metric).report(finished=True)
    assert sorted(map(str, before.scalars + after.scalars)) == sorted(map(str, whole.scalars))
    assert len(before.scalars) > 0 < len(after.scalars)


def test_a_point_of_a_long_run_is_a_mean_over_several_rounds():
    means, key, points = GrowingMeans(4), ("loss", "trainer 0"), []
    for value in range(1, 31):
        points += [
            (value, mean[key]) for mean in [means.add({key: float(value), ("never", "measured"): math.nan})] if mean
        ]
    assert points == [
        *((value, value) for value in (1, 2, 3, 4)),
        *((value, value - 0.5) for value in (6, 8, 10, 12)),
        *((value, value - 1.5) for value in (16, 20, 24, 28)),
    ]
    assert means.rest() == {key: 29.5}
    weighted = GrowingMeans(1)
    assert weighted.add({key: 7.0}, weight=3) == {key: 7.0}
    assert weighted.add({key: 1.0}, weight=1) == {}
    assert weighted.add({key: 5.0}, weight=3) == {key: 4.0}


def test_the_run_does_not_wait_for_an_offline_session_and_follows_nothing_on_the_way(folder, tmp_path, monkeypatch):
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("clearml"))
    with remembered_processes(monkeypatch) as started:
        process = ClearMLProcess(tmp_path / "run", "offline")
        assert started == []
        with (tmp_path / "run" / "clearml" / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # no session is written as long as this is held
            message, is_warning = process.close()
        assert "an offline session is being written" in message
        assert not is_warning
        assert started[0].wait() == 0
    assert scalars_of(session_of(tmp_path / "run")) == scalars_of(session_of(folder))


def test_ctrl_c_and_the_end_of_the_terminal_are_for_the_run_alone(tmp_path):
    program = "import signal, sys; sys.exit(not all(signal.getsignal(s) == signal.SIG_IGN for s in (1, 2)))"
    (tmp_path / "asks.py").write_text(program)
    with (tmp_path / "output").open("wb") as output, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        before = [signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT)]
        assert background.start("asks", output=output).wait() == 0
        assert [signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT)] == before


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
    """Credentials for a server at an address of this machine; the reporting processes that were started."""

    def use(port: int) -> None:
        for name in ("API", "WEB", "FILES"):
            monkeypatch.setenv(f"CLEARML_{name}_HOST", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("CLEARML_API_ACCESS_KEY", "key")
        monkeypatch.setenv("CLEARML_API_SECRET_KEY", "secret")

    monkeypatch.setattr(clearml_process, "WAIT_SECONDS", None)  # for ever: who is waited for comes, or dies
    with remembered_processes(monkeypatch) as started:
        use.started = started
        yield use


def warnings_of(folder: Path) -> list[str]:
    summary = json.loads((folder / "model_training_report" / "summary.json").read_text())
    assert (summary["status"], summary["outer_steps"]) == ("completed", 5)
    return [entry["message"] for entry in summary["warnings"] if "ClearML" in entry["message"]]


def test_a_server_is_told_everything_while_the_run_goes_on(online, tmp_path, monkeypatch):
    server, after_two_rounds = ClearMLServer(), []
    online(server.port)
    original = RunRecorder.on_round

    def on_round(self, run, result):
        original(self, run, result)
        if result.outer_step == 2:
            server.wait_for(lambda: 2 in server.scalars.get(("run", "communications"), {}))
            after_two_rounds.extend(server.scalars)

    monkeypatch.setattr(RunRecorder, "on_round", on_round)
    folder = record_run(tmp_path, clearml="auto", plot_at_end=True)
    server.stop()
    assert warnings_of(folder) == []
    assert ("training loss", "trainer 0") in after_two_rounds
    run = read_run(folder)
    assert server.scalars == expected_scalars(run)
    assert server.repeated == []
    assert server.uploads == len(PLOTS) + 2  # the summary and changes.patch
    assert "tasks.completed" in server.names()
    assert server.task["status"] == "completed"
    weights = (folder / run.summary["best_model"] / "model.safetensors").resolve().as_uri()
    assert weights in [body.get("uri") for name, body in server.calls if name == "models.edit"]


def test_a_resumed_run_goes_on_in_its_task_and_sends_no_point_twice(programs, online, folder, tmp_path):
    server, resumed = ClearMLServer(), tmp_path / "run"
    online(server.port)
    shutil.copytree(folder, resumed, ignore=shutil.ignore_patterns("clearml"))
    report, logs = resumed / "model_training_report", logs_of(folder)
    send = ["-m", "training_logs.log_processor", resumed]
    write_up_to(3, logs, report)
    programs.run(*send)
    assert max(server.scalars["run", "communications"]) == 3
    write_up_to(5, logs, report)
    programs.run(*send)
    assert server.scalars == expected_scalars(read_run(folder))
    assert server.repeated == []
    assert server.names().count("tasks.create") == 1
    assert server.task["status"] == "completed"
    # A new task, because it is asked for, or because the server has lost the old one, gets everything.
    first, server.scalars = server.scalars, {}
    programs.run(*send, "--new")
    assert server.scalars == first
    server.task, server.scalars = {"id": "another"}, {}
    programs.run(*send)
    server.stop()
    assert server.scalars == first
    assert server.names().count("tasks.create") == 3


def test_clearml_kills_no_process_whose_task_is_not_in_progress(programs, tmp_path):
    """As one is that was completed, for a moment, when it is continued."""
    source = f"""
        from pathlib import Path
        from training_logs.trackers.clearml_reporter import start_task
        task = start_task(Path({str(tmp_path)!r}), {{}}, "offline")
        from clearml.backend_interface.task.development.stop_signal import TaskStopSignal
        print("stops:", bool(TaskStopSignal.enabled))
        task.close()
    """
    assert "stops: False" in programs.run("-c", textwrap.dedent(source)).stdout


def test_a_server_that_disappears_in_the_middle_costs_a_warning(online, tmp_path, monkeypatch):
    server = ClearMLServer()
    online(server.port)
    monkeypatch.setattr(clearml_process, "WAIT_SECONDS", 1.0)  # this process tries again and again
    original = RunRecorder.on_round

    def on_round(self, run, result):
        original(self, run, result)
        if result.outer_step == 3:
            server.wait_for(lambda: server.scalars)
            server.stop()

    monkeypatch.setattr(RunRecorder, "on_round", on_round)
    (warning,) = warnings_of(record_run(tmp_path, clearml="online"))
    assert server.scalars
    assert "python -m training_logs.log_processor" in warning


def test_a_server_that_refuses_costs_a_warning(online, tmp_path, monkeypatch):
    monkeypatch.setattr(clearml_process, "WAIT_SECONDS", 1.0)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        online(unused.getsockname()[1])
        (warning,) = warnings_of(record_run(tmp_path, clearml="online"))
    assert "python -m training_logs.log_processor" in warning


def test_a_server_that_hangs_costs_a_warning(online, tmp_path, monkeypatch):
    monkeypatch.setattr(clearml_process, "WAIT_SECONDS", 1.0)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()  # connections are made, and nobody answers
        online(server.getsockname()[1])
        (warning,) = warnings_of(record_run(tmp_path, clearml="auto"))
    assert "ClearML is still sending and goes on in the background for 10 minutes at most" in warning


def test_a_reporter_that_dies_in_the_middle_costs_a_warning(online, tmp_path, monkeypatch):
    server = ClearMLServer()
    online(server.port)
    original = RunRecorder.on_round

    def kill_in_the_second_round(self, run, result):
        if result.outer_step == 2:
            online.started[0].send_signal(signal.SIGKILL)
            online.started[0].wait()
        return original(self, run, result)

    monkeypatch.setattr(RunRecorder, "on_round", kill_in_the_second_round)
    (warning,) = warnings_of(record_run(tmp_path, clearml="online"))
    server.stop()
    assert "ClearML failed (-9)" in warning
