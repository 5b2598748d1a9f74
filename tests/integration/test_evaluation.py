"""Results of lm_eval in a run folder are in its report and in comparisons."""

import json

import pytest

from tests.support.blocks import COMMANDS
from tests.support.runs import record_run
from training_logs.showing.report import downstream_results, run_body
from training_logs.showing.run_data import RunFolderError, read_run
from training_logs.training_monitoring import compare

# Two tasks as lm_eval 0.4.13 wrote them; a run's file has more keys beside "results".
RECORDED = {
    "results": {
        "python_phrases": {
            "name": "python_phrases", "alias": "python_phrases", "sample_len": 6,
            "acc,none": 0.5, "acc_stderr,none": 0.22360679,
        },
        "gsm8k": {"alias": "gsm8k", "exact_match,strict-match": 0.0125, "exact_match_stderr,strict-match": "N/A"},
    },
    "versions": {"python_phrases": 1.0},
}  # fmt: skip


def write_results(folder, content, name="results_2026-01-02T03-04-05.000000.json"):
    path = folder / "evaluation" / "__model" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def test_results_are_read_as_lm_eval_writes_them(tmp_path):
    assert downstream_results(tmp_path) == {}
    write_results(
        tmp_path, {"results": {"python_phrases": {"acc,none": 0.9}}}, "results_2025-12-31T00-00-00.000000.json"
    )
    write_results(tmp_path, RECORDED)  # newer
    expected = {"python_phrases, acc": "0.5 ± 0.22", "gsm8k, exact_match (strict-match)": "0.0125"}
    assert downstream_results(tmp_path) == expected


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"results": 3},
        {"results": {"a": [1]}},
        {"results": {"\ud800": {"acc,none": 1}}},
        {"results": {"a": {"acc,none": 10**400}}},
        {"other": {}},
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path, content):
    write_results(tmp_path, content)
    with pytest.raises(RunFolderError, match=r"results_2026.*json"):
        downstream_results(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return record_run(tmp_path_factory.mktemp("logs"), number_of_initial_trainers=1, number_of_outer_steps=1)


def test_report_and_comparison_show_the_results(folder, tmp_path, no_pixels):
    write_results(folder, {"results": {"<script>": {"acc,none": 0.25, "acc_stderr,none": 0.125}}})
    run = read_run(folder)
    assert "<b>0.25 ± 0.12</b><span>&lt;script&gt;, acc</span>" in run_body(run)
    page = compare([run, run], tmp_path).read_text()
    assert "<td>&lt;script&gt;, acc</td><td>0.25 ± 0.12</td><td>0.25 ± 0.12</td>" in page


# lm_eval without the thousands of tasks that it has itself, which take seconds to read.
LM_EVAL = """
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import manager

manager.__file__ = "/nowhere/manager.py"
cli_evaluate()
"""


def test_the_documented_command_evaluates_a_model_of_a_run_on_a_local_task(programs, folder, tmp_path):
    pytest.importorskip("lm_eval")
    (tmp_path / "evaluate_locally.py").write_text(LM_EVAL)
    (words,) = (words for block in COMMANDS for words in block.commands(run="RUN", id="0") if words[0] == "lm_eval")
    programs.run(tmp_path / "evaluate_locally.py", *(word.replace("logs/RUN", str(folder)) for word in words[1:]))
    assert "python_phrases, acc" in downstream_results(folder)
