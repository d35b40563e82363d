"""The exchange of pieces over a mesh: contributions go to the owners, which add them up and send the mean to all.

Everything here happens as messages arrive, on the event loop; `direct` waits for it, and makes up for what is lost.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Sequence

import numpy as np

from ephemeron.communication.channels.base import Buffer
from ephemeron.communication.direct.connection import CommonBody
from ephemeron.communication.direct.mesh import Mesh
from ephemeron.communication.direct.message import IN_PLACE, SHARED, Head, Kind
from ephemeron.training.collectives.direct_messages import ContributionHeader, Division, MergedHeader, Piece, PieceSum, Version, layout
from ephemeron.training.collectives.group import Collective, Group
from ephemeron.training.tensors import Compressor, codec_by_name

EVERY = -1
"""Owner of a piece that all ranks sum."""
_SPARE = 2
_UNUSED = 2
"""References to a vector in a list and an argument."""


class PieceExchange(Collective):
    """One rank's part in the exchange. See `DirectReduce` for the arguments."""

    overlaps = True

    def __init__(
        self,
        group: Group,
        mesh: Mesh,
        *,
        replays: bool = True,
        division: Division = Division(),  # noqa: B008
    ) -> None:
        self.g, self.mesh, self.replays = group, mesh, replays
        self.upward = Compressor(codec_by_name(group.compression), group.size, group.dtype)
        # See `KReduce`: merged pieces are compressed without error feedback.
        down = codec_by_name("bf16" if group.compression == "int8" else group.compression)
        self.downward = Compressor(down, group.size, group.dtype)
        # Flags and bits of all ranks agree in one phase only if a replacement makes the same contribution again.
        whole = group.policy.deterministic and not self.upward.codec.feedback
        nbytes = group.size * group.dtype.itemsize
        if whole and nbytes * (group.world - 1) <= division.whole_bytes:
            self.pieces = [Piece(0, EVERY, 0, group.size, 0)]
        else:
            owners = group.aggregators
            if whole and division.shard_bytes and group.policy.staleness(aggregator=False) == 0:
                owners = max(1, min(owners, nbytes // division.shard_bytes))
            self.pieces = layout(group.size, owners, group.dtype.itemsize, piece_bytes=division.piece_bytes)
        self.mine = [p for p in self.pieces if p.owner in (group.rank, EVERY)]
        """Pieces of which this rank makes the mean."""
        self.summing = [p for p in self.pieces if self._adds_up(p)]
        """Pieces of which it adds up contributions."""
        # Each rank begins with another owner, so that no owner gets everything at once while the others are idle.
        self._order = sorted(self.pieces, key=lambda p: (p.offset, (p.owner - group.rank) % group.world))
        self.others = [r for r in range(group.world) if r != group.rank]
        self._members = list(group.members) or list(range(group.world))
        self._rank_of = {member: rank for rank, member in enumerate(self._members)}
        role = group.policy.staleness(aggregator=group.is_aggregator)
        self._copies = role > 0 or not group.policy.exact
        """The caller may compute the next contribution, in the same memory, while this one is still needed."""
        # The first piece of each owner is never early. So no owner has all of a contribution before what is sent ahead of the rest
        # of it: see `private_copies`.
        self._early = [] if self._copies or self.upward.codec.feedback else [p for p in self.pieces if p.offset]
        self.applied, self.durable_at = dict.fromkeys(self.others, 0), dict.fromkeys(self.others, 0)
        self._least_applied = self._least_durable = 0
        self._versions: dict[int, Version] = {}
        self._floor = 0
        """Versions below are not needed any more."""
        self._free: dict[int, list[memoryview]] = {}
        """By bytes, memory for contributions."""
        self._spare: list[np.ndarray] = []
        """Memory of the last versions that are not needed any more; callers may still refer to it."""
        self._flags: dict[int, int] = {}
        """By iteration, flags that a predecessor has sent."""
        mesh.handle(Kind.CONTRIBUTION, self._on_contribution, self._contribution_memory)
        mesh.handle(Kind.MERGED, self._on_merged, self._merged_memory)

    # -- sending ------------------------------------------------------------------------------------------

    def submit(self, iteration: int, vector: np.ndarray, weight: float, flags: int = 0) -> None:
        version = self._version(iteration)
        if self._copies and not self.upward.codec.lossy:
            vector = vector.copy()
        payloads = {} if version.payloads is None else version.payloads
        for p in self.pieces:
            if p.number not in payloads:
                payloads[p.number] = self.upward.encode(vector[p.start : p.stop], p.start, p.stop)
        if not version.complete:
            self._register(version, payloads, weight, flags)

    @property
    def early(self) -> Sequence[tuple[int, int]]:
        return [(p.start, p.stop) for p in self._early]

    def submit_piece(self, iteration: int, number: int, part: np.ndarray, weight: float, flags: int = 0) -> None:
        version, piece = self._version(iteration), self._early[number]
        payloads = {} if version.payloads is None else version.payloads
        if not version.complete and piece.number not in payloads:
            payloads[piece.number] = self.upward.encode(part, piece.start, piece.stop)
            self._register(version, payloads, weight, flags)
            self._contribute(version, [piece])

    def _register(self, version: Version, payloads: dict[int, list[Buffer]], weight: float, flags: int) -> None:
        """Takes payloads of this rank's contribution; all have the header of the first one."""
        version.payloads, status = payloads, self.g.status
        if version.header is None:
            flags = self._flags.pop(version.number, flags)
            version.header = ContributionHeader(flags, weight, status.applied, status.durable, status.busy_s, status.spent_usd)

    def _contribute(self, version: Version, pieces: Sequence[Piece]) -> None:
        """Sends pieces of this rank's contribution to their owners, and adds those that it owns itself."""
        header, payloads = version.header, version.payloads
        assert header is not None
        assert payloads is not None
        extra = header.pack()
        version.sent.update(piece.number for piece in pieces)
        for piece in pieces:
            for rank in self._targets(piece):
                self._send(rank, Kind.CONTRIBUTION, version.number, piece.number, extra, payloads[piece.number])
        for piece in pieces:
            if self._adds_up(piece):
                part = self._decoded(self.upward, payloads[piece.number], piece)
                self._add(version, piece, self.g.rank, part, header, None)

    async def upload(self, iteration: int) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        version = self._version(iteration)
        if version.header is not None and version.payloads is not None:
            version.uploaded = True
            self._contribute(version, [p for p in self._order if p.number not in version.sent])
            await self.mesh.drained()
        self.g.trace.record("upload", began, loop.time())

    def _adds_up(self, piece: Piece) -> bool:
        """Whether this rank adds up contributions to a piece."""
        return piece.owner in (self.g.rank, EVERY)

    def _targets(self, piece: Piece) -> Sequence[int]:
        """Other ranks that this one's contribution to a piece goes to."""
        if piece.owner == EVERY:
            return self.others
        return () if piece.owner == self.g.rank else (piece.owner,)

    def _readers(self, piece: Piece) -> Sequence[int]:
        """Ranks that get a merged piece from this one."""
        return self.others if piece.owner == self.g.rank else ()

    def _send(self, rank: int, kind: Kind, number: int, index: int, extra: bytes, buffers: Sequence[Buffer]) -> None:
        # A message without a route is not lost: `_on_connect` sends it again.
        self.mesh.send(self._members[rank], kind, number, index, extra, buffers)

    def _decoded(self, by: Compressor, payload: Sequence[Buffer], piece: Piece) -> np.ndarray:
        data = memoryview(payload[0] if len(payload) == 1 else b"".join(payload))
        return by.codec.decode(data, self.g.dtype, piece.stop - piece.start)

    # -- summing ------------------------------------------------------------------------------------------

    def _contribution_memory(self, member: int, head: Head, nbytes: int) -> memoryview:
        if head.flags & SHARED:
            return IN_PLACE
        if not self.upward.codec.fixed:  # hardly any two have the same size
            return memoryview(np.empty(nbytes, dtype=np.uint8).data)
        free = self._free.get(nbytes)
        return free.pop() if free else memoryview(np.empty(nbytes, dtype=np.uint8).data)

    def _on_contribution(self, member: int, head: Head, body: memoryview) -> None:
        rank, version = self._rank_of.get(member), self._known(head.number)
        if rank is None or version is None or head.part >= len(self.pieces):
            return
        piece = self.pieces[head.part]
        header = ContributionHeader.of(head.extra)
        self._heard(rank, header.applied, header.durable)
        version.heard[rank] = header.flags
        sums, at = self._sums(version, piece, rank)
        shared = head.flags & SHARED
        if sums is None or sums.held[at]:  # merged, not this rank's to merge, or sent again
            if not shared:
                self._release(body)
            return
        self.g.on_message(rank, header.busy_s, header.spent_usd)
        part = self._decoded(self.upward, [body], piece)
        self._add(version, piece, rank, part, header, None if shared else body)
        if shared and not self.upward.codec.lossy:
            sums.keep(at)

    def _sums(self, version: Version, piece: Piece, rank: int) -> tuple[PieceSum | None, int]:
        """The sum that a rank's contribution belongs to, and its place in the order; None: there is none here (any more)."""
        return version.sums.get(piece.number), rank

    def _add(
        self, version: Version, piece: Piece, rank: int, part: np.ndarray, header: ContributionHeader, memory: memoryview | None
    ) -> None:
        sums, at = self._sums(version, piece, rank)
        if sums is None or sums.held[at]:
            return
        loop = asyncio.get_running_loop()
        began = loop.time()
        for free in sums.take(at, part, header, memory):
            self._release(free)
        if sums.complete:
            self._summed(version, piece, sums)
            self.g.trace.record("aggregate", began, loop.time())

    def _summed(self, version: Version, piece: Piece, sums: PieceSum) -> None:
        """All contributions to a sum are added."""
        self._publish(version, piece, sums)

    def _release(self, memory: memoryview) -> None:
        if memory.nbytes and self.upward.codec.fixed:
            self._free.setdefault(memory.nbytes, []).append(memory)

    def _publish(self, version: Version, piece: Piece, sums: PieceSum) -> None:
        """Sends the mean of a piece to all, unless all make it themselves."""
        mean = sums.mean()
        if piece.owner == EVERY and not self.downward.codec.lossy:
            return version.finish(piece, sums.flags)
        payload = self.downward.encode(mean, piece.start, piece.stop)
        if self.downward.codec.lossy:
            mean[:] = self._decoded(self.downward, payload, piece)
        version.finish(piece, sums.flags)
        if piece.owner != EVERY:
            self._send_merged(version, piece, self._readers(piece), payload)

    def _send_merged(self, version: Version, piece: Piece, ranks: Iterable[int], payload: Sequence[Buffer] | None = None) -> None:
        flags = version.done[piece.number]
        assert flags is not None
        if payload is None:  # rounding what is rounded already gives the same bytes
            payload = self.downward.codec.encode(version.vector[piece.start : piece.stop])
        extra = MergedHeader(flags, *self._least(), self.g.status.busy_s, self.g.status.spent_usd).pack()
        body = CommonBody(payload)
        for rank in ranks:
            self._send(rank, Kind.MERGED, version.number, piece.number, extra, body)

    # -- receiving ----------------------------------------------------------------------------------------

    def _merged_memory(self, member: int, head: Head, nbytes: int) -> memoryview | None:
        version = self._known(head.number)
        if version is None or not self.downward.codec.plain or head.part >= len(self.pieces):
            return None
        piece, itemsize = self.pieces[head.part], self.g.dtype.itemsize
        if version.done[piece.number] is not None or piece.number in version.receiving or piece.number in version.sums:
            return None
        version.receiving.add(piece.number)
        return version.view[piece.start * itemsize : piece.stop * itemsize]

    def _on_merged(self, member: int, head: Head, body: memoryview) -> None:
        rank, version = self._rank_of.get(member), self._known(head.number)
        if rank is None or head.part >= len(self.pieces):
            return
        header = MergedHeader.of(head.extra)
        self._least_applied = max(self._least_applied, header.applied)
        self._least_durable = max(self._least_durable, header.durable)
        if version is None or version.done[head.part] is not None:
            return
        piece, loop = self.pieces[head.part], asyncio.get_running_loop()
        began = loop.time()
        version.first_merged = version.first_merged or began
        if body.obj is not version.view.obj:  # not received into its place
            version.vector[piece.start : piece.stop] = self._decoded(self.downward, [body], piece)
        version.finish(piece, header.flags)
        self.g.on_message(rank, header.busy_s, header.spent_usd)
        # A predecessor may have merged it, and not have told all.
        self._send_merged(version, piece, [r for r in self._readers(piece) if r != rank])

    # -- progress and garbage -----------------------------------------------------------------------------

    def _version(self, number: int) -> Version:
        version = self._versions.get(number)
        if version is None:
            version = self._versions[number] = self._new_version(number)
        return version

    def _new_version(self, number: int) -> Version:
        return Version(number, unused(self._spare, self.g.size, self.g.dtype), self.pieces, self.mine, self.g.world)

    def _retire(self, version: Version) -> None:
        """Keeps the memory of a version that is not needed any more."""
        self._spare.append(version.vector)
        del self._spare[:-_SPARE]

    def _known(self, number: int) -> Version | None:
        """A version that is still needed."""
        return None if number < self._floor else self._version(number)

    def _heard(self, rank: int, applied: int, durable: int) -> None:
        self.applied[rank] = max(applied, self.applied[rank])
        self.durable_at[rank] = max(durable, self.durable_at[rank])

    def _least(self) -> tuple[int, int]:
        """Numbers of versions that are applied, and durable, at every rank, as far as this one knows."""
        status = self.g.status
        applied = min(status.applied, *self.applied.values())
        durable = min(status.durable, *self.durable_at.values())
        self._least_applied = max(self._least_applied, applied)
        self._least_durable = max(self._least_durable, durable)
        return self._least_applied, self._least_durable

    def _tidy(self) -> None:
        applied, durable = self._least()
        needed = min(durable if self.replays else applied, self.g.status.applied)
        if needed > self._floor:
            self._floor = needed
            for number in [n for n in self._versions if n < needed]:
                self._retire(self._versions.pop(number))

    async def collect_garbage(self) -> None:
        self._tidy()

    def durable(self) -> int:
        return self._least()[1]

    def acknowledged(self, iteration: int) -> int:
        return min(iteration, self.g.status.applied, self._least()[0])


def unused(spare: list[np.ndarray], size: int, dtype: np.dtype[np.generic]) -> np.ndarray:
    """One of these arrays to which nothing refers any more, which is faster than fresh memory; else a new one."""
    for at in range(len(spare)):
        if sys.getrefcount(spare[at]) == _UNUSED:
            return spare.pop(at)
    return np.empty(size, dtype=dtype)
