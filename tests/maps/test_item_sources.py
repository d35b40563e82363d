"""Items from lines, tables, files and values: their keys, their digests, and what is refused."""

from __future__ import annotations

import io
import json
import os
import sys

import pytest

from ephemeron.errors import JobError
from ephemeron.maps.sources import ItemColumns, open_source, scan

pa = pytest.importorskip("pyarrow", reason="tables are read by pyarrow")
from pyarrow import parquet  # noqa: E402


def source(items, **columns):
    return open_source(items, ItemColumns(**columns))


def values(found):
    return [block.value(n) for block in found.blocks() for n in range(len(block.ids))]


def keys(found):
    return [block.key(n) for block in found.blocks() for n in range(len(block.ids))]


def test_equal_items_are_one_and_changed_ones_are_others(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": 2}\r\n{"a": 1}\n')
    found = source(tmp_path / "a.jsonl")
    one = scan(found)
    assert values(found) == [{"a": 1}, {"a": 2}, {"a": 1}]
    assert one.is_first.tolist() == [True, True, False]
    assert len(set(keys(found))) == 2
    (tmp_path / "b.jsonl").write_text('{"a": 3}\n{"a": 2}\n')
    other = scan(source(tmp_path / "b.jsonl"))
    assert set(one.ids.tolist()) & set(other.ids.tolist()) == {one.ids[1]}


def test_keys_name_items_whatever_their_values(tmp_path):
    (tmp_path / "a.csv").write_text("id,x\n007,1\n8,2\n")
    found = source(tmp_path / "a.csv", key="id", cost="x")
    assert keys(found) == ["007", "8"]
    assert [cost for block in found.blocks() for cost in block.costs] == [1.0, 2.0]
    before = scan(found).ids
    (tmp_path / "a.csv").write_text("id,x\n007,5\n8,2\n")
    after = scan(source(tmp_path / "a.csv", key="id")).ids
    assert (before == after).tolist() == [False, True]


@pytest.mark.parametrize(
    ("name", "content", "columns", "said"),
    [
        ("a.jsonl", '{"k": 1}\n{"k": 2}\n{"k": 1}\n', {"key": "k"}, "items 1 and 3 have the same key '1'"),
        ("a.jsonl", '{"k": 1}\n{"q": 2}\n', {"key": "k"}, r"line 2 has no 'k': it is to be the key"),
        ("a.jsonl", '{"k": 1}\n7\n', {"key": "k"}, "line 2 is no object with a 'k', but 7"),
        ("a.jsonl", '{"k": ""}\n', {"key": "k"}, "line 1 has no value of 'k'"),
        ("a.jsonl", '{"k": 1}\n{\n', {}, "line 2 is no JSON"),
        ("a.jsonl", "\n \n", {}, "has no items"),
        ("a.jsonl", '{"k": "x"}\n', {"cost": "k"}, "'x' of 'k' is no cost"),
        ("a.csv", "store,x\n1,2\n", {"key": "sore"}, "has no column 'sore'.*store"),
        ("a.csv", "k,x\n1,2\n1,3\n", {"key": "k"}, "items 1 and 2 have the same key"),
        ("a.csv", "k,x\n1,2\n", {"needed": ("x", "z")}, "has no column 'z'"),
        ("a.jsonl", '{"x": 1}\n', {"needed": ("x", "z")}, "has no 'z': the function wants it as an argument"),
    ],
)
def test_bad_items_are_refused_with_their_place(tmp_path, name, content, columns, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(JobError, match=said):
        scan(source(tmp_path / name, **columns))


def test_tables_of_a_folder_are_one_source_and_files_are_items(tmp_path):
    for n in range(3):
        parquet.write_table(pa.table({"n": [2 * n, 2 * n + 1]}), tmp_path / f"part-{n}.parquet")
    assert values(source(tmp_path)) == [{"n": n} for n in range(6)]
    assert values(source(f"{tmp_path}/part-[12].parquet")) == [{"n": n} for n in range(2, 6)]
    found = open_source(str(tmp_path), ItemColumns(), each_file=True)
    assert values(found) == [str(tmp_path / f"part-{n}.parquet") for n in range(3)]
    assert keys(found) == [f"part-{n}.parquet" for n in range(3)]
    before = scan(found).ids
    os.utime(tmp_path / "part-1.parquet", (1, 1))
    after = scan(open_source(str(tmp_path), ItemColumns(), each_file=True)).ids
    assert (before == after).tolist() == [True, False, True]
    parquet.write_table(pa.table({"m": [1]}), tmp_path / "part-9.parquet")
    with pytest.raises(JobError, match="has the columns m, and the file before it has n"):
        scan(source(tmp_path))
    with pytest.raises(JobError, match="there is no file"):
        source(tmp_path / "absent*.tiff")


def test_files_that_are_no_tables_are_items(tmp_path):
    for name in ("a.tiff", "b.tiff", "sub/c.tiff"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    assert keys(source(f"{tmp_path}/**/*.tiff")) == ["a.tiff", "b.tiff", "sub/c.tiff"]
    with pytest.raises(JobError, match="are files, which have no columns"):
        source(f"{tmp_path}/*.tiff", key="k")


def test_text_ends_at_line_feeds_and_a_fingerprint_is_of_the_content(tmp_path):
    (tmp_path / "a.jsonl").write_bytes('\ufeff"a\u2028b\x85"\n"c"'.encode())
    found = source(tmp_path / "a.jsonl")
    assert values(found) == ["a\u2028b\x85", "c"]
    mark = found.fingerprint()
    assert mark == source(tmp_path / "a.jsonl").fingerprint() != source(tmp_path / "a.jsonl", key="k").fingerprint()
    (tmp_path / "a.jsonl").write_bytes(b'"d"\n')
    assert source(tmp_path / "a.jsonl").fingerprint() != mark


def test_iterables_and_standard_input_are_read_once(monkeypatch):
    found = source(n for n in range(25_000))
    assert scan(found).items == 25_000
    assert values(found) == list(range(25_000))
    found.close()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"1\n2\n")))
    found = source("-")
    assert (values(found), values(found)) == ([1, 2], [1, 2])
    found.close()
    with pytest.raises(JobError, match="is no iterable"):
        source(5)


def test_values_that_json_has_not_have_digests(tmp_path):
    import datetime

    days = [datetime.date(2026, 1, n) for n in (1, 2)]
    assert len(set(scan(source([{"day": day} for day in days])).ids)) == 2
    parquet.write_table(pa.table({"day": days, "data": [b"a", b"b"]}), tmp_path / "a.parquet")
    assert values(source(tmp_path / "a.parquet"))[0] == {"day": days[0], "data": b"a"}
    assert json.dumps(keys(source([{1, 2}])))
