"""All processes have the same configuration and data: they compare what they have before training."""

import dataclasses
import re

import pytest

from fabrics.data import dataset_loader
from fabrics.data.dataset_loader import Dataset, load_data
from fabrics.data.documents import DatasetError
from tests.support.helpers import make_config, tiny_data
from tests.support.threads import refusals, together
from utils.config.schema import ConfigError
from utils.distributed.processes import agree, agree_on_config, decided, done_by_all


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        (
            [{"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 3, "c": 4}],
            "b: 2 on rank 0, 3 on rank 1; c: 3 on rank 0, 4 on rank 1",
        ),
        ([{"a": "x"}, {"a": "x"}, {}], "a: 'x' on rank 0, None on rank 2"),
        # Equal for Python, but not the same configuration.
        ([{"a": 1}, {"a": True}], "a: 1 on rank 0, True on rank 1"),
    ],
)
def test_differences_are_named_with_their_ranks(statements, expected):
    lines = refusals(len(statements), lambda process: agree(process, "things", statements[process.rank]))
    assert lines == [f"the processes have different things: {expected}"] * len(statements)


def test_processes_with_other_code_do_not_train_together(monkeypatch):
    codes = iter(["1a", "2b"])
    monkeypatch.setattr("utils.distributed.processes.program_digest", lambda: next(codes))
    (line, _) = refusals(2, lambda process: agree_on_config(process, make_config()))
    assert re.fullmatch(r"the processes have different programs: code: '(1a|2b)' on rank 0, .*", line)


def test_a_machine_may_have_its_own_devices_and_cache():
    configs = [make_config(), make_config(devices=["cpu"], cache_dir="/elsewhere", CUDA_VISIBLE_DEVICES="1")]
    together(2, lambda process: agree_on_config(process, configs[process.rank]))


def test_the_main_process_decides_and_its_error_stops_all():
    assert together(3, lambda process: decided(process, lambda: f"rank {process.rank}")) == ["rank 0"] * 3

    def cannot():
        raise OSError("no such folder")

    assert refusals(3, lambda process: decided(process, cannot)) == ["no such folder"] * 3


@pytest.mark.parametrize(("ranks", "expected"), [([0, 1, 2], "bad key"), ([0], "bad key"), ([2], "rank 2: bad key")])
def test_an_error_of_one_process_stops_all(ranks, expected):
    def work(process):
        def own():
            if process.rank in ranks:
                raise ConfigError("bad key")
            return process.rank

        return done_by_all(process, own)

    assert refusals(3, work) == [expected] * 3
    ranks = []
    assert together(3, work) == [0, 1, 2]


# Data


@pytest.fixture
def loading(monkeypatch):
    """A function that lets a dataset load, in every process, what a function of the rank returns or raises."""

    def install(of_rank):
        dataset = Dataset("causal_lm", lambda config: of_rank(int(config.cache_dir)))
        monkeypatch.setattr(dataset_loader, "DATASETS", {"c4": dataset})

    return install


def load(process):
    """Load the data of a process; its rank reaches the loaders in a key that may differ."""
    config = make_config(dataset="c4", cache_dir=str(process.rank))
    return load_data(config, process)


DATA = tiny_data()


@pytest.mark.parametrize(("failing", "prefix"), [(0, ""), (1, "rank 1: ")])
def test_data_that_one_process_cannot_load_stops_all(loading, failing, prefix):
    def of_rank(rank):
        if rank == failing:
            raise DatasetError("the hub cannot be reached")
        return DATA

    loading(of_rank)
    line = "dataset: c4 cannot be loaded: the hub cannot be reached; dataset=python_docs works without a download"
    assert refusals(3, load) == [prefix + line] * 3


def test_other_data_on_one_process_stops_all(loading):
    more = tiny_data(train=97)
    swapped = dataclasses.replace(DATA, train=type(DATA.train)(DATA.train._tokens[::-1]))
    shared = dataclasses.replace(DATA, shares=[{"documents": 3}])  # the compared examples may be the same
    for other, named in (
        (more, "training examples: 96 on rank 0, 97 on rank 1; contents: "),
        (swapped, "contents: "),
        (shared, "contents: "),
    ):
        loading(lambda rank, other=other: other if rank == 1 else DATA)
        (line,) = set(refusals(2, load))
        assert line.startswith(f"the processes have different data: {named}")


def test_the_first_process_of_a_machine_loads_before_the_others(loading):
    order = []
    loading(lambda rank: order.append(rank) or DATA)
    together(4, load, machines=(0, 0, 1, 1))
    assert set(order[:2]) == {0, 2}
    assert set(order[2:]) == {1, 3}
