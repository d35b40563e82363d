"""Search for the peers that a missing object is due to.

A rank waits for an aggregator's merged shard, or, as an aggregator, for a contribution. The peer that should have stored the
missing object may itself wait for another one. So the search looks in the channel for what that peer waits for, before it
names a peer as stalled. A peer that may have got what it waited for only just now is given some more time.
"""

from __future__ import annotations

import asyncio

from ephemeron.training.collectives._tasks import all_of
from ephemeron.training.collectives.chunks import Chunk
from ephemeron.training.collectives.garbage_collection import ObjectGC
from ephemeron.training.collectives.group import GRACE_SHARE, Group, StalledPeers

CONCURRENT_CHECKS = 4
"""Objects that are read at once to see whether they are stored."""


class StallSearch:
    """The search of one rank in a group whose versions hold all contributions of their iteration.

    Args:
        group: the ranks that reduce together.
        chunks: all chunks of the vector.
        garbage: progress of the other ranks.
    """

    def __init__(self, group: Group, chunks: list[Chunk], garbage: ObjectGC) -> None:
        self.g, self.garbage = group, garbage
        self.mine = [c for c in chunks if c.owner == group.rank]
        self.others = [c for c in chunks if c.owner != group.rank]
        self.unsent: set[tuple[int, int]] = set()
        """Iteration and number of each own chunk that is being sent."""
        self._checks = asyncio.Semaphore(CONCURRENT_CHECKS)

    async def contribution(self, iteration: int, rank: int, key: str) -> StalledPeers:
        """Stalled peers where a contribution of `rank` is missing.

        It is missing because that rank is stalled, or waits for an earlier version: for a share of this rank's that was
        lost, or for one of another aggregator's.
        """
        lost = await self.first_lost(rank, iteration)
        if lost is not None:
            return StalledPeers(lost, [self.g.rank])
        missing = await self._first_missing(range(self.g.status.applied, iteration), self.others)
        if missing is not None:
            return await self.merged(*missing)
        # It may have waited for an earlier version that has arrived just now.
        grace_s = self._grace_s() if iteration > self.g.status.applied else 0.0
        return StalledPeers(iteration, [rank], [key], grace_s)

    async def merged(self, version: int, chunk: Chunk) -> StalledPeers:
        """Stalled peers where a merged chunk is missing: its aggregator, or ranks that the aggregator waits for."""
        ranks = [rank for rank in range(self.g.world) if rank != chunk.owner]
        keys = [self.g.keys.contribution(version, rank, chunk.label) for rank in ranks]
        sent = await all_of(self._exists(key) for key in keys)
        missing = [rank for rank, there in zip(ranks, sent, strict=True) if not there]
        return await self._contributors(version, version, missing, chunk)

    async def first_lost(self, rank: int, iteration: int) -> int | None:
        """See `Collective.first_lost`. Checks versions that this rank has stored, that cannot have been deleted, and that
        `rank` is not known to have applied."""
        first = max(self.g.status.intact, self.garbage.applied.get(rank, 0))
        found = await self._first_missing(range(first, iteration), self.mine)
        return None if found is None else found[0]

    async def is_stored(self, version: int, chunk: Chunk) -> bool:
        """Whether a merged chunk is in the channel, undamaged."""
        return await self._exists(self.g.keys.merged(version, chunk.label))

    async def owner(self, version: int, chunk: Chunk) -> StalledPeers:
        """The aggregator of a chunk as the stalled peer."""
        return StalledPeers(version, [chunk.owner], [self.g.keys.merged(version, chunk.label)])

    async def _contributors(self, version: int, iteration: int, ranks: list[int], chunk: Chunk) -> StalledPeers:
        """Stalled peers where contributions of `ranks` to an iteration are missing for a version; none: its aggregator."""
        others = [rank for rank in ranks if rank != self.g.rank]
        if others:
            keys = [self.g.keys.contribution(iteration, rank, chunk.label) for rank in others]
            return StalledPeers(iteration, others, keys)
        if ranks:  # this rank's own was lost, unless it is being sent
            return StalledPeers(iteration, () if (iteration, chunk.index) in self.unsent else ranks)
        # The last contribution may have arrived just now.
        return (await self.owner(version, chunk))._replace(grace_s=self._grace_s())

    async def _first_missing(self, versions: range, chunks: list[Chunk]) -> tuple[int, Chunk] | None:
        """The first version of which one of these chunks is missing, and that chunk."""
        wanted = [(version, chunk) for version in versions for chunk in chunks]
        there = await all_of(self.is_stored(version, chunk) for version, chunk in wanted)
        return next((w for w, found in zip(wanted, there, strict=True) if not found), None)

    def _grace_s(self) -> float:
        """Seconds, within the timeout, in which a peer that has just got what it waited for ends its iteration."""
        timeout_s = self.g.wait_timeout_s(1)
        return min(timeout_s, max(GRACE_SHARE * timeout_s, 1.5 * self.g.status.busy_s))

    async def _exists(self, key: str) -> bool:
        async with self._checks:
            return await self.g.channel.fetch(key) is not None
