"""Matrices as tiles: what is stored is what was given; views; mistakes are one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron import FunctionExecutor
from ephemeron.errors import CorruptMessage, DamagedObject, JobError, TaskFailed
from ephemeron.linalg import matmul
from ephemeron.linalg.matrices.big_matrix import BigMatrix
from ephemeron.linalg.matrices.stored import CLOUD, DTYPES, LOCAL, StoredMatrix, decode_tile, encode_tile, tile_size


@pytest.fixture
def store(tmp_path: Path) -> str:
    return (tmp_path / "matrices").as_uri()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_tile_as_bytes(dtype, order):
    tile = np.asarray(np.random.default_rng(0).standard_normal((5, 7)), dtype=dtype, order=order)
    found = decode_tile(memoryview(b"".join(encode_tile(tile))))
    assert found.dtype == tile.dtype
    assert (found == tile).all()
    strided = tile[::2, ::3]
    assert (decode_tile(memoryview(b"".join(encode_tile(strided)))) == strided).all()


@pytest.mark.parametrize("data", [b"", b"\x93NUMPY\x01\x00", b"x" * 300])
def test_bytes_that_are_no_tile(data):
    with pytest.raises(CorruptMessage, match="not a tile"):
        decode_tile(memoryview(data))


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 40), tile=st.tuples(st.integers(1, 17), st.integers(1, 17)))
def test_what_is_read_is_what_was_stored(tmp_path_factory, rows, columns, tile):
    a = np.random.default_rng(rows * 41 + columns).standard_normal((rows, columns))
    big = BigMatrix.from_numpy(a, tile=tile, store=tmp_path_factory.mktemp("m").as_uri())
    assert big.shape == a.shape
    assert (big.to_numpy() == a).all()
    assert (big.T.to_numpy() == a.T).all()
    assert (big.T.T.to_numpy() == a).all()
    part = big[tile[0] : max(2 * tile[0], 1), :] if rows > tile[0] else big
    assert (part.to_numpy() == (a[tile[0] : 2 * tile[0]] if rows > tile[0] else a)).all()


def test_views_of_views(store):
    a = np.arange(60 * 40, dtype="complex64").reshape(60, 40)
    big = BigMatrix.from_numpy(a, tile=10, store=store)
    assert (big[10:50, 20:].T[:, 10:30].to_numpy() == a[10:50, 20:].T[:, 10:30]).all()
    assert len(big) == 60
    assert (np.asarray(big) == a).all()


def test_names_files_and_functions(store, tmp_path):
    a = np.random.default_rng(0).standard_normal((30, 20))
    BigMatrix.from_numpy(a, tile=16, store=store, name="a")
    assert (BigMatrix.open(store, "a").to_numpy() == a).all()
    with pytest.raises(JobError, match="has a matrix 'a' already; open it with"):
        BigMatrix.from_numpy(a, tile=16, store=store, name="a")
    with pytest.raises(JobError, match="has another matrix 'a'"):
        BigMatrix.from_numpy(a, tile=8, store=store, name="a")
    BigMatrix.open(store, "a").delete()
    with pytest.raises(JobError, match="no matrix 'a'"):
        BigMatrix.open(store, "a")
    np.save(tmp_path / "a.npy", a)
    assert (BigMatrix.from_npy(tmp_path / "a.npy", tile=7, store=store).to_numpy() == a).all()
    made = BigMatrix.from_function(lambda r, c: a[r, c], a.shape, tile=(8, 20), store=store)
    assert (made.to_numpy() == a).all()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (np.zeros((2, 2, 2)), "an array with 3 dimensions is no matrix"),
        (np.zeros((0, 3)), "has no values"),
        (np.array([["a"]]), "matrices of <U1 are not supported"),
        (np.zeros((2, 2), "float16"), "float16 are not supported"),
    ],
)
def test_what_is_no_matrix(store, given, says):
    with pytest.raises(JobError, match=says):
        BigMatrix.from_numpy(given, store=store)


def test_ranges_that_are_no_views(store):
    big = BigMatrix.from_numpy(np.zeros((30, 30)), tile=10, store=store)
    with pytest.raises(JobError, match=r"rows 5:30 do not begin and end where tiles of 10 do; use multiples of 10"):
        big.stored.part(slice(5, 30), slice(None))
    assert repr(big[5:, :7]).endswith("[5:30, 0:7]: 25 x 7, float64, not computed>")
    assert repr(big[5:][3:]).endswith("[5:30, 0:30])[3:25, 0:30]: 22 x 30, float64, not computed>")
    with pytest.raises(JobError, match="selects single rows or columns"):
        big[0]  # type: ignore[index]
    with pytest.raises(JobError, match="select nothing"):
        big[20:10]


def test_a_structure_says_which_tiles_are_zero():
    lower = StoredMatrix(store="s", name="n", rows=30, columns=30, tile_rows=10, tile_columns=10, dtype="float64", structure="lower")
    assert [lower.is_stored(0, 1), lower.is_stored(1, 1), lower.is_stored(2, 0)] == [False, True, True]
    assert lower.T.is_stored(0, 1)
    assert not lower.T.is_stored(1, 0)


def test_tile_sizes():
    assert tile_size(100, 100, 8, workers=2) == 100, "one tile"
    assert 500 <= tile_size(8000, 8000, 8, workers=2, speed=LOCAL) <= 4000
    large = tile_size(262_144, 262_144, 8, workers=512, speed=CLOUD)
    assert 2000 <= large <= 5000, "that of NumPyWren is 4096"
    assert 12 * 8 * large**2 <= 1.769e9


@pytest.mark.parametrize("cut", [False, True])
def test_a_damaged_tile_is_named(store, tmp_path, cut):
    big = BigMatrix.from_numpy(np.eye(4), tile=2, store=store, name="m")
    [path] = (tmp_path / "matrices" / "m").glob("*.1.0")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data[:-4] if cut else data)
    with pytest.raises(DamagedObject, match=r"damaged.*\(key m/[0-9a-f]{16}\.1\.0\)"):
        big.to_numpy()
    with FunctionExecutor("simulated", progress=False) as pool, pytest.raises(TaskFailed, match=r"damaged.*1\.0"):
        matmul(big, big, executor=pool)
    (tmp_path / "matrices" / "m" / "matrix.json").write_bytes(b"x")
    with pytest.raises(DamagedObject, match=r"key m/matrix\.json"):
        BigMatrix.open(store, "m")
    big.delete()
    assert not [p for p in (tmp_path / "matrices" / "m").rglob("*") if p.is_file()]
