"""Compression of sent data, only where the link, as measured, is slower than the codec (DPFlow section 4.3.1).

DPFlow compresses always (Snappy), and so pays for it on loopback and for JPEG. Here the receiver measures how fast
large data sections arrive and reports the rate in the heads of its own frames; the sender measures its codec on the data
itself. With a link of `l` bytes/s, a codec of `c` bytes/s and compressed size over size `r`, compressing first
takes n/c + r·n/l instead of n/l, which is less exactly when (1 - r)·c > l. Data that does not shrink is left alone
for a while. Decompression is several times as fast and neglected.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

from ephemeron.errors import ProtocolError

_PROBE_BYTES = 64 << 10
_LEAST_BYTES = 4 << 10
_PAUSE = 32
"""Buffers sent as they are after one that was not worth it."""


@dataclass(frozen=True, slots=True)
class FrameCodec:
    """A way to make bytes fewer."""

    id: int
    name: str
    compress: Callable[[memoryview], bytes]
    decompress: Callable[[memoryview, int], bytes]
    """`(data, nbytes)`: at most little more than `nbytes` bytes, also for damaged data."""


@cache
def offered() -> tuple[str, ...]:
    """Names of the codecs installed here, best first."""
    return tuple(name for name, module in _MODULES.items() if module == "zlib" or find_spec(module) is not None)


def common(mine: Sequence[str], theirs: Sequence[str]) -> FrameCodec | None:
    """The best codec that both have."""
    return next((codec(_IDS[name]) for name in mine if name in theirs), None)


def codec(id: int) -> FrameCodec:
    """The codec of a frame's table.

    Raises:
        ProtocolError: an unknown codec, or one that is not installed.
    """
    names = {number: name for name, number in _IDS.items()}
    if id not in names or names[id] not in offered():
        raise ProtocolError(f"a buffer is compressed with codec {id}, which this end did not offer")
    return _MAKE[names[id]]()


def expand(id: int, data: memoryview, nbytes: int) -> bytes:
    """Undoes a codec.

    Raises:
        ProtocolError: the data is damaged, or is not that many bytes.
    """
    try:
        whole = codec(id).decompress(data, nbytes)
    except ProtocolError:
        raise
    except Exception as e:  # each codec has errors of its own
        raise ProtocolError(f"a compressed buffer is damaged: {e}") from e
    if len(whole) != nbytes:
        raise ProtocolError(f"a compressed buffer holds {len(whole)} bytes and claims {nbytes}")
    return whole


def worth(*, link_bps: float, codec_bps: float, ratio: float) -> bool:
    """Whether compressing first is quicker. Bytes per second; `ratio` is compressed size over size."""
    return (1 - ratio) * codec_bps > link_bps


class Squeezer:
    """Decides and compresses, for one connection.

    Args:
        codec: what to compress with.
        clock: seconds; measures the codec.
    """

    def __init__(self, codec: FrameCodec, *, clock: Callable[[], float]) -> None:
        self.codec = codec
        self._clock = clock
        self._pause = 0

    def squeeze(self, data: memoryview, *, link_bps: float | None) -> bytes | None:
        """The data compressed, or None if it should go as it is."""
        if link_bps is None or data.nbytes < _LEAST_BYTES:
            return None
        if self._pause:
            self._pause -= 1
            return None
        middle = max(0, (data.nbytes - _PROBE_BYTES) // 2)
        probe = data[middle : middle + _PROBE_BYTES]
        begun = self._clock()
        small = self.codec.compress(probe)
        codec_bps = probe.nbytes / max(self._clock() - begun, 1e-9)
        if not worth(link_bps=link_bps, codec_bps=codec_bps, ratio=len(small) / probe.nbytes):
            self._pause = _PAUSE
            return None
        whole = small if probe.nbytes == data.nbytes else self.codec.compress(data)
        return whole if len(whole) < data.nbytes else None


def _zlib() -> FrameCodec:
    def decompress(data: memoryview, nbytes: int) -> bytes:
        return zlib.decompressobj().decompress(data, nbytes + 1)  # one more, to see whether there is more

    return FrameCodec(1, "zlib", lambda data: zlib.compress(data, 1), decompress)


def _zstd() -> FrameCodec:
    import zstandard

    def decompress(data: memoryview, nbytes: int) -> bytes:
        if zstandard.frame_content_size(data) != nbytes:
            raise ProtocolError(f"a compressed buffer does not hold {nbytes} bytes")
        return bytes(zstandard.ZstdDecompressor().decompress(data, max_output_size=nbytes))

    return FrameCodec(2, "zstd", lambda data: bytes(zstandard.ZstdCompressor(level=1).compress(data)), decompress)


def _lz4() -> FrameCodec:
    import lz4.frame

    def decompress(data: memoryview, nbytes: int) -> bytes:
        return bytes(lz4.frame.LZ4FrameDecompressor().decompress(data, max_length=nbytes + 1))

    return FrameCodec(3, "lz4", lambda data: bytes(lz4.frame.compress(data)), decompress)


_MODULES = {"zstd": "zstandard", "lz4": "lz4", "zlib": "zlib"}
_IDS = {"zlib": 1, "zstd": 2, "lz4": 3}
_MAKE: dict[str, Callable[[], FrameCodec]] = {"zlib": _zlib, "zstd": _zstd, "lz4": _lz4}
