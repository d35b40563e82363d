"""Indices and values on the connection: fewer bytes for what can be written shorter, decoded by a few NumPy calls.

Ascending indices are sent as differences in the narrowest integer that holds all of them, other ones as int32 or int64. Values are
float32, float16 (half the bytes, clipped to ±65504) or int8 with one factor per frame (a quarter).

Fewer bytes for gradients: entries below a threshold wait, values lose digits, and what was not sent is added to the next push.

The difference between a gradient and what was sent of it is kept at the client (error feedback), so every part of it arrives
sooner or later; `push_residual` sends what is left. It is lost with the client. With optimisers other than SGD and Sum, a
late gradient has another effect than an early one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ephemeron.config.typed import NonNegative, Typed
from ephemeron.errors import ProtocolError
from ephemeron.sparse.store.optimizers import Floats, Indices

ValueType: TypeAlias = Literal["float32", "float16", "int8"]
_FLOAT16_MAX = np.float32(65504)


class IndexCode(IntEnum):
    """Encoding of indices."""

    INT64 = 0
    INT32 = 1
    DELTA8 = 2
    DELTA16 = 3
    DELTA32 = 4


class ValueCode(IntEnum):
    """Encoding of values."""

    FLOAT32 = 0
    FLOAT16 = 1
    INT8 = 2


VALUE_CODES: dict[str, ValueCode] = {"float32": ValueCode.FLOAT32, "float16": ValueCode.FLOAT16, "int8": ValueCode.INT8}
_INDEX_TYPES: tuple[np.dtype[Any], ...] = tuple(np.dtype(t) for t in ("<i8", "<i4", "u1", "<u2", "<u4"))
_VALUE_TYPES: tuple[np.dtype[Any], ...] = tuple(np.dtype(t) for t in ("<f4", "<f2", "i1"))


class EncodedIndices(NamedTuple):
    """Indices ready to send."""

    code: IndexCode
    base: int
    """The first index, where differences follow."""
    data: NDArray[Any]


def encode_indices(indices: Indices, steps: Indices | None) -> EncodedIndices:
    """Encodes indices of one shard, none negative and at least one.

    Args:
        indices: relative to the shard's first row.
        steps: their differences, if none is negative; None: the indices are not ascending.
    """
    if steps is not None:
        largest = int(steps.max()) if steps.size else 0
        base = int(indices[0])
        if largest < 1 << 8:
            return EncodedIndices(IndexCode.DELTA8, base, steps.astype("u1"))
        if largest < 1 << 16:
            return EncodedIndices(IndexCode.DELTA16, base, steps.astype("<u2"))
        if largest < 1 << 32:
            return EncodedIndices(IndexCode.DELTA32, base, steps.astype("<u4"))
    elif int(indices.max()) < 1 << 31:
        return EncodedIndices(IndexCode.INT32, 0, indices.astype("<i4"))
    return EncodedIndices(IndexCode.INT64, 0, indices)


def index_bytes(code: int, count: int) -> int:
    """Bytes of so many encoded indices.

    Raises:
        ProtocolError: no such encoding.
    """
    if not 0 <= code < len(_INDEX_TYPES):
        raise ProtocolError(f"indices are encoded in an unknown way ({code})")
    return (count - (code >= IndexCode.DELTA8)) * _INDEX_TYPES[code].itemsize


def decode_indices(code: int, base: int, count: int, data: memoryview) -> Indices:
    """The inverse of `encode_indices`: int64[count]."""
    stored = np.frombuffer(data, _INDEX_TYPES[code])
    if code < IndexCode.DELTA8:
        return stored.astype(np.int64)
    indices = np.empty(count, np.int64)
    indices[0] = base
    np.cumsum(stored, out=indices[1:])
    indices[1:] += base
    return indices


def value_bytes(code: int, values: int) -> int:
    """Bytes of so many encoded values.

    Raises:
        ProtocolError: no such encoding.
    """
    if not 0 <= code < len(_VALUE_TYPES):
        raise ProtocolError(f"values are encoded in an unknown way ({code})")
    return values * _VALUE_TYPES[code].itemsize + (8 if code == ValueCode.INT8 else 0)


def encode_values(code: ValueCode, values: Floats) -> bytes:
    """Encodes float32 values of any shape."""
    if code is ValueCode.FLOAT32:
        return values.tobytes()
    if code is ValueCode.FLOAT16:
        return np.clip(values, -_FLOAT16_MAX, _FLOAT16_MAX).astype("<f2").tobytes()
    factor = np.float64(np.max(np.abs(values), initial=0)) / 127 or np.float64(1)
    return factor.tobytes() + np.rint(values / factor).astype("i1").tobytes()


def decode_values(code: int, data: memoryview) -> Floats:
    """The inverse of `encode_values`: flat; of float32, a view."""
    if code == ValueCode.FLOAT32:
        return np.frombuffer(data, "<f4")
    if code == ValueCode.FLOAT16:
        return np.frombuffer(data, "<f2").astype(np.float32)
    factor = np.frombuffer(data, "<f8", 1)[0]
    values: Floats = (np.frombuffer(data, "i1", offset=8) * factor).astype(np.float32)
    return values


# -- fewer bytes for gradients ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression(Typed):
    """Compression of the gradients of a table."""

    threshold: NonNegative = 0.0
    """Rows are sent once the largest absolute value of their gradient, earlier remainders included, is at least this."""
    values: ValueType = "float32"
    """Type of the values that are sent. int8 has one factor for each push and shard."""

    @property
    def code(self) -> ValueCode:
        """Encoding of the values."""
        return VALUE_CODES[self.values]

    @property
    def lossy(self) -> bool:
        """Whether anything may remain unsent."""
        return self.threshold > 0 or self.values != "float32"


class Residual:
    """What is still to be sent of the gradients of a table.

    Memory is that of the table (float32[rows, width]), of which the system provides the pages that are used.
    """

    def __init__(self, rows: int, width: int, compression: Compression) -> None:
        self.compression = compression
        self._values = np.zeros((rows, width), np.float32)

    def select(self, rows: Indices, gradient: Floats) -> tuple[Indices, Floats]:
        """Rows to send now, and their values with what was left of earlier ones. They count as sent.

        Args:
            rows: distinct, ascending.
            gradient: float32[rows, width].
        """
        total = self._values[rows] + gradient
        if self.compression.threshold > 0:
            large = np.abs(total).max(axis=1) >= self.compression.threshold
            if not large.all():
                self._values[rows[~large]] = total[~large]
                rows, total = rows[large], total[large]
        self._values[rows] = 0
        return rows, total

    def keep_rest(self, rows: Indices, values: Floats, sent: Floats) -> None:
        """Keeps the difference between the values of rows and what the shard reads of them."""
        self._values[rows] = values - sent.reshape(values.shape)

    def drain(self) -> tuple[Indices, Floats]:
        """All that is left, which counts as sent."""
        rows = np.flatnonzero(np.any(self._values != 0, axis=1))
        values = self._values[rows]
        self._values[rows] = 0
        return rows, values
