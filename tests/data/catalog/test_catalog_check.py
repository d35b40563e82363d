"""`check`: nothing to say of what is whole, one line for each thing that is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from catalog_worlds import overwrite, publish, publish_records, put, record_metas, records
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore

from ephemeron.data.catalog import DataRef, DatasetStore, NewVariant, SampleMeta
from ephemeron.data.catalog.check import VariantCheck, check_variant, unreferenced
from ephemeron.data.catalog.objects import ObjectFiles


def checked(store: DatasetStore, **how: object) -> VariantCheck:
    return check_variant(store, store.dataset("me/x"), "train", **how)  # type: ignore[arg-type]


def test_whole(any_store: DatasetStore) -> None:
    publish_records(any_store, 130, shard_size=30)
    told: list[tuple[str, int, int | None]] = []
    found = checked(any_store, decode=None, tell=lambda *args: told.append(args))
    assert found == VariantCheck(variant="train", samples=130, files=1, nbytes=650, decoded=130, defects=())
    assert ("train: metadata", 130, 130) in told
    assert told[-1] == ("train: decoding", 130, 130)
    assert checked(any_store, decode=7).decoded == 7
    assert checked(any_store, decode=0).decoded == 0
    assert unreferenced(any_store, "me/x") == {}


@pytest.mark.parametrize("content", [None, b"{}", b""])
def test_a_bad_shard_is_one_defect(store: DatasetStore, content: bytes | None) -> None:
    dataset, _ = publish_records(store, 130, shard_size=30)
    overwrite(store, dataset.shard_path("train", 1), content)
    found = checked(store, decode=None)
    assert found.decoded == 100
    (defect,) = found.defects
    assert defect.startswith("me/x, version 1, train, sample 30: file:///")
    assert "ms-1." in defect


def test_every_range_that_leaves_its_file_is_told(store: DatasetStore) -> None:
    publish_records(store, 20)
    overwrite(store, "datasets/me/x/data/records.bin", records(20)[:83])
    found = checked(store, decode=None)
    assert found.decoded == 16
    assert len(found.defects) == 4
    assert found.defects[0] == ("me/x version 1, train, sample 16: records.bin has 83 bytes, but bytes 80 to 85 are wanted")


def test_files_that_are_absent_or_of_another_size(store: DatasetStore) -> None:
    put(store.files, "datasets/me/x/data/a", b"12345")
    names = [("a", 5), ("a", 6), ("b", 5)]
    publish(store, [SampleMeta(key=n, data={"part": DataRef(path=n, length=size)}) for n, size in names])
    found = checked(store, decode=None)
    assert found.decoded == 1
    assert [d.partition("sample ")[2] for d in found.defects] == ["1: a has 5 bytes, but had 6 when it was imported", "2: b is absent"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bad=st.sets(st.integers(0, 149), max_size=12))
def test_exactly_what_cannot_be_decoded_is_told(bad: set[int]) -> None:
    store = DatasetStore(ObjectFiles(MemoryStore(), url="memory://test"))
    put(store.files, "datasets/me/x/data/r", b"".join(b"[[[[[" if i in bad else b"12345" for i in range(150)))
    store.publish("me/x", {"train": NewVariant(samples=record_metas("r", 150), decoders={"part": {"decoder": "json"}})})
    found = checked(store, decode=None)
    assert found.decoded == 150 - len(bad)
    assert [int(d.partition("sample ")[2].partition(":")[0]) for d in found.defects] == sorted(bad)


def test_samples_are_chosen_by_the_seed(store: DatasetStore) -> None:
    put(store.files, "datasets/me/x/data/r", b"[[[[[" * 50)
    store.publish("me/x", {"train": NewVariant(samples=record_metas("r", 50), decoders={"part": {"decoder": "json"}})})
    one, two, other = (checked(store, decode=5, seed=seed).defects for seed in (0, 0, 1))
    assert one == two != other
    assert len(one) == len(other) == 5


def test_a_line_that_is_no_sample(store: DatasetStore) -> None:
    """Its digest is right: whoever wrote it meant it."""
    import json

    from ephemeron.data.catalog.dataset import digest, encode_shard, shard_file

    put(store.files, "datasets/me/x/data/records.bin", records(3))
    dataset = publish(store, record_metas("records.bin", 3))
    data = encode_shard(record_metas("records.bin", 3), dataset="me/x", variant="train", shard=0, first=0)
    data = data.replace(b'"offset":5,', b'"offset":-5,')
    put(store.files, f"datasets/me/x/meta/{shard_file('train', 0, digest(data))}", data)
    document = Path(store.files.root) / "datasets/me/x/meta/versions/000001.json"  # type: ignore[attr-defined]
    document.write_text(document.read_text().replace(dataset.variants["train"].shards[0], digest(data)))
    assert json.loads(document.read_text())
    found = checked(store, decode=None)
    assert found.decoded == 2
    assert found.defects == ("me/x version 1, train, sample 1: its metadata is wrong: offset -5 with length 5",)
    assert np.all([path.endswith(".json") for path in unreferenced(store, "me/x")])
    assert len(unreferenced(store, "me/x")) == 1
