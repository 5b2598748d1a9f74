"""Plots, report and comparison show what is in the CSVs and the summary, and foreign files do no harm."""

import dataclasses
import math
import platform
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support.runs import before_round, record_run, rows_of
from training_logs import log_processor, training_monitoring
from training_logs.recording.recorder import RunRecorder
from training_logs.showing import plots
from training_logs.showing.plots import draw, plots_of
from training_logs.showing.report import headline, run_body
from training_logs.showing.run_data import read_run, read_table
from training_logs.showing.styles import OVER, colour
from training_logs.training_monitoring import OTHER_DATA, compare, differences, draw_comparison
from utils.text import byte_size

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return record_run(tmp_path_factory.mktemp("logs"), plot_at_end=True)


@pytest.fixture(scope="module")
def run(folder):
    return read_run(folder)


def with_summary(run, **values):
    """The run with other values in its summary."""
    return dataclasses.replace(run, summary=run.summary | values)


def line(axes, label: str):
    (found,) = [line for line in axes.lines if line.get_label() == label]
    return found


# Reading


def test_numbers_are_read_without_half_a_last_line(tmp_path):
    path = tmp_path / "log.csv"
    assert len(read_table(path)) == 0
    path.write_text("a,b\r\n")
    assert read_table(path)["b"].tolist() == []
    path.write_text("a,b\r\n1,\r\n2,3\r\n4,")
    rows = read_table(path)
    assert rows["a"].tolist() == [1, 2]
    assert math.isnan(rows["b"][0])
    assert rows[1].tolist() == (2, 3)
    for damaged in ("a,b\r\n1,text\r\n", "a,b\r\n1\r\n"):
        path.write_text(damaged)
        with pytest.raises(ValueError, match=r"text|tuple of length"):
            read_table(path)


def test_the_exchange_log_adds_up_to_the_round_log(run):
    sent = 0
    for row in run.rounds:
        exchanges = run.exchanges.get((int(row["outer_step"]), int(row["trainer_id"])), [])
        assert bool(exchanges) == (row["nodes"] > 1)
        assert len(exchanges) == row["round_events"]
        each = sum(exchange.sent for exchange in exchanges)
        assert round(each * row["nodes"]) == row["round_bytes_synchronised"]
        largest = max((max(e.sent, e.received) for e in exchanges), default=0.0)
        assert largest == row["largest_exchange_bytes"]
        sent += row["round_bytes_synchronised"]
    assert sent == run.rounds[-1]["bytes_synchronised"] > 0


# Memory


def test_memory_is_logged_at_stages(folder):
    rows = rows_of(folder / "memory_report" / "memory_log.csv")
    own = [row for row in rows if row["device"] == "process 0"]
    assert [row["stage"] for row in own] == ["before training", *["after a round"] * 5, "end"]
    assert [row["outer_step"] for row in own] == ["0", "1", "2", "3", "4", "5", "5"]
    assert all(10**8 < int(r["allocated_bytes"]) <= int(r["peak_bytes"]) < int(r["total_bytes"]) for r in own)
    assert {row["device"] for row in rows} == {"process 0", "host"}


# Plots


@pytest.mark.parametrize("x", OVER)
def test_the_metric_is_drawn_as_the_csv_has_it(run, x):
    axes = draw(run, [(plots.draw_metric, x)]).axes[0]
    rows = rows_of(run.report_dir / "training_log.csv")
    for trainer in ("0", "1", "2"):
        own = [row for row in rows if row["trainer_id"] == trainer]
        drawn = line(axes, f"trainer {trainer}")
        assert list(drawn.get_xdata()) == [float(row[x]) for row in own]
        assert list(drawn.get_ydata()) == [float(row["validation_metric"]) for row in own]
        assert drawn.get_color() == colour(int(trainer))
    assert axes.get_xlabel() == OVER[x]


@pytest.mark.parametrize(
    ("panel", "value"),
    [
        (plots.draw_loss, lambda row: row["validation_loss"]),
        (plots.draw_batches, lambda row: row["requested_batch"]),
        (plots.draw_noise_scale, lambda row: row["gradient_variance"] / row["gradient_squared_norm"]),
    ],
)
def test_panels_show_the_csv_where_it_is_positive(run, panel, value):
    drawn = line(draw(run, [(panel, "outer_step")]).axes[0], "trainer 0")
    values = {row["outer_step"]: value(row) for row in run.by_trainer[0]}
    assert dict(zip(*drawn.get_data(), strict=True)) == {step: y for step, y in values.items() if y > 0}


def test_the_metric_before_a_merge_is_drawn_without_the_merge(run):
    merged = run.merges.keys()
    assert merged
    communications, _ = run.best_metrics("communications")
    expected = {row["communications"] - (row["outer_step"] in merged) for row in run.rounds}
    assert communications.tolist() == sorted(expected)
    sent, _ = run.best_metrics("bytes_communicated")
    first = min(merged)
    # Until the end of the round of the first merge nothing but synchronisations was sent.
    assert sent[first - 1] == run.by_round[first]["bytes_synchronised"][0]


def test_the_metric_after_a_merge_in_the_last_round_is_the_last_point(run):
    last = max(run.by_round)
    merge = next(iter(run.merges.values()))
    ended = dataclasses.replace(with_summary(run, final_metric=1.5), merges=run.merges | {last: merge})
    communications, metrics = ended.best_metrics("communications")
    assert communications[-1] == run.by_round[last]["communications"][0] == communications[-2] + 1
    assert metrics[-1] == 1.5
    assert ended.best_metrics("tokens")[1].tolist() == [*run.best_metrics("tokens")[1][:-1], 1.5]
    assert headline(ended)["perplexity, best in a round"] == headline(run)["perplexity, best in a round"] != "1.50"


def test_a_run_that_has_evaluated_no_round_yet_has_a_report(run, tmp_path, no_pixels):
    copy = shutil.copytree(run.folder, tmp_path / "run")
    rounds = run.rounds.copy()
    rounds["validation_metric"] = math.nan
    early = dataclasses.replace(with_summary(run, final_metric=None), folder=copy, rounds=rounds)
    plots.plot_run(early)
    assert headline(early)["perplexity, best in a round"] == "-"
    assert "<h2>Plots</h2>" in run_body(early)
    assert "<h2>Plots</h2>" not in run_body(dataclasses.replace(early, rounds=rounds[:0]))


def test_nodes_without_work_are_shown(run):
    more = with_summary(run, nodes=6)
    (times, living) = draw(more, [(plots.draw_node_times, "outer_step"), (plots.draw_living, "outer_step")]).axes
    idle = [bar.get_height() for bar in times.containers[-1]]
    assert idle[4:] == [run.node_rows["ends"].max()] * 2
    assert set(line(living, "all nodes").get_ydata()) == {6}


def test_the_bars_of_the_nodes_end_together_and_show_the_idle_time(run):
    (axes,) = draw(run, [(plots.draw_node_times, "outer_step")]).axes
    heights = np.array([[bar.get_height() for bar in bars] for bars in axes.containers])
    assert heights.sum(axis=0) == pytest.approx(run.node_rows["ends"].max())
    idle = [container.get_label() for container in axes.containers].index("idle")
    assert heights[idle].sum() / heights.sum() == pytest.approx(run.summary["idle_share"])


def test_merges_are_marked(run):
    axes = draw(run, [(plots.draw_loss, "outer_step")]).axes[0]
    marks = [line.get_xdata()[0] for line in axes.lines if (line.get_linestyle(), line.get_color()) == (":", "grey")]
    assert marks == list(run.merges) == [2, 4]


# Report


def test_the_report_holds_everything_and_needs_no_other_file(run):
    page = (run.report_dir / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(plots_of(run))
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    for text in (f"{run.summary['final_metric']:,.2f}", "completed", "trainer 0", "after round 2", "training loss"):
        assert text in page, text
    assert page.count("<tr class=changed>") >= 5


def test_the_report_of_the_folder_where_one_is_has_its_name(run, monkeypatch):
    monkeypatch.chdir(run.folder)
    assert f"<h1>{run.folder.name} <span" in run_body(read_run(Path()))


def test_warnings_are_in_the_report_with_their_counts(run):
    warnings = [{"message": "no network <b>", "count": 1}, {"message": "worker 3 left out", "count": 1234}]
    body = run_body(with_summary(run, warnings=warnings))
    assert "<li>no network &lt;b&gt;</li>" in body
    assert "<li>worker 3 left out (1,234 times)</li>" in body


def test_the_report_states_the_origin_of_the_run(folder, run):
    (invocation,) = run.summary["invocations"]
    assert (folder / invocation["patch"]).read_text() == "+1\n"
    resumed = invocation | {"first_round": 1234, "commit": "<b>unknown</b>", "changed": None, "patch": None}
    page = run_body(with_summary(run, invocations=[invocation, resumed]))
    begun = "<td>2026-01-02T03:04:05+01:00</td><td>{}</td><td>python run.py &#x27;run_name=&lt;i&gt;&#x27;</td>"
    assert begun.format("1") + "<td>c0ffee</td><td>in changes.patch</td>" in page
    assert begun.format("1,234") + "<td>&lt;b&gt;unknown&lt;/b&gt;</td><td>-</td>" in page
    assert f"{platform.node()}: {invocation['hardware'][0]['cpu']}, " in page
    assert "<h2>Origin</h2>" not in run_body(with_summary(run, invocations=[]))


def test_a_long_table_of_rounds_shows_its_last_rows(run, monkeypatch):
    assert len(run.rounds) > 2
    assert "The last" not in run_body(run)
    monkeypatch.setattr("training_logs.showing.report.MOST_ROWS", 2)
    page = run_body(run)
    assert f"The last 2 of {len(run.rounds)} rows" in page
    assert page.partition("<h2>Rounds</h2>")[2].partition("</table>")[0].count("<tr") == 1 + 2


def test_a_budget_is_compared_with_its_use(tmp_path):
    limits = {"number_of_outer_steps": None, "max_tokens": 900, "eval_every": 99, "number_of_initial_trainers": 1}
    folder = record_run(tmp_path, byte_budget=500_000, sampling_method="none", max_batch_size=16, **limits)
    summary = read_run(folder).summary
    used = summary["bytes_communicated"]
    expected = {"unit": "bytes", "amount": 500_000, "used": used, "deviation_percent": round(used / 5_000 - 100, 2)}
    assert summary["budget"] == expected
    words = f"{byte_size(used)} of 500.0 kB used"
    assert headline(read_run(folder))["budget"] == words
    assert f"budget: {words}" in (folder / "training_log.log").read_text(encoding="utf-8")


def test_a_killed_run_has_a_report_up_to_its_last_round(tmp_path, monkeypatch, no_pixels):
    monkeypatch.setattr(RunRecorder, "finish", lambda *arguments: None)

    def die():
        raise KeyboardInterrupt

    before_round(monkeypatch, 2, die)
    with pytest.raises(KeyboardInterrupt):
        record_run(tmp_path)
    (dead,) = tmp_path.iterdir()
    with (dead / "model_training_report" / "training_log.csv").open("a") as file:
        file.write("3,0,1,8,8,2")
    assert training_monitoring.main([str(dead)]) == 0
    run = read_run(dead)
    assert len(run.rounds) == 6
    assert (run.summary["status"], run.summary["outer_steps"], run.summary["merges"]) == ("running", 2, 1)
    assert headline(run)["rounds"] == "2"
    assert "<span class='status running'>running</span>" in (run.report_dir / "report.html").read_text()
    assert (run.report_dir / "loss.png").exists()


# Comparison


def test_several_runs_are_drawn_on_common_axes(folder, run, tmp_path, capsys, no_pixels):
    other = record_run(tmp_path / "logs", number_of_initial_trainers=1, sampling_method="none")
    assert training_monitoring.main([str(folder), str(other), "--output", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "out" / "comparison.html")
    assert not (other / "model_training_report" / "report.html").exists()  # only the comparison is written
    runs = [run, read_run(other)]
    found = differences(runs)
    expected = {"number_of_initial_trainers": [3, 1], "plot_at_end": [True, False]}
    assert found == expected | {"sampling_method": ["norm_test", "none"]}
    page = (tmp_path / "out" / "comparison.html").read_text()
    assert "sampling_method" in page
    assert "merge_frequency" not in page
    figure = draw_comparison(runs)
    columns = ("tokens", "communications", "bytes_communicated", "wall_seconds")
    for axes, x in zip(figure.axes, columns, strict=True):
        for index, each in enumerate(runs):
            usage, metric = each.best_metrics(x)
            assert x != "wall_seconds" or usage.min() > 0
            drawn = axes.lines[index].get_data()
            assert dict(zip(*drawn, strict=True)) == dict(zip(usage, metric, strict=True))
    best = run.best_metrics("communications")[1].tolist()
    assert best == [
        min(row["validation_metric"] for row in run.rounds if row["outer_step"] == step) for step in range(1, 6)
    ]


def test_the_start_up_of_a_resume_counts_from_its_first_round(run):
    (invocation,) = run.summary["invocations"]
    assert invocation["startup_seconds"] == run.summary["startup_seconds"]
    begun = invocation | {"startup_seconds": 2.0}
    resumed = with_summary(run, invocations=[begun, begun | {"first_round": 4, "startup_seconds": 5.0}])
    wall = [rows["wall_seconds"][0] for rows in run.by_round.values()]
    assert np.allclose(resumed.best_metrics("wall_seconds")[0], np.array(wall) - [2.0, 2.0, 2.0, 5.0, 5.0])


def test_runs_with_different_metrics_or_without_a_round_are_compared(run, tmp_path, no_pixels):
    other = with_summary(run, metric="accuracy", metric_higher_is_better=True, metric_decimals=4)
    begun = with_summary(dataclasses.replace(run, rounds=run.rounds[:0]), initial_metric=None, final_metric=None)
    figure = draw_comparison([run, other, begun])
    assert [axes.get_title().split()[0] for axes in figure.axes] == ["Perplexity"] * 4 + ["Accuracy"] * 4
    assert len({axes.get_title() for axes in figure.axes}) == 8
    assert [len(axes.lines) for axes in figure.axes] == [2] * 4 + [1] * 4
    assert compare([begun, other], tmp_path).exists()


def test_a_comparison_of_runs_with_different_data_says_so(run, tmp_path, capsys, monkeypatch, no_pixels):
    other = with_summary(run, data_digest="another")
    for second, said in ((other, True), (run, False)):
        runs = iter([run, second])
        monkeypatch.setattr(training_monitoring, "read_run", lambda folder, runs=runs: next(runs))
        assert training_monitoring.main(["a", "b", "--output", str(tmp_path)]) == 0
        assert (OTHER_DATA in capsys.readouterr().out) == said
        assert (OTHER_DATA in (tmp_path / "comparison.html").read_text()) == said


def test_a_run_of_one_round_and_one_step_is_seen(tmp_path):
    folder = record_run(tmp_path, number_of_outer_steps=1, number_of_inner_steps_between_outers=1)
    run = read_run(folder)
    figures = {name: draw(run, panels) for name, panels in plots_of(run).items()}
    steps, rounds = figures["loss.png"].axes
    points = [line(steps, "trainer 0"), *(each for each in rounds.lines if len(each.get_xdata()) == 1)]
    assert len(points) == 7  # of three trainers, training and validation
    assert all(point.get_marker() != "None" for point in points)
    living = figures["overview.png"].axes[-1]
    assert line(living, "living trainers").get_xdata().tolist() == [0.5, 1.5]
    for axes in (living, *figures["resources.png"].axes):
        ticks = axes.get_xticks()
        assert ticks.tolist() == ticks.round().tolist()


def test_panels_without_data_are_left_out(run):
    alone = dataclasses.replace(run, rounds=run.rounds.copy(), merges={})
    alone.rounds["communications"] = 0
    alone.rounds["gradient_variance"] = math.nan
    found = plots_of(alone)
    assert "gradient_noise.png" not in found
    assert [panel for panel, _ in found["metric.png"]] == [plots.draw_metric]


def test_a_smoothed_loss_does_not_lag(run):
    """The mean of a line of slope -1 is the line itself; of 400 steps, 10 on each side are in the window."""
    line_of_losses = (np.arange(1, 401), np.arange(400, 0, -1.0))
    run.__dict__["step_losses"], kept = {0: line_of_losses}, run.step_losses
    (axes,) = draw(run, [(plots.draw_step_loss, "outer_step")]).axes
    run.__dict__["step_losses"] = kept
    steps, losses = line(axes, "trainer 0").get_data()
    assert (steps[0], steps[-1]) == (11, 390)
    assert losses == pytest.approx(401 - steps)


@pytest.mark.parametrize("first", [0, 1])
def test_runs_with_different_numbers_are_compared_in_any_order(run, tmp_path, no_pixels, first):
    budget = {"unit": "communications", "amount": 15, "used": 12, "deviation_percent": -20.0}
    runs = [run, with_summary(run, budget=budget, simulated_seconds=12.5, waiting_share=None)]
    page = compare([runs[first], runs[1 - first]], tmp_path).read_text()
    row = ["-", "12 of 15 communications used"]
    assert f"<td>budget</td><td>{row[first]}</td><td>{row[1 - first]}</td>" in page
    assert "<td>nodes wait</td>" in page


# Foreign and damaged folders


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert training_monitoring.main([str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("model_type: microllama")
    assert training_monitoring.main([str(tmp_path)]) == 2
    assert "not a run folder, or damaged" in capsys.readouterr().err


@pytest.mark.parametrize("command", [training_monitoring.main, log_processor.main])
@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model_training_report/summary.json", "{}"),
        ("model_training_report/summary.json", "[]"),
        ("model_training_report/summary.json", "null"),
        ("model_training_report/summary.json", '{"status": "completed"}'),
        ("model_training_report/summary.json", "[" * 100_000),
        ("model_training_report/training_log.csv", "outer_step,trainer_id\r\n1,0\r\n"),
        ("config.yaml", "[" * 20_000),
    ],
    ids=["empty", "list", "null", "status alone", "nested summary", "few columns", "nested config"],
)
def test_a_damaged_run_folder_is_one_line(folder, tmp_path, capsys, command, file, content):
    damaged = tmp_path / "run"
    shutil.copytree(folder, damaged, ignore=shutil.ignore_patterns("*.png", "model_weights"))
    (damaged / file).write_text(content)
    assert command([str(damaged)]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {damaged}: not a run folder, or damaged: ")


def test_a_foreign_summary_injects_no_html(run):
    hostile = "x'><script>alert(1)</script><span class='"
    page = run_body(with_summary(run, status=hostile, dataset=hostile, data_source=hostile))
    assert "<script" not in page
    assert "status x&#x27;&gt;&lt;script" in page
