"""What a run writes while it goes on: warnings, exchanges, step losses, node times, and what cannot be written."""

import csv
import dataclasses
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from algorithms.batch.switch_mode import ExecutionPlan
from algorithms.synchronisation.group import Event
from fabrics.training.worker import WorkerRound
from tests.support.helpers import warnings_of
from tests.support.runs import record_run, start_training, summary, table_of, write_config
from training_logs.recording import recorder as recording
from training_logs.recording.csv_log import CsvLog
from training_logs.recording.recorder import RunRecorder
from training_logs.recording.records import ClusterRound, RoundReport
from training_logs.recording.round_log import EXCHANGE_COLUMNS, exchange_rows
from training_logs.recording.step_loss_logger import StepLossLogger
from training_logs.showing.run_data import RunData
from utils.run_layout import has_checkpoint

# Warnings


def after_rounds(monkeypatch, action) -> None:
    """Do something with the recorder after every round."""
    original = RunRecorder.on_round

    def on_round(self, run, result):
        original(self, run, result)
        action(self, result.outer_step)

    monkeypatch.setattr(RunRecorder, "on_round", on_round)


def test_a_repeated_warning_is_logged_once_and_counted(tmp_path, monkeypatch):
    after_rounds(monkeypatch, lambda recorder, step: recorder.warn("node 3 failed"))
    folder = record_run(tmp_path, number_of_outer_steps=3)
    assert summary(folder)["warnings"] == [{"message": "node 3 failed", "count": 3}]
    assert (folder / "training_log.log").read_text().count("warning: node 3 failed") == 1


def test_the_summary_holds_a_limited_number_of_warnings(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "MOST_WARNINGS", 2)
    after_rounds(monkeypatch, lambda recorder, step: recorder.warn(f"round {step}"))
    folder = record_run(tmp_path, number_of_outer_steps=4)
    assert [entry["message"] for entry in summary(folder)["warnings"]] == ["round 1", "round 2"]
    assert "warning: round 4" in (folder / "training_log.log").read_text()


def test_a_full_disk_is_one_warning_and_the_rows_come_later(tmp_path, monkeypatch):
    """training_log.csv cannot be written in rounds 2 and 3."""
    kept = {}

    def fill_the_disk(recorder, step):
        path = recorder.report_dir / "training_log.csv"
        if step == 1:
            kept["log"] = path.rename(tmp_path / "elsewhere")
            path.symlink_to("/dev/full")
        if step == 3:
            path.unlink()
            kept["log"].rename(path)

    after_rounds(monkeypatch, fill_the_disk)
    folder = record_run(tmp_path / "logs", number_of_outer_steps=4, number_of_initial_trainers=1)
    assert [row["outer_step"] for row in rows_of(folder / "model_training_report" / "training_log.csv")] == list("1234")
    expected = "training_log.csv could not be written (No space left on device); training goes on"
    assert summary(folder)["warnings"] == [{"message": expected, "count": 2}]


def rows_of(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# The console


def completed(folder: Path) -> Path:
    """Return the folder of the only run below a folder, which has everything that a completed run leaves."""
    (run,) = (folder / "logs").iterdir()
    assert summary(run)["status"] == "completed"
    assert (run / summary(run)["best_model"] / "model.safetensors").exists()
    assert has_checkpoint(run)
    assert "(100%)" in (run / "training_log.log").read_text(encoding="utf-8")
    return run


def test_a_full_disk_under_standard_output_does_not_end_a_run(programs, tmp_path, cache_dir):
    config = write_config(tmp_path, cache_dir, number_of_outer_steps=2)
    with open("/dev/full", "w") as full:
        process = programs.start("run.py", "--config", config, stdout=full, stderr=subprocess.PIPE)
        _, errors = process.communicate()
    assert process.returncode == 0, errors
    completed(tmp_path)
    assert errors.count("standard output cannot be written") == 1


def test_a_closed_pipe_does_not_end_a_run(programs, tmp_path, cache_dir):
    config = write_config(tmp_path, cache_dir, number_of_outer_steps=2)
    process = programs.start("run.py", "--config", config, apart=True)
    assert process.stdout.readline() == "AdLoCo: loading PyTorch ...\n"
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait() == 0, errors
    completed(tmp_path)
    assert errors.count("standard output cannot be written (Broken pipe)") == 1


def test_an_interrupted_run_whose_terminal_is_gone_ends_with_a_checkpoint(programs, tmp_path, cache_dir):
    """Ctrl-C also ends the `tee` that reads both streams of the run."""
    process, folder = start_training(programs, tmp_path, cache_dir)
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert summary(folder)["status"] == "interrupted"
    assert has_checkpoint(folder)


def test_characters_that_the_console_does_not_know_are_escaped(programs, tmp_path, cache_dir):
    config = write_config(tmp_path, cache_dir, number_of_outer_steps=1, run_name="µ → 0")
    environment = os.environ | {"PYTHONIOENCODING": "ascii:strict"}
    output = programs.run("run.py", "--config", config, env=environment, fresh=True).stdout
    assert r"\xb5 \u2192 0" in output
    assert completed(tmp_path).name == "µ → 0"


# Exchanges


def test_exchanges_that_are_alike_are_one_row_with_the_mean_of_their_bytes(tmp_path):
    """Ten fragments of 30 and 50 bytes, what a monitor says, and statistics."""
    fragments = [Event("synchronisation", step, 30.0 + step % 4 * 10, 40.0, behind=3) for step in range(2, 22, 2)]
    events = (*fragments, Event("monitor", 20, 4.0, 4.0), Event("synchronisation", 20, 8.0, 16.0, through="groups"))
    report = dataclasses.replace(round_of(5), events=events)
    assert (len(report.events), report.largest_exchange, report.communications) == (12, 50.0, 11)
    assert report.bytes_synchronised == 2 * (10 * 40 + 4 + 8)
    rows = exchange_rows(ClusterRound(5, 0.5, {7: report}, {}, None, None, []))
    assert rows == [
        (5, 7, "synchronisation", "all", 10, 40.0, 40.0, 3, 2, 20),
        (5, 7, "monitor", "all", 1, 4.0, 4.0, 0, 20, 20),
        (5, 7, "synchronisation", "groups", 1, 8.0, 16.0, 0, 20, 20),
    ]
    run = run_of(tmp_path, 5)
    log = CsvLog(run.report_dir / "exchange_log.csv", EXCHANGE_COLUMNS)
    log.append(rows)
    with log.path.open("a") as file:
        file.write("6,7,monitor,all,1,4.0")  # it died here
    found = run.exchanges
    assert found.keys() == {(5, 7)}
    assert [dataclasses.astuple(record) for record in found[5, 7]] == [row[2:] for row in rows]
    assert found[5, 7][0].steps == list(range(2, 22, 2))


# Step losses

STEPS = 5
BATCHES = (4, 12)


def losses_of(outer_step: int) -> list[list[float]]:
    """Of two workers; the second one diverges in every third round."""
    generator = np.random.default_rng(outer_step)
    losses = generator.normal(3.0, 1.0, (2, STEPS)).tolist()
    if outer_step % 3 == 0:
        losses[1] = [losses[1][0], *[float("nan")] * (STEPS - 1)]
    return losses


def round_of(outer_step: int) -> RoundReport:
    rates = [1.0 / step for step in range(1, STEPS + 1)]
    workers = {
        index: WorkerRound(index, ExecutionPlan((BATCHES[index],)), losses, rates, None, 1.0, 16)
        for index, losses in enumerate(losses_of(outer_step))
    }
    return RoundReport(7, 16, 16, workers, None, STEPS, 80, 800, (Event("synchronisation", STEPS, 50, 50),), 1.0)


def test_what_a_round_communicated_is_counted_from_its_events():
    """Of two workers; what a batch test or a monitor needs is sent as well, but is no communication."""
    events = (
        Event("synchronisation", 2, 30.0, 20.0),
        Event("parameters", STEPS, 10.0, 50.0),
        Event("monitor", STEPS, 2.0, 2.0),
        Event("statistics", STEPS, 4.5, 4.5),
    )
    report = dataclasses.replace(round_of(1), events=events)
    assert (report.communications, report.bytes_synchronised, report.largest_exchange) == (2, 93, 50.0)
    served = dataclasses.replace(report, events=(Event("synchronisation", STEPS, 30.0, 20.0, through="server"),))
    assert (served.communications, served.bytes_synchronised) == (1, 100)
    silent = dataclasses.replace(report, events=())
    assert (silent.communications, silent.bytes_synchronised, silent.largest_exchange) == (0, 0, 0.0)


def write_steps(folder: Path, rounds: range, state: dict | None = None) -> dict:
    logger = StepLossLogger(folder, state)
    for step in rounds:
        logger.log(step, [round_of(step)])
    return logger.state_dict()


def test_a_step_log_that_is_continued_is_the_one_that_was_not_interrupted(tmp_path):
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    write_steps(tmp_path / "whole", range(1, 21))
    state = write_steps(tmp_path / "cut", range(1, 8))
    write_steps(tmp_path / "cut", range(8, 15), state)  # lost: the checkpoint was written before
    write_steps(tmp_path / "cut", range(8, 21), state)
    whole, cut = ((tmp_path / name / "step_loss_log.csv").read_bytes() for name in ("whole", "cut"))
    assert whole == cut


def run_of(folder: Path, rounds: int) -> RunData:
    (folder / "model_training_report").mkdir(exist_ok=True)
    table = table_of([{"outer_step": step, "trainer_id": 7, "inner_steps": STEPS} for step in range(1, rounds + 1)])
    return RunData(folder, {}, {}, table, [])


def test_step_losses_are_read_as_means_over_workers_that_have_one(tmp_path):
    run = run_of(tmp_path, 10)
    write_steps(run.report_dir, range(1, 12))  # the last round is not in the round log yet
    numbers, losses = run.step_losses[7]
    assert numbers.tolist() == list(range(1, 10 * STEPS + 1))
    (first, second), *_ = zip(*losses_of(2), strict=True)
    assert losses[STEPS] == pytest.approx((4 * first + 12 * second) / 16)
    assert losses[2 * STEPS + 1] == losses_of(3)[0][1]  # the second worker diverged


# Drawing


def test_a_plot_that_raises_at_the_end_is_a_warning_and_the_run_is_completed(tmp_path, monkeypatch):
    def broken(folder):
        raise ValueError("Image size of 123456x10 pixels is too large")

    monkeypatch.setattr("training_logs.training_monitoring.draw", broken)
    folder = record_run(tmp_path, number_of_outer_steps=1, plot_at_end=True)
    expected = "plots and report could not be drawn: ValueError: Image size of 123456x10 pixels is too large"
    assert any(text.endswith(expected) for text in warnings_of(folder))
    assert summary(folder)["status"] == "completed"
