"""What each backend has stored of a run, read by the backend's own means where it has any."""

from __future__ import annotations

import csv
import json
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Points = list[tuple[int, float]]


@dataclass
class Stored:
    """A logged run."""

    metrics: dict[str, Points] = field(default_factory=dict)
    """Steps and values by name, in the order in which they were logged."""
    params: dict[str, str] = field(default_factory=dict)
    artifacts: set[str] = field(default_factory=set)
    status: str = ""

    def add(self, name: str, step: int, value: float) -> None:
        self.metrics.setdefault(name, []).append((step, value))


def of_csv(folder: Path) -> Stored:
    found = Stored(params={k: str(v) for k, v in json.loads((folder / "params.json").read_text()).items()})
    with (folder / "metrics.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            for name, value in row.items():
                if name != "step" and value:
                    found.add(name, int(row["step"]), float(value))
    return found


def of_tensorboard(folder: Path) -> Stored:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
    read.Reload()
    tags, found = read.Tags(), Stored()
    for name in tags["scalars"]:
        for event in read.Scalars(name):
            found.add(name, event.step, event.value)
    text = read.Tensors("parameters/text_summary")[0].tensor_proto.string_val[0].decode()
    found.params = dict(line.strip("| ").split(" | ") for line in text.splitlines()[2:])
    found.artifacts = {f"{name}.png" for name in tags["images"]}
    found.artifacts |= {f"{n.partition('/')[0]}.json" for n in tags["tensors"] if not n.startswith("parameters")}
    return found


def of_mlflow(uri: str, run: str) -> Stored:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    stored = client.get_run(run)
    found = Stored(params=dict(stored.data.params), status=stored.info.status)
    for name in stored.data.metrics:
        for metric in client.get_metric_history(run, name):
            found.add(name, metric.step, metric.value)
    found.artifacts = {a.path for a in client.list_artifacts(run)}
    return found


def of_wandb(folder: Path, run: str) -> Stored:
    """All offline files of a run below a folder, the oldest first."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # its process has written everything when it has ended
    found = Stored()
    for path in sorted(folder.rglob(f"run-{run}.wandb"), key=lambda p: p.stat().st_mtime_ns):
        for data in _leveldb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            match record.WhichOneof("record_type"):
                case "history":
                    row = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
                    for name, value in row.items():
                        if "iteration" in row and not name.startswith("_") and name != "iteration":
                            found.add(name, row["iteration"], math.nan if value == "NaN" else value)
                case "config":
                    found.params |= {(i.key or ".".join(i.nested_key)): str(json.loads(i.value_json)) for i in record.config.update}
                case "files":
                    found.artifacts |= {re.sub(r"media/images/(\w+?)_.*", r"\1.png", f.path) for f in record.files.files}
                case "exit":
                    found.status = str(record.exit.exit_code)
    found.artifacts.discard("requirements.txt")
    return found


def _leveldb_records(data: bytes) -> Iterator[bytes]:
    """Records of a file in the format of LevelDB's log, behind a header of seven bytes."""
    block, position, parts = 32768, 7, []
    while position + 7 <= len(data):
        left = block - position % block
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def same(found: Any, expected: Points) -> bool:
    """Whether points are equal; values to the precision of float32, in which TensorBoard stores them. NaN equals NaN."""
    return [s for s, _ in found] == [s for s, _ in expected] and all(
        (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=1e-6) for (_, a), (_, b) in zip(found, expected, strict=True)
    )
