"""What travels between workers: a fixed header and raw buffers. Never a pickle.

The header says how to read the vector (kind, codec, dtype, elements), who sent it (rank, attempt, iteration, shard) and what
its sender has done (`applied`, `durable`), which is all that aggregators need to know when an object may be deleted. 64
bytes, little-endian, behind the frame of 64 bytes that every object of a run has (`channels.frame`): that one binds
the message to its key and has the checksum. The payload that follows both is aligned for NumPy.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ephemeron.communication.channels.base import Buffer
from ephemeron.communication.object_frame import FRAME_BYTES
from ephemeron.errors import CorruptMessage
from ephemeron.training.tensors.compression import GradientCodec, codec_by_id

_HEADER = struct.Struct("<BBBBIIIQdIIQdIf")
HEADER_BYTES = FRAME_BYTES + _HEADER.size
"""What a message has beside marks and vector, its frame included."""
STOP = 1
"""Flag: the sender wants the run to stop at the next consistent iteration."""
RELAY = 2
"""Flag: the sender will soon hand over to a successor; whoever is past the middle of its life does so as well."""

_DTYPES: dict[int, np.dtype[np.generic]] = {
    1: np.dtype("float32"),
    2: np.dtype("float64"),
    3: np.dtype("float16"),
}
_DTYPE_IDS = {dtype: i for i, dtype in _DTYPES.items()}
Kind = Literal["contribution", "merged"]
_KINDS: tuple[Kind, ...] = ("contribution", "merged")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageHeader:
    """Everything about a message but its vector."""

    kind: Kind
    rank: int
    attempt: int
    iteration: int
    shard: int
    weight: float
    """Samples that the vector stands for."""
    applied: int
    """Merged versions the sender had applied."""
    durable: int
    """Merged versions a replacement of the sender would not need again."""
    flags: int = 0
    sent_at: float = 0.0
    """Run seconds at which the sender began its put: a hint for the next poll, nothing depends on it."""
    busy_s: float = 0.0
    """Seconds that the slowest iteration known to the sender took, without waiting for others."""
    marks: tuple[int, ...] = ()
    """Merged messages of asynchronous runs: per rank, iterations folded in so far."""


def pack(
    envelope: MessageHeader,
    payload: Sequence[Buffer],
    *,
    codec: GradientCodec,
    dtype: np.dtype[np.generic],
    elements: int,
) -> list[Buffer]:
    """Header, marks and payload, ready for `Channel.put`. The payload is not copied."""
    marks = np.asarray(envelope.marks, dtype="<i8").tobytes()
    body: list[Buffer] = [marks, *payload] if marks else list(payload)
    header = _HEADER.pack(
        _KINDS.index(envelope.kind), codec.id, _DTYPE_IDS[dtype], envelope.flags, envelope.rank, envelope.attempt,
        envelope.shard, envelope.iteration, envelope.weight, envelope.applied, envelope.durable, elements,
        envelope.sent_at, len(envelope.marks), envelope.busy_s,
    )  # fmt: skip
    return [header, *body]


def unpack(data: memoryview, *, key: str) -> tuple[MessageHeader, np.ndarray]:
    """The inverse of `pack`: envelope and decoded vector (a read-only view of `data` where the codec allows).

    Raises:
        CorruptMessage: not a message.
    """
    try:
        (kind, codec_id, dtype_id, flags, rank, attempt, shard, iteration, weight, applied, durable, elements, sent_at,
         n_marks, busy_s) = _HEADER.unpack_from(data)  # fmt: skip
        body = data[_HEADER.size :]
        marks = tuple(np.frombuffer(body[: 8 * n_marks], dtype="<i8", count=n_marks).tolist()) if n_marks else ()
        vector = codec_by_id(codec_id).decode(body[8 * n_marks :], _DTYPES[dtype_id], elements)
        envelope = MessageHeader(
            kind=_KINDS[kind], rank=rank, attempt=attempt, iteration=iteration, shard=shard, weight=weight,
            applied=applied, durable=durable, flags=flags, sent_at=sent_at, busy_s=busy_s, marks=marks,
        )  # fmt: skip
    except (struct.error, ValueError, IndexError, KeyError) as e:
        raise CorruptMessage(f"not a message between workers: {e}", key=key) from None
    return envelope, vector
