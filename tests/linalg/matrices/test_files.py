"""Matrices from files and to files: read tile by tile, the same values; what cannot be read is one line."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from ephemeron.errors import JobError, MissingExtra
from ephemeron.linalg.matrices.big_matrix import BigMatrix


@pytest.fixture
def store(tmp_path: Path) -> str:
    return (tmp_path / "matrices").as_uri()


def test_zarr(store, tmp_path):
    zarr = pytest.importorskip("zarr", reason="Zarr is not installed")
    a = np.random.default_rng(0).standard_normal((30, 20)).astype("complex64")
    zarr.create_array(str(tmp_path / "a.zarr"), data=a, chunks=(11, 6))
    big = BigMatrix.from_zarr(tmp_path / "a.zarr", tile=(8, 20), store=store)
    assert (big.to_numpy() == a).all()
    big.T.to_zarr(tmp_path / "b.zarr")
    written = zarr.open_array(str(tmp_path / "b.zarr"))
    assert written.chunks == (20, 8)
    assert (written[:] == a.T).all()
    with pytest.raises(JobError, match=r"b\.zarr cannot be written as a Zarr array"):
        big.to_zarr(tmp_path / "b.zarr")
    with pytest.raises(JobError, match=r"c\.zarr cannot be read as a Zarr array"):
        BigMatrix.from_zarr(tmp_path / "c.zarr", store=store)
    zarr.create_array(str(tmp_path / "i.zarr"), data=np.arange(6, dtype="int32"))
    assert BigMatrix.from_zarr(tmp_path / "i.zarr", store=store).shape == (6, 1)


def test_parquet(store, tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"x": np.arange(25.0), "y": np.arange(25) % 3, "name": ["a"] * 25, "gap": [None, *range(24)]}
    parquet.write_table(arrow.table(columns), tmp_path / "t.parquet", row_group_size=7)
    big = BigMatrix.from_parquet(tmp_path / "t.parquet", columns=["y", "x"], tile=(6, 1), store=store)
    assert (big.to_numpy() == np.stack([columns["y"], columns["x"]], axis=1)).all()
    for chosen, says in (
        (None, "column 'name' of .* is string, not numbers; choose columns among x, y, gap"),
        (["z"], "has no column 'z'; its columns are x, y, name, gap"),
        (["gap"], r"column 'gap' of .* has nulls in rows 0:\d+; fill or drop them"),
    ):
        with pytest.raises(JobError, match=says):
            BigMatrix.from_parquet(tmp_path / "t.parquet", columns=chosen, store=store)
    with pytest.raises(JobError, match="cannot be read as a Parquet file"):
        BigMatrix.from_parquet(tmp_path / "none.parquet", store=store)


def test_a_missing_extra_names_the_install_command(store, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", None)
    big = BigMatrix.from_numpy(np.eye(3), store=store)
    with pytest.raises(MissingExtra, match=r"zarr is not installed; run: pip install 'ephemeron\[linalg-files\]'"):
        big.to_zarr(tmp_path / "a.zarr")
