"""Vectors that are mostly zero as bytes, without loss: values and their places, in the shortest of three forms.

dense    all values
bitmap   one bit for each element, and the values that are kept
runs     for each run of kept values its distance from the run before and its length, and the values

Zeros are left out, or minus zeros (`absence`) where those are more frequent. All else is kept to the bit, so sums of decoded
vectors have the bits that sums of the vectors have.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from ephemeron.communication.channels.base import Buffer

_HEAD = struct.Struct("<BBBBIQ")
"""Form, bytes of a distance, bytes of a length, whether minus zeros are left out, number of runs, number of values."""
_DENSE, _BITMAP, _RUNS = range(3)


def encode(vector: NDArray[np.floating]) -> list[Buffer]:
    """Raw buffers; may share memory with `vector`."""
    vector = np.ascontiguousarray(vector)
    bits = vector.view(f"u{vector.itemsize}")
    minus = _minus_zero(bits.dtype)
    kept, negative = int(np.count_nonzero(bits)), False
    if 2 * kept > bits.size:
        others = int(np.count_nonzero(bits != minus))
        kept, negative = min((kept, False), (others, True))
    spare = (bits.size - kept) * vector.itemsize
    """Bytes that places may take."""
    if spare <= 2:
        return _dense(vector)
    places = np.flatnonzero(bits != minus if negative else bits)
    distances, lengths = _runs(places)
    runs_bytes, bitmap_bytes = distances.nbytes + lengths.nbytes, -(-bits.size // 8)
    if spare <= min(runs_bytes, bitmap_bytes):
        return _dense(vector)
    values = _bytes(vector[places])
    if runs_bytes < bitmap_bytes:
        head = _HEAD.pack(_RUNS, distances.itemsize, lengths.itemsize, negative, distances.size, kept)
        return [head, values, _bytes(distances), _bytes(lengths)]
    mask = np.zeros(bits.size, bool)
    mask[places] = True
    return [_HEAD.pack(_BITMAP, 0, 0, negative, 0, kept), values, _bytes(np.packbits(mask))]


def decode(data: memoryview, dtype: np.dtype[np.generic], elements: int) -> np.ndarray:
    """The inverse of `encode`; may share memory with `data`.

    Raises:
        ValueError, IndexError, struct.error: the bytes are not of `encode`.
    """
    form, distance, length, negative, runs, kept = _HEAD.unpack_from(data)
    if form == _DENSE:
        return np.frombuffer(data, dtype, elements, _HEAD.size)
    values, at = np.frombuffer(data, dtype, kept, _HEAD.size), _HEAD.size + kept * dtype.itemsize
    vector = np.full(elements, -0.0, dtype) if negative else np.zeros(elements, dtype)
    if form == _BITMAP:
        packed = np.frombuffer(data, np.uint8, -(-elements // 8), at)
        vector[np.unpackbits(packed, count=elements).view(bool)] = values
    elif form == _RUNS:
        distances = np.frombuffer(data, f"<u{distance}", runs, at)
        lengths = np.frombuffer(data, f"<u{length}", runs, at + runs * distance)
        vector[_places(distances, lengths)] = values
    else:
        raise ValueError(f"sparse vectors have no form {form}")
    return vector


def _minus_zero(dtype: np.dtype[np.unsignedinteger]) -> np.unsignedinteger:
    return dtype.type(1 << (8 * dtype.itemsize - 1))


def _dense(vector: NDArray[np.floating]) -> list[Buffer]:
    return [_HEAD.pack(_DENSE, 0, 0, 0, 0, vector.size), _bytes(vector)]


def _runs(places: NDArray[np.int64]) -> tuple[NDArray[np.unsignedinteger], NDArray[np.unsignedinteger]]:
    """Distances of runs of neighbouring places from the end of the run before, and their lengths."""
    first = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    lengths = np.diff(first, append=places.size)
    begins = places[first]
    distances = begins - np.concatenate(([0], (begins + lengths)[:-1]))
    return _narrow(distances), _narrow(lengths)


def _places(distances: NDArray[np.unsignedinteger], lengths: NDArray[np.unsignedinteger]) -> NDArray[np.int64]:
    """The inverse of `_runs`."""
    before = np.cumsum(lengths, dtype=np.int64) - lengths
    """Values in all runs before."""
    begins = np.cumsum(distances, dtype=np.int64) + before
    if (lengths == 1).all():
        return begins
    return np.repeat(begins - before, lengths) + np.arange(int(lengths.sum(dtype=np.int64)))


def _narrow(numbers: NDArray[np.int64]) -> NDArray[np.unsignedinteger]:
    """Integers in the narrowest type that holds them."""
    largest = int(numbers.max(initial=0))
    return numbers.astype("<u1" if largest < 1 << 8 else "<u2" if largest < 1 << 16 else "<u4")


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.view(np.uint8).data)
