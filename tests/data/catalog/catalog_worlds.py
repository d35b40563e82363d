"""Small datasets for the tests of the catalog."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from ephemeron.data.catalog import DataRef, Dataset, DatasetStore, NewVariant, SampleMeta
from ephemeron.data.catalog.files import Files
from ephemeron.data.catalog.loop import run

BYTES = {"part": {"decoder": "bytes"}}

names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda s: s not in (".", "..")
)
paths = st.lists(names, min_size=1, max_size=3).map("/".join)
plain_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
sizes = st.integers(0, 2**40)
pins = st.none() | st.sampled_from(['etag:"a-1"', "xxh3:0123456789abcdef", "xxh3:0123456789abcdef@17"])


@st.composite
def refs(draw: st.DrawFn) -> DataRef:
    """References of every form."""
    path, form = draw(paths), draw(st.sampled_from(["whole", "range", "packed", "row"]))
    if form == "row":
        pair, column = draw(st.tuples(sizes, sizes)), draw(st.none() | st.text(max_size=5))
        return DataRef(path=path, length=draw(sizes), unpack="parquet", row=pair, column=column, pin=draw(pins))
    length = draw(sizes)
    offset = None if form == "whole" else draw(sizes)
    if form != "packed":
        return DataRef(path=path, offset=offset, length=length, pin=draw(pins))
    how = draw(st.sampled_from(["gzip", "deflate", "cifar-python"]))
    inner = draw(st.none() | st.tuples(sizes, sizes))
    return DataRef(path=path, offset=offset, length=length, unpack=how, inner=inner, pin=draw(pins))


@st.composite
def metas(draw: st.DrawFn) -> SampleMeta:
    """Metadata of every form."""
    data = draw(st.dictionaries(st.text(min_size=1, max_size=5), refs(), min_size=1, max_size=3))
    at = draw(st.none() | refs())
    target = None if at is not None else draw(plain_json)
    extra = draw(st.dictionaries(st.text(max_size=5), plain_json, max_size=2))
    return SampleMeta(key=draw(st.text(max_size=9)), data=data, target=target, target_at=at, extra=extra)


def put(files: Files, path: str, data: bytes) -> None:
    assert run(files.create(path, data))


def overwrite(store: DatasetStore, path: str, data: bytes | None) -> None:
    """What nobody may do: changes or removes a file of a store in a folder."""
    where = Path(store.files.root) / path  # type: ignore[attr-defined]
    where.unlink()
    if data is not None:
        where.write_bytes(data)


def records(count: int, size: int = 5) -> bytes:
    """`count` records of `size` bytes, no two alike."""
    return np.random.default_rng(count).integers(0, 256, (count, size), dtype=np.uint8).tobytes()


def record_metas(path: str, count: int, size: int = 5) -> list[SampleMeta]:
    """One sample per record of a file; targets are their numbers."""
    whole = DataRef(path=path, length=count * size)
    return [SampleMeta(key=f"{path}[{i}]", data={"part": whole.within(i * size, size)}, target=i) for i in range(count)]


def publish(store: DatasetStore, samples: Iterable[SampleMeta], *, name: str = "me/x", variant: str = "train", **how: object) -> Dataset:
    """Publishes samples whose data is in the dataset's own folder, as bytes."""
    return store.publish(name, {variant: NewVariant(samples=samples, decoders=BYTES)}, **how)  # type: ignore[arg-type]


def publish_records(store: DatasetStore, count: int, **how: object) -> tuple[Dataset, list[bytes]]:
    """A dataset of records, and what its samples are."""
    data = records(count)
    put(store.files, "datasets/me/x/data/records.bin", data)
    dataset = publish(store, record_metas("records.bin", count), **how)
    return dataset, [data[i * 5 : i * 5 + 5] for i in range(count)]
