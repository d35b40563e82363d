"""Values between stages as one object: a head of JSON, and raw tensors. Pure.

`f` carries values of a micro-batch forwards, `b` their gradients back, `s` gradients of parameters that several stages
have, `e` values of a part of the test set. Every letter also says what its sender wants all to know (`flags`), and `b`
the micro-batch's loss as far as it is known, so that every rank can report it.

A reader may stand in the middle of a file or of shared memory: buffers begin at multiples of 64 bytes, and are copied
when they are read, because PyTorch wants memory of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from ephemeron.communication.channels.base import Buffer
from ephemeron.errors import CorruptMessage
from ephemeron.partition.runtime.wire import packed, unpacked

MAGIC = b"EPHSTG1\n"
ALIGNED = 64


def sealed(values: Mapping[str, Any], **said: Any) -> list[Buffer]:
    """What to put.

    Raises:
        JobError: a value that does not travel; names it.
    """
    table, buffers = packed(values)
    sizes = [b.nbytes for b in buffers]
    head = json.dumps({**said, **table, "sizes": sizes, "checksum": _checksum(buffers)}).encode()
    start = len(MAGIC) + 8 + len(head)
    made: list[Buffer] = [MAGIC, len(head).to_bytes(8, "little"), head, bytes(-start % ALIGNED)]
    for b in buffers:
        made += [b, bytes(-b.nbytes % ALIGNED)]
    return made


def opened(data: memoryview, *, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was said, and the values.

    Raises:
        CorruptMessage: not a letter, or damaged.
    """
    try:
        if bytes(data[: len(MAGIC)]) != MAGIC:
            raise ValueError("it begins otherwise")
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
        return head, unpacked(head, buffers)
    except (ValueError, KeyError, TypeError, StopIteration) as e:
        raise CorruptMessage(f"not a letter between stages: {e}", key=key) from None


def _checksum(buffers: Sequence[Buffer]) -> str:
    hashing = xxhash.xxh3_64()
    for b in buffers:
        hashing.update(b)
    return str(hashing.hexdigest())
