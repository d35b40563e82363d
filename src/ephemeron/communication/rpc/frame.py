"""Frames: their layout on the connection, and the limits that are checked before memory is allocated. No I/O.

A frame is a head, a table, a tag and a data section (DPFlow section 4.3.1, table 4-2 and figure 4-4):

    head    magic "EPH2", kind u8, flags u8, segment u16, id u64, tag u32, count u32, data u64, rate u32
    table   for each of `count` buffers: its length u64, its bytes in the data section u64, mark u8, codec u8
    tag     `tag` bytes of JSON: method, parameters, timeout (`Tag`)
    data    `data` bytes: the buffers, each beginning at a multiple of 64

The lengths precede the data, where DPFlow interleaves both: one read then receives all buffers at their final place,
aligned for NumPy. Big-endian. `segment` is the number of the shared memory with the data section; `rate` tells the other
end how fast its last large data section arrived, in KiB/s (0: unknown).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, NamedTuple, TypeAlias, TypedDict, cast

from ephemeron.errors import ProtocolError

Buffer: TypeAlias = bytes | bytearray | memoryview

MAX_FRAME = 2 << 30
"""Bytes of all buffers of one frame, by default."""
ALIGN = 64
"""Every buffer of a data section begins at a multiple of this."""
OBJECT = 1
"""Flag: buffer 0 is a pickle, the others are its out-of-band buffers."""
NEW_SEGMENT = 2
"""Flag: the handle of the frame's segment comes with its first byte."""

_MAGIC = b"EPH2"
_HEAD = struct.Struct("!4sBBHQIIQI")
_ENTRY = struct.Struct("!QQBB")
_encode = json.JSONEncoder(separators=(",", ":")).encode
HEAD_BYTES = _HEAD.size
ENTRY_BYTES = _ENTRY.size


class Kind(IntEnum):
    """Kind of a frame."""

    REQUEST = 1
    REPLY = 2
    ERROR = 3
    CANCEL = 4


class Tag(TypedDict, total=False):
    """The JSON of a frame."""

    m: str
    """REQUEST: method."""
    p: dict[str, Any]
    """REQUEST, REPLY: parameters."""
    t: float
    """REQUEST: timeout, in seconds."""
    type: str
    """ERROR: name of the exception's class."""
    text: str
    """ERROR: its text."""


class FrameMark(IntEnum):
    """Type of a buffer at the sender."""

    BYTES = 0
    ARRAY = 1
    BYTEARRAY = 2
    VIEW = 3
    STATE = 4
    """`bytes` within an object that may depend on the type."""


_KINDS = {int(kind): kind for kind in Kind}
_MARKS = {int(mark): mark for mark in FrameMark}


class Receive(Enum):
    """Type of received buffers.

    `VIEWS`: writable `memoryview`s, and arrays upon them, on pooled or shared memory; nothing is copied. The memory
    is used again only when nothing refers to it any more; one kept view keeps its whole frame.
    `COPIES`: real `bytes`, and arrays that own their memory.
    """

    VIEWS = "views"
    COPIES = "copies"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLimits:
    """Limits of received frames, checked before memory is allocated."""

    max_frame: int = MAX_FRAME
    """Bytes of all buffers of one frame."""
    max_buffers: int = 4096
    """Buffers of one frame."""
    max_tag: int = 1 << 20
    """Bytes of one frame's JSON."""


class Head(NamedTuple):
    """The fixed part of a frame."""

    kind: Kind
    flags: int
    segment: int
    id: int
    tag_bytes: int
    buffers: int
    data: int
    rate: int


class FrameEntry(NamedTuple):
    """One line of the table."""

    nbytes: int
    stored: int
    mark: FrameMark
    codec: int


class FrameMessage(NamedTuple):
    """A frame to send. The buffers are not copied."""

    kind: Kind
    id: int
    tag: bytes
    buffers: tuple[memoryview, ...]
    marks: Sequence[int]
    flags: int
    nbytes: int
    """Bytes of all buffers."""

    @property
    def cost(self) -> int:
        """Bytes of the frame."""
        return HEAD_BYTES + len(self.tag) + ENTRY_BYTES * len(self.buffers) + self.nbytes


class Frame(NamedTuple):
    """A frame received. Buffers are views or bytes, as the receiver asked."""

    kind: Kind
    id: int
    tag: Tag
    buffers: list[Any]
    marks: list[FrameMark]
    flags: int
    cost: int


def message(
    kind: Kind,
    id: int,
    tag: Tag,
    buffers: Sequence[Buffer] = (),
    *,
    limits: FrameLimits,
    marks: Sequence[int] | None = None,
    flags: int = 0,
) -> FrameMessage:
    """A frame ready to send.

    Raises:
        ProtocolError: it exceeds a limit; nothing was sent.
        TypeError, ValueError: the tag is no JSON.
    """
    text = _encode(dict(tag)).encode() if tag else b""
    views = tuple([flat(b) for b in buffers])
    nbytes = sum([v.nbytes for v in views])
    _check(limits, tag=len(text), count=len(views), nbytes=nbytes)
    return FrameMessage(kind, id, text, views, bytes(len(views)) if marks is None else marks, flags, nbytes)


def pack(head: Head, entries: Sequence[FrameEntry], tag: bytes) -> bytes:
    """Head, table and tag as they are sent."""
    return b"".join([_HEAD.pack(_MAGIC, *head), *[_ENTRY.pack(*entry) for entry in entries], tag])


def unpack_head(raw: Buffer, limits: FrameLimits) -> Head:
    """Reads a head and checks it against the limits.

    Raises:
        ProtocolError: not the head of a frame, or too large.
    """
    magic, kind, flags, segment, id, tag, count, data, rate = _HEAD.unpack(raw)
    if magic != _MAGIC or kind not in _KINDS or flags > OBJECT | NEW_SEGMENT:
        raise ProtocolError(f"not a frame: it begins with {bytes(raw[:6])!r}")
    _check(limits, tag=tag, count=count, nbytes=data - min(data, ALIGN * count))
    if (data and not count) or (segment and not data) or (flags & NEW_SEGMENT and not segment):
        raise ProtocolError(f"a frame of {count} buffers has a data section of {data} bytes in segment {segment}")
    return Head(_KINDS[kind], flags, segment, id, tag, count, data, rate)


def unpack_rest(raw: memoryview, head: Head, limits: FrameLimits) -> tuple[list[FrameEntry], Tag]:
    """Reads table and tag, which must agree with the head.

    Raises:
        ProtocolError: they do not, or the buffers exceed a limit once decompressed.
    """
    split = ENTRY_BYTES * head.buffers
    try:
        entries = [FrameEntry(n, s, _MARKS[m], c) for n, s, m, c in _ENTRY.iter_unpack(raw[:split])]
        tag = json.loads(bytes(raw[split:])) if head.tag_bytes else {}
    except (ValueError, KeyError, RecursionError, struct.error) as e:
        raise ProtocolError("a frame's table or tag is damaged") from e
    if not isinstance(tag, dict):
        raise ProtocolError(f"a frame's tag is a {type(tag).__name__}, not an object")
    _check(limits, nbytes=sum([entry.nbytes for entry in entries]))
    if section_bytes([entry.stored for entry in entries]) != head.data:
        raise ProtocolError("a frame's lengths do not add up")
    if any(entry.nbytes != entry.stored if not entry.codec else not entry.nbytes for entry in entries):
        raise ProtocolError("a buffer's length is not that of its data")
    if head.flags & OBJECT and not entries:
        raise ProtocolError("a frame with an object has no buffers")
    return entries, cast(Tag, tag)


def offsets(lengths: Sequence[int]) -> Iterator[int]:
    """Offset of each buffer in a data section."""
    at = 0
    for length in lengths:
        yield at
        at += -(-length // ALIGN) * ALIGN


def section_bytes(lengths: Sequence[int]) -> int:
    """Bytes of a data section: the last buffer ends it, without padding."""
    return sum([-(-length // ALIGN) * ALIGN for length in lengths[:-1]]) + lengths[-1] if lengths else 0


def flat(buffer: Buffer) -> memoryview:
    """The same memory as a flat view of bytes."""
    view = memoryview(buffer)
    if view.nbytes == 0:
        return memoryview(b"")
    return view if view.ndim == 1 and view.format == "B" and view.contiguous else view.cast("B")


def _check(limits: FrameLimits, *, tag: int = 0, count: int = 0, nbytes: int = 0) -> None:
    for name, value, most in (
        ("max_frame", nbytes, limits.max_frame),
        ("max_buffers", count, limits.max_buffers),
        ("max_tag", tag, limits.max_tag),
    ):
        if value > most:
            raise ProtocolError(
                f"a frame's {name.removeprefix('max_')} of {value} exceeds {most}; send less at a time, or raise {name} at both ends"
            )
