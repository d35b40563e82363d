"""The port to folders and stores: one contract, run over each."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
from pathlib import Path

import pytest
from catalog_worlds import put
from obstore.store import MemoryStore

from ephemeron.data.catalog import objects
from ephemeron.data.catalog.files import FileRange, FileReader, Files
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.objects import ObjectFiles
from ephemeron.data.catalog.open_files import FolderFiles, open_files
from ephemeron.errors import DatasetError, DatasetUnreachable, JobError

ODD = ["a b.jpg", "ä.jpg", "50%.jpg", "%41.jpg", "x#1.jpg", "a+b.jpg", "q?.jpg", "[x].jpg", "a&b.jpg", "d/e/日本.txt"]


def fetch(files: Files, *ranges: FileRange) -> list[bytes]:
    return run(files.fetch(ranges))


def test_ranges_come_in_the_order_asked_for(files: Files) -> None:
    put(files, "a/x", b"0123456789")
    put(files, "b", b"other")
    asked = [FileRange("a/x", 8, 2), FileRange("b"), FileRange("a/x"), FileRange("a/x", 0, 3), FileRange("a/x", 7), FileRange("b", 1, 0)]
    assert fetch(files, *asked) == [b"89", b"other", b"0123456789", b"012", b"789", b""]
    assert fetch(files, *asked * 40) == [b"89", b"other", b"0123456789", b"012", b"789", b""] * 40


def test_a_file_that_ends_before_gives_what_there_is(files: Files) -> None:
    put(files, "x", b"0123456789")
    put(files, "empty", b"")
    assert fetch(files, FileRange("x", 8, 5), FileRange("x", 10, 5), FileRange("x", 99, 5)) == [b"89", b"", b""]
    assert fetch(files, FileRange("x", 99), FileRange("empty"), FileRange("empty", 0, 5)) == [b"", b"", b""]


def test_absent_files(files: Files) -> None:
    put(files, "a/x", b"1")
    for wanted in (FileRange("a/y"), FileRange("a/y", 0, 1), FileRange("a/y", 5), FileRange("a/x/deeper")):
        with pytest.raises(FileNotFoundError) as caught:
            fetch(files, FileRange("a/x"), wanted)
        assert caught.value.args == (wanted.path,)
        assert run(files.size(wanted.path)) is None
    assert run(files.size("a/x")) == 1
    assert run(files.size("a")) is None, "a folder is no file"


def test_listing(files: Files) -> None:
    assert run(files.tree("")) == run(files.tree("nowhere")) == {}
    assert run(files.folders("")) == run(files.folders("nowhere")) == []
    for path in ("b/2", "a/c/1", "a/3", "ab/4", "top"):
        put(files, path, path.encode())
    assert run(files.tree("")) == {p: len(p) for p in sorted(["a/3", "a/c/1", "ab/4", "b/2", "top"])}
    assert list(run(files.tree("a"))) == list(run(files.tree("a/"))) == ["a/3", "a/c/1"]
    assert run(files.folders("")) == ["a", "ab", "b"]
    assert run(files.folders("a")) == run(files.folders("a/")) == ["c"]


def test_odd_names(files: Files) -> None:
    for name in ODD:
        put(files, name, name.encode())
    assert list(run(files.tree(""))) == sorted(ODD)
    assert fetch(files, *map(FileRange, ODD)) == [name.encode() for name in ODD]


def test_nothing_is_overwritten(files: Files, tmp_path: Path) -> None:
    assert run(files.create("x", b"first"))
    assert not run(files.create("x", b"second"))
    (tmp_path / "local").write_bytes(b"third")
    assert not run(files.create("x", tmp_path / "local"))
    assert run(files.create("d/y", tmp_path / "local"))
    assert fetch(files, FileRange("x"), FileRange("d/y")) == [b"first", b"third"]


def test_of_many_who_create_one_wins(files: Files) -> None:
    won: list[int] = []
    barrier = threading.Barrier(8)

    def create(i: int) -> None:
        barrier.wait(timeout=60)
        if run(files.create("x", bytes([i]) * 10_000)):
            won.append(i)

    threads = [threading.Thread(target=create, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert fetch(files, FileRange("x")) == [bytes(won) * 10_000]
    assert list(run(files.tree(""))) == ["x"], "losers leave nothing behind"


def test_a_file_as_a_stream(files: Files) -> None:
    put(files, "x", b"__0123456789__")
    stream = FileReader(files, "x", offset=2, length=10)
    assert stream.read(3) == b"012"
    assert stream.seek(-2, 2) == 8
    assert stream.read() == b"89"
    assert stream.read(5) == b""
    assert stream.seek(1) + stream.seek(1, 1) == 3
    assert (stream.read(1), stream.tell()) == (b"2", 3)


@pytest.mark.slow
def test_several_event_loops_at_once(files: Files) -> None:
    put(files, "x", b"0123456789")

    async def read() -> list[bytes]:
        return await files.fetch([FileRange("x", i % 10, 1) for i in range(100)])

    assert asyncio.run(read()) == asyncio.run(read()) == run(read()) == [b"%d" % (i % 10) for i in range(100)]


@pytest.mark.parametrize("form", ["plain", "uri", "relative"])
def test_folders_by_path_and_by_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    where = tmp_path / "with space" / "ü%41"
    where.mkdir(parents=True)
    (where / "x").write_bytes(b"1")
    monkeypatch.chdir(tmp_path)
    files = open_files({"plain": str(where), "uri": where.as_uri(), "relative": "with space/ü%41"}[form])
    assert fetch(files, FileRange("x")) == [b"1"]
    assert files.url == where.as_uri()
    assert fetch(pickle.loads(pickle.dumps(files)), FileRange("x")) == [b"1"]


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    (tmp_path / "real" / "in").mkdir(parents=True)
    (tmp_path / "real" / "in" / "x").write_bytes(b"1")
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "in" / "up").symlink_to(tmp_path / "top")
    assert list(run(open_files(str(tmp_path / "top")).tree(""))) == ["link/in/x"]


def test_leavings_of_a_killed_writer_are_not_listed(tmp_path: Path) -> None:
    (tmp_path / ".part-0123").write_bytes(b"half")
    assert run(open_files(str(tmp_path)).tree("")) == {}


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DatasetUnreachable, match=r"file:///.*/file/below/x: Not a directory"):
        run(open_files(str(tmp_path / "file" / "below")).create("x", b"1"))


@pytest.mark.parametrize("url", ["file://host/path", "ftp://x/y", "s3://", "s3://key:secret@bucket"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(JobError) as caught:
        open_files(url)
    assert "secret" not in str(caught.value)


def test_a_missing_bucket_is_not_a_missing_file(s3: str) -> None:
    files = open_files("s3://not-our-bucket/prefix")
    for call in (
        lambda: files.fetch([FileRange("x")]),
        lambda: files.fetch([FileRange("x", 1, 2)]),
        lambda: files.tree(""),
        lambda: files.folders(""),
        lambda: files.create("x", b""),
    ):
        with pytest.raises(DatasetUnreachable, match="bucket does not exist"):
            run(call())


def test_a_store_is_pickled_as_its_url(s3: str) -> None:
    files = open_files(s3 + "/pickled")
    run(files.create("x", b"1"))
    assert fetch(pickle.loads(pickle.dumps(files)), FileRange("x")) == [b"1"]


def test_object_stores_refuse_a_forked_child_instead_of_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    files = ObjectFiles(MemoryStore(), url="memory://test")
    put(files, "x", b"1")
    assert objects._first_used_by == os.getpid()
    monkeypatch.setattr(objects, "_first_used_by", os.getpid() + 1)
    for call in (
        lambda: files.fetch([FileRange("x")]),
        lambda: files.size("x"),
        lambda: files.tree(""),
        lambda: files.folders(""),
        lambda: files.create("y", b""),
    ):
        with pytest.raises(DatasetError, match=r"process forked after.*multiprocessing_context='forkserver'"):
            run(call())


def test_the_loop_cannot_wait_for_itself(tmp_path: Path) -> None:
    files = FolderFiles(tmp_path)

    async def inside() -> None:
        run(files.tree(""))

    with pytest.raises(RuntimeError, match="cannot wait for itself"):
        run(inside())
