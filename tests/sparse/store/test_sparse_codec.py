"""Encodings of indices and values, and compression with what it leaves for later."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.sparse.store import Compression
from ephemeron.sparse.store.codec import (
    IndexCode,
    Residual,
    ValueCode,
    decode_indices,
    decode_values,
    encode_indices,
    encode_values,
    index_bytes,
    value_bytes,
)


def round_trip(rows: np.ndarray, *, ascending: bool) -> tuple[np.ndarray, IndexCode]:
    encoded = encode_indices(rows, np.diff(rows) if ascending else None)
    data = memoryview(encoded.data.tobytes())
    assert data.nbytes == index_bytes(encoded.code, rows.size)
    return decode_indices(encoded.code, encoded.base, rows.size, data), encoded.code


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=50), st.booleans())
def test_indices_arrive_as_they_were(rows: list[int], ascending: bool) -> None:
    given_rows = np.array(sorted(rows) if ascending else rows, np.int64)
    got, _ = round_trip(given_rows, ascending=ascending)
    np.testing.assert_array_equal(got, given_rows)


@pytest.mark.parametrize(
    ("step", "code"), [(255, IndexCode.DELTA8), (256, IndexCode.DELTA16), (1 << 16, IndexCode.DELTA32), (1 << 32, IndexCode.INT64)]
)
def test_differences_take_the_narrowest_type(step: int, code: IndexCode) -> None:
    assert round_trip(np.array([3, 4, 4 + step]), ascending=True)[1] is code


@pytest.mark.parametrize("code", list(ValueCode))
def test_values_are_as_near_as_their_type_allows(code: ValueCode) -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    data = memoryview(encode_values(code, values))
    assert data.nbytes == value_bytes(code, 1000)
    allowed = {ValueCode.FLOAT32: 0, ValueCode.FLOAT16: 2e-3, ValueCode.INT8: np.abs(values).max() / 254 * 1.001}[code]
    assert np.abs(decode_values(code, data) - values).max() <= allowed


def test_float16_is_clipped_and_not_infinite() -> None:
    data = encode_values(ValueCode.FLOAT16, np.array([1e9, -1e9], np.float32))
    np.testing.assert_array_equal(decode_values(ValueCode.FLOAT16, memoryview(data)), [65504, -65504])


def test_a_zero_gradient_in_int8() -> None:
    data = encode_values(ValueCode.INT8, np.zeros(3, np.float32))
    np.testing.assert_array_equal(decode_values(ValueCode.INT8, memoryview(data)), np.zeros(3))


def test_small_gradients_wait_until_they_have_grown() -> None:
    residual = Residual(10, 1, Compression(threshold=1.0))
    rows, gradient = np.array([2, 5]), np.array([[0.4], [2.0]], np.float32)
    assert residual.select(rows, gradient)[0].tolist() == [5]
    assert residual.select(rows, gradient)[0].tolist() == [5]
    sent, values = residual.select(rows, gradient)
    assert sent.tolist() == [2, 5]
    np.testing.assert_allclose(values, [[1.2], [2.0]], rtol=1e-6)
    residual.select(rows, gradient)
    left, values = residual.drain()
    assert left.tolist() == [2]
    np.testing.assert_allclose(values, [[0.4]], rtol=1e-6)
    assert residual.drain()[0].size == 0
