"""A CSV that is continued after a resume, and survives a full disk."""

import json

import pytest

from training_logs.recording.csv_log import CsvLog


def test_a_log_continues_where_its_state_says(tmp_path):
    path = tmp_path / "log.csv"
    log = CsvLog(path)
    log.append([{"a": 1, "b": 2}, {"a": 3, "b": None}])
    state = json.loads(json.dumps(log.state_dict()))
    before = path.read_bytes()
    log.append([{"a": 5, "b": 6}])
    with path.open("a") as file:
        file.write("7,")  # killed in the middle of a row
    again = CsvLog(path, state)
    assert path.read_bytes() == before
    again.append([{"a": 5, "b": 6}])
    assert path.read_text().split() == ["a,b", "1,2", "3,", "5,6"]


def test_a_log_with_named_columns_has_a_header_without_rows(tmp_path):
    path = tmp_path / "log.csv"
    log = CsvLog(path, columns=("a", "b"))
    log.append([])
    CsvLog(path, log.state_dict()).append([])
    assert path.read_bytes() == b"a,b\r\n"
    log.append([{"a": 1, "b": 2}])
    assert path.read_bytes() == b"a,b\r\n1,2\r\n"


def test_rows_that_cannot_be_written_are_kept(tmp_path):
    path = tmp_path / "log.csv"
    log = CsvLog(path)
    log.append([{"a": 1}])
    hidden = path.rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError):
        log.append([{"a": 2}])
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        log.append([{"a": 3}])
    state = log.state_dict()
    assert state["pending"].split() == ["2", "3"]
    path.unlink()
    hidden.rename(path)
    resumed = CsvLog(path, state)
    for each in (log, resumed):
        each.append([{"a": 4}])
        assert path.read_text().split() == ["a", "1", "2", "3", "4"]
