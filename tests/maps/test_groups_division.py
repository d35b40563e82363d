"""The pass that brings the rows of groups together: equal to pandas, in bounded memory, whatever the sizes of groups."""

from __future__ import annotations

import json
import weakref
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.maps import parquet_rows
from ephemeron.maps.groups import division, group_rows, table_data
from ephemeron.maps.groups.division import Division
from ephemeron.maps.groups.grouping import find_grouping, group_table, remove_others
from ephemeron.maps.groups.row_digests import DigestedColumns, RowDigest, digest_of_rows
from ephemeron.maps.groups.table_data import MemoryTable, open_table
from ephemeron.maps.objects import Objects

pa = pytest.importorskip("pyarrow", reason="tables; pip install 'ephemeron[maps]'")
pd = pytest.importorskip("pandas", reason="pandas to compare with")
from pyarrow import parquet  # noqa: E402


def rows_of(grouping) -> dict[str, list[dict]]:
    """Rows of each group, as a function reads them."""
    about = grouping.manifest
    columns = [column.name for column in about.columns]
    return {
        group["key"]: group_rows.read_group(
            grouping.objects.place(about.file(group["file"])),
            group["first"],
            group["rows"],
            digest=group["digest"],
            columns=columns,
            key=group["key"],
        ).to_pylist()
        for group in grouping.index.to_pylist()
    }


def expected_rows(table, by) -> dict[str, list[dict]]:
    from ephemeron.maps.groups.keys import text_of

    found: dict[str, list[dict]] = {}
    for row in table.to_pylist():
        found.setdefault(text_of([row[name] for name in by]), []).append(row)
    return found


def unequal(rows: int = 20_000) -> pa.Table:
    """One group has half of the rows, and most have a few."""
    rng = np.random.default_rng(0)
    group = np.where(rng.uniform(size=rows) < 0.5, 0, rng.zipf(1.5, rows) % 500)
    return pa.table(
        {
            "g": [f"g{n}" for n in group],
            "n": pa.array(rng.integers(0, 9, rows), mask=rng.uniform(size=rows) < 0.1),
            "x": rng.standard_normal(rows),
            "text": [None if n == 3 else "x" * n for n in rng.integers(0, 20, rows)],
        }
    )


@pytest.mark.parametrize("sorted_bytes", [1 << 10, 20_000, 1 << 30])
def test_rows_of_each_group_are_those_of_the_table_in_their_order(tmp_path, monkeypatch, sorted_bytes):
    monkeypatch.setattr(table_data, "READ_ROWS", 1000)
    monkeypatch.setattr(division, "READ_ROWS", 1000)
    monkeypatch.setattr(division, "_MOST_SPILLED", 5)
    table = unequal()
    grouping = group_table(MemoryTable(table), ["g"], Objects(tmp_path.as_uri()), sorted_bytes=sorted_bytes)
    expected = expected_rows(table, ["g"])
    assert rows_of(grouping) == expected
    assert (grouping.manifest.rows, grouping.manifest.groups) == (table.num_rows, len(expected))
    digests = dict(zip(grouping.index.column("key").to_pylist(), grouping.index.column("digest").to_pylist(), strict=True))
    kept = ["n", "x", "text"]
    for key, rows in list(expected.items())[:50]:
        assert digests[key] == digest_of_rows(pa.Table.from_pylist(rows, schema=table.schema).select(kept)), "they are of the rows alone"


def test_memory_does_not_grow_with_the_table_or_its_largest_group(tmp_path, monkeypatch):
    """Counts the parts of the table that are alive, and the bytes that are sorted at a time."""
    monkeypatch.setattr(table_data, "READ_ROWS", 500)
    monkeypatch.setattr(division, "READ_ROWS", 500)
    most, alive, limit = [0], set(), 50_000
    table = unequal(40_000)

    def parts():
        for first in range(0, table.num_rows, 500):
            part = pa.table({name: table.column(name).slice(first, 500).to_pylist() for name in table.column_names}, schema=table.schema)
            alive.add(id(part))
            weakref.finalize(part, alive.discard, id(part))
            most[0] = max(most[0], len(alive))
            yield part

    sizes: list[int] = []
    passed: list[int] = []
    sort, single = Division._sorted, Division._passed

    def sorting(self, rows, out):
        sizes.append(rows.nbytes)
        return sort(self, rows, out)

    def passing(self, spilled, out):
        passed.append(spilled.nbytes)
        return single(self, spilled, out)

    monkeypatch.setattr(Division, "_sorted", sorting)
    monkeypatch.setattr(Division, "_passed", passing)
    divided = Division(["g"], ["n", "x", "text"], name="t", sorted_bytes=limit)
    found = Counter()
    for file in divided.files(parts(), nbytes=table.nbytes):
        found.update(dict(zip(file.groups.column("key").to_pylist(), file.groups.column("rows").to_pylist(), strict=True)))
        metadata = parquet.read_metadata(file.path)
        assert max(metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)) <= division._PACK_ROWS
    assert most[0] <= 3, "parts of the table are held"
    assert max(sizes) <= limit * 1.1
    assert max(passed) > 10 * limit, "the largest group has passed through"
    assert found == {key: len(rows) for key, rows in expected_rows(table, ["g"]).items()}


def test_small_groups_share_row_groups_and_large_ones_come_first(tmp_path):
    table = unequal(60_000)
    grouping = group_table(MemoryTable(table), ["g"], Objects(tmp_path.as_uri()))
    rows = grouping.index.column("rows").to_numpy()
    assert list(rows) == sorted(rows, reverse=True)
    costs = grouping.index.column("cost").to_numpy()
    assert list(costs) == sorted(costs, reverse=True)
    metadata = parquet.read_metadata(tmp_path / grouping.manifest.file(0))
    assert metadata.num_row_groups < 10 < len(rows)


def test_a_function_reads_a_shared_row_group_once(tmp_path, monkeypatch):
    grouping = group_table(MemoryTable(unequal(5000)), ["g"], Objects(tmp_path.as_uri()))
    read = []
    whole = parquet.ParquetFile.read_row_group
    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", lambda self, n: read.append(n) or whole(self, n))
    for held in (parquet_rows._open, group_rows._held):
        held.clear()
    rows_of(grouping)
    assert len(read) == parquet.read_metadata(tmp_path / grouping.manifest.file(0)).num_row_groups


KINDS = {
    "whole": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "small": (pa.int8(), st.integers(-128, 127)),
    "number": (pa.float64(), st.floats(allow_nan=True)),
    "truth": (pa.bool_(), st.booleans()),
    "text": (pa.string(), st.text(max_size=5)),
    "long": (pa.large_string(), st.text(max_size=5)),
    "bytes": (pa.binary(), st.binary(max_size=5)),
    "day": (pa.date32(), st.dates()),
    "time": (pa.timestamp("us", tz="UTC"), st.integers(0, 2**40)),
    "price": (pa.decimal128(10, 2), st.decimals(-1000, 1000, places=2)),
    "list": (pa.list_(pa.int64()), st.lists(st.integers(0, 9), max_size=3)),
    "nothing": (pa.null(), st.none()),
}


@given(st.data())
def test_digests_are_of_rows_and_not_of_how_they_are_held(data):
    name = data.draw(st.sampled_from(sorted(KINDS)))
    kind, values = KINDS[name]
    cells = data.draw(st.lists(st.none() | values, min_size=1, max_size=20))
    table = pa.table({"c": pa.array(cells, kind)})
    whole = digest_of_rows(table)
    low = data.draw(st.integers(0, len(cells)))
    parts = RowDigest(table.schema)
    for part in (table.slice(0, low), table.slice(low)):
        if part.num_rows:
            parts.add(DigestedColumns(part), 0, part.num_rows)
    assert parts.digest() == whole, "parts are the whole"
    around = pa.table({"c": pa.array([None, *cells, *cells, None], kind)})
    columns = DigestedColumns(around)
    assert RowDigest(table.schema).add(columns, 1, 1 + len(cells)).digest() == whole, "a range is its rows"
    assert RowDigest(table.schema).add(columns, 1 + len(cells), 1 + 2 * len(cells)).digest() == whole
    taken = table.take(list(range(len(cells))))
    assert digest_of_rows(taken) == whole
    other = data.draw(st.lists(st.none() | values, min_size=1, max_size=20))
    changed = pa.table({"c": pa.array(other, kind)})
    if name != "number":
        assert (digest_of_rows(changed) == whole) == (changed.equals(table))
    assert digest_of_rows(table.rename_columns(["d"])) != whole


def test_what_is_stored_below_a_null_says_nothing():
    zeros = pa.Array.from_buffers(pa.int64(), 2, [pa.py_buffer(b"\x01"), pa.py_buffer(np.array([5, 0]))])
    nines = pa.Array.from_buffers(pa.int64(), 2, [pa.py_buffer(b"\x01"), pa.py_buffer(np.array([5, 9]))])
    assert digest_of_rows(pa.table({"c": zeros})) == digest_of_rows(pa.table({"c": nines}))
    assert digest_of_rows(pa.table({"c": zeros})) != digest_of_rows(pa.table({"c": pa.array([5, 0])}))


def test_tables_of_many_files_and_kinds_are_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(table_data, "READ_ROWS", 10)
    frame = pd.DataFrame({"g": pd.Categorical(["a", "b"] * 20), "x": np.arange(40.0), "when": pd.date_range("2024-01-01", periods=40)})
    frame[:25].to_parquet(tmp_path / "a.parquet")
    frame[25:].to_parquet(tmp_path / "b.parquet")
    data = open_table(tmp_path)
    parts = list(data.parts())
    assert max(part.num_rows for part in parts) <= 10
    assert pa.concat_tables(parts).column("g").type == pa.string(), "categories are their values"
    assert pa.concat_tables(parts).column("x").to_pylist() == frame.x.tolist()
    before = data.digest()
    frame[25:].to_parquet(tmp_path / "c.parquet")
    assert open_table(tmp_path).digest() != before


def test_a_pass_that_was_killed_is_made_again(tmp_path):
    table = unequal(500)
    objects = Objects(tmp_path.as_uri())
    whole = group_table(MemoryTable(table), ["g"], objects)
    place = tmp_path / "groups" / f"{whole.manifest.name}.json"
    place.write_text(json.dumps({"used_at": 0}))  # as it is until all is there
    (tmp_path / whole.manifest.file(0)).write_bytes(b"half of it")
    again = group_table(MemoryTable(table), ["g"], objects)
    assert rows_of(again) == expected_rows(table, ["g"])
    notes = []
    group_table(MemoryTable(table), ["g"], objects, on_note=notes.append)
    assert notes == []


def test_groups_that_another_client_makes_are_not_removed(tmp_path):
    objects = Objects(tmp_path.as_uri())
    old = group_table(MemoryTable(unequal(100)), ["g"], objects)
    own = group_table(MemoryTable(unequal(200)), ["g"], objects)
    objects.put("groups/another.json", json.dumps({"used_at": own.manifest.used_at + 1}).encode())
    objects.put("groups/another.00000.parquet", b"begun")
    remove_others(objects, own.manifest)
    names = {name.partition("/")[2].partition(".")[0] for name in objects.sizes("groups/")}
    assert names == {own.manifest.name, "another"}
    assert find_grouping(objects, old.manifest.name) is None
