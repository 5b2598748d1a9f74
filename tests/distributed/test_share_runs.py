"""Runs on data that differ, as users start them: what is recorded, and the same bits after a kill."""

import csv
from pathlib import Path

import numpy as np
import pytest

import run as program
from tests.support.helpers import TINY_ARCHITECTURE
from tests.support.programs import ROOT
from tests.support.runs import assert_same_run, summary, table_of
from training_logs.showing.plots import draw, plots_of
from training_logs.showing.run_data import read_run

# configs/clusters.yaml in little, with what it leaves out.
LESS = {
    "number_of_initial_trainers": 3, "merge_frequency": 2, "weigh_shares": True, "eval_every": 1,
    "smallest_worker_batch": 2, "INITIAL_BATCH_SIZE": 4, "sampling_method": "norm_test", "ETA": 0.4,
    "batch_test_start": 1, "number_of_inner_steps_between_outers": 4, "number_of_outer_steps": 5,
    "data_sample_size": 400, "val_size": 150, "eval_batch_size": 128, "merge_count": 2, "sequence_length": 32,
    "vocab_size": 400, "model_config": TINY_ARCHITECTURE, "save_weights_every": 2,
    "clearml": "off", "plot_at_end": False, "processes": 1, "max_requested_batch": 24,
    # In a pool that changes, besides.
    "data_shares": 4, "node_schedule": [[0.0, 3], [0.4, 4]], "message_loss": 0.3,
}  # fmt: skip


def forget_clusters(cache_dir: Path) -> None:
    """Let the next run find them."""
    for known in cache_dir.glob("clusters/*.npz"):
        known.unlink()


def command(cache_dir: Path, folder: Path, **values) -> list[str]:
    """The arguments of a run that begins, in a folder, by finding its clusters."""
    forget_clusters(cache_dir)
    given = LESS | {"log_dir": folder, "cache_dir": cache_dir} | values
    return ["--config", str(ROOT / "configs" / "clusters.yaml"), *(f"{key}={value}" for key, value in given.items())]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache_dir):
    """Three trainers, two merges, and four workers that read a share each at the end."""
    folder = tmp_path_factory.mktemp("whole")
    assert program.main(command(cache_dir, folder)) == 0
    return next(folder.iterdir())


def share_log(folder: Path) -> list[dict]:
    with (folder / "model_training_report" / "share_log.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_of_which_a_process_is_killed_goes_on_with_the_same_bits(programs, whole, cache_dir, tmp_path):
    """By SIGKILL, the second of two in round 4; on one. Clusters are found before, and again after."""
    begin = command(cache_dir, tmp_path, processes=2)
    done = programs.run("tests/support/killed_in_round.py", "SIGKILL", 1, *begin, status=1)
    assert "was killed (SIGKILL)" in done.stdout + done.stderr
    (folder,) = tmp_path.iterdir()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["round_00002"]
    forget_clusters(cache_dir)
    assert program.main(["--resume", str(folder), "processes=1"]) == 0
    assert [*cache_dir.glob("clusters/*.npz")]
    assert_same_run(folder, whole, besides=("processes",))
    assert share_log(folder) == share_log(whole)
    rows = read_run(whole).rounds
    nodes = [sum(rows["nodes"][rows["outer_step"] == step]) for step in range(1, 6)]
    assert nodes == [3, 3, 4, 4, 4]
    assert summary(whole)["lost_messages"] > 0  # after the round it was stopped in: before it workers are alone


def test_the_summary_says_what_is_in_which_share(whole):
    shares = summary(whole)["data_shares"]
    assert (shares["split"], shares["over"], shares["labels"]) == ("clusters", "workers", 4)
    assert [share["first_trainer"] for share in shares["shares"]] == [0, 1, 2, 2]
    assert sum(share["documents"] for share in shares["shares"]) == 400
    fractions = np.array([share["tokens"] for share in shares["shares"]])
    fractions = fractions / fractions.sum()
    assert shares["total_variation"] == pytest.approx(1 - (fractions**2).sum())  # no cluster is in two shares
    rows = share_log(whole)
    assert {row["share"] for row in rows} == set("0123")
    last = [row for row in rows if row["outer_step"] == "5"]
    assert [float(row["validation_metric"]) for row in last] == [s["final_metric"] for s in shares["shares"]]


def test_a_plot_shows_the_best_loss_on_each_share(whole):
    """Trainers have shares 0, 1, and 2 and 3; two merge after round 2, and all that are left after round 4."""
    run = read_run(whole)
    assert [merge.outer_step for merge in run.merges] == [2, 4]
    rows = share_log(whole)
    (axes,) = draw(run, plots_of(run)["shares.png"]).axes
    lines = {line.get_label(): line.get_data() for line in axes.lines}
    for share in "0123":
        steps, losses = lines[f"share {share}"]
        assert steps.tolist() == [1, 2, 3, 4, 5]
        for step, loss in zip(steps, losses, strict=True):
            own = [row for row in rows if (int(row["outer_step"]), row["share"]) == (step, share)]
            assert loss == min(float(row["validation_loss"]) for row in own)
    run.__dict__["share_rows"] = table_of([])  # as of a run without validation_per_share
    assert "shares.png" not in plots_of(run)
