"""Updates in pieces, so that what has arrived before a connection was lost is not sent again. No input or output.

`Outbox` keeps what a region sends, a `Cursor` is the progress of one connection through it, and `Inbox` puts pieces together.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ephemeron.communication.channels.base import Channel
from ephemeron.config.typed import Count, build, plain
from ephemeron.errors import CorruptMessage, JobError, KeyExists
from ephemeron.regions.communicator.base import Update

PIECE_BYTES = 128 << 10
WHOLE = -1
"""In place of a number of bytes: all of an update has arrived."""
_LONGEST = 4 << 30

Key = tuple[int, int]
"""Fragment and round."""
Have = Sequence[Sequence[int]]
"""Fragment, round, and bytes that have arrived without a gap, or `WHOLE`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceHead:
    """What a message says of the piece of an update that it carries. Names are short as each piece has one."""

    f: int
    """Fragment."""
    r: Count
    """Round."""
    e: int
    """Fence of the sender."""
    n: int
    """Samples."""
    q: float | None
    """Norm; None: it is not finite, which JSON cannot say."""
    o: int
    """Offset of the piece."""
    t: int
    """Bytes of the update."""
    c: int
    """CRC-32 of the update."""


class Piece(NamedTuple):
    """Part of an update to send."""

    head: PieceHead
    data: memoryview


class Outbox:
    """Updates of this region that others may lack.

    Args:
        others: regions that take part.
        limit_bytes: kept for slow regions at most; the latest update of each fragment is kept in any case.
    """

    def __init__(self, others: Iterable[str], *, limit_bytes: int) -> None:
        self._limit, self._bytes = limit_bytes, 0
        self._acknowledged: dict[str, dict[int, int]] = {name: {} for name in others}
        self._since: dict[str, int] = {}
        self._kept: dict[Key, tuple[Update, int]] = {}
        """In the order of publication, with the checksum."""
        self.published: dict[int, int] = {}
        """By fragment, latest round."""
        self.first: dict[int, int] = {}
        """By fragment, first round that was not forgotten for lack of room."""

    @property
    def updates(self) -> Sequence[Update]:
        """All that are kept, in the order of publication."""
        return [update for update, _ in self._kept.values()]

    def get(self, fragment: int, round: int) -> Update | None:
        """An update that is kept."""
        found = self._kept.get((fragment, round))
        return None if found is None else found[0]

    def add(self, update: Update) -> bool:
        """Keeps an update; returns whether it is the first of its round."""
        key = update.fragment, update.round
        if key in self._kept or self._is_done(key):
            return False
        self._kept[key] = update, zlib.crc32(update.payload)
        self._bytes += len(update.payload)
        self.published[update.fragment] = max(update.round, self.published.get(update.fragment, 0))
        for old in list(self._kept):
            if self._bytes <= self._limit:
                break
            if old[1] < self.published[old[0]]:
                self._drop(old)
                self.first[old[0]] = max(old[1] + 1, self.first.get(old[0], 0))
        return True

    def join(self, region: str, *, since: int) -> None:
        """A region takes part in the rounds after `since`."""
        self._acknowledged.setdefault(region, {})
        self._since[region] = since

    def leave(self, region: str) -> None:
        """A region needs nothing any more."""
        self._acknowledged.pop(region, None)
        self._clean()

    def acknowledge(self, region: str, rounds: Mapping[int, int]) -> None:
        """A region needs the rounds of these fragments up to these no more."""
        known = self._acknowledged.get(region)
        if known is None:
            return
        for fragment, number in rounds.items():
            known[fragment] = max(number, known.get(fragment, 0))
        self._clean()

    def is_needed_by(self, region: str, key: Key) -> bool:
        """Whether a region has not acknowledged a round of a fragment."""
        known = self._acknowledged.get(region)
        return known is not None and key[1] > max(known.get(key[0], 0), self._since.get(region, 0))

    def is_awaited(self, region: str) -> bool:
        """Whether a region has not acknowledged all that was published."""
        return any(self.is_needed_by(region, (f, r)) for f, r in self.published.items())

    @property
    def kept(self) -> Iterable[tuple[Update, int]]:
        """Updates with their checksums, in the order of publication."""
        return self._kept.values()

    def _is_done(self, key: Key) -> bool:
        return key[1] <= self.published.get(key[0], 0) and not any(self.is_needed_by(r, key) for r in self._acknowledged)

    def _clean(self) -> None:
        for key in [key for key in self._kept if self._is_done(key)]:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        self._bytes -= len(self._kept.pop(key)[0].payload)


class Cursor:
    """Pieces that one connection sends to a region, each once, in the order of publication.

    Args:
        outbox: of this region.
        region: that receives.
        have: what has arrived there over earlier connections.
    """

    def __init__(self, outbox: Outbox, region: str, have: Have) -> None:
        self._outbox, self._region = outbox, region
        self._sent: dict[Key, int] = {(int(f), int(r)): int(n) for f, r, n in have}
        """By update, bytes that need not be sent over this connection."""

    def next(self) -> Piece | None:
        """The next piece; None: there is none yet."""
        for update, checksum in self._outbox.kept:
            key = update.fragment, update.round
            done = self._sent.get(key, 0)
            if done == WHOLE or not self._outbox.is_needed_by(self._region, key):
                continue
            total = len(update.payload)
            if not 0 <= done <= total:
                done = 0
            end = min(done + PIECE_BYTES, total)
            self._sent[key] = WHOLE if end == total else end
            norm = update.norm if math.isfinite(update.norm) else None
            head = PieceHead(f=update.fragment, r=update.round, e=update.fence, n=update.samples, q=norm, o=done, t=total, c=checksum)
            return Piece(head, memoryview(update.payload)[done:end])
        return None


class _Partial:
    """An update of which pieces have arrived."""

    def __init__(self, total: int) -> None:
        self.data, self.parts = bytearray(total), dict[int, int]()

    def prefix(self) -> int:
        at = 0
        while self.parts.get(at):
            at += self.parts[at]
        return at


class Inbox:
    """Updates of other regions that have arrived, until this region acknowledges them."""

    def __init__(self) -> None:
        self.updates: dict[tuple[str, int, int], Update] = {}
        self.acknowledged: dict[str, dict[int, int]] = {}
        """By region and fragment, rounds that this region needs no more."""
        self._partial: dict[tuple[str, int, int], _Partial] = {}
        self._first: dict[str, dict[int, int]] = {}

    def take(self, region: str, raw: object, data: memoryview | bytes) -> Update | None:
        """Adds a piece; returns the update that it has completed.

        Raises:
            CorruptMessage: it is no piece, or the update is damaged; its pieces are dropped.
        """
        try:
            head = build(PieceHead, raw, where="piece of an update")
        except JobError as e:
            raise CorruptMessage(f"region {region}: {e}") from None
        key = region, head.f, head.r
        if key in self.updates or head.r <= self.acknowledged.get(region, {}).get(head.f, 0):
            return None
        if not 0 <= head.t <= _LONGEST or not 0 <= head.o <= head.o + len(data) <= head.t:
            raise CorruptMessage(f"region {region}: a piece is outside of its update")
        partial = self._partial.get(key)
        if partial is None or len(partial.data) != head.t:
            partial = self._partial[key] = _Partial(head.t)
        partial.data[head.o : head.o + len(data)] = data
        partial.parts[head.o] = len(data)
        if partial.prefix() < head.t:
            return None
        del self._partial[key]
        payload = bytes(partial.data)
        if zlib.crc32(payload) != head.c:
            raise CorruptMessage(f"region {region}: round {head.r} of fragment {head.f} has another checksum")
        update = self.updates[key] = Update(
            region=region,
            fence=head.e,
            fragment=head.f,
            round=head.r,
            samples=head.n,
            norm=math.inf if head.q is None else head.q,
            payload=payload,
        )
        return update

    def add(self, update: Update) -> None:
        """Adds a whole update that has come another way."""
        if update.round > self.acknowledged.get(update.region, {}).get(update.fragment, 0):
            self.updates.setdefault((update.region, update.fragment, update.round), update)

    def have(self, region: str) -> list[list[int]]:
        """What has arrived from a region and was not acknowledged; see `Have`."""
        whole = [[f, r, WHOLE] for name, f, r in self.updates if name == region]
        return whole + [[f, r, p.prefix()] for (name, f, r), p in self._partial.items() if name == region and p.prefix()]

    def acknowledge(self, region: str, fragment: int, round: int) -> bool:
        """Forgets rounds up to `round`; returns whether that is news to their sender."""
        known = self.acknowledged.setdefault(region, {})
        if round <= known.get(fragment, 0):
            return False
        known[fragment] = round
        for held in (self.updates, self._partial):
            for key in [k for k in held if k[:2] == (region, fragment) and k[2] <= round]:
                held.pop(key, None)
        return True

    def forgotten(self, region: str, first: Mapping[int, int]) -> None:
        """A region says from which rounds on it keeps its updates."""
        self._first.setdefault(region, {}).update(first)

    def is_forgotten(self, region: str, fragment: int, round: int) -> bool:
        """Whether its sender keeps an update no more, and it has not arrived."""
        return round < self._first.get(region, {}).get(fragment, 0) and (region, fragment, round) not in self.updates


# -- an update as an object of a store ----------------------------------------------------------------------------


_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    fence: int
    fragment: int
    round: int
    samples: int
    norm: float | None


async def put_update(channel: Channel, prefix: str, update: Update) -> None:
    """Stores an update, unless an earlier attempt has."""
    norm = update.norm if math.isfinite(update.norm) else None
    head = _Head(fence=update.fence, fragment=update.fragment, round=update.round, samples=update.samples, norm=norm)
    text = json.dumps(plain(head), separators=(",", ":")).encode()
    key = f"{prefix}/{update.region}/{update.fragment}.{update.round:07d}"
    with contextlib.suppress(KeyExists):
        await channel.put(key, [_LENGTH.pack(len(text)), text, update.payload], create=True)


async def get_update(channel: Channel, key: str, region: str) -> Update | None:
    """The update of a key; None: it was deleted.

    Raises:
        CorruptMessage: it is none.
    """
    data = await channel.fetch(key)
    if data is None:
        return None
    try:
        size = _LENGTH.size + int(_LENGTH.unpack_from(data)[0])
        head = build(_Head, json.loads(bytes(data[_LENGTH.size : size])), where=key)
    except (struct.error, ValueError, JobError) as e:
        raise CorruptMessage(f"not an update of a region: {e}", key=key) from None
    return Update(
        region=region,
        fence=head.fence,
        fragment=head.fragment,
        round=head.round,
        samples=head.samples,
        norm=math.inf if head.norm is None else head.norm,
        payload=bytes(data[size:]),
    )
