"""What a run writes while it goes on stays small however long it goes on, and is read back in pieces."""

import csv
import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from algorithms.batch.switch_mode import ExecutionPlan
from algorithms.synchronisation.method import Event
from fabrics.training.worker import WorkerRound
from tests.integration.test_reporting import record_run
from tests.integration.test_resume import summary
from tests.support.helpers import warnings_of
from training_logs.recording import drawing, memory_monitor, step_loss_logger
from training_logs.recording.append_log import AppendLog
from training_logs.recording.drawing import Drawing, affordable
from training_logs.recording.exchange_log import COLUMNS, exchange_rows
from training_logs.recording.memory_monitor import MemoryMonitor
from training_logs.recording.recorder import RunRecorder
from training_logs.recording.records import RoundReport
from training_logs.recording.step_loss_logger import StepLossLogger
from training_logs.recording.warnings import KEPT, Warnings, kind_of
from training_logs.showing import number_log
from training_logs.showing.number_log import NumberLog, Rows, parse_rows
from training_logs.showing.run_data import RunData
from training_logs.showing.series import step_losses

# Warnings


def letters(number: int) -> str:
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


def test_warnings_that_differ_in_numbers_are_one_kind():
    assert kind_of("trainer 3: worker 12 left out in round 70: loss 1.5e-3") == kind_of(
        "trainer 0: worker 1 left out in round 7: loss 2"
    )
    warnings = Warnings()
    logged = [step for step in range(1, 50_001) if warnings.add(f"trainer 1: worker 0 failed in round {step}")]
    assert logged == [*range(1, 11), 100, 1000, 10_000]
    assert warnings.add("disk full")
    assert not warnings.add("disk full")
    assert warnings.summary() == [
        {
            "message": "trainer 1: worker 0 failed in round 1",
            "count": 50_000,
            "last": "trainer 1: worker 0 failed in round 50000",
        },
        {"message": "disk full", "count": 2},
    ]


def test_of_many_kinds_the_first_and_the_last_are_kept_and_all_are_counted():
    warnings = Warnings()
    for number in range(5000):
        warnings.add(f"kind {letters(number)}")
    for _ in range(2):
        warnings = Warnings(warnings.state_dict())  # a resume changes nothing
    warnings.add("kind " + letters(4900))
    found = warnings.summary()
    assert [entry["message"] for entry in found[:KEPT]] == [f"kind {letters(number)}" for number in range(KEPT)]
    last = [*range(4901, 5000), 4900]  # the one that came up again is the last
    assert [entry["message"] for entry in found[KEPT + 1 :]] == [f"kind {letters(number)}" for number in last]
    assert found[KEPT]["count"] == 5000 - 2 * KEPT
    assert found[-1]["count"] == 2
    assert sum(entry["count"] for entry in found) == 5001


# Exchanges


def test_exchanges_that_are_alike_are_one_row_with_the_mean_of_their_bytes(tmp_path):
    """Ten fragments of 30 and 50 bytes, what a monitor says, and statistics."""
    fragments = [Event("synchronisation", step, 30.0 + step % 4 * 10, 40.0, behind=3) for step in range(2, 22, 2)]
    events = (*fragments, Event("monitor", 20, 4.0, 4.0), Event("synchronisation", 20, 8.0, 16.0, through="groups"))
    report = dataclasses.replace(round_of(5), events=events)
    assert (len(report.events), report.largest_exchange, report.communications) == (12, 50.0, 11)
    assert report.bytes_synchronised == 2 * (10 * 40 + 4 + 8)
    rows = exchange_rows(5, [report])
    assert rows == [
        (5, 7, "synchronisation", "all", 10, 40.0, 40.0, 3, 2, 20, "", ""),
        (5, 7, "monitor", "all", 1, 4.0, 4.0, 0, 20, 20, "", ""),
        (5, 7, "synchronisation", "groups", 1, 8.0, 16.0, 0, 20, 20, "", ""),
    ]
    run = run_of(tmp_path, 5)
    log = AppendLog(run.report_dir / "exchange_log.csv", COLUMNS)
    assert log.append(rows) is None
    with log.path.open("a") as file:
        file.write("6,7,monitor,all,1,4.0")  # it died here
    found = run.exchanges
    assert found.keys() == {(5, 7)}
    assert [dataclasses.astuple(record) for record in found[5, 7]] == [(*row[2:-2], (), ()) for row in rows]
    assert run.moves == {}
    assert found[5, 7][0].steps == list(range(2, 22, 2))


def test_a_run_before_exchanges_were_logged_has_none(tmp_path):
    assert run_of(tmp_path, 5).exchanges is None


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
        assert logger.flush() is None
    return logger.state_dict()


def rows_of(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_step_log_grows_with_the_logarithm_of_the_run(tmp_path, monkeypatch):
    """40 rows of every step of both workers are four rounds; 40 means over workers 8, over two steps (3 rows) 14."""
    monkeypatch.setattr(step_loss_logger, "ROWS", 40)
    write_steps(tmp_path, range(1, 1001))
    rows = rows_of(tmp_path / "step_loss_log.csv")
    kinds = [(row["worker"] != "", int(row["steps"])) for row in rows]
    assert kinds[:40] == [(True, 1)] * 40
    assert kinds[40:80] == [(False, 1)] * 40
    assert kinds[80:122] == [(False, 2), (False, 2), (False, 1)] * 14
    assert kinds[122:162] == [(False, 4), (False, 1)] * 20
    # From there on a row is a whole round: never fewer than the round log has.
    assert kinds[162:] == [(False, STEPS)] * (1000 - 4 - 8 - 14 - 20)
    row = rows[80]
    expected = [
        np.average([of[step] for of in losses_of(13) if of[step] == of[step]], weights=BATCHES[: 2 if step < 9 else 1])
        for step in (0, 1)
    ]
    assert (row["outer_step"], row["inner_step"], row["effective_batch"]) == ("13", "2", "16")
    assert float(row["loss"]) == pytest.approx(np.mean(expected))
    assert float(row["learning_rate"]) == 0.5


def test_inner_steps_that_nobody_makes_have_no_row(tmp_path, monkeypatch):
    """As where workers wait for a server: of five inner steps the third is nobody's, and the last one worker's."""
    monkeypatch.setattr(step_loss_logger, "ROWS", 1)
    logger = StepLossLogger(tmp_path)
    turns = {0: (0, 1, 3), 1: (1, 3, 4)}
    workers = {
        index: WorkerRound(
            index, ExecutionPlan((4,)), [2.0, 4.0, 6.0], [1.0 / (turn + 1) for turn in own], (), 1.0, 16, turns=own
        )
        for index, own in turns.items()
    }
    report = dataclasses.replace(round_of(1), workers=workers)
    for outer_step in (1, 2, 3):  # rows of one step of a worker, of all workers, and of two steps
        logger.log(outer_step, [report])
    assert logger.flush() is None
    names = ("outer_step", "inner_step", "steps", "loss", "learning_rate")
    rows = [tuple(float(row[name]) for name in names) for row in rows_of(tmp_path / "step_loss_log.csv")]
    assert rows[6:10] == [(2, 1, 1, 2, 1), (2, 2, 1, 3, 0.5), (2, 4, 1, 5, 0.25), (2, 5, 1, 6, 0.2)]
    assert rows[10:] == [(3, 2, 2, pytest.approx(8 / 3), 0.5), (3, 4, 2, 5, 0.25), (3, 5, 1, 6, 0.2)]


def test_a_step_log_that_is_continued_is_the_one_that_was_not_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(step_loss_logger, "ROWS", 40)
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    write_steps(tmp_path / "whole", range(1, 101))
    state = write_steps(tmp_path / "cut", range(1, 30))
    write_steps(tmp_path / "cut", range(30, 45), state)  # lost: the checkpoint was written before
    write_steps(tmp_path / "cut", range(30, 101), state)
    whole, cut = ((tmp_path / name / "step_loss_log.csv").read_bytes() for name in ("whole", "cut"))
    assert whole == cut


def run_of(folder: Path, rounds: int) -> RunData:
    (folder / "report").mkdir(exist_ok=True)
    table = Rows.of([{"outer_step": step, "trainer_id": 7, "inner_steps": STEPS} for step in range(1, rounds + 1)])
    return RunData(folder, {"model_training_report_dir": "report"}, {}, table, [])


@pytest.mark.parametrize("piece", [97, 10**6])
def test_step_losses_are_read_in_pieces_and_weigh_what_they_stand_for(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(step_loss_logger, "ROWS", 40)
    monkeypatch.setattr(number_log, "_PIECE", piece)
    run = run_of(tmp_path, 40)
    write_steps(run.report_dir, range(1, 42))  # the last round is not in the round log yet
    numbers, losses, steps = step_losses(run, 7)
    assert numbers[:60].tolist() == list(range(1, 61))
    assert set(np.diff(numbers[100:])) <= {1.0, 4.0, 5.0}
    assert numbers[-1] == steps.sum() == 40 * STEPS
    (first, second), *_ = zip(*losses_of(2), strict=True)
    assert losses[STEPS] == pytest.approx((4 * first + 12 * second) / 16)
    assert step_losses(run, 8)[0].tolist() == []


# Reading


def test_numbers_are_read_once_and_half_a_line_waits(tmp_path, monkeypatch):
    path, read = tmp_path / "log.csv", []
    monkeypatch.setattr(number_log, "parse_rows", lambda text: (read.append(text), parse_rows(text))[1])
    log = NumberLog(path)
    assert list(log.new()) == []
    path.write_text("a,b")
    assert list(log.new()) == []
    path.write_text("a,b\r\n1,\r\n2,3\r\n4,")
    assert [piece.tolist() for piece in log.new()] == [[[1, pytest.approx(np.nan, nan_ok=True)], [2, 3]]]
    assert list(log.new()) == []
    with path.open("a") as file:
        file.write("5\r\n")
    assert [piece.tolist() for piece in log.new()] == [[[4, 5]]]
    assert b"".join(read) == path.read_bytes()[len("a,b\r\n") :]
    assert np.nan_to_num(parse_rows(b",1,,,\n5,,,6,7\n"), nan=-1).tolist() == [[-1, 1, -1, -1, -1], [5, -1, -1, 6, 7]]
    with pytest.raises(ValueError, match="text"):
        parse_rows(b"1,text\n")


# Memory


def test_the_memory_log_grows_with_the_logarithm_of_the_run(tmp_path, monkeypatch):
    """A measurement is two rows, process and host: 8 rows are four rounds, then eight, sixteen and so on."""
    monkeypatch.setattr(memory_monitor, "ROWS", 8)
    state = None
    for start in range(0, 200, 50):
        monitor = MemoryMonitor(tmp_path, [torch.device("cpu")], None, state=state)
        for step in range(start, start + 50):
            if step == 150:
                monitor._peaks.clear()
            monitor.measure("after a round", step)
        state = monitor.state_dict()
        monitor.close()
    measured = [int(row["outer_step"]) for row in rows_of(tmp_path / "memory_log.csv") if row["device"] == "host"]
    early = [*range(4), *range(4, 12, 2), *range(12, 28, 4)]
    assert measured == [*early, *range(32, 64, 8), *range(64, 128, 16), 128, 160, 192]
    assert monitor.peaks["process"]["outer_step"] >= 150  # of all measurements, written or not


# Drawing


def test_drawing_keeps_to_two_per_cent_of_the_run_across_a_resume(tmp_path):
    assert [affordable(0.0, 2.0, elapsed) for elapsed in (99.0, 100.0)] == [False, True]
    assert [affordable(30.0, 15.0, elapsed) for elapsed in (2249.0, 2251.0)] == [False, True]
    resumed = Drawing(tmp_path, {"spent": 30.0, "last": 15.0})
    assert resumed.draw_if_cheap(2249.0) is None
    assert resumed._process is None
    assert resumed.state_dict() == {"spent": 30.0, "last": 15.0}


def record_with(folder: Path, monkeypatch, after: dict, **values) -> tuple[Path, list[dict]]:
    """A run that may draw after every round; what is done to its recorder after some; drawing's states."""
    states, original = [], RunRecorder.on_round

    def on_round(self, run, result):
        original(self, run, result)
        after.get(result.outer_step, lambda recorder: None)(self)
        if self._drawing._process is not None:
            os.waitid(os.P_PID, self._drawing._process.pid, os.WEXITED | os.WNOWAIT)
        states.append(self.state_dict()["drawing"])

    monkeypatch.setattr(RunRecorder, "on_round", on_round)
    monkeypatch.setattr(drawing, "SHARE", 1e9)
    monkeypatch.setattr(drawing.background, "NICENESS", 0)
    return record_run(folder, number_of_outer_steps=3, plot_at_end=True, **values), states


@pytest.mark.usefixtures("programs")
def test_on_the_way_another_process_draws(tmp_path, monkeypatch):
    drawn = []

    def see(recorder):
        os.waitid(os.P_PID, recorder._drawing._process.pid, os.WEXITED | os.WNOWAIT)
        drawn.append((recorder.report_dir / "report.html").exists())

    folder, states = record_with(tmp_path, monkeypatch, {1: see}, plot_every=1)
    assert drawn == [True]
    assert [state["spent"] > 0 for state in states] == [False, True, True]
    assert states[1]["spent"] == states[1]["last"]
    assert states[2]["spent"] == pytest.approx(states[1]["last"] + states[2]["last"])
    assert warnings_of(folder) == []
    assert not list(folder.rglob(".*"))


@pytest.mark.usefixtures("programs")
def test_what_cannot_be_drawn_is_a_warning_with_its_reason(tmp_path, monkeypatch):
    def spoil(recorder):
        (recorder.folder / "config.yaml").write_text("no: configuration")

    folder, _ = record_with(tmp_path, monkeypatch, {1: spoil}, plot_every=2)
    (warning,) = (text for text in warnings_of(folder) if "drawn" in text)
    assert "plots and report could not be drawn: " in warning
    assert "not a run folder, or damaged: 'model_training_report_dir'" in warning


def test_a_plot_that_raises_at_the_end_is_a_warning_and_the_run_is_completed(tmp_path, monkeypatch):
    def broken(folder):
        raise ValueError("Image size of 123456x10 pixels is too large")

    monkeypatch.setattr("training_logs.training_monitoring.draw", broken)
    folder = record_run(tmp_path, number_of_outer_steps=1, plot_at_end=True)
    expected = "plots and report could not be drawn: ValueError: Image size of 123456x10 pixels is too large"
    assert any(text.endswith(expected) for text in warnings_of(folder))
    assert summary(folder)["status"] == "completed"


def test_a_log_that_is_continued_keeps_its_own_columns(tmp_path):
    """Of a version that knew fewer of them: rows that had others could not be read."""
    older = AppendLog(tmp_path / "log.csv", ("a", "c"))
    older.append([(1, 3)])
    continued = AppendLog(tmp_path / "log.csv", ("a", "b", "c"), older.state_dict())
    row = {"a": 4, "b": 5, "c": 6}
    continued.append([[row[column] for column in continued.columns]])
    assert (tmp_path / "log.csv").read_text().split() == ["a,c", "1,3", "4,6"]
