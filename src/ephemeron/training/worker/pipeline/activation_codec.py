"""Values between stages as one object: a head of JSON, and raw tensors. Pure.

Kinds of messages: `f` has values of a micro-batch forwards, `b` their gradients back, `s` gradients of parameters that several
stages have, `e` values of a part of the test set. Every message has the flags of its sender, and `b` the micro-batch's loss
where it is known, so that every rank can report it.

The reader's memory may be part of a file or of shared memory: buffers begin at multiples of 64 bytes, and are copied when they
are read, because PyTorch needs memory of its own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from ephemeron.communication.channels.base import Buffer
from ephemeron.errors import CorruptMessage
from ephemeron.partition.runtime.codec import BoundaryValue, decode_values, encode_values

MAGIC = b"EPHSTG1\n"
ALIGNED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationHeader:
    """Everything about a message but its values."""

    flags: int
    """See `tensors.message`."""
    sent_at: float
    """Seconds of the run at which the put began."""
    busy_s: float
    """Time of the slowest iteration known to the sender, without waits."""
    loss: float | None = None
    """Loss of the micro-batch; None: not known to the sender."""
    weight: float | None = None
    """Weight of that loss in a mean over micro-batches and replicas; None: not known to the sender."""


def sealed(values: Mapping[str, BoundaryValue], header: ActivationHeader) -> list[Buffer]:
    """Buffers to put.

    Raises:
        JobError: a value is neither a dense tensor nor a plain one; names it.
    """
    rows, buffers = encode_values(values)
    sizes = [b.nbytes for b in buffers]
    said = dataclasses.asdict(header)
    head = json.dumps({**said, "values": rows, "sizes": sizes, "checksum": _checksum(buffers)}).encode()
    start = len(MAGIC) + 8 + len(head)
    made: list[Buffer] = [MAGIC, len(head).to_bytes(8, "little"), head, bytes(-start % ALIGNED)]
    for b in buffers:
        made += [b, bytes(-b.nbytes % ALIGNED)]
    return made


def opened(data: memoryview, *, key: str) -> tuple[ActivationHeader, dict[str, BoundaryValue]]:
    """Header and values.

    Raises:
        CorruptMessage: not such a message, or damaged.
    """
    try:
        if bytes(data[: len(MAGIC)]) != MAGIC:
            raise ValueError("it has another beginning")
        size = int.from_bytes(data[len(MAGIC) : len(MAGIC) + 8], "little")
        at = len(MAGIC) + 8 + size
        head = json.loads(bytes(data[len(MAGIC) + 8 : at]))
        at += -at % ALIGNED
        buffers = []
        for nbytes in head["sizes"]:
            if at + nbytes > len(data):
                raise ValueError("it is cut short")
            buffers.append(bytearray(data[at : at + nbytes]))
            at += nbytes + (-nbytes % ALIGNED)
        if _checksum(buffers) != head["checksum"]:
            raise ValueError("checksum differs")
        loss, weight = head["loss"], head["weight"]
        header = ActivationHeader(
            flags=int(head["flags"]),
            sent_at=float(head["sent_at"]),
            busy_s=float(head["busy_s"]),
            loss=None if loss is None else float(loss),
            weight=None if weight is None else float(weight),
        )
        return header, decode_values(head["values"], buffers)
    except (ValueError, KeyError, TypeError, StopIteration) as e:
        raise CorruptMessage(f"not a message between stages: {e}", key=key) from None


def _checksum(buffers: Sequence[Buffer]) -> str:
    hashing = xxhash.xxh3_64()
    for b in buffers:
        hashing.update(b)
    return str(hashing.hexdigest())
