"""The frame around every object of a run: it is accepted only under the key it was written for, and only whole.

Sixty-four bytes before the object itself, little-endian. A key names run, group, kind, iteration, sender and shard; its hash in
the frame binds the object to all of them at once, so an older object, another rank's, another shard's or another run's
is refused under any other key. The checksum covers frame and object: a flipped bit in a position or a loss does as
much harm as one in a gradient. XXH3 checks 10 GB/s and more on one core; it detects damage, not forgery.

    magic 4s, version B, 3 unused, run Q, key Q, length Q, token 16s, checksum Q, 8 unused
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import xxhash

from ephemeron.communication.channels.base import Buffer, Channel, Received, Wrapper
from ephemeron.errors import ChannelTimeout, CorruptMessage, DamagedObject

if TYPE_CHECKING:
    from ephemeron.communication.channels.reduction import SupportsReduction

MAGIC = b"EPHM"
VERSION = 2
_HEAD = struct.Struct("<4sB3xQQQ16s")
_CHECKSUM = struct.Struct("<Q8x")
FRAME_BYTES = _HEAD.size + _CHECKSUM.size
NO_TOKEN = bytes(16)

FIRST_AGAIN_S, MOST_AGAIN_S = 0.05, 1.0
"""Pauses between reads of a damaged object: the damage may have happened on the way."""
FETCHED_AGAIN = 4
"""Times that `fetch`, which does not wait, reads a damaged object again: an object that counts as absent by mistake costs a
replacement of its sender. Where one read in fifty is truncated, that happens once in three hundred million."""


def run_hash(run_id: str) -> int:
    """64-bit hash that ties an object to its run."""
    return int(xxhash.xxh3_64_intdigest(run_id.encode()))


def sealed(buffers: Sequence[Buffer], *, key: str, token: bytes = NO_TOKEN) -> list[Buffer]:
    """The object as it is to be stored under `key`. Nothing is copied.

    Args:
        token: 16 bytes that make this writer's object unlike any other's.
    """
    length = sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in buffers)
    head = _HEAD.pack(MAGIC, VERSION, run_hash(key.partition("/")[0]), _key_hash(key), length, token)
    return [head + _CHECKSUM.pack(_checksum(head, buffers)), *buffers]


def opened(data: memoryview, *, key: str) -> memoryview:
    """The inverse of `sealed`: a view of the object.

    Raises:
        CorruptMessage: not a framed object, written for another key, damaged or truncated.
    """
    if len(data) < FRAME_BYTES:
        raise CorruptMessage(f"{len(data)} bytes are too few for a frame", key=key)
    magic, version, run, place, length, _ = _HEAD.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise CorruptMessage(f"magic {magic!r} version {version} is not an object of this release", key=key)
    body = data[FRAME_BYTES:]
    if len(body) != length:
        raise CorruptMessage(f"{len(body)} bytes of {length} arrived", key=key)
    if bytes(data[_HEAD.size : FRAME_BYTES]) != _CHECKSUM.pack(_checksum(data[: _HEAD.size], [body])):
        raise CorruptMessage("checksum differs", key=key)
    if run != run_hash(key.partition("/")[0]):
        raise CorruptMessage("the object belongs to another run", key=key)
    if place != _key_hash(key):
        raise CorruptMessage("the object was written for another key of this run", key=key)
    return body


class Framed(Wrapper):
    """Frames objects that are put, and checks objects that are read.

    A damaged object is read again, at pauses that grow while the same bytes are read, and then treated as absent: `fetch`
    returns None and `get` waits on, so that the waiting rank asks for its sender's replacement, which puts it again. At the deadline of a `get` the
    error is a `DamagedObject`.

    Args:
        inner: where objects are stored. Metering and retries belong inside, so that repeated reads are counted.
        owner: name of this writer, unlike every other's in the run: makes create-only objects unique.
        damaged: called with the error of every damaged object.
    """

    def __init__(
        self, inner: Channel, *, owner: str, damaged: Callable[[CorruptMessage], None] = lambda error: None
    ) -> None:
        super().__init__(inner)
        self._owner, self._damaged, self._created = owner, damaged, 0

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        token = NO_TOKEN
        if create:
            self._created += 1
            token = xxhash.xxh3_128_digest(f"{self._owner}/{self._created}".encode())
        await self.inner.put(key, sealed(buffers, key=key, token=token), create=create)

    async def fetch(self, key: str) -> memoryview | None:
        pause_s = FIRST_AGAIN_S
        for left in range(FETCHED_AGAIN, -1, -1):
            data = await self.inner.fetch(key)
            if data is None:
                return None
            try:
                return opened(data, key=key)
            except CorruptMessage as e:
                self._damaged(e)
            if left:
                await asyncio.sleep(pause_s)
                pause_s *= 2
        return None

    async def get(self, key: str, *, deadline: float, expected_at: float | None = None) -> Received:
        loop = asyncio.get_running_loop()
        began, pause_s, polls = loop.time(), FIRST_AGAIN_S, 0
        damage: CorruptMessage | None = None
        damaged = 0
        while True:
            asked = loop.time()
            try:
                received = await self.inner.get(key, deadline=deadline, expected_at=expected_at)
            except ChannelTimeout as e:
                if damage is None:
                    raise
                raise DamagedObject(f"{e.problem}; before, a damaged object: {damage.problem}", key=key) from damage
            try:
                body = opened(received.data, key=key)
            except CorruptMessage as e:
                damage = e
                self._damaged(e)
                before, damaged = damaged, xxhash.xxh3_64_intdigest(received.data)
                if damaged != before:  # put again since, or damaged on the way: likely whole at the next read
                    pause_s = FIRST_AGAIN_S
            else:
                return Received(body, asked - began + received.waited_s, polls + received.polls, received.poll_s)
            left_s = deadline - loop.time()
            if left_s <= 0:
                text = f"only a damaged object there after {loop.time() - began:.1f} s: {damage.problem}"
                raise DamagedObject(text, key=key) from damage
            polls += received.polls + 1
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, MOST_AGAIN_S)

    def reducer(self) -> SupportsReduction | None:
        # A server frames the sums that it makes.
        return self.inner.reducer()


def _key_hash(key: str) -> int:
    return int(xxhash.xxh3_64_intdigest(key.encode()))


def _checksum(head: Buffer, body: Sequence[Buffer]) -> int:
    digest = xxhash.xxh3_64(head)
    for part in body:
        digest.update(part)
    return digest.intdigest()
