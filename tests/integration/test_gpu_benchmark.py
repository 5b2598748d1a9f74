"""`make gpu`: no effect without a GPU, the text for given numbers, and its parts on the CPU with tiny models."""

import json
from functools import partial

import pytest
import torch

from benchmarks.performance import gpu
from benchmarks.performance.throughput import OVERHEAD, BareLoop, LibraryLoop, make_data
from tests.support.helpers import TINY_ARCHITECTURE
from tests.support.runs import PAGE


def test_without_a_gpu_nothing_is_written(monkeypatch, capsys):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    page = gpu.PAGE.read_bytes()
    assert gpu.main([]) == 0
    assert capsys.readouterr().out == "no GPU here: nothing is measured, and nothing written\n"
    assert gpu.PAGE.read_bytes() == page


def test_the_page_has_the_section_of_the_recorded_results():
    page = gpu.PAGE.read_text(encoding="utf-8")
    text = "No number here is from a GPU: no run on a GPU has been made yet."
    if results := gpu.recorded():
        text = "\n\n".join(map(gpu.section, results))
    assert gpu.with_section(page, text) == page
    changed = gpu.with_section(page, "other")
    assert changed == page.replace(text, "other")


def test_parts_are_recorded_one_by_one_and_made_again_if_they_failed(monkeypatch, tmp_path):
    page = tmp_path / "speed.md"
    page.write_text(gpu.PAGE.read_text(encoding="utf-8"))
    monkeypatch.setattr(gpu, "PAGE", page)
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "gpu.json")
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu.torch.cuda, "get_device_name", lambda device: "a GPU")
    found = {"tests": {"status": 1, "passed": 9, "failed": 1}, "eager": {"problem": "no memory"}, "graphs": {}}

    def interrupted(name, limit):
        if name == "large":
            raise KeyboardInterrupt
        return found[name]

    monkeypatch.setattr(gpu, "measured", interrupted)
    monkeypatch.setattr(gpu, "program_digest", lambda: "first")
    with pytest.raises(KeyboardInterrupt):
        gpu.main(["--parts", *found, "large"])
    (entry,) = gpu.recorded()
    assert entry["parts"] == {name: part | {"program": "first"} for name, part in found.items()}
    assert "- eager: no memory" in page.read_text()
    measured = []
    monkeypatch.setattr(gpu, "measured", lambda name, limit: measured.append(name) or {})
    assert gpu.main([]) == gpu.main([]) == 0
    assert measured == [name for name in gpu.PARTS if name != "graphs"]
    monkeypatch.setattr(gpu, "program_digest", lambda: "second")
    measured.clear()
    assert gpu.main([]) == 0
    assert measured == list(gpu.PARTS)
    monkeypatch.setattr(gpu, "program_digest", lambda: "third")
    monkeypatch.setattr(gpu, "measured", lambda name, limit: {"problem": "no time was left"})
    before = gpu.recorded()
    assert gpu.main([]) == 0
    assert gpu.recorded() == before
    monkeypatch.setattr(gpu, "measured", lambda name, limit: {})
    monkeypatch.setattr(gpu.torch.cuda, "get_device_name", lambda device: "another")
    assert gpu.main(["--parts", "compiled"]) == 0
    assert [set(entry["parts"]) for entry in gpu.recorded()] == [set(gpu.PARTS), {"compiled"}]
    for name in ("a GPU", "another"):
        assert page.read_text().count(f"On {name}, with ") == 1


def tiny(**values):
    small = {
        "devices": ["cpu"],
        "model_config": TINY_ARCHITECTURE | {"vocab_size": 300},
        "sequence_length": 8,
        "INITIAL_BATCH_SIZE": 8,
        "number_of_inner_steps_between_outers": 2,
    }
    return gpu.configured(OVERHEAD | small, **values)


def test_the_parts_measure_speed_and_memory(monkeypatch):
    monkeypatch.setattr(gpu, "peak_flops", lambda device: 1e11)
    found = gpu.speeds(tiny(), repeats=2)
    loops = {"bare_loop", "loop_over_adloco.Worker", "inner_steps", "whole_round"}
    assert set(found["mfu"]) == set(found["tokens_per_second"]) == loops
    speed, mfu = found["tokens_per_second"]["inner_steps"], found["mfu"]["inner_steps"]
    # 6 for each weight of the layer (q and o, k and v, MLP) and of the head, and 6 * 16 * 8 for attention.
    assert mfu * 1e11 / speed == pytest.approx(6 * (512 + 256 + 1152 + 4800) + 768)
    plain, less = gpu.large(tiny()), gpu.large(tiny(activation_checkpointing=True, offload_outer_state=True))
    assert plain["parameters"] == less["parameters"] > 0
    small = gpu.graphs({"eager": tiny(), "again": tiny()}, repeats=2)["tokens_per_second"]
    assert list(small) == ["eager", "again"]
    assert min(plain["planned_bytes"], less["planned_bytes"]) > 4 * plain["parameters"]


@pytest.mark.parametrize("loop", [BareLoop, partial(LibraryLoop, inner_steps=3)])
def test_the_compared_loops_copy_their_batches_to_the_device_alike(monkeypatch, loop):
    config = tiny()
    compared = loop(config, make_data(config), torch.device("cpu"))
    copied = []
    examples = BareLoop.examples
    monkeypatch.setattr(BareLoop, "examples", lambda loop, rows: copied.append(len(rows)) or examples(loop, rows))
    compared.run(3)
    assert copied == [8, 8, 8]


def test_four_trainers_are_measured_in_some_processes(cache_dir, programs, monkeypatch):
    monkeypatch.setattr(gpu.subprocess, "run", lambda command, **how: programs.run(*command[1:]))
    short = ("number_of_outer_steps=1", "number_of_inner_steps_between_outers=2", "vocab_size=400")
    data = [f"{key}={json.dumps(value)}" for key, value in (PAGE | {"cache_dir": str(cache_dir)}).items()]
    found = gpu.trainers("cpu", (1,), (*gpu._CONSTANT, *short, *data))
    assert list(found["tokens_per_second"]) == ["processes=1"]
    assert found["tokens_per_second"]["processes=1"] > 0


@pytest.mark.usefixtures("programs")
def test_a_part_that_fails_or_has_no_time_records_the_reason(monkeypatch, tmp_path):
    program = tmp_path / "program.py"
    monkeypatch.setattr(gpu, "__file__", str(program))
    program.write_text("import sys; sys.exit('no memory')")
    assert gpu.measured("eager", 60) == {"problem": "no memory"}
    program.write_text("print('warming up'); print('{\"a\": 1}')")
    assert gpu.measured("eager", 60) == {"a": 1}
    assert gpu.measured("eager", 9) == {"problem": "no time was left"}


def test_an_interrupt_ends_the_part_that_runs(monkeypatch):
    """Otherwise it would keep the GPU."""
    started = []

    def interrupted(process, timeout):
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu.subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu.measured("eager", 60.0)
    assert started[0].returncode == -gpu.signal.SIGKILL
