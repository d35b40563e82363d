"""What decides without reading: metadata and its JSON, shards, joining of ranges, the cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from catalog_worlds import metas, refs
from hypothesis import example, given
from hypothesis import strategies as st

from ephemeron.data import catalog
from ephemeron.data.catalog import DataRef, Dataset, DatasetShardMeta, SampleMeta, Variant
from ephemeron.data.catalog.dataset import check_id, check_name, cut, digest, encode_shard
from ephemeron.data.catalog.fetcher import BoundedCache, calc_index, coalesce
from ephemeron.errors import DatasetNotFound, JobError

bounds = st.tuples(st.integers(0, 500), st.integers(0, 60)).map(lambda p: (p[0], p[0] + p[1]))


@given(refs())
def test_references_survive_json(ref: DataRef) -> None:
    assert DataRef.from_json(json.loads(json.dumps(ref.to_json()))) == ref


@given(refs().filter(lambda r: r.row is None), st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000))
def test_a_range_within_a_range_is_a_range(ref: DataRef, a: int, b: int, length: int) -> None:
    assert ref.within(a, 10**6).within(b, length) == ref.within(a + b, length)
    assert ref.within(a, length).nbytes == length


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"path": "../../etc/passwd"}, "not a plain relative path"),
        ({"path": "/etc/passwd"}, "not a plain relative path"),
        ({"path": "a/./b"}, "not a plain relative path"),
        ({"path": ""}, "not a plain relative path"),
        ({"path": "a\0b"}, "not a plain relative path"),
        ({}, "'path' is missing"),
        ("a", "str instead of a table"),
        ({"path": "a", "offset": 1}, "offset 1 with length None"),
        ({"path": "a", "offset": -1, "length": 2}, "offset -1"),
        ({"path": "a", "length": True}, "not of type int"),
        ({"path": "a", "length": "3"}, "length = '3' is not of type int"),
        ({"path": "a", "unpack": "pickle"}, "unpack = 'pickle' is not one of"),
        ({"path": "a", "inner": [0, 1]}, "`inner` with what is unpacked"),
        ({"path": "a", "unpack": "parquet"}, "`row` goes with parquet"),
        ({"path": "a", "unpack": "gzip", "row": [0, 1]}, "`row` goes with parquet"),
        ({"path": "a", "unpack": "gzip", "inner": [0, -1]}, "negative position"),
        ({"path": "a", "unpack": "gzip", "inner": [0, 1, 2]}, "not a pair"),
        ({"path": "a", "unpack": "gzip", "inner": [0, 1.5]}, "not a pair"),
        ({"path": "a", "size": 3}, "unknown field 'size'"),
    ],
)
def test_references_that_are_none(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataRef.from_json(value)


@given(st.lists(metas(), min_size=1, max_size=8), st.integers(0, 10**9))
def test_shards_survive_their_bytes(samples: list[SampleMeta], first: int) -> None:
    data = encode_shard(samples, dataset="me/x", variant="v", shard=3, first=first)
    shard = DatasetShardMeta(data)
    assert [shard.sample(i) for i in range(len(shard))] == samples
    assert (shard.first, shard.count) == (first, len(samples))
    plain = json.loads(data)
    found = [SampleMeta.from_json(s, plain.get("pins", {})) for s in plain["samples"]]
    assert found == samples, "a shard is plain JSON"
    assert encode_shard(samples, dataset="me/x", variant="v", shard=3, first=first) == data
    for beyond in (-1, len(samples)):
        with pytest.raises(IndexError):
            shard.sample(beyond)


@given(st.lists(metas(), min_size=1, max_size=3), st.data())
def test_no_part_of_a_shard_passes_for_one(samples: list[SampleMeta], data: st.DataObject) -> None:
    whole = encode_shard(samples, dataset="me/x", variant="v", shard=0, first=0)
    stop = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ValueError, match="truncated"):
        DatasetShardMeta(whole[:stop])
    changed = bytearray(whole)
    changed[stop] ^= data.draw(st.integers(1, 255))
    assert digest(bytes(changed)) != digest(whole)


@pytest.mark.parametrize("target", [float("nan"), float("inf"), {1, 2}, b"x"])
def test_what_is_no_json_is_refused(target: object) -> None:
    meta = SampleMeta(key="k", data={"part": DataRef(path="a")}, target=target)
    with pytest.raises((ValueError, TypeError)):
        encode_shard([meta], dataset="me/x", variant="v", shard=0, first=0)


@given(st.lists(st.integers(), max_size=40), st.integers(1, 45))
def test_cutting_loses_nothing_and_agrees_with_calc_index(samples: list[int], size: int) -> None:
    chunks = list(cut(samples, size))  # type: ignore[arg-type]
    assert [s for chunk in chunks for s in chunk] == samples
    assert all(len(chunk) == size for chunk in chunks[:-1])
    for i, sample in enumerate(samples):
        shard, position = calc_index(i, size)
        assert chunks[shard][position] == sample


@given(st.lists(bounds, max_size=30), st.integers(0, 50), st.integers(1, 200))
def test_joined_ranges_serve_everybody_once(ranges: list[tuple[int, int]], gap: int, largest: int) -> None:
    spans = coalesce(ranges, gap=gap, largest=largest)
    assert sorted(m for span in spans for m in span.members) == list(range(len(ranges)))
    for span in spans:
        inside = [ranges[m] for m in span.members]
        assert span.start == min(a for a, _ in inside)
        assert span.stop == max(b for _, b in inside)
        assert span.stop - span.start <= largest or len(span.members) == 1
        covered = {n for a, b in inside for n in range(a, b)}
        wasted = [n for n in range(span.start, span.stop) if n not in covered]
        assert len(wasted) <= gap * (len(inside) - 1)


def test_ranges_side_by_side_are_one_request() -> None:
    ranges = [(i * 10, i * 10 + 10) for i in (5, 3, 4, 9, 10)]
    assert [(s.start, s.stop) for s in coalesce(ranges, gap=0, largest=1000)] == [(30, 60), (90, 110)]
    assert len(coalesce(ranges, gap=30, largest=1000)) == 1
    assert len(coalesce(ranges, gap=29, largest=1000)) == 2
    assert len(coalesce(ranges, gap=30, largest=10)) == 5


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 12), st.booleans()), min_size=5, max_size=40), st.integers(0, 30))
@example([("a", 5, False), ("b", 5, False), ("a", 0, True), ("c", 5, False), ("a", 0, True), ("b", 0, True)], 10)
def test_the_cache_is_bounded_and_forgets_the_least_recently_used(steps: list[tuple[str, int, bool]], limit: int) -> None:
    cache: BoundedCache[str, int] = BoundedCache(limit)
    model: dict[str, int] = {}  # in order of use, oldest first
    for key, nbytes, reading in steps:
        if reading:
            assert cache.get(key) == model.get(key)
            if key in model:
                model[key] = model.pop(key)
        else:
            cache.put(key, nbytes, nbytes)
            model.pop(key, None)
            if nbytes <= limit:
                model[key] = nbytes
                while sum(model.values()) > limit:
                    model.pop(next(iter(model)))
        assert cache.nbytes == sum(model.values()) <= limit
        assert len(cache) == len(model)


def variant(**changes: object) -> dict[str, object]:
    good = Variant(samples=5, shard_size=2, shards=("0" * 32,) * 3, decoders={"x": {"decoder": "bytes"}})
    return {**good.to_json(), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 7}, "7 samples do not fit into 3 shards of 2"),
        ({"samples": 0, "shards": []}, "0 samples"),
        ({"shards": ["0"] * 3}, "not a list of digests"),
        ({"shards": ["../../../" + "0" * 23] * 3}, "not a list of digests"),
        ({"decoders": {"x": {}}}, "'decoder' is missing"),
        ({"root": 3}, "root = 3 is not a URL"),
    ],
)
def test_variants_that_are_none(changes: dict[str, object], message: str) -> None:
    assert Variant.from_json(variant()).to_json() == variant()
    with pytest.raises(ValueError, match=message):
        Variant.from_json(variant(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "document of format 2; this version of ephemeron reads 1"),
        ({"history": {"1": 2}}, "do not fit"),
        ({"variants": {}}, "do not fit"),
        ({"version": 1}, "version = 1 is not of type str"),
    ],
)
def test_documents_that_are_none(changes: dict[str, object], message: str) -> None:
    good = {"format": 1, "dataset": "a/b", "version": "1", "number": 1, "history": {"1": 1}, "variants": {"v": variant()}}
    dataset = Dataset.from_json(good)
    assert dataset.to_json() == good
    with pytest.raises(DatasetNotFound, match="a/b version 1 has no variant 'w', only v"):
        dataset.variant("w")
    with pytest.raises(ValueError, match=message):
        Dataset.from_json({**good, **changes})


@pytest.mark.parametrize("name", ["x", "a/b/c", "/b", "a/", "../b", "a/..", "a b/c", "a/ü", "", ".a/b", "a/b\n"])
def test_names_of_datasets(name: str) -> None:
    assert check_id("core/ms-coco_2017.v1") == "core/ms-coco_2017.v1"
    with pytest.raises(JobError, match="is not of the form namespace/name; write"):
        check_id(name)


@pytest.mark.parametrize("name", ["latest", "", "a/b", "..", "x" * 101, "1\n"])
def test_names_of_versions_and_variants(name: str) -> None:
    assert check_name("version", "2017-v1.0") == "2017-v1.0"
    with pytest.raises(JobError, match="is not a valid name; use letters"):
        check_name("version", name)


def test_importing_the_catalog_costs_no_library() -> None:
    program = "import json, sys, ephemeron.data.catalog.check; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert "ephemeron.data.catalog.reader" in loaded
    assert not loaded & {"obstore", "PIL", "pyarrow", "soundfile", "torch", "click", "rich"}


def test_every_name_that_the_package_promises_is_there() -> None:
    assert catalog.__all__ == list(dict.fromkeys(catalog.__all__))
    assert all(hasattr(catalog, name) for name in catalog.__all__)


def test_the_shard_on_the_page_is_one() -> None:
    page = (Path(__file__).parents[3] / "docs" / "datasets.md").read_text()
    blocks = [part.partition("```")[0] for part in page.split("```json\n")[1:]]
    (block,) = [block for block in blocks if '"samples":[' in block]
    shard = DatasetShardMeta(block.encode())
    assert [shard.sample(i).target for i in range(len(shard))] == [0, 1]
    assert shard.sample(1).data["image"].offset == 1536
