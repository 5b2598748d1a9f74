"""Readers of the files of experiment trackers."""

import json
import re
import struct
import zipfile
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Tracked:
    """Values by (title, series) and round, texts, names of figures, and the configuration."""

    scalars: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    figures: set[str] = field(default_factory=set)
    config: dict = field(default_factory=dict)

    def add(self, name: str, step: int, value: float) -> None:
        title, series = name.replace("_", " ").split("/", 1)  # TensorBoard's names have no spaces
        points = self.scalars.setdefault((title, series), {})
        assert step not in points, "written twice"
        points[step] = value


def session_of(store: Path) -> zipfile.ZipFile:
    """Return the only offline session of ClearML."""
    (path,) = (store / "offline").glob("*.zip")
    return zipfile.ZipFile(path)


def clearml(store: Path) -> Tracked:
    found = Tracked()
    session = session_of(store)
    for text in session.read("metrics.jsonl").decode().splitlines():
        for event in json.loads(text):
            if event["type"] == "training_stats_scalar":
                found.add(f"{event['metric']}/{event['variant']}", event["iter"], event["value"])
    found.texts.append(session.read("log.jsonl").decode())
    found.figures.update(re.findall(r"/plots_(\w+)_00000000\.png$", "\n".join(session.namelist()), re.MULTILINE))
    hyperparameters = json.loads(session.read("task.json"))["hyperparams"]["config"]
    found.config.update({name: entry["value"] for name, entry in hyperparameters.items()})
    return found


def tensorboard(store: Path) -> Tracked:
    from tensorboardX.proto.event_pb2 import Event

    found = Tracked()
    (path,) = store.glob("events.out.tfevents.*")
    data = path.read_bytes()
    while data:  # TFRecord: length, its checksum, the record, its checksum
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found.add(value.tag, event.step, value.simple_value)
            elif value.HasField("image"):
                found.figures.add(value.tag.removeprefix("plots/"))
            elif value.tag.startswith("config"):
                found.config = json.loads(value.tensor.string_val[0])
            else:
                found.texts.append(value.tensor.string_val[0].decode())
    return found


def wandb(store: Path) -> Tracked:
    from wandb.proto.wandb_internal_pb2 import Record

    found = Tracked()
    (path,) = store.glob("wandb/offline-run-*/run-*.wandb")
    for data in _leveldb_records(path.read_bytes()[7:]):
        record = Record.FromString(data)
        for item in record.run.config.update:
            found.config[item.key] = json.loads(item.value_json)
        items = {tuple(item.nested_key) or (item.key,): json.loads(item.value_json) for item in record.history.item}
        for (name, *part), value in items.items():
            if name == "messages":
                if part == ["path"]:
                    (table,) = store.glob(f"wandb/offline-run-*/files/{value}")
                    found.texts += [row[0] for row in json.loads(table.read_text())["data"]]
            elif name.startswith("plots/"):
                found.figures.add(name.removeprefix("plots/"))
            elif not name.startswith("_"):
                found.add(name, record.history.step.num, value)
    return found


def _leveldb_records(data: bytes) -> list[bytes]:
    """Return the records of a log of LevelDB, whose first block has lost a header of 7 bytes."""
    records = [b""]
    place = 7
    while data:
        if 32768 - place % 32768 < 7:  # no header fits into the rest of the block
            rest = 32768 - place % 32768
        else:
            length, kind = struct.unpack("<HB", data[4:7])
            records[-1] += data[7 : 7 + length]
            if kind in (1, 4):  # full, or last
                records.append(b"")
            rest = 7 + length
        data = data[rest:]
        place += rest
    return records[:-1]
