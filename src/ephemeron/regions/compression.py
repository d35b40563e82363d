"""Payloads between regions: plain values, int8, int4 or the largest values only, with error feedback.

    none            the bytes of the vector
    int8            blocks of 1,024 values with one float32 scale: 1.004 bytes a value
    int4            blocks of 256 values with one float32 scale, two values a byte: 0.516 bytes a value
    topk:F          the ⌈F·n⌉ values of the largest magnitude as float32, with the gaps between them: 5 bytes a kept value (F ≥ 0.01)
    topk2:F         the same, each with a sign and one of two magnitudes: 1.25 bytes a kept value

What a payload lacks of the vector, the sender adds to its next one (`Feedback`). Its residual is a part of the region's state, and encoding is a
function of vector and residual, so a replacement that repeats a round sends the same bytes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from ephemeron.errors import CorruptMessage, JobError
from ephemeron.training.tensors.compression import codec_by_name

INT4_BLOCK = 256
_ESCAPE = 255
"""Gap byte that means: 255 more, and the next byte counts, too."""


class Codec(ABC):
    """Vector to bytes and back."""

    lossy = True

    @abstractmethod
    def encode(self, vector: np.ndarray) -> bytes:
        """Bytes of a finite 1-D vector."""

    @abstractmethod
    def decode(self, data: bytes | memoryview, elements: int, dtype: np.dtype[np.generic]) -> np.ndarray:
        """The vector, a new array.

        Raises:
            CorruptMessage: no such payload.
        """


class Plain(Codec):
    """The bytes as they are."""

    lossy = False

    def encode(self, vector: np.ndarray) -> bytes:
        return np.ascontiguousarray(vector).tobytes()

    def decode(self, data: bytes | memoryview, elements: int, dtype: np.dtype[np.generic]) -> np.ndarray:
        _check(len(data) == elements * dtype.itemsize)
        return np.frombuffer(data, dtype=dtype).copy()


class Int8(Codec):
    """The codec of gradients inside a region."""

    def encode(self, vector: np.ndarray) -> bytes:
        return b"".join(codec_by_name("int8").encode(vector))

    def decode(self, data: bytes | memoryview, elements: int, dtype: np.dtype[np.generic]) -> np.ndarray:
        _check(len(data) == 4 * -(-elements // 1024) + elements)
        found = codec_by_name("int8").decode(memoryview(data), dtype, elements)
        values: np.ndarray = found + dtype.type(0)  # minus zero marks absent gradients, of which there are none
        return values


class Int4(Codec):
    """Blocks on a grid of 15 steps between ± their largest magnitude; two values a byte."""

    def encode(self, vector: np.ndarray) -> bytes:
        blocks = -(-vector.size // INT4_BLOCK)
        grid = np.zeros((blocks, INT4_BLOCK), dtype=np.float32)
        grid.reshape(-1)[: vector.size] = vector
        scale = np.abs(grid).max(axis=1) / np.float32(7)
        scale[scale < np.finfo(np.float32).tiny] = 0
        steps = np.rint(grid / np.where(scale > 0, scale, np.float32(1))[:, None]).astype(np.int8)
        flat = (steps.reshape(-1)[: vector.size + vector.size % 2] + 8).astype(np.uint8)
        return b"".join((scale.tobytes(), (flat[0::2] | flat[1::2] << 4).tobytes()))

    def decode(self, data: bytes | memoryview, elements: int, dtype: np.dtype[np.generic]) -> np.ndarray:
        blocks = -(-elements // INT4_BLOCK)
        _check(len(data) == 4 * blocks + -(-elements // 2))
        scale = np.frombuffer(data, dtype=np.float32, count=blocks)
        packed = np.frombuffer(data, dtype=np.uint8, offset=4 * blocks)
        steps = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)[:elements].astype(np.float32) - 8
        return (steps * np.repeat(scale, INT4_BLOCK)[:elements]).astype(dtype)


class TopK(Codec):
    """The values of the largest magnitude.

    Args:
        share: part of the values that is kept, at least one.
        two_bit: keep of each value its sign and whether it is one of the larger half of those kept.
    """

    def __init__(self, share: float, *, two_bit: bool = False) -> None:
        self.share, self.two_bit = share, two_bit

    def encode(self, vector: np.ndarray) -> bytes:
        kept = min(vector.size, max(1, math.ceil(self.share * vector.size)))
        magnitude = np.abs(vector)
        # A stable order: of equal magnitudes the first ones are kept, on every machine.
        places = np.sort(np.argsort(-magnitude, kind="stable")[:kept])
        values = vector[places].astype(np.float32)
        gaps = _packed_gaps(places)
        head = np.array([kept, gaps.size], dtype=np.uint32).tobytes()
        return head + gaps.tobytes() + (_two_bits(values) if self.two_bit else values.tobytes())

    def decode(self, data: bytes | memoryview, elements: int, dtype: np.dtype[np.generic]) -> np.ndarray:
        _check(len(data) >= 8)
        kept, size = (int(n) for n in np.frombuffer(data, dtype=np.uint32, count=2))
        body = memoryview(data)[8 + size :]
        _check(len(body) == (8 + -(-kept // 4) if self.two_bit else 4 * kept))
        places = _unpacked_gaps(np.frombuffer(data, dtype=np.uint8, offset=8, count=size))
        _check(places.size == kept and (kept == 0 or int(places[-1]) < elements))
        out = np.zeros(elements, dtype=dtype)
        out[places] = _from_two_bits(body, kept) if self.two_bit else np.frombuffer(body, dtype=np.float32)
        return out


def codec_of(text: str) -> Codec:
    """The codec of a value of `regions.compression`.

    Raises:
        JobError: there is no such one.
    """
    name, _, rest = text.partition(":")
    plain: dict[str, Callable[[], Codec]] = {"none": Plain, "int8": Int8, "int4": Int4}
    if name in plain and not rest:
        return plain[name]()
    if name in ("topk", "topk2"):
        try:
            share = float(rest or "0.05")
        except ValueError:
            share = 0.0
        if 0 < share <= 1:
            return TopK(share, two_bit=name == "topk2")
        raise JobError(f"regions.compression = {text!r}: {rest!r} is no share", remedy=f"write {name}:0.05 to keep 5 % of the values")
    raise JobError(f"regions.compression = {text!r} is not known", remedy="use none, int8, int4, topk:SHARE or topk2:SHARE")


class Feedback:
    """Encoder of one region's contributions, with the rounding errors that it still owes.

    Args:
        codec: of the payloads.
        elements: size of the whole vector.
        dtype: of the vector.
        changes: whether the codec may change.
    """

    def __init__(self, codec: Codec, elements: int, dtype: np.dtype[np.generic], *, changes: bool = False) -> None:
        self.codec = codec
        self.residual = np.zeros(elements if codec.lossy or changes else 0, dtype=dtype)

    def encode(self, vector: np.ndarray, part: slice) -> bytes:
        """Bytes of a contribution, which is a part of the whole vector; the residual becomes what they lack."""
        if not self.residual.size:
            return self.codec.encode(vector)
        wanted = vector + self.residual[part]
        data = self.codec.encode(wanted)
        self.residual[part] = wanted - self.codec.decode(data, vector.size, vector.dtype)
        return data


def _check(holds: bool) -> None:
    if not holds:
        raise CorruptMessage("not a contribution of a region: its length is wrong")


def _packed_gaps(places: np.ndarray) -> np.ndarray:
    """Gaps between ascending numbers as bytes."""
    gaps = np.diff(places, prepend=-1) - 1
    escapes = gaps // _ESCAPE
    out = np.full(int((escapes + 1).sum()), _ESCAPE, dtype=np.uint8)
    out[np.cumsum(escapes + 1) - 1] = gaps % _ESCAPE
    return out


def _unpacked_gaps(packed: np.ndarray) -> np.ndarray:
    ends = packed != _ESCAPE
    reached = np.cumsum(packed.astype(np.int64)) + np.cumsum(ends)
    places: np.ndarray = reached[ends] - 1
    return places


def _two_bits(values: np.ndarray) -> bytes:
    """Two magnitudes, and two bits for each value: sign and magnitude."""
    magnitude = np.abs(values)
    large = magnitude > np.median(magnitude) if values.size else np.zeros(0, dtype=bool)
    levels = [float(magnitude[which].mean()) if which.any() else 0.0 for which in (~large, large)]
    bits = np.zeros(-(-values.size // 4) * 4, dtype=np.uint8)
    bits[: values.size] = (values < 0).astype(np.uint8) | large.astype(np.uint8) << 1
    four = bits.reshape(-1, 4)
    return np.array(levels, dtype=np.float32).tobytes() + (four[:, 0] | four[:, 1] << 2 | four[:, 2] << 4 | four[:, 3] << 6).tobytes()


def _from_two_bits(data: memoryview, count: int) -> np.ndarray:
    levels = np.frombuffer(data, dtype=np.float32, count=2)
    packed = np.frombuffer(data, dtype=np.uint8, offset=8)
    bits = np.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], axis=1).reshape(-1)[:count]
    values: np.ndarray = np.where(bits & 1, -1, 1).astype(np.float32) * levels[bits >> 1]
    return values
