"""Records of a run: warnings, exchanges, step losses, node times, and files that cannot be written."""

import contextlib
import dataclasses
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import run as program
from algorithms.batch.switch_mode import ExecutionPlan
from algorithms.nodes.traffic import Event
from fabrics.training.worker import WorkerRound
from tests.support.helpers import CPU, warnings_of
from tests.support.runs import PAGE, before_round, record_run, summary, table_of, write_config
from training_logs.recording.csv_log import CsvLog
from training_logs.recording.memory_monitor import memory_use
from training_logs.recording.recorder import RunRecorder
from training_logs.recording.records import ClusterRound, RoundReport
from training_logs.recording.round_log import exchange_rows, step_rows
from training_logs.showing.run_data import RunData
from utils.files import has_checkpoint

# Warnings


def test_a_repeated_warning_is_logged_once_and_counted(tmp_path, monkeypatch):
    on_round = RunRecorder.on_round

    def with_a_warning(self, run, result):
        on_round(self, run, result)
        self.warn("node 3 failed")

    monkeypatch.setattr(RunRecorder, "on_round", with_a_warning)
    folder = record_run(tmp_path, number_of_outer_steps=3)
    assert summary(folder)["warnings"] == [{"message": "node 3 failed", "count": 3}]
    assert (folder / "training_log.log").read_text().count("warning: node 3 failed") == 1


def test_warnings_that_differ_in_every_round_do_not_fill_the_summary(tmp_path, monkeypatch):
    on_round = RunRecorder.on_round

    def with_a_warning(self, run, result):
        on_round(self, run, result)
        self.warn(f"round {result.outer_step}: node 3 failed")

    monkeypatch.setattr(RunRecorder, "on_round", with_a_warning)
    monkeypatch.setattr("training_logs.recording.recorder.MOST_WARNINGS", 2)
    folder = record_run(tmp_path, number_of_outer_steps=5)
    counts = [
        ("round 1: node 3 failed", 1),
        ("round 2: node 3 failed", 1),
        ("further warnings, which are in the log", 3),
    ]
    assert [(each["message"], each["count"]) for each in summary(folder)["warnings"]] == counts
    assert (folder / "training_log.log").read_text().count("node 3 failed") == 5


# The console


def completed(folder: Path) -> Path:
    """Return the folder of the only run below a folder, which has everything that a completed run leaves."""
    (run,) = (folder / "logs").iterdir()
    assert summary(run)["status"] == "completed"
    assert (run / summary(run)["best_model"] / "model.safetensors").exists()
    assert has_checkpoint(run)
    assert "(100%)" in (run / "training_log.log").read_text(encoding="utf-8")
    return run


@pytest.mark.parametrize(("full", "buffering"), [("stdout", 1), ("stdout", -1), ("stderr", 1)])
def test_a_full_disk_under_a_standard_stream_does_not_end_a_run(tmp_path, monkeypatch, capsys, full, buffering):
    """Not even while documents are tokenised."""
    config = write_config(tmp_path, tmp_path / "cache", **PAGE, number_of_outer_steps=2)
    monkeypatch.setattr(sys, "argv", ["run.py", "--config", str(config)])
    file = open("/dev/full", "w", buffering)  # noqa: SIM115 (closing it fails)
    with monkeypatch.context() as patch:
        patch.setattr(sys, full, file)
        assert program.start() == 0
    with contextlib.suppress(OSError):
        file.close()
    completed(tmp_path)
    assert capsys.readouterr().err.count("standard output cannot be written") == (full == "stdout")


@pytest.mark.usefixtures("programs")
def test_closed_standard_streams_do_not_end_a_run(tmp_path, cache_dir):
    config = write_config(tmp_path, cache_dir, **PAGE, number_of_outer_steps=1)
    command = f'"{sys.executable}" run.py --config "{config}" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", command], cwd=Path(program.__file__).parent, check=False).returncode == 0
    completed(tmp_path)


def test_an_interrupted_run_whose_terminal_is_gone_ends_with_a_checkpoint(tmp_path, cache_dir, monkeypatch):
    """Ctrl-C also ends the `tee` that reads both streams of the run."""
    config = write_config(tmp_path, cache_dir, save_weights_every=None)
    monkeypatch.setattr(sys, "argv", ["run.py", "--config", str(config)])
    read, write = os.pipe()
    standard_error = os.dup(2)

    def interrupt():
        os.close(read)
        os.dup2(write, 2)  # the signal handler writes to this descriptor
        os.kill(os.getpid(), signal.SIGINT)

    before_round(monkeypatch, 2, interrupt)
    with program._unchanged_program(), open(write, "w", 1) as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setattr(sys, "stderr", terminal)
        status = program.start()
        os.dup2(standard_error, 2)
    os.close(standard_error)
    assert status == 130
    (folder,) = (tmp_path / "logs").iterdir()
    assert summary(folder)["status"] == "interrupted"
    assert has_checkpoint(folder)


def test_characters_that_the_console_does_not_know_are_escaped(tmp_path, cache_dir, monkeypatch):
    config = write_config(tmp_path, cache_dir, number_of_outer_steps=1, run_name="µ → 0")
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii", errors="strict"))
    assert program.main(["--config", str(config)]) == 0
    assert rb"\xb5 \u2192 0" in output.getvalue()
    assert completed(tmp_path).name == "µ → 0"


# Rows of a round

STEPS = 5
BATCHES = (4, 12)
EVENTS = (Event("synchronisation", STEPS, 50.0, 50.0),)


def losses_of(outer_step: int) -> list[list[float]]:
    """Losses of two workers, of which the second diverges in every third round."""
    losses = [[3.0 + outer_step + step / 8 for step in range(STEPS)] for _ in BATCHES]
    if outer_step % 3 == 0:
        losses[1] = [losses[1][0], *[float("nan")] * (STEPS - 1)]
    return losses


def round_of(outer_step: int, events: tuple[Event, ...] = EVENTS) -> ClusterRound:
    """A round of trainer 7 with two workers."""
    rates = [1.0 / step for step in range(1, STEPS + 1)]
    workers = {
        index: WorkerRound(index, ExecutionPlan((BATCHES[index],)), losses, rates, None, 1.0, 16)
        for index, losses in enumerate(losses_of(outer_step))
    }
    report = RoundReport(7, 16, 16, workers, None, STEPS, 80, 800, events, 1.0)
    return ClusterRound(outer_step, 0.5, {7: report}, {}, None, None, [])


def test_equal_exchanges_are_one_row_with_the_mean_of_their_bytes(tmp_path):
    """Ten fragments of 30 and 50 bytes, a monitor, and an exchange of two workers in groups."""
    fragments = [Event("synchronisation", step, 30.0 + step % 4 * 10, 40.0, behind=3) for step in range(2, 22, 2)]
    events = (
        *fragments,
        Event("monitor", 20, 4.0, 4.0),
        Event("synchronisation", 20, 8.0, 16.0, through="groups of 2", by=(0, 2)),
    )
    rows = exchange_rows(round_of(5, events))
    assert [tuple(row.values()) for row in rows] == [
        (5, 7, "synchronisation", "all", None, 10, 40.0, 40.0, 3, 2, 20),
        (5, 7, "monitor", "all", None, 1, 4.0, 4.0, 0, 20, 20),
        (5, 7, "synchronisation", "groups of 2", "0 2", 1, 8.0, 16.0, 0, 20, 20),
    ]
    run = run_of(tmp_path, 5)
    log = CsvLog(run.report_dir / "exchange_log.csv")
    log.append(rows)
    with log.path.open("a") as file:
        file.write("6,7,monitor,all,1,4.0")  # killed in the middle of a row
    found = run.exchanges
    assert found.keys() == {(5, 7)}
    assert found[5, 7] == [dataclasses.replace(event, sent=40.0) for event in fragments] + list(events[10:])


@pytest.mark.parametrize(
    ("events", "counted"),
    [
        # Of two workers. Statistics and monitors are sent as well, but are no communications.
        (
            [
                Event("synchronisation", 2, 30.0, 20.0),
                Event("parameters", STEPS, 10.0, 50.0),
                Event("monitor", STEPS, 2.0, 2.0),
                Event("statistics", STEPS, 4.5, 4.5),
            ],
            (2, 93, 50.0),
        ),
        ([Event("synchronisation", STEPS, 30.0, 20.0, through="server")], (1, 100, 30.0)),
        ([], (0, 0, 0.0)),
    ],
)
def test_communications_and_bytes_of_a_round_are_counted_from_its_events(events, counted):
    report = round_of(1, tuple(events)).reports[7]
    assert (report.communications, report.bytes_synchronised, report.largest_exchange) == counted


def run_of(folder: Path, rounds: int) -> RunData:
    (folder / "model_training_report").mkdir()
    table = table_of([{"outer_step": step, "trainer_id": 7, "inner_steps": STEPS} for step in range(1, rounds + 1)])
    return RunData(folder, {}, {}, table, [])


def test_step_losses_are_read_as_means_over_workers_that_have_one(tmp_path):
    run = run_of(tmp_path, 10)
    log = CsvLog(run.report_dir / "step_loss_log.csv")
    for step in range(1, 12):  # the last round is not in the round log yet
        log.append(step_rows(round_of(step)))
    numbers, losses = run.step_losses[7]
    assert numbers.tolist() == list(range(1, 10 * STEPS + 1))
    (first, second), *_ = zip(*losses_of(2), strict=True)
    assert losses[STEPS] == pytest.approx((4 * first + 12 * second) / 16)
    assert losses[2 * STEPS + 1] == losses_of(3)[0][1]  # the second worker diverged


# Memory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the peak")
def test_a_peak_between_two_measurements_is_seen():
    (_, before, _, peak_before, _), *_ = memory_use(CPU)
    block = np.ones((peak_before - before) // 8 + 8_000_000)
    del block
    (_, _, _, peak, _), *_ = memory_use(CPU)
    assert peak > peak_before + 40_000_000


# Drawing


def test_a_plot_that_raises_at_the_end_is_a_warning_and_the_run_is_completed(tmp_path, monkeypatch):
    def broken(folder):
        raise ValueError("Image size of 123456x10 pixels is too large")

    monkeypatch.setattr("training_logs.training_monitoring.draw", broken)
    folder = record_run(tmp_path, number_of_outer_steps=1, plot_at_end=True)
    expected = "plots and report could not be drawn: ValueError: Image size of 123456x10 pixels is too large"
    assert any(text.endswith(expected) for text in warnings_of(folder))
    assert summary(folder)["status"] == "completed"
