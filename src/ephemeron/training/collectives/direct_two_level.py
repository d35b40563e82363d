"""The reduction over a mesh in two levels: first among ranks that share a machine, then between the machines.

Ranks form *blocks* of a given size: ranks 0 … L−1, L … 2L−1, and so on. In each block one rank adds up the block's contributions to a piece
and sends the partial sum to the piece's owner, which adds the partial sums in the order of the blocks and sends the mean back to one
rank of each block, which passes it on. Where the ranks of a block share a machine, a machine sends and receives (M − 1)/M of the vector twice,
with M machines: an L-th of what `DirectReduce` sends from machine to machine.

Order of summation: within each block by rank, then by block. It depends on ranks alone, never on where a function runs or by which route its
messages go, so results are those of every run with the same block size; they are not bit for bit those of K-REDUCE over a store.
What is lost is made up for as in `DirectReduce`: ranks keep their contributions, and those that add up a block keep partial sums, until
they are not needed any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ephemeron.communication.channels.base import Buffer
from ephemeron.communication.direct.mesh import Mesh
from ephemeron.communication.direct.message import SHARED, Head, Kind
from ephemeron.training.collectives.direct import DirectReduce
from ephemeron.training.collectives.direct_exchange import EVERY, unused
from ephemeron.training.collectives.direct_messages import ContributionHeader, Division, Piece, PieceSum, Version
from ephemeron.training.collectives.group import Group

_SPARE = 2


class Blocks(NamedTuple):
    """Division of ranks into blocks of neighbours; the last one may be smaller."""

    world: int
    size: int

    @property
    def number(self) -> int:
        return -(-self.world // self.size)

    def of(self, rank: int) -> int:
        """Block of a rank."""
        return rank // self.size

    def ranks(self, block: int) -> range:
        """Ranks of a block."""
        return range(block * self.size, min(self.world, (block + 1) * self.size))

    def adds_up(self, block: int, owner: int) -> int:
        """Rank that adds up a block's contributions to a piece of this owner: the owner itself in its own block."""
        ranks = self.ranks(block)
        return ranks[owner % self.size % len(ranks)]


class Partial(NamedTuple):
    """A block's sum of one piece, as it is sent to the piece's owner."""

    header: ContributionHeader
    payload: list[Buffer]


class TwoLevelVersion(Version):
    """One version, with the sums of this rank's block.

    Args:
        number, vector, pieces, mine, blocks: see `Version`; one contribution of each block is summed.
        scratch: memory of the block's sums.
        summing: pieces of which this rank adds up its block's contributions.
        ranks: number of ranks in the block.
    """

    __slots__ = ("block_sums", "partials", "scratch")

    def __init__(
        self,
        number: int,
        vector: np.ndarray,
        pieces: list[Piece],
        mine: list[Piece],
        blocks: int,
        *,
        scratch: np.ndarray,
        summing: list[Piece],
        ranks: int,
    ) -> None:
        super().__init__(number, vector, pieces, mine, blocks)
        self.scratch = scratch
        self.block_sums: dict[int, PieceSum] = {}
        """By piece, sums over the block that are not complete."""
        self.partials: dict[int, Partial] = {}
        """By piece, those that are."""
        start = 0
        for piece in summing:
            stop = start + piece.stop - piece.start
            self.block_sums[piece.number] = PieceSum(ranks, scratch[start:stop])
            start = stop


class TwoLevelReduce(DirectReduce):
    """See `Collective`. For policies under which all ranks have applied all earlier versions (BSP).

    Args:
        group, mesh, replays, division: see `DirectReduce`. Vectors that are sent whole have one level.
        ranks_per_machine: L, ranks of a block.
    """

    def __init__(
        self,
        group: Group,
        mesh: Mesh,
        *,
        ranks_per_machine: int,
        replays: bool = True,
        division: Division = Division(),  # noqa: B008
    ) -> None:
        self.blocks = Blocks(group.world, ranks_per_machine)
        self.block = self.blocks.of(group.rank)
        self.mates = [r for r in self.blocks.ranks(self.block) if r != group.rank]
        self._scratch: list[np.ndarray] = []
        super().__init__(group, mesh, replays=replays, division=division)
        mesh.handle(Kind.PARTIAL, self._on_partial, self._contribution_memory)

    @property
    def two_levels(self) -> bool:
        """Whether vectors are cut into pieces at all."""
        return self.pieces[0].owner != EVERY

    def _adds_up(self, piece: Piece) -> bool:
        if not self.two_levels:
            return super()._adds_up(piece)
        return self.blocks.adds_up(self.block, piece.owner) == self.g.rank

    # -- who sends what to whom ---------------------------------------------------------------------------

    def _targets(self, piece: Piece) -> Sequence[int]:
        if not self.two_levels:
            return super()._targets(piece)
        target = self.blocks.adds_up(self.block, piece.owner)
        return () if target == self.g.rank else (target,)

    def _readers(self, piece: Piece) -> Sequence[int]:
        if not self.two_levels:
            return super()._readers(piece)
        if not self._adds_up(piece):
            return ()
        if piece.owner != self.g.rank:
            return self.mates
        others = (b for b in range(self.blocks.number) if b != self.block)
        return [*(self.blocks.adds_up(b, piece.owner) for b in others), *self.mates]

    def _giver(self, piece: Piece) -> int:
        if not self.two_levels or self._adds_up(piece):
            return super()._giver(piece)
        return self.blocks.adds_up(self.block, piece.owner)

    def _absent(self, version: Version) -> set[int]:
        if not self.two_levels:
            return super()._absent(version)
        assert isinstance(version, TwoLevelVersion)
        ranks = self.blocks.ranks(self.block)
        open_sums = [sums for number, sums in version.block_sums.items() if version.done[number] is None]
        return {ranks[at] for sums in open_sums for at in sums.missing()}

    def _awaited(self, version: Version) -> list[int]:
        found = set(super()._awaited(version))
        if self.two_levels:
            for number, sums in version.sums.items():
                owner = self.pieces[number].owner
                found.update(self.blocks.adds_up(block, owner) for block in sums.missing())
        return sorted(found - {self.g.rank})

    # -- sums ---------------------------------------------------------------------------------------------

    def _new_version(self, number: int) -> Version:
        if not self.two_levels:
            return super()._new_version(number)
        size, dtype = sum(p.stop - p.start for p in self.summing), self.g.dtype
        return TwoLevelVersion(
            number,
            unused(self._spare, self.g.size, dtype),
            self.pieces,
            self.mine,
            self.blocks.number,
            scratch=unused(self._scratch, size, dtype),
            summing=self.summing,
            ranks=len(self.mates) + 1,
        )

    def _retire(self, version: Version) -> None:
        super()._retire(version)
        if isinstance(version, TwoLevelVersion):
            self._scratch.append(version.scratch)
            del self._scratch[:-_SPARE]

    def _sums(self, version: Version, piece: Piece, rank: int) -> tuple[PieceSum | None, int]:
        if not isinstance(version, TwoLevelVersion):
            return super()._sums(version, piece, rank)
        if self.blocks.of(rank) != self.block:
            return None, 0
        return version.block_sums.get(piece.number), rank - self.blocks.ranks(self.block).start

    def _summed(self, version: Version, piece: Piece, sums: PieceSum) -> None:
        """The block's sum is complete: the owner adds it up with those of the other blocks."""
        if not isinstance(version, TwoLevelVersion):
            return super()._summed(version, piece, sums)
        del version.block_sums[piece.number]
        part = sums.total()
        status, known = self.g.status, [self.applied[r] for r in self.mates]
        durable = min([status.durable, *(self.durable_at[r] for r in self.mates)])
        header = ContributionHeader(sums.flags, sums.weight, min([status.applied, *known]), durable, status.busy_s, status.spent_usd)
        if piece.owner == self.g.rank:
            self._add_block(version, piece, self.block, part, header, None)
        elif version.done[piece.number] is None:
            version.partials[piece.number] = Partial(header, self.downward.encode(part, piece.start, piece.stop))
            self._send_partial(version, piece)

    def _send_partial(self, version: TwoLevelVersion, piece: Piece) -> None:
        header, payload = version.partials[piece.number]
        self._send(piece.owner, Kind.PARTIAL, version.number, piece.number, header.pack(), payload)

    def _add_block(
        self, version: TwoLevelVersion, piece: Piece, block: int, part: np.ndarray, header: ContributionHeader, memory: memoryview | None
    ) -> None:
        sums = version.sums.get(piece.number)
        if sums is None or sums.held[block]:
            return
        for free in sums.take(block, part, header, memory):
            self._release(free)
        if sums.complete:
            self._publish(version, piece, sums)

    def _on_partial(self, member: int, head: Head, body: memoryview) -> None:
        rank, version = self._rank_of.get(member), self._known(head.number)
        if rank is None or not isinstance(version, TwoLevelVersion) or head.part >= len(self.pieces):
            return
        piece, block = self.pieces[head.part], self.blocks.of(rank)
        header, shared = ContributionHeader.of(head.extra), head.flags & SHARED
        for mate in self.blocks.ranks(block):
            if mate != self.g.rank:
                self._heard(mate, header.applied, header.durable)
        sums = version.sums.get(piece.number)
        if sums is None or sums.held[block]:
            if not shared:
                self._release(body)
            return
        self.g.on_message(rank, header.busy_s, header.spent_usd)
        part = self._decoded(self.downward, [body], piece)
        self._add_block(version, piece, block, part, header, None if shared else body)
        if shared and not self.downward.codec.lossy:
            sums.keep(block)

    # -- losses -------------------------------------------------------------------------------------------

    def _send_held(self, version: Version, piece: Piece, rank: int) -> None:
        super()._send_held(version, piece, rank)
        if isinstance(version, TwoLevelVersion) and piece.owner == rank and piece.number in version.partials:
            self._send_partial(version, piece)
