"""Layout and headers of a reduction over a mesh: pieces of the vector, and the few bytes before each of them.

A piece is the unit of sending, summing and receiving, so that these overlap. Shards are those of K-REDUCE, one per owner;
a shard is cut where the codec's blocks end, so that a piece has the very bytes that it has within the shard.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ephemeron.communication.channels.base import Buffer
from ephemeron.training.tensors import bounds
from ephemeron.training.tensors.compression import INT8_BLOCK

PIECE_BYTES = 1 << 20
"""Largest piece: its sum takes a third of a millisecond, for which nothing else is received."""
ONE_PHASE_BYTES = 128 << 10
"""Most bytes that a rank sends where all send their vectors to all. On one machine this takes 0.6 to 0.9 of the time of two steps up
to about 0.5 MB, and more from 0.7 MB on; links between machines are slower, and their latency is longer."""
SHARED_SHARD_BYTES = 1 << 20
"""Least bytes of the shards that the cores of one machine, on which all ranks are, sum at a time. A shard costs each rank W − 1 messages, which
take longer than they save where no core is free to sum it. On two cores, 4 and 8 ranks reduce 0.1 MB in one shard in 0.3 to 0.6 of the
time, and 1 MB in two in 0.6 to 0.9; from 4 MB on there is no difference (`benchmarks.direct_algorithms`)."""
NOT_HELD = 255
"""In place of flags: there is no such contribution."""

_CONTRIBUTION = struct.Struct("<BdQQfd")
_MERGED = struct.Struct("<BQQfd")
_ANSWER = struct.Struct("<BQH?")
_WAIT = struct.Struct("<QH")


class Piece(NamedTuple):
    """Elements `start:stop` of the vector."""

    number: int
    owner: int
    """Rank that sums it; -1: every rank does."""
    start: int
    stop: int
    offset: int
    """First element's place within the shard."""


class ContributionHeader(NamedTuple):
    """What a rank says of its contribution to one piece. The numbers are those of `MessageHeader`."""

    flags: int
    weight: float
    applied: int
    durable: int
    busy_s: float
    spent_usd: float

    def pack(self) -> bytes:
        return _CONTRIBUTION.pack(*self)

    @classmethod
    def of(cls, extra: bytes) -> ContributionHeader:
        return cls(*_CONTRIBUTION.unpack(extra))


class MergedHeader(NamedTuple):
    """What a holder says of a merged piece."""

    flags: int
    """Union of the contributors' flags."""
    applied: int
    """Number of versions that every rank is known to have applied."""
    durable: int
    """Number of versions that no replacement of any rank would need again."""
    busy_s: float
    spent_usd: float

    def pack(self) -> bytes:
        return _MERGED.pack(*self)

    @classmethod
    def of(cls, extra: bytes) -> MergedHeader:
        return cls(*_MERGED.unpack(extra))


class MissingAnswer(NamedTuple):
    """Answer of a rank that was asked for a version; what it holds of the version it has sent before."""

    held: int
    """Flags of the asking rank's contribution to that version, which it has received; or `NOT_HELD`."""
    applied: int
    """Number of versions that its parameters contain."""
    waits: list[tuple[int, int]]
    """Iterations and ranks of what it waits for itself; none: it computes, or is late for another reason."""
    asks: bool = False
    """Whether it has not contributed yet: it asks these ranks what its predecessor has sent."""

    def pack(self) -> bytes:
        head = _ANSWER.pack(self.held, self.applied, len(self.waits), self.asks)
        return head + b"".join(_WAIT.pack(*wait) for wait in self.waits)

    @classmethod
    def of(cls, data: memoryview) -> MissingAnswer:
        held, applied, n, asks = _ANSWER.unpack_from(data)
        waits = list(_WAIT.iter_unpack(data[_ANSWER.size : _ANSWER.size + n * _WAIT.size]))
        return cls(held, applied, waits, asks)


def pack_indices(indices: Iterable[int], pieces: int) -> bytes:
    """A set of pieces as bits."""
    bits = 0
    for index in indices:
        bits |= 1 << index
    return bits.to_bytes(-(-pieces // 8), "little")


def unpack_indices(data: bytes) -> list[int]:
    """The inverse of `pack_indices`, ascending."""
    bits, found, index = int.from_bytes(data, "little"), [], 0
    while bits:
        if bits & 1:
            found.append(index)
        bits >>= 1
        index += 1
    return found


class Division(NamedTuple):
    """Limits by which vectors are divided.

    Args:
        whole_bytes: most bytes that each rank sends where vectors are sent whole.
        shard_bytes: least bytes of a shard, where fewer owners give the same bits.
        piece_bytes: most bytes that are sent, summed and received at a time.
    """

    whole_bytes: int = ONE_PHASE_BYTES
    shard_bytes: int = 0
    piece_bytes: int = PIECE_BYTES

    @classmethod
    def of(cls, world: int, shared_cores: int) -> Division:
        """For W ranks that have cores of their own (0), or share some."""
        if not shared_cores:
            return cls()
        # Whole vectors save a delay, and take W/2 times as many messages.
        whole = ONE_PHASE_BYTES if world <= shared_cores else 0
        return cls(whole, SHARED_SHARD_BYTES // shared_cores)


def layout(size: int, owners: int, itemsize: int, *, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """Pieces of a vector, by number, in the order of their positions within the shards.

    Args:
        size: elements of the vector.
        owners: number of shards.
        itemsize: bytes per element.
        piece_bytes: most bytes of a piece.
    """
    step = max(1, piece_bytes // itemsize // INT8_BLOCK) * INT8_BLOCK
    found = [
        (start - first, owner, start, min(start + step, stop))
        for owner, (first, stop) in enumerate(bounds(size, owners))
        for start in (range(first, stop, step) or [first])
    ]
    found.sort()
    return [Piece(i, owner, start, stop, offset) for i, (offset, owner, start, stop) in enumerate(found)]


# -- one version of a reduction over a mesh -----------------------------------------------------------------------


class PieceSum:
    """Sum of one piece in a fixed order, that of the ranks; contributions that come before their turn wait.

    Args:
        sources: number of contributions.
        into: memory of the sum.
    """

    __slots__ = ("_first", "flags", "held", "into", "next", "waiting", "weight")

    def __init__(self, sources: int, into: np.ndarray) -> None:
        self.into = into
        self._first: tuple[np.ndarray, memoryview | None] | None = None
        self.next = 0
        """Rank whose contribution is added next."""
        self.waiting: dict[int, tuple[np.ndarray, ContributionHeader, memoryview | None]] = {}
        self.held = [False] * sources
        """Ranks whose contribution has arrived."""
        self.weight, self.flags = 0.0, 0

    @property
    def complete(self) -> bool:
        """Whether all contributions are added."""
        return self.next == len(self.held)

    def take(self, rank: int, part: np.ndarray, header: ContributionHeader, memory: memoryview | None = None) -> list[memoryview]:
        """Takes a contribution in, adds all whose turn has come, and returns the memory that is free again.

        Args:
            rank: of the contributor.
            part: its elements; must not change until they are added.
            header: of the message.
            memory: that `part` is in, if it is to be used again.
        """
        self.held[rank] = True
        self.waiting[rank] = part, header, memory
        free: list[memoryview] = []
        while self.next in self.waiting:
            part, header, memory = self.waiting.pop(self.next)
            self.weight += header.weight
            self.flags |= header.flags
            if self.next == 0:
                self._first = part, memory
            else:
                if self._first is not None:  # the first two are added at once, which saves a copy
                    first, before = self._first
                    self._first = None
                    np.add(first, part, out=self.into)
                    free += [before] if before is not None else []
                else:
                    self.into += part
                free += [memory] if memory is not None else []
            self.next += 1
        return free

    def keep(self, rank: int) -> None:
        """Copies a contribution that is not added yet: its memory is about to change."""
        if rank in self.waiting:
            part, header, memory = self.waiting[rank]
            self.waiting[rank] = part.copy(), header, memory
        elif self._first is not None and rank == 0:
            np.copyto(self.into, self._first[0])
            self._first = None

    def total(self) -> np.ndarray:
        """The sum, in its memory."""
        if self._first is not None:  # of one contribution alone
            np.copyto(self.into, self._first[0])
            self._first = None
        return self.into

    def mean(self) -> np.ndarray:
        """Mean over all samples, in the memory of the sum; the sum itself if there are none."""
        self.total()
        if self.weight > 0:
            self.into /= self.into.dtype.type(self.weight)
        return self.into

    def missing(self) -> list[int]:
        """Ranks whose contribution has not arrived."""
        return [rank for rank, held in enumerate(self.held) if not held]


class Version:
    """State of one version.

    Args:
        number: of the version.
        vector: memory of the merged vector.
        pieces: of the vector.
        mine: pieces that this rank sums.
        world: number of ranks.
    """

    __slots__ = (
        "awaited",
        "complete",
        "done",
        "first_merged",
        "flags",
        "header",
        "heard",
        "left",
        "mine_left",
        "number",
        "payloads",
        "receiving",
        "sent",
        "sums",
        "uploaded",
        "vector",
        "view",
        "waiters",
    )

    def __init__(self, number: int, vector: np.ndarray, pieces: list[Piece], mine: list[Piece], world: int) -> None:
        self.number, self.vector = number, vector
        self.view = memoryview(vector.view(np.uint8).data)
        """Bytes of the vector, into which merged pieces are received."""
        self.sums = {p.number: PieceSum(world, vector[p.start : p.stop]) for p in mine}
        """By piece, sums that are not complete."""
        self.done: list[int | None] = [None] * len(pieces)
        """By piece, flags, once it is merged."""
        self.left, self.mine_left = len(pieces), len(mine)
        self.heard: dict[int, int] = {}
        """By rank, flags of its contribution, as far as it was sent to this one."""
        self.receiving: set[int] = set()
        """Pieces that are being received into their place."""
        self.flags = 0
        self.complete = False
        self.payloads: dict[int, list[Buffer]] | None = None
        """By piece, this rank's own contribution: kept until the version is complete here."""
        self.sent: set[int] = set()
        """Pieces of it that were sent."""
        self.header: ContributionHeader | None = None
        """Of the own contribution."""
        self.uploaded = False
        self.awaited = 0
        """Number of callers that wait for it."""
        self.waiters: list[asyncio.Future[bool]] = []
        self.first_merged = 0.0
        """Loop time at which the first merged piece was there."""

    def finish(self, piece: Piece, flags: int) -> None:
        """A piece is merged, and in its place."""
        self.done[piece.number] = flags
        self.receiving.discard(piece.number)
        self.flags |= flags
        self.left -= 1
        mine = self.sums.pop(piece.number, None) is not None
        self.mine_left -= mine
        if not self.left:
            self.complete, self.payloads = True, None
        if not self.left or (mine and not self.mine_left):
            for waiter in self.waiters:
                if not waiter.done():
                    waiter.set_result(True)
            self.waiters.clear()

    def missing(self) -> list[int]:
        """Pieces that are not merged, or not here."""
        return [index for index, flags in enumerate(self.done) if flags is None]
