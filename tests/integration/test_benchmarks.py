"""The benchmarks run, and what they say about memory is the formula; their timings are not tested."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.compare import runs
from benchmarks.compare.plan import Run
from benchmarks.performance import budget, data, logs, scaling, throughput
from fabrics.data.documents import python_documents
from fabrics.models.meta_model import flops_per_token
from tests.support.helpers import random_sequences, tiny_llama
from training_logs.recording import step_loss_logger
from training_logs.showing import plots
from training_logs.showing.run_data import read_run
from training_logs.training_monitoring import draw
from utils.config.reading import load_config
from utils.config.schema import BUDGETS

ROOT = Path(__file__).resolve().parents[2]


def test_throughput_prints_ratios_and_the_memory_formula(cache_dir, capsys, monkeypatch):
    def outer_step(config, repeats):
        throughput.outer_step(config, repeats, elements=250_000)

    monkeypatch.setitem(throughput.PARTS, "outer", outer_step)
    overrides = ["number_of_inner_steps_between_outers=2", "sequence_length=16", "model_config.num_hidden_layers=1"]
    overrides += ["model_config.vocab_size=300", "INITIAL_BATCH_SIZE=4"]
    threads = torch.get_num_threads()
    assert throughput.main(["--repeats", "2", f"cache_dir={cache_dir}", f"cpu_threads={threads}", *overrides]) == 0
    output = capsys.readouterr().out
    measured = float(re.search(r"measured +([\d.]+) bytes per parameter", output)[1])
    # 2 trainers and 4 workers: 4 (2 + 1 + 2 * 2 + 2 * 4).
    assert measured == 60.0
    assert "formula  60 =" in output
    for name in ("bare loop", "inner steps", "whole round", "whole round with norm test"):
        assert re.search(rf"^{name} +[\d,]+ +\d+\.\d% +\d\.\d+", output, re.MULTILINE), name
    assert re.search(r"outer step of 250,000 parameters: \d+\.\d GB/s", output)
    assert re.findall(r"^  (\d) trainer\(s\): +[\d,]+, \d+\.\d+ of one", output, re.MULTILINE) == ["1", "2", "4"]


def test_model_flops_are_those_that_pytorch_counts():
    """Its counter sees all pairs of tokens in attention; half of them are masked and not counted here."""
    model = tiny_llama(dtype=torch.float32)
    model.config._attn_implementation = "eager"
    ids, length = torch.from_numpy(random_sequences(3, 12)).long(), 12
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.sum().backward()
    width = model.config.num_attention_heads * (model.config.hidden_size // model.config.num_attention_heads)
    masked = 6 * model.config.num_hidden_layers * width * length
    assert counter.get_total_flops() == pytest.approx(ids.numel() * (flops_per_token(model, length) + masked), rel=1e-6)


def test_the_bare_loop_and_the_inner_steps_do_the_same_work(cache_dir):
    """Same model, same batches, same optimiser: after some steps the same parameters."""
    from algorithms.schedule.limits import RoundSchedule
    from cluster import Cluster
    from tests.support.helpers import make_config

    config = make_config(
        **throughput.DEFAULTS
        | {
            "sequence_length": 16,
            "model_config": {"preset": "demo", "vocab_size": 2048},
            "cache_dir": str(cache_dir),
            "learning_rate_for_inner_opt": 1e-3,
            "training_seed": 0,
        }
    )
    data = throughput.make_data(config, 2048)
    cluster = Cluster(config, data)
    bare = throughput.BareLoop(config, data, cluster.devices[0])
    trainer = cluster.trainers[0]
    order = trainer.cursor.peek(0, 3 * config.INITIAL_BATCH_SIZE)
    bare.tokens = bare.tokens[torch.from_numpy(order)]
    bare.run(3)
    throughput.inner_steps(trainer, RoundSchedule(3, 0.0, 0.0))
    for own, reference in zip(
        cluster.working[cluster.devices[0]].module.parameters(), bare.model.parameters(), strict=True
    ):
        torch.testing.assert_close(own, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("programs")
def test_data_prints_memory_opening_and_batches(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(data, "python_documents", lambda: python_documents()[:500])
    sizes = ["--documents", "50", "--sequences", "200", "--examples", "1000", "--repeats", "2"]
    data.main([*sizes, "--folder", str(tmp_path)])
    output = capsys.readouterr().out
    rows = re.findall(r"^ +50 +(\d) +([\d,]+) +[\d,]+ +(\d+) MB$", output, re.MULTILINE)
    assert [processes for processes, _, _ in rows] == ["1", "2"]
    assert rows[0][1] == rows[1][1]
    assert all(100 < int(peak) < 2000 for _, _, peak in rows)
    assert re.search(r"^opening 200 sequences: \d+\.\d+ s, \d+\.\d MB$", output, re.MULTILINE)
    for kind in ("packed", "padded"):
        assert re.search(rf"^{kind} batch of 8 x 128: \d+ us, \d+\.\d\d% of a training step", output, re.MULTILINE)


def test_scaling_sends_and_writes_and_says_how_much(programs):
    parts = ["--parts", "synchronisation", "exchange", "checkpoint", "--parameters", "400000", "--repeats", "1"]
    done = programs.run("benchmarks/performance/scaling.py", *parts)
    rows = re.findall(
        r"^  (\w+) +(in worker order|one all-reduce) .* ([\d.]+) MB sent by both, ([\d.]+) by a process(.*)$",
        done.stdout,
        re.MULTILINE,
    )
    # Two workers: each sends half of its tensor, and half of the mean; in islands of two each process half of that.
    expected = [
        ("float32", "in worker order", "3.2"),
        ("float32", "one all-reduce", "3.2"),
        ("bfloat16", "in worker order", "1.6"),
        ("int8", "in worker order", "1.2"),
        ("int4", "in worker order", "1.0"),
        ("adaptive", "in worker order", "1.0"),
    ]
    assert [row[:3] for row in rows] == 2 * expected
    for number, (*_, sent, of_a_process, counted) in enumerate(rows):
        assert float(of_a_process) == pytest.approx(float(sent) / (2 if number < len(expected) else 4), abs=0.05)
        if Path("/proc/self/io").exists():
            assert counted == f", {of_a_process} written at most"
    assert len(re.findall(r"^  (?:copy to a file|write|verify|read) +\d", done.stdout, re.MULTILINE)) == 4


@pytest.mark.usefixtures("programs")
def test_scaling_compares_an_island_and_the_bare_loop_with_a_device(monkeypatch, capsys, cache_dir):
    small = {"dataset": "text", "text_files": "[README.md]", "text_documents": "blank_lines", "val_size": 4}
    small |= {"sequence_length": 16, "vocab_size": 300, "number_of_inner_steps_between_outers": 1}
    monkeypatch.setattr(scaling, "RUN", scaling.RUN | small | {"cache_dir": cache_dir})
    one, _, island, _ = scaling.ISLANDS
    settings = (one, island, scaling.Bare("bare loop"))
    scaling.compare("small", settings, scaling.ONE_TRAINER | {"number_of_outer_steps": 1}, 1)
    rows = re.findall(r"^(.*\S) +([\d,]+) +([\d.]+) \(([\d.]+)\)$", capsys.readouterr().out, re.MULTILINE)
    assert [name for name, *_ in rows] == ["1 device", "1 island of 2 devices", "bare loop"]
    device, *others = (float(speed.replace(",", "")) for _, speed, *_ in rows)
    ratios = [pytest.approx(other / device, rel=0.01, abs=0.01) for other in others for _ in range(2)]
    expected = [1.0, 1.0, *ratios]  # of speeds that are not rounded
    assert [float(ratio) for _, _, *both in rows for ratio in both] == expected


def test_logs_of_synthetic_rounds_are_those_of_a_run(tmp_path, monkeypatch):
    beside = []
    monkeypatch.setattr(logs, "beside", lambda *command: beside.append(command))
    monkeypatch.setattr(step_loss_logger, "ROWS", 200)
    monkeypatch.setattr(plots, "PLOTS", {name: plots.PLOTS[name] for name in ("overview.png", "batch_sizes.png")})
    found = logs.push(tmp_path / "run", 30, 2, 4, 3)
    run = read_run(tmp_path / "run")
    # Two trainers until the merge after the third round; 4 workers of 3 steps until 200 rows are reached.
    assert len(run.rounds) == found["logs"]["training_log.csv"]["rows"] == 2 * 3 + 27
    assert found["logs"]["exchange_log.csv"]["rows"] == 2 * 3 + 27
    assert found["logs"]["step_loss_log.csv"]["rows"] < 30 * 4 * 3
    assert (run.summary["status"], run.summary["outer_steps"], run.summary["merges"]) == ("completed", 30, 1)
    assert run.summary["warnings"][0]["count"] == 30
    assert found["points_reported"] > 30 * 10
    assert [command[0] for command in beside] == ["training_logs.training_monitoring", "training_logs.log_processor"]
    draw(tmp_path / "run")


def test_a_run_of_a_benchmark_is_made_until_it_is_complete_and_then_no_more(tmp_path, monkeypatch):
    statuses, commands = ["interrupted", "completed"], []

    def run(command, **_options):
        (log_dir,) = (argument.removeprefix("log_dir=") for argument in command if argument.startswith("log_dir="))
        report = Path(log_dir) / f"run_{len(commands)}" / "model_training_report"
        report.mkdir(parents=True)
        (report / "summary.json").write_text(f'{{"status": "{statuses[len(commands)]}"}}')
        commands.append(command)

    monkeypatch.setattr(runs.subprocess, "run", run)
    place = tmp_path / "place"
    assert runs.made_run(place, "config.yaml", ("a=1",)) is None
    again = runs.made_run(place, "config.yaml", ("a=1",))
    assert again == runs.made_run(place, "config.yaml", ("a=1",)) == place / "run_1"
    assert len(commands) == 2
    assert all("a=1" in command and "cpu_threads=1" in command for command in commands)


@pytest.mark.parametrize(
    ("said", "fails"),
    [("  model:     'usually the slots `Traceback``.'", False), ("Traceback (most recent call last):", True)],
)
def test_a_run_of_a_comparison_may_say_traceback_but_not_have_one(tmp_path, monkeypatch, said, fails):
    class Ended:
        pid = 2**22 + 1  # no process has it

        def wait(self) -> int:
            return 0

    def begin(command, *, stdout, **_options):
        (log_dir,) = (argument.removeprefix("log_dir=") for argument in command if argument.startswith("log_dir="))
        (Path(log_dir) / "run").mkdir()
        stdout.write(f"completed\n{said}\n".encode())
        return Ended()

    for name in ("commit", "machine"):
        monkeypatch.setattr(runs, name, str)
    store, run, made = runs.Store(tmp_path), Run("DiLoCo", None, 1, (), "id"), []
    runner = runs.Runner(store, "config.yaml", 1)
    monkeypatch.setattr(runs.subprocess, "Popen", begin)
    if fails:
        with pytest.raises(runs.ComparisonError, match="DiLoCo"):
            runner.make([run], "runs", (), made.append)
        assert (made, store.record(run)) == ([], None)
    else:
        runner.make([run], "runs", (), made.append)
        assert (made, store.record(run)["completed"]) == ([run], True)


@pytest.mark.parametrize("name", budget.RUNS)
def test_the_budget_of_every_run_of_the_benchmark_can_be_configured(name):
    config, _warnings = load_config(ROOT / "config.yaml", ["max_batch_size=64", *budget.RUNS[name]])
    assert sum(getattr(config, key) is not None for key in BUDGETS) == 1
