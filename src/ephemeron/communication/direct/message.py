"""Messages between members of a run: a head of 48 bytes, a small header of the kind, and a body.

Little-endian. The checksum is for transports that have none of their own that suffices; 0: there is none.

    kind B, flags B, sender H, target H, extra bytes H, attempt I, part I, number q, body bytes Q, checksum Q, 8 unused
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from ephemeron.errors import ProtocolError

_HEAD = struct.Struct("<BBHHHIIqQQ8x")
HEAD_BYTES = _HEAD.size
MOST_EXTRA_BYTES = (1 << 16) - 1
MOST_BODY_BYTES = 1 << 34
FORWARDED = 1
"""Flag of a message that a third member has passed on."""
SHARED = 2
"""Flag of a message whose body is in shared memory; the field of the checksum is its slot."""
IN_PLACE = memoryview(b"")
"""In place of memory for a body with the flag `SHARED`: it is only read, while it is handled."""


class Kind(IntEnum):
    """Kinds of messages. Those below 32 are the mesh's own."""

    HELLO = 1
    LINKS = 2
    PING = 3
    PONG = 4
    REQUEST = 5
    REPLY = 6
    REFUSED = 7
    MEMBER = 8
    """A successor that was connected already is a member from now on."""
    UPGRADE = 9
    """First message of a connection that may replace the one that the pair has; these are in `upgrades`."""
    MEASURE = 10
    MEASURED = 11
    SWITCH = 12
    LAST = 13
    RECEIVED = 14
    OBJECT = 32
    """An object of a `PeerChannel`; `extra` is its key."""
    DELETED = 33
    """Keys of a `PeerChannel` that no rank needs any more."""
    LOOKUP = 34
    """Question for an object of a `PeerChannel`, or for the keys with a prefix."""
    CONTRIBUTION = 40
    MERGED = 41
    MISSING = 42
    PARTIAL = 43
    """Sum of one machine's contributions to a piece."""
    PRIVATE = 48
    """What only one rank has, kept by others for its replacement."""
    STATUS = 49
    """Question what a rank can give a replacement."""
    STATE = 50
    """Question for a rank's state, or for what it keeps of the asking one's."""
    BACK = 51
    """All ranks go back to a checkpoint."""
    CHECKPOINTS = 52
    """Iterations whose checkpoints a rank has stored."""
    SUCCESSOR = 53
    """First message of a rank's next attempt to the present one, before it is a member."""
    TAKEN = 54
    """The next attempt has the state."""
    PROBE = 56
    """Measurement of a connection."""


class Head(NamedTuple):
    """Head of a message."""

    kind: int
    sender: int
    """Rank."""
    target: int
    """Rank."""
    number: int = 0
    """Iteration, version, or number of a request."""
    part: int = 0
    """Chunk, or what the kind says."""
    extra: bytes = b""
    """Small header of the kind."""
    attempt: int = 0
    """Attempt of the sender."""
    flags: int = 0


def pack_head(head: Head, *, nbytes: int, checksum: int = 0) -> bytes:
    """The head and its extra bytes as they are sent.

    Raises:
        ProtocolError: `extra` is too long.
    """
    if len(head.extra) > MOST_EXTRA_BYTES:
        raise ProtocolError(f"{len(head.extra)} extra bytes in a message; at most {MOST_EXTRA_BYTES}")
    packed = _HEAD.pack(
        head.kind, head.flags, head.sender, head.target, len(head.extra), head.attempt, head.part, head.number, nbytes, checksum
    )
    return packed + head.extra if head.extra else packed


class Incoming(NamedTuple):
    """What the first bytes of a message say."""

    head: Head
    """Without its extra bytes."""
    extra_bytes: int
    nbytes: int
    checksum: int


def unpack_head(data: memoryview) -> Incoming:
    """The inverse of `pack_head`, for the first `HEAD_BYTES`.

    Raises:
        ProtocolError: the body is larger than any message of ours.
    """
    kind, flags, sender, target, extra, attempt, part, number, nbytes, checksum = _HEAD.unpack_from(data)
    if nbytes > MOST_BODY_BYTES:
        raise ProtocolError(f"a message of {nbytes} bytes is none of ours")
    return Incoming(Head(kind, sender, target, number, part, b"", attempt, flags), extra, nbytes, checksum)
