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
from ephemeron.communication.keys import is_put_again
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
"""Times that `fetch`, which does not wait, reads a damaged object again: an object that counts as damaged by mistake costs a
replacement of its sender, or the run. Where one read in fifty is truncated, that happens once in three hundred million."""
LASTING_S = 10.0
"""Time for which the same damaged bytes are there, after which `get` waits no longer for an object that nobody is bound to put again:
writers that read back what they have put need a second or two."""
_REMEMBERED = 1000
"""Damaged objects, of which it is remembered how they looked."""


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
    """Frames objects that are put, and checks objects that are read. A read has three outcomes:

    - *present*: the object is whole, and was written for this key.
    - *absent*: nothing is there.
    - *damaged*: the same damaged bytes are read again and again, so it did not happen on the way. `DamagedObject` names the key. Only
      objects that their writers put again once they are missed (`put_again`: contributions, checkpoints, signs of life) are absent
      then: the waiting rank asks for the sender's replacement.

    `fetch` knows the outcome within a second. `get` raises `ChannelTimeout` at its deadline, which says what is wrong with a damaged
    object, and `DamagedObject` once the damage has lasted for `LASTING_S`, over several calls as well.

    Args:
        inner: where objects are stored. Metering and retries belong inside, so that repeated reads are counted.
        owner: name of this writer, unlike every other's in the run: makes create-only objects unique.
        damaged: called with the error of every damaged object, once for the same bytes.
        put_again: whether the object of a key is put again by its writer's replacement, so that its damage counts as absence.
    """

    def __init__(
        self,
        inner: Channel,
        *,
        owner: str,
        damaged: Callable[[CorruptMessage], None] = lambda error: None,
        put_again: Callable[[str], bool] = is_put_again,
    ) -> None:
        super().__init__(inner)
        self._owner, self._damaged, self._created = owner, damaged, 0
        self.put_again = put_again
        self._known: dict[str, tuple[int, float]] = {}
        """By key of a damaged object: digest of its bytes, and the loop time at which they were first seen."""

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        token = NO_TOKEN
        if create:
            self._created += 1
            token = xxhash.xxh3_128_digest(f"{self._owner}/{self._created}".encode())
        await self.inner.put(key, sealed(buffers, key=key, token=token), create=create)

    async def fetch(self, key: str) -> memoryview | None:
        pause_s, left = FIRST_AGAIN_S, FETCHED_AGAIN
        while True:
            data = await self.inner.fetch(key)
            if data is None:
                return None
            try:
                return self._opened(data, key)
            except CorruptMessage as e:
                is_known = self._remember(key, data, e) >= FIRST_AGAIN_S * (2**FETCHED_AGAIN - 1)
                if is_known or not left:
                    if self.put_again(key):
                        return None
                    raise DamagedObject(f"only a damaged object there: {e.problem}", key=key) from e
            left -= 1
            await asyncio.sleep(pause_s)
            pause_s *= 2

    async def get(self, key: str, *, deadline: float, expected_at: float | None = None) -> Received:
        loop = asyncio.get_running_loop()
        began, pause_s, polls = loop.time(), FIRST_AGAIN_S, 0
        damage: CorruptMessage | None = None
        while True:
            asked = loop.time()
            try:
                received = await self.inner.get(key, deadline=deadline, expected_at=expected_at)
            except ChannelTimeout as e:
                if damage is None:
                    raise
                raise ChannelTimeout(f"{e.problem}; before, a damaged object: {damage.problem}", key=key) from damage
            try:
                body = self._opened(received.data, key)
            except CorruptMessage as e:
                damage = e
                lasted_s = self._remember(key, received.data, e)
                if not lasted_s:  # put again since, or damaged on the way: likely whole at the next read
                    pause_s = FIRST_AGAIN_S
                elif lasted_s >= LASTING_S and not self.put_again(key):
                    raise DamagedObject(f"only a damaged object there: {e.problem}", key=key) from e
            else:
                return Received(body, asked - began + received.waited_s, polls + received.polls, received.poll_s)
            left_s = deadline - loop.time()
            if left_s <= 0:
                text = f"only a damaged object there after {loop.time() - began:.1f} s: {damage.problem}"
                raise ChannelTimeout(text, key=key) from damage
            polls += received.polls + 1
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, MOST_AGAIN_S)

    def _opened(self, data: memoryview, key: str) -> memoryview:
        body = opened(data, key=key)
        if self._known:
            self._known.pop(key, None)
        return body

    def _remember(self, key: str, data: memoryview, error: CorruptMessage) -> float:
        """Takes note of damage; returns for how many seconds the same bytes have been there."""
        now, digest = asyncio.get_running_loop().time(), xxhash.xxh3_64_intdigest(data)
        before, since = self._known.get(key, (None, now))
        if before == digest:
            return now - since
        while len(self._known) >= _REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[key] = (digest, now)
        self._damaged(error)
        return 0.0

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
