"""The bandwidth that published methods need, on paper and against the published numbers."""

import json

import pytest

from algorithms.nodes.traffic import Link
from benchmarks.compare.spec import ROOT
from benchmarks.published import GRID, covenant, needed_point, scaling_laws, streaming, utilisation


def test_data_parallel_training_hides_what_the_backward_pass_has_sent():
    case = scaling_laws()["10B, data-parallel"]  # 120 Gbit in 48 layers, 0.8 s per step
    hidden = 0.8 * 2 / 3 * 47 / 48  # the first layer's gradient is known last
    assert utilisation(case, Link(100e9)) == pytest.approx(0.8 / (0.8 + 1.2 - hidden))
    assert utilisation(case, Link(100e9), overlap=False) == pytest.approx(0.8 / (0.8 + 1.2))
    # On a fast link only the last message, 2.5 Gbit, delays the next step.
    assert utilisation(case, Link(500e9)) == pytest.approx(0.8 / (0.8 + 2.5 / 500))
    assert GRID[needed_point(case, 0.99)] == pytest.approx(323.75, abs=0.01)  # 2.5 / (0.8 / 0.99 - 0.8) = 309.4


def test_diloco_exchanges_everything_every_h_steps():
    case = scaling_laws()["10B, DiLoCo, H = 100"]
    assert utilisation(case, Link(1.5e9), overlap=False) == pytest.approx(80 / (80 + 80))


def test_a_fragment_travels_during_the_next_step():
    case = streaming()["10B, Streaming, overlap"]  # 16 fragments of 7.5 Gbit, one every 5 s
    # Fragment f has layers f, f + 16, f + 32 of 48. Its last layer is sent first, 39.5 / 48 of a backward pass before
    # the step's end in the mean over f = 0 ... 15; then the worker makes one more step.
    hidden = 0.8 * (1 + 2 / 3 * 39.5 / 48)
    assert utilisation(case, Link(1e9)) == pytest.approx(5 / (5 + 7.5 - hidden))


def test_the_messages_of_a_real_run_by_hand():
    """72e9 parameters, of which one in 64 has 12 bits of position and 2 of value; 1200 s of computing."""
    one, received, sent = covenant()
    gbit = 72 / 64 * (12 + 2)
    assert (one["Gbit"], received["Gbit"]) == pytest.approx((gbit, 19 * gbit))
    assert one["this clock"] == pytest.approx(100 * 1200 / (1200 + gbit / 0.110), abs=0.01)
    assert received["this clock"] == pytest.approx(100 * 1200 / (1200 + 19 * gbit / 0.500), abs=0.01)
    assert sent["this clock"] == pytest.approx(100 * 1200 / (1200 + 19 * gbit / 0.110), abs=0.01)
    # As the page says, none is within two points of the published 94.5%, and the published 70 s need a faster link.
    assert max(row["this clock"] for row in (one, received, sent)) < 94.5 - 2
    assert gbit / 70 == pytest.approx(0.225)


def test_the_page_has_the_tables_that_the_command_prints(programs, tmp_path):
    page = (ROOT / "docs" / "results" / "published.md").read_text(encoding="utf-8")
    printed = programs.run("benchmarks/published.py", "--json", tmp_path / "tables.json").stdout
    for part in printed.strip().split("\n\n"):
        assert part in page
    tables = json.loads((tmp_path / "tables.json").read_text())
    compared = tables["scaling_laws"] + tables["streaming"]
    off = [step for row in compared for step in row["grid steps"] if abs(step) > 1]
    assert len(off) == 2  # the page explains them
    for row in tables["real_runs"]:
        assert row["this clock"] == pytest.approx(row["published"], abs=0.05)
