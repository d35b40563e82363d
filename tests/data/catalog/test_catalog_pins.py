"""A version means the bytes that were imported: other bytes in their place are an error, not a sample."""

from __future__ import annotations

import gzip
import json
import os
import secrets
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
from click.testing import CliRunner

from ephemeron.cli.data import data as data_commands
from ephemeron.data.catalog import DatasetReader, DatasetStore
from ephemeron.data.catalog.check import verify_variant
from ephemeron.data.catalog.files import FileRange
from ephemeron.data.catalog.importers import import_dataset
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.open_files import open_files
from ephemeron.data.flow import Flow, LocalReader
from ephemeron.errors import DatasetDamaged, FileVersionChanged, SampleFailed

ROWS = "x,label\n" + "".join(f"{i:03d},{i % 3}\n" for i in range(20))


def csv_file(folder: Path) -> Path:
    folder.mkdir()
    (folder / "a.csv").write_text(ROWS)
    return folder


def packed_csv(folder: Path) -> Path:
    folder.mkdir()
    (folder / "a.csv.gz").write_bytes(gzip.compress(ROWS.encode(), mtime=0))
    return folder


def npz(folder: Path) -> Path:
    folder.mkdir()
    np.savez(folder / "a.npz", x=np.arange(60, dtype=np.int32).reshape(20, 3), y=np.arange(20))
    return folder


def tar(folder: Path) -> Path:
    csv_file(folder)
    with tarfile.open(folder.with_suffix(".tar"), "w") as archive:
        archive.add(folder / "a.csv", "a.csv")
    shutil.rmtree(folder)
    return folder.with_suffix(".tar")


def parquet(folder: Path) -> Path:
    pa = pytest.importorskip("pyarrow")
    folder.mkdir()
    table = pa.table({"x": list(range(20)), "label": [i % 3 for i in range(20)]})
    __import__("pyarrow.parquet").parquet.write_table(table, folder / "a.parquet", compression="none", use_dictionary=False)
    return folder


def swap(path: Path, *, keep_time: bool = False) -> None:
    """Other bytes, as many: a byte in the data is another one. A tar file's header, which comes first, has times in digits."""
    data, before = bytearray(path.read_bytes()), path.stat()
    place = data.rfind(b"007") if b"007" in data else len(data) // 3 if path.suffix in (".gz", ".npz") else 24
    if path.suffix == ".npz":
        place = data.find(np.arange(12, 15, dtype=np.int32).tobytes())
    if path.suffix == ".parquet":
        place = data.find(np.arange(4, dtype=np.int64).tobytes()) + 8
    data[place] ^= 1
    path.unlink()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns if keep_time else before.st_mtime_ns + 10**9))


def published(store: DatasetStore, kind: str, source: Path | str, **more: Any) -> DatasetReader:
    options = {"options": {"target": "label"}} if kind in ("csv", "parquet") else {}
    import_dataset(kind, str(source), "test/pinned", store, **{**options, **more})
    return DatasetReader.open("test/pinned", "train", store=store)


SOURCES = {"csv": csv_file, "gz": packed_csv, "npz": npz, "tar": tar, "parquet": parquet}


@pytest.mark.parametrize("form", SOURCES)
def test_a_file_of_equal_size_is_not_taken_for_what_was_imported(store: DatasetStore, tmp_path: Path, form: str) -> None:
    source = SOURCES[form](tmp_path / "source")
    kind = "csv" if form in ("gz", "tar") else form
    reader = published(store, kind, source)
    expected = [repr(s.value) for s in reader]
    (path,) = [source] if source.is_file() else source.iterdir()
    os.utime(path)  # touched, and still the same
    assert [repr(s.value) for s in DatasetReader.open("test/pinned", "train", store=store)] == expected
    swap(path)
    with pytest.raises(DatasetDamaged, match=r"(a\.(csv|npz|parquet)|source\.tar).*was xxh3:[0-9a-f]{16}.*is xxh3:[0-9a-f]{16}"):
        DatasetReader.open("test/pinned", "train", store=store).read_many(range(20))
    found = verify_variant(store, store.dataset("test/pinned"), "train")
    assert found.defects
    assert "was xxh3:" in found.defects[0]
    if form != "gz":  # whose checksum is wrong now
        import_dataset(kind, str(source), "test/pinned", store, options={"target": "label"} if kind != "npz" else {})
        DatasetReader.open("test/pinned", "train", store=store).read_many(range(20))


def test_samples_that_were_not_touched_can_be_read(store: DatasetStore, tmp_path: Path) -> None:
    reader = published(store, "csv", csv_file(tmp_path / "source"))
    swap(tmp_path / "source" / "a.csv")
    assert [s.target for s in reader.read_many([0, 6, 8])] == [0, 0, 2]
    with pytest.raises(DatasetDamaged, match="sample 7"):
        reader.read(7)
    found = verify_variant(store, store.dataset("test/pinned"), "train")
    assert (found.pinned, found.unpinned, len(found.defects)) == (20, 0, 1)
    assert "sample 7" in found.defects[0]


def test_a_parquet_file_with_its_old_time_is_found_by_verify(store: DatasetStore, tmp_path: Path) -> None:
    """Reading looks at the time, since the whole file would have to be read; verify reads it."""
    published(store, "parquet", parquet(tmp_path / "source"))
    assert not verify_variant(store, store.dataset("test/pinned"), "train").defects
    swap(tmp_path / "source" / "a.parquet", keep_time=True)
    assert len(verify_variant(store, store.dataset("test/pinned"), "train").defects) == 1


def replaced(s3: str, name: str, change: Callable[[bytes], bytes]) -> None:
    files: Any = open_files(s3)
    (data,) = run(files.fetch([FileRange(name)]))
    obstore.put(files._store, name, change(data))


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "form"), [(0, "csv"), (0, "npz"), (0, "parquet"), (1, "csv")])
def test_an_object_that_was_replaced(store: DatasetStore, tmp_path: Path, s3: str, form: str, workers: int) -> None:
    folder = f"{s3}/{secrets.token_hex(4)}"
    source = SOURCES[form](tmp_path / "source")
    (path,) = source.iterdir()
    run(open_files(folder).create(path.name, path))
    published(store, form, folder)

    def batches() -> list[Any]:
        flow = Flow("test/pinned").dataset("test/pinned", store=store.files.url)
        with flow.prepare_read(LocalReader(workers)).to_shuffled(5, list) as found:
            return list(found)

    assert sum(map(len, batches())) == 20
    assert not verify_variant(store, store.dataset("test/pinned"), "train").defects
    replaced(folder, path.name, lambda data: data)  # the same content has the same ETag
    assert sum(map(len, batches())) == 20
    replaced(folder, path.name, lambda data: data[:30] + bytes([data[30] ^ 1]) + data[31:])
    with pytest.raises(SampleFailed, match=r"a\..*: it is not the object that was imported.*etag:.*etag:"):
        batches()
    (first, *_) = verify_variant(store, store.dataset("test/pinned"), "train").defects
    assert "was etag:" in first
    assert path.name in first


def test_a_copy_in_a_bucket_is_checked_by_content(tmp_path: Path, s3: str) -> None:
    store = DatasetStore.open(f"{s3}/{secrets.token_hex(4)}")
    reader = published(store, "csv", csv_file(tmp_path / "source"), copy=True)
    assert len(list(reader)) == 20
    path = next(p for p in run(store.files.tree("datasets/test/pinned/data")))
    replaced(store.files.url, path, lambda data: data.replace(b"007", b"070"))
    with pytest.raises(DatasetDamaged, match=r"was xxh3:.*is xxh3:"):
        DatasetReader.open("test/pinned", "train", store=store).read(7)


def test_a_version_is_pinned_and_the_next_one_reads_the_new_content(store: DatasetStore, tmp_path: Path) -> None:
    source = csv_file(tmp_path / "source")
    published(store, "csv", source)
    swap(source / "a.csv")
    import_dataset("csv", str(source), "test/pinned", store, options={"target": "label"})
    assert DatasetReader.open("test/pinned", "train", version="2", store=store).read(7)
    with pytest.raises(DatasetDamaged, match="version 1"):
        DatasetReader.open("test/pinned", "train", version="1", store=store).read(7)


def test_metadata_without_digests_still_reads(store: DatasetStore, tmp_path: Path) -> None:
    source = csv_file(tmp_path / "source")
    reader = published(store, "csv", source, digests=False)
    shards = list((tmp_path / "store").rglob("ms-0.*.json"))
    assert all('"pin' not in shard.read_text() for shard in shards)
    swap(source / "a.csv")
    assert len(list(reader)) == 20
    found = verify_variant(store, store.dataset("test/pinned"), "train")
    assert (found.pinned, found.unpinned, found.defects) == (0, 20, ())


def test_pins_take_little_room(store: DatasetStore, tmp_path: Path) -> None:
    """What many samples share is said once per shard."""
    source = packed_csv(tmp_path / "source")
    published(store, "csv", source)
    (shard,) = (tmp_path / "store").rglob("ms-0.*.json")
    text = shard.read_text()
    assert text.count("xxh3:") == 1
    assert json.loads(text)["pins"].keys() == {"a.csv.gz"}


def test_a_file_is_fetched_only_as_it_was(s3: str) -> None:
    files: Any = open_files(f"{s3}/{secrets.token_hex(4)}")
    run(files.create("x", b"0123456789"))
    pin = run(files.identity("x"))
    assert run(files.identities(""))["x"] == pin
    assert run(files.identity("none")) is None
    ranges = [FileRange("x", 2, 3, pin), FileRange("x", pin=pin), FileRange("x", 4, None, pin)]
    assert run(files.fetch(ranges)) == [b"234", b"0123456789", b"456789"]
    obstore.put(files._store, "x", b"9876543210")
    for wanted in ranges:
        with pytest.raises(FileVersionChanged) as info:
            run(files.fetch([wanted]))
        assert (info.value.path, info.value.wanted, info.value.found) == ("x", pin, run(files.identity("x")))


def test_verify_from_the_command_line(home: Path, tmp_path: Path) -> None:
    source = csv_file(tmp_path / "source")

    def run_it(*arguments: str) -> Any:
        return CliRunner().invoke(data_commands, arguments)

    assert run_it("import", "csv", str(source), "me/rows", "-o", "target=label").exit_code == 0
    sound = run_it("verify", "me/rows")
    assert sound.exit_code == 0, sound.output
    assert "20 of 20" in sound.output
    swap(source / "a.csv")
    damaged = run_it("verify", "me/rows")
    assert damaged.exit_code == 1
    assert "a.csv" in damaged.output
    assert "was xxh3:" in damaged.output
    told = json.loads(run_it("verify", "me/rows", "--json").stdout)
    assert (told["pinned"], told["decoded"], len(told["defects"])) == (20, 0, 1), "what has changed is not decoded"
    unread = run_it("verify", "me/rows", "--no-digests", "--sample", "0")
    assert unread.exit_code == 0
    assert unread.output.endswith("in 1 file (120 B), 0 decoded: no defects\n"), unread.output
    assert run_it("import", "csv", str(source), "me/other", "--no-digests").exit_code == 0
    bare = run_it("verify", "me/other")
    assert bare.exit_code == 0
    assert "20 have no digest" in bare.output
