"""One version of a reduction over a mesh, as one rank has it: sums of the pieces that it owns, and the merged vector so far."""

from __future__ import annotations

import asyncio

import numpy as np

from ephemeron.communication.channels.base import Buffer
from ephemeron.training.collectives.direct_messages import ContributionHeader, Piece


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
