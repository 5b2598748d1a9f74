"""The loop without the framework that wall-clock comparisons with data-parallel training use."""

import re


def test_two_processes_train_what_one_does(programs):
    programs.torchrun(2, "tests/support/data_parallel.py")


def test_rounds_are_measured_against_the_loop(programs):
    small = ("nodes_per_gpu=2", "sequence_length=16", "number_of_inner_steps_between_outers=2")
    program = "benchmarks/performance/data_parallel.py"
    lines = programs.torchrun(2, program, "--repeats", "1", *small).stdout.splitlines()
    found = [match for line in lines if (match := re.fullmatch(r"(\w+) +([\d,]+) tokens/s, ([\d.]+) of DDP", line))]
    speeds = {match[1]: float(match[2].replace(",", "")) for match in found}
    assert list(speeds) == ["Synchronous", "DiLoCo", "DDP"]
    for match in found:
        assert abs(float(match[3]) - speeds[match[1]] / speeds["DDP"]) < 0.01
    programs.torchrun(2, program, "INITIAL_BATCH_SIZE=3", "nodes_per_gpu=2", status=1)
