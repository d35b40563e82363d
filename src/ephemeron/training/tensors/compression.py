"""Smaller messages: bf16 (half the bytes), int8 with error feedback (a quarter), and sparse (without loss, for what is mostly zero).

Without error feedback, rounding to 8 bits stalls training once gradients fall below a step of the grid. With
it, the rounding error is added to the next message, so that it is delayed and not lost (Seide et al. 2014;
Karimireddy et al. 2019). The residual is part of a worker's state and of its checkpoint.

All codecs are deterministic: the same vector and residual give the same bytes on every platform. All keep minus zero,
which marks absent values.

Minus zero as the mark of a parameter without gradient, which survives sums and takes no further bytes.

A parameter that took no part in a step has no gradient in PyTorch, and optimisers skip it: no decay, no momentum. A gradient
of zero has another effect. In IEEE 754 a sum is minus zero only if all of its terms are (round to nearest), and a
division by a positive number keeps it: the merged gradient of a parameter is minus zero throughout only if no rank had
one. Contributors write minus zero for absent gradients and never for others.

Not covered: a gradient all of whose elements are negative and underflow in its format.

Vectors that are mostly zero as bytes, without loss: values and their places, in the shortest of three forms.

dense    all values
bitmap   one bit for each element, and the values that are kept
runs     for each run of kept values its distance from the run before and its length, and the values

Zeros are left out, or minus zeros where those are more frequent. All else is kept to the bit, so sums of decoded
vectors have the bits that sums of the vectors have.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ephemeron.communication.channels.base import Buffer
from ephemeron.errors import JobError

_MINUS_ZERO = -128
INT8_BLOCK = 1024
"""Elements that share one float32 scale: 0.4 % of overhead."""


class GradientCodec(ABC):
    """Vector to bytes and back."""

    name: ClassVar[str]
    id: ClassVar[int]
    lossy: ClassVar[bool] = True
    feedback: ClassVar[bool] = False
    """Whether the rounding error is added to the next message."""
    fixed: ClassVar[bool] = True
    """Whether the number of elements determines the number of bytes."""
    plain: ClassVar[bool] = False
    """Whether the bytes are those of the vector, so that they can be received into their place."""

    @abstractmethod
    def encode(self, vector: np.ndarray) -> list[Buffer]:
        """Raw buffers; may share memory with `vector`."""

    @abstractmethod
    def decode(self, data: memoryview, dtype: np.dtype[np.generic], elements: int) -> np.ndarray:
        """A vector of `elements` values of `dtype`; may share memory with `data`."""


class Plain(GradientCodec):
    """The bytes as they are."""

    name, id, lossy, plain = "none", 0, False, True

    def encode(self, vector: np.ndarray) -> list[Buffer]:
        return [_view(np.ascontiguousarray(vector))] if vector.size else []

    def decode(self, data: memoryview, dtype: np.dtype[np.generic], elements: int) -> np.ndarray:
        return np.frombuffer(data, dtype=dtype, count=elements)


class BFloat16(GradientCodec):
    """The upper half of a float32, rounded to nearest even."""

    name, id = "bf16", 1

    def encode(self, vector: np.ndarray) -> list[Buffer]:
        bits = np.ascontiguousarray(vector, dtype=np.float32).view(np.uint32)
        rounded = bits + (((bits >> 16) & 1) + 0x7FFF)
        special = (bits & 0x7F800000) == 0x7F800000  # infinities and NaN must not be rounded into one another
        half = (np.where(special, bits, rounded) >> 16).astype(np.uint16)
        if special.any():
            half |= (special & ((bits & 0x007FFFFF) != 0)).astype(np.uint16) << 6  # a NaN of low bits only stays one
        return [_view(half)] if half.size else []

    def decode(self, data: memoryview, dtype: np.dtype[np.generic], elements: int) -> np.ndarray:
        half = np.frombuffer(data, dtype=np.uint16, count=elements)
        return (half.astype(np.uint32) << 16).view(np.float32).astype(dtype, copy=False)


class Int8(GradientCodec):
    """Blocks of 1,024 values on a grid of 255 steps between ± their largest magnitude; -128 is minus zero."""

    name, id, feedback = "int8", 2, True

    def encode(self, vector: np.ndarray) -> list[Buffer]:
        if not vector.size:
            return []
        blocks = -(-vector.size // INT8_BLOCK)
        padded = np.zeros(blocks * INT8_BLOCK, dtype=np.float32)
        padded[: vector.size] = vector
        grid = padded.reshape(blocks, INT8_BLOCK)
        scale = np.abs(grid).max(axis=1) / np.float32(127)
        scale[scale < np.finfo(np.float32).tiny] = 0  # too coarse a number for a grid: its steps would overflow
        safe = np.where(scale > 0, scale, np.float32(1))
        quantised = np.rint(grid / safe[:, None]).astype(np.int8).reshape(-1)[: vector.size]
        quantised[is_absent(vector)] = _MINUS_ZERO
        return [_view(scale), _view(np.ascontiguousarray(quantised))]

    def decode(self, data: memoryview, dtype: np.dtype[np.generic], elements: int) -> np.ndarray:
        blocks = -(-elements // INT8_BLOCK)
        scale = np.frombuffer(data, dtype=np.float32, count=blocks)
        quantised = np.frombuffer(data, dtype=np.int8, offset=4 * blocks, count=elements)
        out = quantised.astype(np.float32)
        full = elements // INT8_BLOCK * INT8_BLOCK
        out[:full].reshape(-1, INT8_BLOCK)[:] *= scale[: full // INT8_BLOCK, None]
        out[full:] *= scale[-1] if blocks else 1
        out[quantised == _MINUS_ZERO] = ABSENT
        return out.astype(dtype, copy=False)


class Sparse(GradientCodec):
    """Values that are not zero and their places, or all values where that is shorter; see `compression`."""

    name, id, lossy, fixed = "sparse", 3, False, False

    def encode(self, vector: np.ndarray) -> list[Buffer]:
        return encode(vector)

    def decode(self, data: memoryview, dtype: np.dtype[np.generic], elements: int) -> np.ndarray:
        return decode(data, dtype, elements)


def _view(array: np.ndarray) -> memoryview:
    """The array's bytes, not copied."""
    return memoryview(array.view(np.uint8).data)


_CODECS: tuple[GradientCodec, ...] = (Plain(), BFloat16(), Int8(), Sparse())


def codec_by_name(name: str) -> GradientCodec:
    """The codec of a value of `--compression`."""
    for codec in _CODECS:
        if codec.name == name:
            return codec
    raise JobError(f"compression = {name!r} is not known", remedy=f"use one of {', '.join(c.name for c in _CODECS)}")


def codec_by_id(number: int) -> GradientCodec:
    """The codec of a number in a header."""
    return _CODECS[number]


class Compressor:
    """A codec with error feedback: encodes slices of one vector, and adds their rounding errors to the next ones.

    Args:
        codec: to encode with.
        size: elements of the whole vector.
        dtype: of the vector.
    """

    def __init__(self, codec: GradientCodec, size: int, dtype: np.dtype[np.generic]) -> None:
        self.codec = codec
        self.dtype = dtype
        self.residual = np.zeros(size if codec.feedback else 0, dtype=dtype)

    def encode(self, vector: np.ndarray, start: int, stop: int) -> list[Buffer]:
        """Bytes of `vector` (which is elements `start:stop` of the whole), updating the residual."""
        if not self.codec.feedback:
            return self.codec.encode(vector)
        residual = self.residual[start:stop]
        wanted = vector + residual
        wanted[is_absent(vector) & (residual == 0)] = ABSENT
        payload = self.codec.encode(wanted)
        got = self.codec.decode(memoryview(b"".join(payload)), self.dtype, stop - start)
        self.residual[start:stop] = wanted - got
        return payload

    def round_trip(self, payload: list[Buffer], vector: np.ndarray) -> np.ndarray:
        """The values that readers of `payload` get, for a sender that has to use the same ones."""
        if not self.codec.lossy:
            return vector
        return self.codec.decode(memoryview(b"".join(payload)), self.dtype, vector.size)


# -- minus zero as the mark of a parameter without gradient -------------------------------------------------------


ABSENT = -0.0


def is_absent(values: np.ndarray) -> np.ndarray:
    """Elementwise: whether a value is minus zero."""
    found: np.ndarray = (values == 0) & np.signbit(values)
    return found


def absent_parts(vector: np.ndarray, bounds: Sequence[tuple[int, int]]) -> frozenset[int]:
    """Numbers of the non-empty parts `start:stop` that are minus zero throughout."""
    filled = [(i, start, stop) for i, (start, stop) in enumerate(bounds) if stop > start]
    if not filled:
        return frozenset()
    first = is_absent(vector[[start for _, start, _ in filled]])  # nearly always the whole answer
    return frozenset(i for (i, start, stop), maybe in zip(filled, first, strict=True) if maybe and is_absent(vector[start:stop]).all())


# -- vectors that are mostly zero as bytes ------------------------------------------------------------------------


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
