"""Publishing: versions that do not change, importers that cannot hurt each other, documents that are believed or refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from catalog_worlds import BYTES, overwrite, publish, publish_records, put, record_metas

from ephemeron.data.catalog import DataRef, DatasetReader, DatasetStore, NewVariant, SampleMeta
from ephemeron.data.catalog.check import unreferenced
from ephemeron.data.catalog.dataset import version_path
from ephemeron.data.catalog.files import FileRange
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.open_files import FolderFiles
from ephemeron.errors import DatasetDamaged, DatasetNotFound, DatasetUnreachable, JobError


def metas(count: int, tag: str = "x") -> list[SampleMeta]:
    return record_metas(f"{tag}.bin", count)


def test_what_is_published_is_found(any_store: DatasetStore) -> None:
    assert any_store.names() == []
    made = publish(any_store, metas(25), name="core/digits", shard_size=10)
    assert any_store.names() == ["core/digits"]
    found = any_store.dataset("core/digits")
    assert found == made
    assert (found.version, found.number, found.history) == ("1", 1, {"1": 1})
    variant = found.variant("train")
    assert (variant.samples, variant.shard_size, len(variant.shards), variant.root) == (25, 10, 3, None)
    files = list(run(any_store.files.tree("datasets/core/digits")))
    shards = [f"datasets/core/digits/meta/train/ms-{i}.{d}.json" for i, d in enumerate(variant.shards)]
    assert files == [*shards, "datasets/core/digits/meta/versions/000001.json"]


def test_versions_count_up_keep_other_variants_and_do_not_change(any_store: DatasetStore) -> None:
    publish(any_store, metas(25), shard_size=10)
    before = run(any_store.files.tree(""))
    second = publish(any_store, metas(5, "y"), variant="val")
    assert (second.version, sorted(second.variants)) == ("2", ["train", "val"])
    third = publish(any_store, metas(24), shard_size=10)
    assert third.variants["train"].shards[:2] == second.variants["train"].shards[:2], "unchanged shards are shared"
    alone = publish(any_store, metas(5, "y"), variant="test", keep=False, version="v4")
    assert list(alone.variants) == ["test"]
    assert any_store.dataset("me/x").version == "v4"
    assert any_store.dataset("me/x", "latest") == alone
    assert [any_store.dataset("me/x", v).number for v in ("1", "2", "3", "v4")] == [1, 2, 3, 4]
    assert any_store.dataset("me/x", "1").variants["train"].samples == 25
    after = run(any_store.files.tree(""))
    assert {path: after[path] for path in before} == before
    assert len(after) == len(before) + 3 + 3, "three documents; shards: val 0, train 2, test 0"


def test_default_names_step_over_those_that_are_taken(store: DatasetStore) -> None:
    assert publish(store, metas(1), version="2").version == "2"
    assert publish(store, metas(2)).version == "3"
    assert publish(store, metas(3), version="4").version == "4"
    assert publish(store, metas(4), version="1").version == "1"
    assert publish(store, metas(5)).version == "5"


def test_a_version_is_refused_before_its_samples_are_read(store: DatasetStore) -> None:
    publish(store, metas(1), version="2017")

    def never() -> Iterator[SampleMeta]:
        pytest.fail("read")
        yield

    with pytest.raises(JobError, match="version '2017' of me/x is published, and versions do not change; choose"):
        publish(store, never(), version="2017")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"name": "x"}, "not of the form namespace/name"),
        ({"variant": "a/b"}, "variant 'a/b' is not a valid name"),
        ({"version": "latest"}, "version 'latest' is not a valid name"),
        ({"shard_size": 0}, "shard size 0 is not positive"),
    ],
)
def test_wrong_wishes(store: DatasetStore, how: dict[str, object], message: str) -> None:
    with pytest.raises(JobError, match=message):
        publish(store, metas(1), **how)  # type: ignore[arg-type]
    assert run(store.files.tree("")) == {}


def test_nothing_to_publish(store: DatasetStore) -> None:
    with pytest.raises(JobError, match="me/x, train: there are no samples; check the source"):
        publish(store, [])
    with pytest.raises(JobError, match="me/x: there is no variant"):
        store.publish("me/x", {})
    bad = SampleMeta(key="k", data={"part": DataRef(path="a")}, target=float("nan"))
    with pytest.raises(JobError, match=r"me/x, train, samples 2 to 3: Out of range float values"):
        publish(store, [*metas(3), bad], shard_size=2)
    assert store.names() == []


def test_an_import_that_dies_publishes_nothing_and_is_no_obstacle(store: DatasetStore) -> None:
    def dying() -> Iterator[SampleMeta]:
        yield from metas(15)
        raise OSError("the disk is gone")

    publish(store, metas(3, "y"))
    with pytest.raises(OSError, match="gone"):
        publish(store, dying(), shard_size=10)
    assert list(store.dataset("me/x").history) == ["1"]
    assert [path.rpartition("/")[2].partition(".")[0] for path in unreferenced(store, "me/x")] == ["ms-0"]
    assert publish(store, metas(25), shard_size=10).version == "2"
    assert unreferenced(store, "me/x") == {}, "the shard that was there is the one that was wanted"


def test_unknown_names_say_what_there_is(any_store: DatasetStore) -> None:
    publish(any_store, metas(1))
    publish(any_store, metas(2), version="b")
    with pytest.raises(DatasetNotFound, match=r"dataset me/y is not in .*; see: ephemeron data ls"):
        any_store.dataset("me/y")
    with pytest.raises(DatasetNotFound, match="dataset me/x has no version '7', only 1, b"):
        any_store.dataset("me/x", "7")
    with pytest.raises(JobError, match="not of the form"):
        any_store.dataset("../me")


def test_importers_at_once_lose_nothing(any_store: DatasetStore) -> None:
    """Every one of them publishes a variant of its own; the last version has them all."""
    barrier = threading.Barrier(6)
    errors: list[Exception] = []

    def one(i: int) -> None:
        try:
            barrier.wait(timeout=60)
            publish(any_store, metas(5 + i, f"f{i}"), variant=f"v{i}", shard_size=2)
        except Exception as e:  # noqa: BLE001 - told to the test
            errors.append(e)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    last = any_store.dataset("me/x")
    assert {name: v.samples for name, v in last.variants.items()} == {f"v{i}": 5 + i for i in range(6)}
    assert sorted(last.history.values()) == list(range(1, 7))
    for version, number in last.history.items():
        found = any_store.dataset("me/x", version)
        assert len(found.variants) == number, "each kept what those before it had"
    assert unreferenced(any_store, "me/x") == {}


class Interrupted(FolderFiles):
    """A folder in which something happens just before a document is created."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.before: list[object] = []
        self.lose_answers = False

    async def create(self, path: str, data: bytes | Path) -> bool:
        if "/versions/" in path and self.before:
            await self.before.pop()(path, data)  # type: ignore[operator]
        done = await super().create(path, data)
        return False if "/versions/" in path and self.lose_answers else done


def test_the_second_of_two_takes_the_next_number_and_what_the_first_published(tmp_path: Path) -> None:
    files = Interrupted(tmp_path)
    store = DatasetStore(files)
    publish(store, metas(1))
    rival = DatasetStore(FolderFiles(tmp_path))

    async def rival_publishes(path: str, data: object) -> None:
        import asyncio

        await asyncio.to_thread(publish, rival, metas(7), variant="val")

    files.before = [rival_publishes]
    made = publish(store, metas(2))
    assert (made.number, made.version) == (3, "3")
    assert {name: v.samples for name, v in made.variants.items()} == {"train": 2, "val": 7}
    files.before = [rival_publishes]
    with pytest.raises(JobError, match="version '4' of me/x is published"):
        publish(store, metas(3), version="4")


def test_an_answer_that_was_lost_is_no_defeat(tmp_path: Path) -> None:
    files = Interrupted(tmp_path)
    files.lose_answers = True
    made = publish(DatasetStore(files), metas(3), version="only")
    assert DatasetStore(FolderFiles(tmp_path)).dataset("me/x") == made
    assert list(made.history) == ["only"]


def test_whoever_is_always_late_gives_up_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ephemeron.data.catalog.store._ATTEMPTS", 3)

    class Taken(FolderFiles):
        async def create(self, path: str, data: bytes | Path) -> bool:
            return "/versions/" not in path and await super().create(path, data)

        async def fetch(self, ranges: object) -> list[bytes]:
            return [b"{}"]

    with pytest.raises(DatasetUnreachable, match="me/x: 3 other imports published first"):
        publish(DatasetStore(Taken(tmp_path)), metas(3))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a version of a dataset"),
        (b"[]", "list instead of a table"),
        (b'{"format": 9}', "document of format 9"),
        (b"[" * 100_000, "is not a version of a dataset"),
        (b"\xff", "is not a version of a dataset"),
    ],
)
def test_damaged_documents(store: DatasetStore, content: bytes, message: str) -> None:
    publish(store, metas(3))
    overwrite(store, version_path("me/x", 1), content)
    with pytest.raises(DatasetDamaged, match=r"me/x: file:///.*/meta/versions/000001.json: is not a version") as caught:
        store.dataset("me/x")
    assert message in str(caught.value)


def test_a_document_in_another_place_is_refused(store: DatasetStore) -> None:
    publish(store, metas(3))
    publish(store, metas(4), name="me/other")
    (theirs,) = run(store.files.fetch([FileRange(version_path("me/other", 1))]))
    overwrite(store, version_path("me/x", 1), theirs)
    with pytest.raises(DatasetDamaged, match=r"it describes me/other, number 1"):
        store.dataset("me/x")


def test_a_version_whose_document_is_lost(store: DatasetStore) -> None:
    publish(store, metas(3))
    publish(store, metas(4))
    overwrite(store, version_path("me/x", 1), None)
    with pytest.raises(DatasetDamaged, match=r"000001\.json: is absent"):
        store.dataset("me/x", "1")
    assert store.dataset("me/x").version == "2"


def test_other_files_among_the_documents_are_passed_over(store: DatasetStore) -> None:
    publish(store, metas(3))
    put(store.files, "datasets/me/x/meta/versions/000007.json.bak", b"")
    put(store.files, "datasets/me/x/meta/versions/notes.txt", b"")
    assert store.dataset("me/x").number == 1


def test_the_document_is_what_the_page_says(store: DatasetStore) -> None:
    made, _ = publish_records(store, 3)
    document = json.loads((Path(store.files.root) / version_path("me/x", 1)).read_text())  # type: ignore[attr-defined]
    assert set(document) == {"format", "dataset", "version", "number", "history", "variants"}
    assert document["variants"]["train"] == {
        "samples": 3,
        "shard_size": 1000,
        "root": None,
        "decoders": BYTES,
        "info": {},
        "source": {},
        "shards": list(made.variants["train"].shards),
    }


def test_the_default_store_is_in_the_home_folder(home: Path) -> None:
    store = DatasetStore.open()
    assert store.files.url == (home / "datasets-store").as_uri()
    assert store.names() == []
    assert not home.exists(), "looking makes nothing"
    publish_records(store, 4)
    assert DatasetReader.open("me/x", "train").read(3).target == 3


def test_a_variant_at_a_url_of_its_own(any_store: DatasetStore, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.bin").write_bytes(b"0123456789")
    root = (tmp_path / "elsewhere").as_uri()
    any_store.publish("me/x", {"train": NewVariant(samples=metas(2), decoders=BYTES, root=root)})
    reader = DatasetReader.open("me/x", "train", store=any_store)
    assert [s.value for s in reader] == [b"01234", b"56789"]
