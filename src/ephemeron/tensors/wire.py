"""What travels between workers: a fixed header and raw buffers. Never a pickle.

The header says whose message it is (run, rank, attempt, iteration, shard), how to read it (kind, codec, dtype,
elements) and what its sender has done (`applied`, `durable`), which is all that aggregators need to know when an
object may be deleted. 128 bytes, little-endian; the payload that follows is aligned for NumPy. A checksum covers
both: a flipped bit in `weight` or `durable` would do more harm than one in the vector.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import xxhash

from ephemeron.channels.base import Buffer
from ephemeron.errors import CorruptMessage
from ephemeron.tensors.compression import Codec, codec_by_id

MAGIC = b"EPHM"
VERSION = 1
_HEADER = struct.Struct("<4sBBBBQIIIIQdIIIIQd")
_TRAILER = struct.Struct("<QQ")
"""Length of what follows, and the checksum of what stands before and what follows."""
HEADER_BYTES = 128
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
class Envelope:
    """Everything about a message but its vector."""

    kind: Kind
    run: int
    """64-bit hash of the run's name; see `run_hash`."""
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
    marks: tuple[int, ...] = ()
    """Merged messages of asynchronous runs: per rank, iterations folded in so far."""


def run_hash(run_id: str) -> int:
    """64-bit hash that ties a message to its run."""
    return int(xxhash.xxh3_64_intdigest(run_id.encode()))


def pack(
    envelope: Envelope, payload: Sequence[Buffer], *, codec: Codec, dtype: np.dtype[np.generic], elements: int
) -> list[Buffer]:
    """Header, marks and payload, ready for `Channel.put`. The payload is not copied."""
    marks = np.asarray(envelope.marks, dtype="<i8").tobytes()
    body: list[Buffer] = [marks, *payload] if marks else list(payload)
    length = sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in body)
    header = _HEADER.pack(
        MAGIC, VERSION, _KINDS.index(envelope.kind), codec.id, _DTYPE_IDS[dtype], envelope.run, envelope.rank,
        envelope.attempt, envelope.shard, envelope.flags, envelope.iteration, envelope.weight, envelope.applied,
        envelope.durable, len(envelope.marks), 0, elements, envelope.sent_at,
    )  # fmt: skip
    header = header.ljust(HEADER_BYTES - _TRAILER.size, b"\0")
    return [header + _TRAILER.pack(length, _checksum(header, body)), *body]


def unpack(data: memoryview, *, run: int, key: str) -> tuple[Envelope, np.ndarray]:
    """The inverse of `pack`: envelope and decoded vector (a read-only view of `data` where the codec allows).

    Raises:
        CorruptMessage: not ours, another run's, damaged or cut short.
    """
    if len(data) < HEADER_BYTES:
        raise CorruptMessage(f"{len(data)} bytes are too few for a header", key=key)
    (magic, version, kind, codec_id, dtype_id, run_id, rank, attempt, shard, flags, iteration, weight, applied,
     durable, n_marks, _, elements, sent_at) = _HEADER.unpack_from(data)  # fmt: skip
    if magic != MAGIC or version != VERSION:
        raise CorruptMessage(f"magic {magic!r} version {version} is not a message of this release", key=key)
    if run_id != run:
        raise CorruptMessage("the message belongs to another run", key=key)
    length, checksum = _TRAILER.unpack_from(data, HEADER_BYTES - _TRAILER.size)
    body = data[HEADER_BYTES:]
    if len(body) != length:
        raise CorruptMessage(f"{len(body)} bytes of {length} arrived", key=key)
    if _checksum(data[: HEADER_BYTES - _TRAILER.size], [body]) != checksum:
        raise CorruptMessage("checksum differs", key=key)
    marks = tuple(np.frombuffer(body[: 8 * n_marks], dtype="<i8").tolist()) if n_marks else ()
    vector = codec_by_id(codec_id).decode(body[8 * n_marks :], _DTYPES[dtype_id], elements)
    envelope = Envelope(
        kind=_KINDS[kind], run=run_id, rank=rank, attempt=attempt, iteration=iteration, shard=shard, weight=weight,
        applied=applied, durable=durable, flags=flags, sent_at=sent_at, marks=marks,
    )  # fmt: skip
    return envelope, vector


def _checksum(header: Buffer, body: Sequence[Buffer]) -> int:
    digest = xxhash.xxh3_64(header)
    for part in body:
        digest.update(part)
    return digest.intdigest()
