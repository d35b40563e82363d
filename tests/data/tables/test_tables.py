"""Prepared datasets: written once, read whole, named where they are damaged."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.data.tables import Column, TableDataset, TableWriter, csr_batch, dense_batch
from ephemeron.errors import DatasetDamaged, DatasetNotFound, JobError

pa = pytest.importorskip("pyarrow", reason="prepared datasets are Arrow files")

COLUMNS = (
    Column(name="click", kind="label", dtype="float32"),
    Column(name="age", kind="numeric", dtype="float64"),
    Column(name="site", kind="categorical", dtype="string"),
    Column(name="features", kind="sparse", dtype="float32", width=100),
)


def table(rows, first=0):
    at = range(first, first + rows)
    return pa.table(
        {
            "click": pa.array([float(n % 2) for n in at], pa.float32()),
            "age": [None if n % 3 == 2 else n / 2 for n in at],
            "site": [f"s{n % 5}" for n in at],
            "features.indices": pa.array([list(range(n % 4)) for n in at], pa.list_(pa.int64())),
            "features.values": pa.array([[float(n)] * (n % 4) for n in at], pa.list_(pa.float32())),
        }
    )


def write(url, sizes=(7, 5)):
    writer = TableWriter(url, COLUMNS)
    parts = [writer.write(n, table(size, sum(sizes[:n]))) for n, size in enumerate(sizes)]
    return writer.finish("clicks", parts)


def test_what_is_written_is_read(tmp_path):
    write(str(tmp_path))
    dataset = TableDataset.open(str(tmp_path))
    assert dataset.schema == COLUMNS
    assert len(dataset) == 12
    assert [p.rows for p in dataset.partitions] == [7, 5]
    assert pa.concat_tables(dataset.tables()).to_pylist() == table(12).to_pylist()
    assert dataset.read(1, ["age"]).column_names == ["age"]
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.read(0).equals(dataset.read(0))


def test_a_table_describes_its_columns(tmp_path):
    from ephemeron.data.tables.arrow import columns_of

    assert columns_of(write(str(tmp_path)).read(0).schema) == COLUMNS


def test_the_version_is_that_of_the_content(tmp_path):
    first, same = write(str(tmp_path / "a")), write(str(tmp_path / "b"))
    assert first.version == same.version
    assert write(str(tmp_path / "c"), (7, 6)).version != first.version


def test_of_two_writers_of_a_partition_the_first_has_effect(tmp_path):
    writer = TableWriter(str(tmp_path), COLUMNS)
    first = writer.write(0, table(7))
    assert TableWriter(str(tmp_path), COLUMNS).write(0, table(9)) == first
    assert writer.finish("a", [first]).version == writer.finish("a", [first]).version
    with pytest.raises(JobError, match="holds another dataset; name another folder"):
        writer.finish("a", [first, writer.write(1, table(3))])


def test_an_unfinished_dataset_is_not_found(tmp_path):
    TableWriter(str(tmp_path), COLUMNS).write(0, table(7))
    with pytest.raises(DatasetNotFound, match=r"has no dataset\.json"):
        TableDataset.open(str(tmp_path))


@pytest.mark.parametrize("content", ["{}", "[1", '{"format": 2}'])
def test_a_damaged_manifest_is_named(tmp_path, content):
    Path(tmp_path, "dataset.json").write_text(content)
    with pytest.raises(DatasetDamaged, match=r"dataset\.json: it is no manifest"):
        TableDataset.open(str(tmp_path))


def test_a_manifest_of_a_later_format_is_refused(tmp_path):
    write(str(tmp_path))
    path = tmp_path / "dataset.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(DatasetDamaged, match="its format is 2"):
        TableDataset.open(str(tmp_path))


def test_damaged_partitions_are_named(tmp_path):
    dataset = write(str(tmp_path))
    path = tmp_path / "part-00001.arrow"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    assert dataset.read(0).num_rows == 7
    with pytest.raises(DatasetDamaged, match=r"part-00001\.arrow: its content is not what was written"):
        dataset.read(1)
    path.unlink()
    with pytest.raises(DatasetDamaged, match=r"part-00001\.arrow: it is absent"):
        dataset.read(1)


@given(st.lists(st.integers(0, 11), max_size=20), st.integers(0, 12), st.integers(0, 12))
def test_rows_in_compressed_form(chosen, begin, end):
    whole = table(12).cast(pa_schema())
    dense = np.zeros((12, 4))
    for n in range(12):
        dense[n, : n % 4] = n
    for rows in (slice(begin, end), np.array(chosen, np.int64), None):
        got = csr_batch(whole, rows)
        wanted = dense[slice(None) if rows is None else rows]
        made = np.zeros_like(wanted)
        for n in range(len(wanted)):
            made[n, got.indices[got.indptr[n] : got.indptr[n + 1]]] = got.values[got.indptr[n] : got.indptr[n + 1]]
        assert np.array_equal(made, wanted)
        assert np.array_equal(got.labels, np.arange(12)[slice(None) if rows is None else rows] % 2)
        assert got.indptr.dtype == got.indices.dtype == np.int64
        assert got.values.dtype == np.float32


def test_slices_of_a_table_have_their_own_rows():
    part = table(12).cast(pa_schema()).slice(3, 5)
    whole = csr_batch(table(12).cast(pa_schema()), slice(3, 8))
    assert all(np.array_equal(a, b) for a, b in zip(csr_batch(part), whole, strict=True))


def test_dense_columns_and_labels():
    dense, labels = dense_batch(table(6).cast(pa_schema()), slice(1, 4))
    np.testing.assert_array_equal(dense, [[0.5], [np.nan], [1.5]])
    assert labels.tolist() == [1, 0, 1]


def test_a_table_without_sparse_columns_is_refused():
    with pytest.raises(ValueError, match="no sparse columns"):
        csr_batch(pa.table({"a": [1.0]}))


def pa_schema():
    from ephemeron.data.tables.arrow import schema_of

    return schema_of(COLUMNS)
