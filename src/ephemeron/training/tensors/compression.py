"""Smaller messages: bf16 (half the bytes), int8 with error feedback (a quarter), and sparse (without loss, for what is mostly zero).

Without error feedback, rounding to 8 bits stalls training once gradients fall below a step of the grid. With
it, the rounding error is added to the next message, so that it is delayed and not lost (Seide et al. 2014;
Karimireddy et al. 2019). The residual is part of a worker's state and of its checkpoint.

All codecs are deterministic: the same vector and residual give the same bytes on every platform. All keep minus zero,
which marks absent values (`tensors.absence`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from ephemeron.communication.channels.base import Buffer
from ephemeron.errors import JobError
from ephemeron.training.tensors import sparse_encoding
from ephemeron.training.tensors.absence import ABSENT, is_absent

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
    """Values that are not zero and their places, or all values where that is shorter; see `sparse_encoding`."""

    name, id, lossy, fixed = "sparse", 3, False, False

    def encode(self, vector: np.ndarray) -> list[Buffer]:
        return sparse_encoding.encode(vector)

    def decode(self, data: memoryview, dtype: np.dtype[np.generic], elements: int) -> np.ndarray:
        return sparse_encoding.decode(data, dtype, elements)


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
