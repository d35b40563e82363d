"""Messages between workers: a fixed header and raw buffers. No pickle.

The header has the encoding of the vector (kind, codec, dtype, elements), its sender (rank, attempt, iteration, shard) and the
sender's progress (`applied`, `durable`), from which aggregators decide when an object may be deleted. It has 72 bytes,
little-endian, behind the frame of 64 bytes that every object of a run has (`communication.object_frame`): the frame binds the
message to its key and has the checksum. The payload after both is aligned for NumPy.
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

_HEADER = struct.Struct("<BBBBIIIQdIIQdIfd")
HEADER_BYTES = FRAME_BYTES + _HEADER.size
"""Size of a message without marks and vector, its frame included."""
STOP = 1
"""Flag: the sender wants the run to stop at the next consistent iteration."""
HAND_OFF = 2
"""Flag: the sender will hand off to a successor soon; every rank past the middle of its time limit does so as well."""
RESIZE = 4
"""Flag: the next generation of the run is agreed on, and stored."""
SUCCESSOR = 8
"""Flag: the sender has started its successor; every rank past the middle of its time limit does so as well."""

_DTYPES: dict[int, np.dtype[np.generic]] = {1: np.dtype("float32"), 2: np.dtype("float64"), 3: np.dtype("float16")}
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
    """Number of samples in the vector's sum."""
    applied: int
    """Number of merged versions that the sender had applied."""
    durable: int
    """Number of merged versions that a replacement of the sender would not need again."""
    flags: int = 0
    sent_at: float = 0.0
    """Seconds of the run at which the sender began its put: a hint for the next poll, on which no result depends."""
    busy_s: float = 0.0
    """Time of the slowest iteration known to the sender, without waits."""
    spent_usd: float = 0.0
    """Cost of the sender's rank so far."""
    marks: tuple[int, ...] = ()
    """In merged messages of asynchronous runs: see `collectives.arrived.Marks`."""


def pack(
    message: MessageHeader, payload: Sequence[Buffer], *, codec: GradientCodec, dtype: np.dtype[np.generic], elements: int
) -> list[Buffer]:
    """Header, marks and payload, ready for `Channel.put`. The payload is not copied."""
    marks = np.asarray(message.marks, dtype="<i8").tobytes()
    body: list[Buffer] = [marks, *payload] if marks else list(payload)
    header = _HEADER.pack(
        _KINDS.index(message.kind),
        codec.id,
        _DTYPE_IDS[dtype],
        message.flags,
        message.rank,
        message.attempt,
        message.shard,
        message.iteration,
        message.weight,
        message.applied,
        message.durable,
        elements,
        message.sent_at,
        len(message.marks),
        message.busy_s,
        message.spent_usd,
    )
    return [header, *body]


def unpack(data: memoryview, *, key: str) -> tuple[MessageHeader, np.ndarray]:
    """The inverse of `pack`: header and decoded vector (a read-only view of `data` where the codec allows).

    Raises:
        CorruptMessage: not a message.
    """
    try:
        (
            kind,
            codec_id,
            dtype_id,
            flags,
            rank,
            attempt,
            shard,
            iteration,
            weight,
            applied,
            durable,
            elements,
            sent_at,
            n_marks,
            busy_s,
            spent_usd,
        ) = _HEADER.unpack_from(data)
        body = data[_HEADER.size :]
        marks = tuple(np.frombuffer(body[: 8 * n_marks], dtype="<i8", count=n_marks).tolist()) if n_marks else ()
        vector = codec_by_id(codec_id).decode(body[8 * n_marks :], _DTYPES[dtype_id], elements)
        message = MessageHeader(
            kind=_KINDS[kind],
            rank=rank,
            attempt=attempt,
            iteration=iteration,
            shard=shard,
            weight=weight,
            applied=applied,
            durable=durable,
            flags=flags,
            sent_at=sent_at,
            busy_s=busy_s,
            spent_usd=spent_usd,
            marks=marks,
        )
    except (struct.error, ValueError, IndexError, KeyError) as e:
        raise CorruptMessage(f"not a message between workers: {e}", key=key) from None
    return message, vector


# -- division of a flat vector into K shards ----------------------------------------------------------------------


def bounds(size: int, parts: int) -> list[tuple[int, int]]:
    """Start and stop of each of `parts` consecutive pieces whose lengths differ by at most one.

    More parts than elements are allowed: the last ones are empty.
    """
    if parts < 1:
        raise ValueError(f"parts = {parts} should be at least 1")
    base, extra = divmod(size, parts)
    out, start = [], 0
    for part in range(parts):
        stop = start + base + (part < extra)
        out.append((start, stop))
        start = stop
    return out


def chunk_bounds(start: int, stop: int, chunk: int) -> list[tuple[int, int]]:
    """Cuts `start:stop` into pieces of about `chunk` elements; an empty range is one empty piece."""
    pieces = max(1, -(-(stop - start) // max(1, chunk)))
    return [(start + a, start + b) for a, b in bounds(stop - start, pieces)]
