"""The unified reader: the same samples however they are asked for, bounded memory, errors that say where."""

from __future__ import annotations

import asyncio
import gzip
import json
import multiprocessing
import os
import pickle
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from catalog_worlds import BYTES, overwrite, publish, publish_records, put, record_metas, records
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore

from ephemeron.data.catalog import DataRef, DatasetReader, DatasetStore, NewVariant, ReadLimits, SampleMeta
from ephemeron.data.catalog.files import FileRange
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.objects import ObjectFiles
from ephemeron.data.catalog.open_files import FolderFiles
from ephemeron.errors import DatasetDamaged, DatasetUnreachable, JobError, MissingExtra


class Counting(FolderFiles):
    """A folder that keeps what was asked of it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: list[FileRange] = []

    async def fetch(self, ranges: Sequence[FileRange]) -> list[bytes]:
        self.asked += ranges
        return await super().fetch(ranges)


def opened(store: DatasetStore, **how: object) -> DatasetReader:
    return DatasetReader.open("me/x", "train", store=store, **how)  # type: ignore[arg-type]


@pytest.mark.slow
def test_every_store_gives_the_same_samples(any_store: DatasetStore) -> None:
    _, expected = publish_records(any_store, 50, shard_size=7)
    reader = opened(any_store)
    assert len(reader) == 50
    assert [s.value for s in reader] == expected
    sample = reader.read(13)
    assert (sample.index, sample.key, sample.target, sample.data) == (13, "records.bin[13]", 13, {"part": expected[13]})
    assert reader[49] == (expected[49], 49)
    assert reader.__getitems__([4, 2, 4]) == [(expected[4], 4), (expected[2], 2), (expected[4], 4)]
    assert [m.target for m in reader.metas(range(5, 20))] == list(range(5, 20))


@pytest.mark.parametrize("offset", [None, 0])
def test_an_absent_file_is_named(any_store: DatasetStore, offset: int | None) -> None:
    publish_records(any_store, 3)
    gone = SampleMeta(key="g", data={"part": DataRef(path="gone", offset=offset, length=1)})
    publish(any_store, [*record_metas("records.bin", 3), gone])
    with pytest.raises(DatasetDamaged, match=r"me/x, version 2, train, sample 3: .*/data/gone: the file is absent") as e:
        opened(any_store).read_many([0, 3])
    assert (e.value.index, e.value.file.rpartition("/")[2]) == (3, "gone")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(1, 40),
    shard_size=st.integers(1, 45),
    gap=st.integers(0, 30),
    largest=st.integers(1, 60),
    cache=st.integers(0, 3000),
    data=st.data(),
)
def test_random_access_is_sequential_access(count: int, shard_size: int, gap: int, largest: int, cache: int, data: st.DataObject) -> None:
    store = DatasetStore(ObjectFiles(MemoryStore(), url="memory://test"))
    _, expected = publish_records(store, count, shard_size=shard_size)
    limits = ReadLimits(meta_cache_bytes=cache, gap_bytes=gap, request_bytes=largest)
    reader = opened(store, limits=limits)
    order = data.draw(st.lists(st.integers(0, count - 1), max_size=60))
    assert [(s.index, s.value, s.target) for s in reader.read_many(order)] == [(i, expected[i], i) for i in order]
    batch = data.draw(st.integers(1, 50))
    assert [s.value for s in reader.iterate(batch=batch)] == expected
    start, stop = data.draw(st.integers(0, count)), data.draw(st.integers(0, count + 3))
    assert [s.value for s in reader.iterate(start, stop, batch=batch)] == expected[start:stop]
    assert reader._fetcher().shards.nbytes <= cache


def test_metadata_is_read_once_while_it_fits_and_never_held_beyond_the_bound(tmp_path: Path) -> None:
    files = Counting(tmp_path)
    store = DatasetStore(files)
    publish_records(store, 100, shard_size=10)
    reader = opened(store)
    order = np.random.default_rng(0).permutation(100)
    files.asked.clear()
    for i in order:
        reader.read(i)
    assert sum("/meta/" in r.path for r in files.asked) == 10
    per_shard = reader._fetcher().shards.nbytes // 10
    small = opened(store, limits=ReadLimits(meta_cache_bytes=3 * per_shard + 50))
    files.asked.clear()
    for i in order:
        small.read(i)
        assert small._fetcher().shards.nbytes <= 3 * per_shard + 50
    assert len(small._fetcher().shards) == 3
    assert sum("/meta/" in r.path for r in files.asked) > 50, "it had to be read again"


def test_neighbours_are_one_request_and_strangers_are_not(tmp_path: Path) -> None:
    files = Counting(tmp_path)
    store = DatasetStore(files)
    publish_records(store, 1000)
    reader = opened(store, limits=ReadLimits(gap_bytes=10, request_bytes=10_000))
    reader.metas([0])
    files.asked.clear()
    reader.read_many([3, 1, 2, 500, 502, 900])
    asked = [(r.offset, r.length) for r in files.asked]
    assert asked == [(5, 15), (2500, 15), (4500, 5)]


def test_a_shard_that_many_want_at_once_is_read_once(tmp_path: Path) -> None:
    files = Counting(tmp_path)
    store = DatasetStore(files)
    publish_records(store, 100, shard_size=100)
    reader = opened(store)
    files.asked.clear()

    async def many() -> None:
        await asyncio.gather(*(reader.read_many_async([i]) for i in range(50)))

    asyncio.run(many())
    assert sum("/meta/" in r.path for r in files.asked) == 1


@pytest.mark.slow
def test_many_threads_read_what_one_reads(any_store: DatasetStore) -> None:
    _, expected = publish_records(any_store, 200, shard_size=9)
    reader = opened(any_store, limits=ReadLimits(meta_cache_bytes=4000))
    barrier = threading.Barrier(8)

    def read(seed: int) -> bool:
        order = np.random.default_rng(seed).permutation(200)
        barrier.wait(timeout=60)
        parts = [reader.read_many(order[i : i + 25]) for i in range(0, 200, 25)]
        return [s.value for part in parts for s in part] == [expected[i] for i in order]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(8)))


def test_pickled_readers_read_the_version_they_were_opened_with(store: DatasetStore) -> None:
    _, expected = publish_records(store, 20, shard_size=6)
    reader = opened(store)
    reader.read(0)
    data = pickle.dumps(reader)
    publish(store, record_metas("records.bin", 7))
    copy = pickle.loads(data)
    assert [s.value for s in copy] == expected
    assert copy.dataset.version == "1"
    assert len(opened(store)) == 7


def test_a_reader_of_a_bucket_is_pickled_too(s3: str) -> None:
    store = DatasetStore.open(f"{s3}/pickle-{os.getpid()}")
    _, expected = publish_records(store, 5)
    assert [s.value for s in pickle.loads(pickle.dumps(opened(store)))] == expected


def _child(reader: DatasetReader, queue: multiprocessing.SimpleQueue) -> None:  # type: ignore[type-arg]
    queue.put([s.value for s in reader.read_many([5, 3])])


@pytest.mark.parametrize("busy", [False, True])
def test_a_reader_survives_fork_after_use(store: DatasetStore, busy: bool) -> None:
    _, expected = publish_records(store, 20)
    reader = opened(store, limits=ReadLimits(meta_cache_bytes=0))
    reader.read(0)
    if busy:  # another thread is in the middle of reading the same shard, and the child will not see the end of it

        async def never_done() -> None:
            reader._fetcher()._loading["meta", 0] = asyncio.get_running_loop().create_future()  # type: ignore[assignment]

        run(never_done())
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_child, args=(reader, queue))
    child.start()
    child.join(timeout=30)
    child.kill()
    child.join()
    assert child.exitcode == 0, "it hung, or died"
    assert queue.get() == [expected[5], expected[3]]


def test_a_torch_data_loader_carries_it(store: DatasetStore) -> None:
    torch_data = pytest.importorskip("torch.utils.data", reason="PyTorch is not installed")
    array = np.arange(30 * 4, dtype="<f4").reshape(30, 4)
    put(store.files, "datasets/me/x/data/a", array.tobytes())
    decoders = {"part": {"decoder": "array", "dtype": "<f4", "shape": [4]}}
    store.publish("me/x", {"train": NewVariant(samples=record_metas("a", 30, 16), decoders=decoders)}, shard_size=8)
    loader = torch_data.DataLoader(opened(store), batch_size=8, num_workers=2, multiprocessing_context="fork")
    batches = list(loader)
    assert [len(y) for _, y in batches] == [8, 8, 8, 6]
    np.testing.assert_array_equal(np.concatenate([x.numpy() for x, _ in batches]), array)


def test_in_an_event_loop(store: DatasetStore) -> None:
    _, expected = publish_records(store, 20)
    reader = opened(store)

    async def main() -> list[bytes]:
        assert reader.read(0).value == expected[0], "the blocking face works there too"
        return [s.value for s in await reader.read_many_async([7, 8])]

    assert asyncio.run(main()) == expected[7:9]


@pytest.mark.parametrize("index", [-1, 20, 10**12])
def test_numbers_outside(store: DatasetStore, index: int) -> None:
    publish_records(store, 20)
    with pytest.raises(IndexError, match=f"me/x version 1, train: sample {index} of 20"):
        opened(store).read(index)
    with pytest.raises(TypeError):
        opened(store).read(1.5)  # type: ignore[arg-type]


def shard_path(store: DatasetStore, shard: int) -> str:
    return store.dataset("me/x").shard_path("train", shard)


@pytest.mark.parametrize("how", ["absent", "cut", "changed", "swapped"])
def test_damaged_shards_are_named_and_others_are_read(store: DatasetStore, how: str) -> None:
    _, expected = publish_records(store, 30, shard_size=10)
    path = shard_path(store, 1)
    (data,) = run(store.files.fetch([FileRange(path)]))
    (other,) = run(store.files.fetch([FileRange(shard_path(store, 0))]))
    contents = {"absent": None, "cut": data[:-20], "changed": data.replace(b"[15]", b"[51]"), "swapped": other}
    overwrite(store, path, contents[how])
    reader = opened(store)
    assert reader.read(9).value == expected[9]
    for _ in range(2):
        with pytest.raises(DatasetDamaged, match=r"me/x, version 1, train, sample 15: file:///.*/train/ms-1\..*\.json") as e:
            reader.read_many([3, 15])
        assert ("is absent" if how == "absent" else "digest") in str(e.value)
        assert (e.value.dataset, e.value.version, e.value.variant) == ("me/x", "1", "train")
        assert "ms-1" in e.value.file


def test_a_shard_with_the_right_digest_and_the_wrong_samples(store: DatasetStore) -> None:
    publish_records(store, 30, shard_size=10)
    document = store.files.root / "datasets/me/x/meta/versions/000001.json"  # type: ignore[attr-defined]
    table = json.loads(document.read_text())
    shards = table["variants"]["train"]["shards"]
    shards[1] = shards[0]
    first = (store.files.root / shard_path(store, 0)).read_bytes()  # type: ignore[attr-defined]
    document.write_text(json.dumps(table))
    put(store.files, shard_path(store, 1), first)
    with pytest.raises(DatasetDamaged, match="it has samples from 0, 10 of them, not 10 from 10"):
        opened(store).read(12)


@pytest.mark.parametrize("cut", [0, 60, 62, 150])
def test_a_truncated_data_file_is_named_by_every_sample_it_lacks(any_store: DatasetStore, cut: int) -> None:
    put(any_store.files, "datasets/me/x/data/r", records(30)[:cut])
    publish(any_store, record_metas("r", 30))
    reader = opened(any_store)
    for i in range(30):
        if (i + 1) * 5 <= cut:
            assert reader.read(i).value == records(30)[i * 5 : i * 5 + 5]
            continue
        with pytest.raises(DatasetDamaged, match=rf"train, sample {i}: .*/data/r: it ends before byte {i * 5 + 5}") as e:
            reader.read(i)
        assert e.value.index == i


def test_a_whole_file_of_another_size(any_store: DatasetStore) -> None:
    put(any_store.files, "datasets/me/x/data/r", b"short")
    publish(any_store, [SampleMeta(key="r", data={"part": DataRef(path="r", length=9)})])
    with pytest.raises(DatasetDamaged, match=r"sample 0: .*/data/r: it has 5 bytes, but had 9 when it was imported"):
        opened(any_store).read(0)


def test_a_store_that_fails_is_no_damage(store: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_records(store, 3)

    async def fail(*_: object) -> list[bytes]:
        raise DatasetUnreachable("no answer in time", file="file:///x")

    monkeypatch.setattr(FolderFiles, "fetch", fail)
    reader = DatasetReader(store.files, _document(store), "train")
    with pytest.raises(DatasetUnreachable, match=r"me/x, version 1, train, sample 0: file:///x: no answer in time"):
        reader.read(2)


def _document(store: DatasetStore):  # type: ignore[no-untyped-def]
    from ephemeron.data.catalog import Dataset

    path = store.files.root / "datasets/me/x/meta/versions/000001.json"  # type: ignore[attr-defined]
    return Dataset.from_json(json.loads(path.read_text()))


def test_what_cannot_be_decoded_is_named(store: DatasetStore) -> None:
    put(store.files, "datasets/me/x/data/a.json", b'{"a": ')
    meta = SampleMeta(key="a.json", data={"part": DataRef(path="a.json", length=6)})
    store.publish("me/x", {"train": NewVariant(samples=[meta], decoders={"part": {"decoder": "json"}})})
    with pytest.raises(DatasetDamaged, match=r"sample 0: .*/a\.json: part of a.json cannot be decoded \(json\): ") as e:
        opened(store).read(0)
    assert "\n" not in str(e.value)
    assert opened(store, decode=False).read(0).value == b'{"a": '


def test_decoders_of_ones_own(store: DatasetStore) -> None:
    put(store.files, "datasets/me/x/data/r", b"0123456789")
    decoders = {"part": {"decoder": "times", "factor": 3}}
    store.publish("me/x", {"train": NewVariant(samples=record_metas("r", 2), decoders=decoders)})
    with pytest.raises(JobError, match=r"me/x version 1, train: decoder 'times' is not known.*decoders=\{'times': function\}"):
        opened(store)
    assert opened(store, decode=False).read(1).value == b"56789"
    reader = opened(store, decoders={"times": lambda part, options: part * options["factor"]})
    assert reader.read(1).value == b"56789" * 3


def test_a_missing_extra_is_named_as_such(store: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store.files, "datasets/me/x/data/r", b"0123456789")
    for name, extra in (("image", "data"), ("audio", "audio")):
        monkeypatch.setitem(__import__("sys").modules, {"image": "PIL", "audio": "soundfile"}[name], None)
        decoders = {"part": {"decoder": name}}
        store.publish("me/x", {"train": NewVariant(samples=record_metas("r", 2), decoders=decoders)})
        with pytest.raises(MissingExtra, match=rf"pip install 'ephemeron\[{extra}\]'"):
            opened(store).read(0)


def test_several_parts_and_targets_that_lie_somewhere(store: DatasetStore) -> None:
    put(store.files, "datasets/me/x/data/r", b"0123456789")
    whole = DataRef(path="r", length=10)
    meta = SampleMeta(key="k", data={"a": whole.within(0, 2), "b": whole}, target_at=whole.within(4, 3), extra={"speaker": 7})
    decoders = {"a": {"decoder": "text"}, "b": {"decoder": "bytes"}, "target": {"decoder": "json"}}
    store.publish("me/x", {"train": NewVariant(samples=[meta], decoders=decoders)})
    sample = opened(store).read(0)
    assert sample.value == sample.data == {"a": "01", "b": b"0123456789"}
    assert (sample.target, sample.extra) == (456, {"speaker": 7})


def test_an_array_owns_its_memory_and_may_be_changed(store: DatasetStore) -> None:
    put(store.files, "datasets/me/x/data/r", np.arange(6, dtype=">i2").tobytes())
    decoders = {"part": {"decoder": "array", "dtype": ">i2", "shape": [3]}}
    store.publish("me/x", {"train": NewVariant(samples=record_metas("r", 2, 6), decoders=decoders)})
    value = opened(store).read(1).value
    assert value.dtype == np.dtype("i2")
    assert value.tolist() == [3, 4, 5]
    value += 1


class TestUnpacking:
    def make(self, store: DatasetStore, data: bytes, how: str, *, inner: bool = True, count: int = 30) -> None:
        put(store.files, "datasets/me/x/data/packed", b"__" + data)
        whole = DataRef(path="packed", offset=2, length=len(data), unpack=how)
        parts = [whole.within(i * 5, 5) if inner else whole for i in range(count)]
        publish(store, [SampleMeta(key=str(i), data={"part": part}) for i, part in enumerate(parts)])

    def packed(self, how: str) -> bytes:
        if how == "gzip":
            return gzip.compress(records(30))
        stream = zlib.compressobj(wbits=-15)
        return stream.compress(records(30)) + stream.flush()

    @pytest.mark.parametrize("how", ["gzip", "deflate"])
    def test_once_for_all_samples(self, tmp_path: Path, how: str) -> None:
        files = Counting(tmp_path)
        store = DatasetStore(files)
        self.make(store, self.packed(how), how)
        reader = opened(store)
        expected = [records(30)[i * 5 : i * 5 + 5] for i in range(30)]
        assert [s.value for s in reader] == expected
        assert reader.read(7).value == expected[7]
        assert sum("/data/" in r.path for r in files.asked) == 1
        assert reader._fetcher().unpacked.nbytes == 150
        tight = opened(store, limits=ReadLimits(unpack_cache_bytes=149))
        assert [s.value for s in tight] == expected
        assert tight._fetcher().unpacked.nbytes == 0

    def test_what_is_used_whole_is_not_kept(self, store: DatasetStore) -> None:
        self.make(store, self.packed("deflate"), "deflate", inner=False, count=2)
        reader = opened(store)
        assert reader.read(1).value == records(30)
        assert len(reader._fetcher().unpacked) == 0

    def test_members_of_an_archive_are_read_together(self, tmp_path: Path) -> None:
        files = Counting(tmp_path)
        store = DatasetStore(files)
        parts = [zlib.compress(bytes([i]) * 50, wbits=-15) for i in range(20)]
        put(files, "datasets/me/x/data/z", b"".join(parts))
        starts = np.cumsum([0, *map(len, parts)]).tolist()
        refs = [DataRef(path="z", offset=a, length=len(p), unpack="deflate") for a, p in zip(starts, parts, strict=False)]
        publish(store, [SampleMeta(key="", data={"part": ref}) for ref in refs])
        assert [s.value for s in opened(store).read_many([3, 0, 19, 7])] == [bytes([i]) * 50 for i in (3, 0, 19, 7)]
        assert sum("/data/" in r.path for r in files.asked) == 1

    @pytest.mark.parametrize("how", ["gzip", "deflate", "cifar-python"])
    def test_damage_is_named(self, store: DatasetStore, how: str) -> None:
        data = self.packed("gzip" if how == "cifar-python" else how)
        self.make(store, data[: len(data) // 2], how)
        with pytest.raises(DatasetDamaged, match=rf"me/x, version 1, train, sample 3: .*/data/packed: {how}: "):
            opened(store).read(3)

    def test_a_part_beyond_what_was_unpacked(self, store: DatasetStore) -> None:
        self.make(store, self.packed("gzip"), "gzip", count=31)
        with pytest.raises(DatasetDamaged, match=r"sample 30: .*gzip: bytes 150 to 155 are wanted of 150 unpacked"):
            opened(store).read(30)


def test_parts_without_a_decoder(store: DatasetStore) -> None:
    put(store.files, "datasets/me/x/data/r", b"0123456789")
    store.publish("me/x", {"train": NewVariant(samples=record_metas("r", 2), decoders={"other": BYTES["part"]})})
    with pytest.raises(DatasetDamaged, match=r"cannot be decoded \(none is named\)"):
        opened(store).read(0)


def test_an_abandoned_iteration_leaves_nothing_undone(store: DatasetStore) -> None:
    _, expected = publish_records(store, 100)
    reader = opened(store)
    for _ in range(20):
        stream = reader.iterate(batch=3)
        assert next(stream).value == expected[0]
        stream.close()
    assert reader.read(50).value == expected[50]
