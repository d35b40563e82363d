"""One bad row, one empty file, one missing file: an import refuses them, passes them over, or keeps them apart."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from ephemeron.cli.data import data as data_commands
from ephemeron.data.catalog import DatasetReader, DatasetStore
from ephemeron.data.catalog.check import unreferenced
from ephemeron.data.catalog.files import FileRange
from ephemeron.data.catalog.importers import import_dataset
from ephemeron.data.catalog.loop import run
from ephemeron.errors import JobError


def jpeg() -> bytes:
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def images(folder: Path) -> Path:
    return write(folder, {"ant/1.png": jpeg(), "ant/2.png": b"", "cat/1.png": jpeg(), "loose.png": jpeg()})


def coco(folder: Path) -> Path:
    table = {
        "categories": [{"id": 3, "name": "ant"}],
        "images": [{"id": i, "file_name": f"{i}.png"} for i in range(5)],
        "annotations": [
            {"id": 0, "image_id": 0, "bbox": [1, 2, 3, 4], "category_id": 3},
            {"id": 1, "image_id": 3, "bbox": [1, 2, 3], "category_id": 3},
            {"id": 2, "image_id": 4, "bbox": [1, 2, 3, 4], "category_id": 9},
            {"id": 3, "image_id": 77, "bbox": [1, 2, 3, 4], "category_id": 3},
        ],
    }
    files = {f"{i}.png": b"" if i == 1 else jpeg() for i in (0, 1, 3, 4)}
    return write(folder, files | {"notes.json": json.dumps(table).encode()})


def librispeech(folder: Path) -> Path:
    text = "1-2-0 HELLO\n1-2-1\n1-2-2 GONE\n1-2-3 EMPTY\n"
    files = {f"1/2/1-2-{i}.flac": b"" if i == 3 else b"fLaC" for i in (0, 1, 3, 4)}
    return write(folder, files | {"1/2/1-2.trans.txt": text.encode()})


def rows(folder: Path) -> Path:
    good = b"x,label\n1,0\n2,1,9\n3,1\n\xff,1\n5,0\n"
    return write(folder, {"a.csv": good, "b.csv.gz": b"no gzip"})


def parquet(folder: Path) -> Path:
    pa = pytest.importorskip("pyarrow")
    folder.mkdir()
    table = pa.table({"x": [1, 2, 3, 4], "label": [0, None, 1, 1]})
    __import__("pyarrow.parquet").parquet.write_table(table, folder / "a.parquet")
    return write(folder, {"b.parquet": b"no parquet"})


KINDS: dict[str, tuple[Callable[[Path], Path], dict[str, str], int, list[tuple[str, str, str]]]] = {
    "images": (images, {}, 2, [("loose.png", "", "outside of a folder"), ("ant/2.png", "", "is empty")]),
    "coco": (
        coco,
        {"annotations": "notes.json"},
        1,
        [
            ("notes.json", "annotation 3", "77"),
            ("1.png", "", "is empty"),
            ("2.png", "", "has no 2.png"),
            ("3.png", "annotation 1", "box of 3 numbers"),
            ("4.png", "annotation 2", "9"),
        ],
    ),
    "librispeech": (
        librispeech,
        {},
        1,
        [
            ("1/2/1-2.trans.txt", "line 2", "no text"),
            ("1/2/1-2.trans.txt", "line 3", "no audio"),
            ("1/2/1-2-3.flac", "", "is empty"),
            ("1/2/1-2-4.flac", "", "has no transcript"),
        ],
    ),
    "csv": (
        rows,
        {"target": "label"},
        3,
        [("a.csv", "line 3", "3 cells"), ("a.csv", "line 5", "is not UTF-8"), ("b.csv.gz", "", "cannot be unpacked")],
    ),
    "parquet": (
        parquet,
        {"target": "label"},
        3,
        [("b.parquet", "", "not a Parquet file"), ("a.parquet", "row 1 of row group 0", "NoneType")],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["fail", "skip", "quarantine"])
def test_defects(store: DatasetStore, tmp_path: Path, kind: str, policy: str) -> None:
    make, options, good, expected = KINDS[kind]
    source = make(tmp_path / "source")

    def describe() -> Any:
        return import_dataset(kind, str(source), "me/x", store, options=options, on_defect=policy)

    if policy == "fail":
        with pytest.raises(JobError) as info:
            describe()
        assert "on_defect" in str(info.value)
        assert store.names() == []
        return
    made = describe().variant("train")
    reader = DatasetReader.open("me/x", "train", store=store, decode=False)
    assert len(reader) == len(list(reader)) == good == made.samples
    found = store.defects(store.dataset("me/x"), "train")
    assert made.defects.count == len(found) == len(expected)
    for file, at, reason in expected:
        (one,) = [d for d in found if (d.file, d.at) == (file, at) and reason in d.reason]
        if policy == "skip":
            assert one.kept is None
        elif one.kept is not None:
            (copy,) = run(store.files.fetch([FileRange(one.kept)]))
            whole = (source / file).read_bytes()
            assert copy in whole
            assert (copy != whole) == (kind == "csv" and at != ""), "a row, or a whole file"
    if policy == "quarantine":
        assert sum(d.kept is not None for d in found) >= 1
    assert unreferenced(store, "me/x") == {}


def test_whoever_has_only_defects_is_told(store: DatasetStore, tmp_path: Path) -> None:
    source = write(tmp_path / "source", {"ant/1.png": b"", "cat/2.png": b""})
    with pytest.raises(JobError, match=r"there are no samples.*2 defects"):
        import_dataset("images", str(source), "me/x", store, on_defect="skip")
    with pytest.raises(JobError, match=r"on_defect = 'drop'.*fail, skip or quarantine"):
        import_dataset("images", str(source), "me/x", store, on_defect="drop")


def test_a_sound_source_has_no_list(store: DatasetStore, tmp_path: Path) -> None:
    source = write(tmp_path / "source", {"ant/1.png": jpeg(), "cat/2.png": jpeg()})
    made = import_dataset("images", str(source), "me/x", store, on_defect="skip").variant("train")
    assert made.defects is None
    assert store.defects(store.dataset("me/x"), "train") == []
    assert not list((tmp_path / "store").rglob("defects*"))


def test_a_file_that_vanishes_during_the_import(store: DatasetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ephemeron.data.catalog import importers

    source = write(tmp_path / "source", {f"ant/{i}.png": jpeg() for i in range(4)})
    look = importers.open_source

    def then_gone(url: str) -> Any:
        found = look(url)
        (source / "ant/2.png").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(importers, "open_source", then_gone)
    made = import_dataset("images", str(source), "me/y", store, on_defect="skip")
    assert made.variant("train").samples == 3
    (defect,) = store.defects(made, "train")
    assert (defect.file, defect.reason) == ("ant/2.png", "was removed during the import")


def test_the_command_line_prints_ten(home: Path, tmp_path: Path) -> None:
    text = "x,label\n" + "".join(f"{i},1{',9' if i % 2 else ''}\n" for i in range(40))
    source = write(tmp_path / "source", {"a.csv": text.encode()})

    def run_it(*more: str) -> Any:
        return CliRunner().invoke(data_commands, ["import", "csv", str(source), "me/x", "-o", "target=label", *more])

    refused = run_it()
    assert isinstance(refused.exception, JobError)
    assert "--on-defect" in str(refused.exception)
    done = run_it("--on-defect", "skip")
    assert done.exit_code == 0, done.output
    told = done.stderr.splitlines()
    assert "skipped: a.csv, line 3: has 3 cells in line 3, but 2 columns" in told
    assert len([line for line in told if line.startswith("skipped: ")]) == 10
    assert "20 defects in me/x version 1, train; all of them: " in told[-1]
    listed = json.loads(Path(told[-1].rpartition("all of them: ")[2].removeprefix("file://")).read_text())
    assert len(listed["defects"]) == 20
    assert "20 samples" in done.stdout
