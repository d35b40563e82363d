"""Object stores in processes that were forked after the store was used: loaders of flows, and PyTorch's workers."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import psutil
import pytest

from ephemeron.data.catalog import DatasetReader, DatasetStore
from ephemeron.data.catalog.files import FileRange, Files
from ephemeron.data.catalog.importers import import_dataset
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.open_files import open_files
from ephemeron.data.flow import Flow, LocalReader
from ephemeron.errors import DatasetUnreachable, SampleFailed
from running import command_of

pytestmark = [pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"), pytest.mark.slow]
SAMPLES = 24


@pytest.fixture
def digits(s3: str, tmp_path: Path) -> DatasetStore:
    """Sample i of `test/digits` is (an array of i, i), in a bucket that this process has used."""
    store = DatasetStore.open(f"{s3}/{secrets.token_hex(4)}")
    np.savez(tmp_path / "x.npz", x=np.arange(SAMPLES * 3.0).reshape(SAMPLES, 3), y=np.arange(SAMPLES))
    import_dataset("npz", str(tmp_path / "x.npz"), "test/digits", store, variant="train", copy=True)
    return store


def noisy(data: Any) -> Any:
    return data + np.random.random()


def plain(samples: list[Any]) -> list[tuple[int, bytes]]:
    return [(int(y), x.tobytes()) for x, y in samples]


def flow(store: DatasetStore) -> Flow:
    return Flow("test/bucket").dataset("test/digits", store=store.files.url).map_data("noisy", noisy)


def in_child(work: Callable[[], Any]) -> Any:
    """The result of work in a forked process; what it raised, in its place."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def child() -> None:
        try:
            theirs.send(work())
        except Exception as e:  # noqa: BLE001 - it is looked at by the test
            theirs.send(e)

    process = context.Process(target=child)
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(60) else pytest.fail("the child hangs")
    finally:
        process.kill()
        process.join()


def store_processes() -> list[psutil.Process]:
    """Of those that this test has begun."""
    return [p for p in psutil.Process().children(recursive=True) if "store_server" in command_of(p)]


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    yield
    end = time.monotonic() + 120
    while store_processes():
        assert time.monotonic() < end, "a store process has outlived those who use it"
        time.sleep(0.02)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_flow_over_a_bucket_with_loader_processes(digits: DatasetStore, workers: int) -> None:
    def epochs(count: int) -> list[Any]:
        with flow(digits).prepare_read(LocalReader(count)).to_shuffled(5, plain, seed=2) as batches:
            return [list(batches) for _ in range(2)]

    expected = epochs(0)
    assert sorted(y for batch in expected[0] for y, _ in batch) == list(range(SAMPLES))
    assert epochs(workers) == expected


def test_all_loaders_share_one_process(digits: DatasetStore) -> None:
    with flow(digits).prepare_read(LocalReader(3)).to_shuffled(2, plain, seed=2) as batches:
        for _, _batch in zip(range(8), batches, strict=False):
            assert len(store_processes()) == 1
    read = DatasetReader.open("test/digits", "train", store=digits)
    assert len(read.read_many(range(3))) == 3
    assert store_processes() == [], "who was not forked needs none"


@pytest.mark.slow
def test_a_store_process_that_dies_costs_nothing_but_time(digits: DatasetStore) -> None:
    seen, killed = [], 0
    with flow(digits).prepare_read(LocalReader(2)).to_shuffled(1, plain, seed=2, prefetch=1) as batches:
        for batch in batches:
            seen += [y for y, _ in batch]
            if len(seen) in (3, 12):
                for process in store_processes():
                    process.send_signal(signal.SIGKILL)
                    killed += 1
    assert killed >= 2
    assert sorted(seen) == list(range(SAMPLES))


def test_workers_of_pytorch(digits: DatasetStore) -> None:
    torch_data = pytest.importorskip("torch.utils.data", reason="PyTorch is not installed")
    reader = DatasetReader.open("test/digits", "train", store=digits)
    reader.read(0)
    loader = torch_data.DataLoader(reader, batch_size=5, num_workers=2, multiprocessing_context="fork")
    assert [int(y) for _, ys in loader for y in ys] == list(range(SAMPLES))


def test_every_method_works_in_a_forked_child(s3: str, tmp_path: Path) -> None:
    place = f"{s3}/{secrets.token_hex(4)}"
    files = open_files(place)
    run(files.create("a/x", b"0123456789"))

    def there(files: Files) -> list[Any]:
        (tmp_path / "local").write_bytes(b"from a file")
        return [
            run(files.fetch([FileRange("a/x", 2, 3), FileRange("a/x")])),
            [run(files.size("a/x")), run(files.size("none"))],
            run(files.create("a/y", b"1")),
            run(files.create("a/y", b"2")),
            run(files.create("b", tmp_path / "local")),
            run(files.tree("")),
            run(files.folders("")),
        ]

    expected = [[b"234", b"0123456789"], [10, None], True, False, True, {"a/x": 10, "a/y": 1, "b": 11}, ["a"]]
    assert in_child(lambda: there(files)) == expected
    assert run(files.fetch([FileRange("a/y")])) == [b"1"]


def test_errors_are_those_that_they_would_be_here(digits: DatasetStore, s3: str) -> None:
    files = digits.files
    found = in_child(lambda: run(files.fetch([FileRange("nothing/here")])))
    assert isinstance(found, FileNotFoundError)
    assert found.args == ("nothing/here",)
    elsewhere = open_files("s3://no-such-bucket/x")
    found = in_child(lambda: run(elsewhere.fetch([FileRange("x")])))
    assert isinstance(found, DatasetUnreachable)
    assert "bucket does not exist" in str(found)
    assert "s3://no-such-bucket/x/x" in str(found)


def test_many_threads_and_large_answers(s3: str) -> None:
    files = open_files(f"{s3}/{secrets.token_hex(4)}")
    content = np.random.default_rng(0).bytes(3 << 20)
    run(files.create("large", content))

    def there() -> bool:
        from concurrent.futures import ThreadPoolExecutor

        def one(i: int) -> bool:
            whole, part = run(files.fetch([FileRange("large"), FileRange("large", i, 1000)]))
            return whole == content and part == content[i : i + 1000]

        with ThreadPoolExecutor(8) as pool:
            return all(pool.map(one, range(24)))

    assert in_child(there)


def test_a_file_that_is_absent_is_named(digits: DatasetStore) -> None:
    """Through a loader process: the flow's error says which sample and file."""
    files: Any = digits.files
    (path,) = (path for path in run(files.tree("datasets/test/digits/data")) if path.endswith(".npz"))
    obstore.delete(files._store, path)
    with (
        flow(digits).prepare_read(LocalReader(1)).to_shuffled(2, plain) as batches,
        pytest.raises(SampleFailed, match="the file is absent"),
    ):
        next(iter(batches))


def test_a_child_of_a_child(digits: DatasetStore) -> None:
    reader = DatasetReader.open("test/digits", "train", store=digits)
    assert in_child(lambda: in_child(lambda: [int(s.target) for s in reader.read_many([4, 2])])) == [4, 2]
