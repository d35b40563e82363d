"""K-REDUCE without waiting (ASP): a version holds whatever has arrived, the last one what is left.

Every contribution is folded into exactly one version of each shard, whatever dies: see `chain`. Peers that are silent
for long are suspected although no rank waits for them yet, because the last version will wait for them.
"""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np

from ephemeron.training.collectives.chain import Marks, VersionChain
from ephemeron.training.collectives.group import Group, Reduced, StalledPeers
from ephemeron.training.collectives.kreduce import KReduce, Used
from ephemeron.training.collectives.pace import PeerPace
from ephemeron.training.collectives.pieces import Chunk
from ephemeron.training.collectives.state import CollectiveState
from ephemeron.training.tensors import Arrays, MessageHeader, unpack


class ArrivedReduce(KReduce):
    """See `Collective`.

    Args:
        group: who we are.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.chain = VersionChain([0] * group.world)
        """Chain of the shard that this rank reduces, if it reduces one."""
        self._read: dict[str, tuple[int, ...]] = {}
        """By shard, the marks after the last version that was applied."""
        self._next: dict[str, tuple[int, ...]] = {}
        """The same of the next version, as far as it was read."""
        self._paces: dict[str, PeerPace] = {}
        self._looked: dict[int, int] = {}
        """By aggregator, what `latest_iteration` said last."""
        self._predecessor_marks: Marks | None = None

    # -- aggregation --------------------------------------------------------------------------------------

    async def _reduce_chunk(self, version: int, piece: Chunk) -> None:
        """Whatever has arrived. Ranks in order, so ties are decided."""
        chain, rank = self.chain, self.g.rank
        before, bound = tuple(chain.folded), self.chain.bound(version)
        part, envelope = self._own.pop((version, piece.index))
        total, weight, flags = self._fold(None, part, envelope, 0.0, 0)
        chain.folded[rank] = version + 1
        wait = bound is not None or version == self.g.iterations - 1
        for other in range(self.g.world):
            until = self.g.iterations if bound is None else bound[other]
            while other != rank and chain.folded[other] < until:
                found = await self._arrived(chain.folded[other], other, piece, wait=wait)
                if found is None:
                    break
                total, weight, flags = self._fold(total, *found, weight, flags)
                chain.advance(other)
        marks = Marks(before, tuple(chain.folded))
        await self._publish(version, piece, total, weight, flags, self._held(marks), marks.numbers)

    async def _arrived(
        self, iteration: int, rank: int, piece: Chunk, *, wait: bool
    ) -> tuple[np.ndarray, MessageHeader] | None:
        loop = asyncio.get_running_loop()
        pace = self._pace(f"c.{rank}")
        if wait:
            found = await self._contribution(iteration, rank, piece)
            pace.record(loop.time())
            return found
        key = self.g.keys.contribution(iteration, rank, piece.label)
        began = loop.time()
        data = await self.g.channel.fetch(key)
        if data is None:
            if pace.is_late(loop.time(), self.g.silence_timeout_s()):
                await self.g.suspect(StalledPeers(iteration, [rank], [key]))
            return None
        pace.record(loop.time())
        self._record("aggregate", began)
        envelope, part = unpack(data, key=key)
        return part, envelope

    def _held(self, marks: Marks) -> Used:
        return {r: marks.folded(r) for r in range(self.g.world)}

    async def _continue_after(self, version: int, piece: Chunk, theirs: MessageHeader, used: Used) -> Used | None:
        marks = Marks.of(theirs.marks)
        if marks.before[self.g.rank] != version or not self._continues(marks, used):
            if theirs.attempt < self.g.attempt:
                return None
            await self.g.on_timeout(StalledPeers(version, ()))  # leaves: a newer attempt goes on
        self.chain.take_over(marks)
        return self._held(marks)

    def _continues(self, marks: Marks, used: Used) -> bool:
        return all(marks.before[r] == ts.start for r, ts in used.items() if isinstance(ts, range))

    # -- download -----------------------------------------------------------------------------------------

    async def wait(self, version: int) -> Reduced:
        merged = await super().wait(version)
        self._read.update(self._next)
        self._next.clear()
        return merged

    def _follows(self, piece: Chunk, envelope: MessageHeader) -> bool:
        marks = Marks.of(envelope.marks)
        if piece.owner != self.g.rank and self._read.get(piece.label, marks.before) != marks.before:
            return False
        self._next[piece.label] = marks.after
        self.g.on_message(piece.owner, envelope.busy_s)
        self._pace(f"m.{piece.owner}").record(asyncio.get_running_loop().time())
        return True

    async def _glance(self, vector: np.ndarray, version: int, piece: Chunk) -> int | None:
        found = await super()._glance(vector, version, piece)
        if found is None and piece.owner != self.g.rank:
            late = self._pace(f"m.{piece.owner}").is_late(asyncio.get_running_loop().time(), self.g.silence_timeout_s())
            if late and await self._is_stuck(version, piece.owner):
                await self.g.suspect(await self._stalled_owner(version, piece))
        return found

    async def _is_stuck(self, version: int, owner: int) -> bool:
        """Whether an aggregator is past a version that is not there, or has done nothing since the last look."""
        latest = await self.latest_iteration(owner)
        before, self._looked[owner] = self._looked.get(owner), latest
        return latest > version or latest == before

    async def _stalled_contributors(self, iteration: int, rank: int, key: str) -> StalledPeers:
        return StalledPeers(iteration, [rank], [key])  # no rank waits for a version before it contributes

    async def _stalled_for_shard(self, version: int, piece: Chunk) -> StalledPeers:
        if version < self.g.iterations - 1:
            return await self._stalled_owner(version, piece)
        read = self._read.get(piece.label, (0,) * self.g.world)
        sent = set(await self.g.channel.list(self.g.keys.exchanged))
        missing = [
            (t, r) for r in range(self.g.world) for t in range(read[r], self.g.iterations)
            if r != piece.owner and self.g.keys.contribution(t, r, piece.label) not in sent
        ]  # fmt: skip
        first = min((t for t, _ in missing), default=version)
        return await self._stalled_among(version, first, [r for t, r in missing if t == first], piece)

    async def latest_iteration(self, rank: int) -> int:
        """Latest iteration of which an object of a rank exists. Lists keys: only for waits that have timed out."""
        found = [read[rank] - 1 for read in self._read.values()]
        prefix = self.g.keys.exchanged
        for key in await self.g.channel.list(prefix):
            iteration, kind, *rest = key[len(prefix) :].split(".")
            if (kind == "c" and int(rest[0]) == rank) or (kind == "m" and int(rest[0]) == rank):
                found.append(int(iteration))
        return max(found, default=-1)

    # -- replacement --------------------------------------------------------------------------------------

    async def pending(self, iteration: int) -> tuple[bool, bool]:
        if not self.mine:
            sent = self.acknowledged(iteration + 1) > iteration
            return not sent, not sent
        (piece,) = self.mine
        data = await self.g.channel.fetch(self.g.keys.merged(iteration, piece.label))
        if data is not None:
            self._predecessor_marks = marks = self._marks_in(data, iteration, piece)
            self.chain.take_over(marks)
            return True, False
        await self._look_behind(iteration, piece)
        return True, True

    def _marks_in(self, data: memoryview, version: int, piece: Chunk) -> Marks:
        return Marks.of(unpack(data, key=self.g.keys.merged(version, piece.label))[0].marks)

    async def _look_behind(self, gap: int, piece: Chunk) -> None:
        """Versions that a predecessor has published behind a gap say where those in it end. Lists: once per replacement."""
        prefix = self.g.keys.exchanged
        for key in await self.g.channel.list(prefix):
            iteration, kind, label = key[len(prefix) :].split(".", 2)
            if kind == "m" and label == piece.label and int(iteration) > gap:
                data = await self.g.channel.fetch(key)
                if data is not None:
                    self.chain.found(int(iteration), self._marks_in(data, int(iteration), piece).before)

    def _used_by_predecessor(self, version: int, piece: Chunk) -> Used:
        assert self._predecessor_marks is not None
        return self._held(self._predecessor_marks)

    def acknowledged(self, iteration: int) -> int:
        if self.g.world == 1:
            return iteration
        none = (0,) * self.g.world
        others = [p for p in self.pieces if p not in self.mine]
        sent = min((self._read.get(p.label, none)[self.g.rank] for p in others), default=iteration)
        return min(iteration, sent, self._applied_elsewhere())

    def state(self) -> tuple[Arrays, CollectiveState]:
        arrays, state = super().state()
        return arrays, dataclasses.replace(state, folded=tuple(self.chain.folded), read=dict(self._read))

    def load(self, arrays: Arrays, state: CollectiveState) -> None:
        super().load(arrays, state)
        self.chain.folded = list(state.folded)
        self._read = dict(state.read)

    def _pace(self, peer: str) -> PeerPace:
        if peer not in self._paces:
            self._paces[peer] = PeerPace(asyncio.get_running_loop().time())
        return self._paces[peer]
