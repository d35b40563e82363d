"""K-REDUCE for ASP and HSP: a version holds the contributions that have arrived, and the last one before a barrier holds the rest.

Every contribution is folded into exactly one version of each shard, whichever functions die: see `chain`. A peer that is silent
for long is suspected although no rank waits for it, because the last version will have to wait. Barriers are the end of the run
and, under HSP, the ends of epochs.

A version is the sum of its contributions divided by the samples of as many contributions as there are ranks. So a contribution counts as much
alone in a version as among others, and an epoch moves the parameters as far as under BSP. As a mean of what has arrived, a step of one
contribution was as long as one of all, and late contributions that were merged at a barrier were lost but for one step.

The chain of one shard's versions in ASP runs, whose versions hold the contributions that have arrived. Pure.

Version v of a shard holds, for every rank, the iterations from where version v − 1 ended: a chain, in which each
contribution has one place. A published version states, for every rank, how many of its iterations were folded in before it,
and with it. Three rules keep the chain unique, whichever functions die:

- A version is published by a create-only put: either an aggregator or its replacement makes it, and the other one
  continues after it.
- A replacement that finds a gap (a put that was lost) fills it with exactly the contributions that the version after the
  gap does not hold: all of them are still stored, because no rank has applied the version that was lost.
- A version that does not continue the one before it was made by an attempt that had been superseded. Readers ignore
  it, and the newer attempt overwrites it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ephemeron.training.collectives.chunks import Chunk, ChunkSum
from ephemeron.training.collectives.garbage_collection import ObjectGC
from ephemeron.training.collectives.group import CollectiveState, Group, Reduced, StalledPeers
from ephemeron.training.collectives.kreduce import KReduce, Used
from ephemeron.training.collectives.pace import PeerPace
from ephemeron.training.collectives.stall_search import StallSearch
from ephemeron.training.tensors import Arrays, MessageHeader, unpack


class ArrivedStallSearch(StallSearch):
    """Search for stalled peers where no rank waits for a version before it contributes.

    Args:
        group, chunks, garbage: see `StallSearch`.
        read: by shard, numbers of iterations folded in after the last version that was applied, by rank.
    """

    def __init__(self, group: Group, chunks: list[Chunk], garbage: ObjectGC, read: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(group, chunks, garbage)
        self._read = read

    async def contribution(self, iteration: int, rank: int, key: str) -> StalledPeers:
        barrier = self.g.policy.barrier_before(iteration)
        lost = await self.first_lost(rank, barrier)  # without it that rank is still before the barrier
        if lost is not None:
            return StalledPeers(lost, [self.g.rank])
        return StalledPeers(iteration, [rank], [key])

    async def merged(self, version: int, chunk: Chunk) -> StalledPeers:
        barrier = self.g.policy.barrier_after(version, self.g.iterations)
        if version < barrier - 1:
            return await self.owner(version, chunk)
        read = self._read.get(chunk.label, (self.g.policy.first,) * self.g.world)
        sent = set(await self.g.channel.list(self.g.keys.exchanged))
        missing = [
            (t, r)
            for r in range(self.g.world)
            for t in range(read[r], barrier)
            if r != chunk.owner and self.g.keys.contribution(t, r, chunk.label) not in sent
        ]
        first = min((t for t, _ in missing), default=version)
        return await self._contributors(version, first, [r for t, r in missing if t == first], chunk)

    async def owner(self, version: int, chunk: Chunk) -> StalledPeers:
        """The aggregator of a chunk as the stalled peer; none if the chunk has arrived since the wait timed out."""
        key = self.g.keys.merged(version, chunk.label)
        data = await self.g.channel.fetch(key)
        if data is None:
            return await super().owner(version, chunk)
        if self.counts(chunk, Marks.of(unpack(data, key=key)[0].marks)):
            return StalledPeers(version, ())
        return StalledPeers(version, [chunk.owner])  # waiting for that key would be in vain

    def counts(self, chunk: Chunk, marks: Marks) -> bool:
        """Whether a merged chunk of the next version continues the one that was applied."""
        return chunk.owner == self.g.rank or self._read.get(chunk.label, marks.before) == marks.before


class ArrivedReduce(KReduce):
    """See `Collective`.

    Args:
        group: see `KReduce`.
    """

    stalled: ArrivedStallSearch

    def __init__(self, group: Group) -> None:
        self._read: dict[str, tuple[int, ...]] = {}
        """By shard, the marks after the last version that was applied."""
        self._next: dict[str, tuple[int, ...]] = {}
        """The same of the next version, as far as it was read."""
        super().__init__(group)
        self.chain = VersionChain([group.policy.first] * group.world)
        """Chain of the shard that this rank reduces, if it reduces one."""
        self._paces: dict[str, PeerPace] = {}
        self._looked: dict[int, int] = {}
        """By aggregator, the last result of `latest_iteration`."""
        self._predecessor_marks: Marks | None = None

    def _stall_search(self) -> ArrivedStallSearch:
        return ArrivedStallSearch(self.g, self.chunks, self.garbage, self._read)

    # -- reduction ----------------------------------------------------------------------------------------

    async def _reduce_chunk(self, version: int, chunk: Chunk) -> None:
        """Sums the contributions that have arrived, by rank, so that the order is determined."""
        chain, rank = self.chain, self.g.rank
        before, bound = tuple(chain.folded), self.chain.bound(version)
        total = ChunkSum()
        self._add(total, *self._own.pop((version, chunk.index)))
        chain.folded[rank] = version + 1
        barrier = self.g.policy.barrier_after(version, self.g.iterations)
        wait = bound is not None or version == barrier - 1
        for other in range(self.g.world):
            until = barrier if bound is None else min(bound[other], barrier)
            while other != rank and chain.folded[other] < until:
                found = await self._arrived(chain.folded[other], other, chunk, wait=wait)
                if found is None:
                    break
                self._add(total, *found)
                chain.advance(other)
        marks = Marks(before, tuple(chain.folded))
        total.weight *= self.g.world / marks.contributions
        await self._publish(version, chunk, total, self._folded(marks), marks.numbers)

    async def _arrived(self, iteration: int, rank: int, chunk: Chunk, *, wait: bool) -> tuple[np.ndarray, MessageHeader] | None:
        loop = asyncio.get_running_loop()
        pace = self._pace(f"c.{rank}")
        if wait:
            found = await self._contribution(iteration, rank, chunk)
            pace.record(loop.time())
            return found
        key = self.g.keys.contribution(iteration, rank, chunk.label)
        began = loop.time()
        data = await self.g.channel.fetch(key)
        if data is None:
            if pace.is_late(loop.time(), self.g.silence_timeout_s()):
                await self.g.suspect(StalledPeers(iteration, [rank], [key]))
            return None
        pace.record(loop.time())
        self._record("aggregate", began)
        header, part = unpack(data, key=key)
        return part, header

    def _folded(self, marks: Marks) -> Used:
        return {r: marks.folded(r) for r in range(self.g.world)}

    async def _continue_after(self, version: int, chunk: Chunk, theirs: MessageHeader, used: Used) -> Used | None:
        marks = Marks.of(theirs.marks)
        if marks.before[self.g.rank] != version or not self._continues(marks, used):
            if theirs.attempt < self.g.attempt:
                return None
            await self.g.on_timeout(StalledPeers(version, ()))  # ends this invocation: a newer attempt goes on
        self.chain.take_over(marks)
        return self._folded(marks)

    def _continues(self, marks: Marks, used: Used) -> bool:
        return all(marks.before[r] == ts.start for r, ts in used.items() if isinstance(ts, range))

    # -- download -----------------------------------------------------------------------------------------

    async def wait(self, version: int) -> Reduced:
        reduced = await super().wait(version)
        self._read.update(self._next)
        self._next.clear()
        return reduced

    def _counts(self, chunk: Chunk, header: MessageHeader) -> bool:
        marks = Marks.of(header.marks)
        if not self.stalled.counts(chunk, marks):
            return False
        self._next[chunk.label] = marks.after
        self.g.on_message(chunk.owner, header.busy_s, header.spent_usd)
        self._pace(f"m.{chunk.owner}").record(asyncio.get_running_loop().time())
        return True

    async def _poll_chunk(self, vector: np.ndarray, version: int, chunk: Chunk) -> int | None:
        found = await super()._poll_chunk(vector, version, chunk)
        if found is None and chunk.owner != self.g.rank:
            now = asyncio.get_running_loop().time()
            late = self._pace(f"m.{chunk.owner}").is_late(now, self.g.silence_timeout_s())
            if late and await self._is_stuck(version, chunk.owner):
                await self.g.suspect(await self.stalled.owner(version, chunk))
        return found

    async def _is_stuck(self, version: int, owner: int) -> bool:
        """Whether an aggregator is past a version that is missing, or has made no progress since the last look."""
        latest = await self.latest_iteration(owner)
        before, self._looked[owner] = self._looked.get(owner), latest
        return latest > version or latest == before

    async def latest_iteration(self, rank: int) -> int:
        """See `Collective`. Lists: called only after a wait has timed out."""
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
        (chunk,) = self.mine
        data = await self.g.channel.fetch(self.g.keys.merged(iteration, chunk.label))
        if data is not None:
            self._predecessor_marks = marks = self._marks_in(data, iteration, chunk)
            self.chain.take_over(marks)
            return True, False
        await self._find_later(iteration, chunk)
        return True, True

    def _marks_in(self, data: memoryview, version: int, chunk: Chunk) -> Marks:
        return Marks.of(unpack(data, key=self.g.keys.merged(version, chunk.label))[0].marks)

    async def _find_later(self, gap: int, chunk: Chunk) -> None:
        """Finds versions that a predecessor has published behind a gap: they bound those in it. Lists: once per replacement."""
        prefix = self.g.keys.exchanged
        for key in await self.g.channel.list(prefix):
            iteration, kind, label = key[len(prefix) :].split(".", 2)
            if kind == "m" and label == chunk.label and int(iteration) > gap:
                data = await self.g.channel.fetch(key)
                if data is not None:
                    self.chain.found(int(iteration), self._marks_in(data, int(iteration), chunk).before)

    def _used_by_predecessor(self, version: int, chunk: Chunk) -> Used:
        assert self._predecessor_marks is not None
        return self._folded(self._predecessor_marks)

    def acknowledged(self, iteration: int) -> int:
        if self.g.world == 1:
            return iteration
        none = (self.g.policy.first,) * self.g.world
        others = [c for c in self.chunks if c not in self.mine]
        sent = min((self._read.get(c.label, none)[self.g.rank] for c in others), default=iteration)
        return min(iteration, sent, self._applied_elsewhere())

    def state(self) -> tuple[Arrays, CollectiveState]:
        arrays, state = super().state()
        return arrays, dataclasses.replace(state, folded=tuple(self.chain.folded), read=dict(self._read))

    def load(self, arrays: Arrays, state: CollectiveState) -> None:
        super().load(arrays, state)
        self.chain.folded = list(state.folded)
        self._read.clear()
        self._read.update(state.read)

    def _pace(self, peer: str) -> PeerPace:
        if peer not in self._paces:
            self._paces[peer] = PeerPace(asyncio.get_running_loop().time())
        return self._paces[peer]


# -- the chain of one shard's versions in ASP runs ----------------------------------------------------------------


class Marks(NamedTuple):
    """Numbers of iterations folded in, by rank."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Marks:
        """Marks from one sequence, as in a message; the inverse of `numbers`."""
        half = len(numbers) // 2
        return cls(tuple(numbers[:half]), tuple(numbers[half:]))

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.before + self.after

    @property
    def contributions(self) -> int:
        """Contributions in this version."""
        return sum(self.after) - sum(self.before)

    def folded(self, rank: int) -> range:
        """Iterations of a rank in this version."""
        return range(self.before[rank], self.after[rank])


@dataclass(slots=True)
class VersionChain:
    """An aggregator's position in the chain of its shard.

    Args:
        folded: by rank, iterations folded in so far.
    """

    folded: list[int]
    later: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Versions that a predecessor has published behind a gap, ascending, each with its marks before."""

    def found(self, version: int, before: Sequence[int]) -> None:
        """Takes in that a version behind the next one exists."""
        self.later = sorted({*self.later, (version, tuple(before))})

    def bound(self, version: int) -> tuple[int, ...] | None:
        """By rank, where a version has to end because a later one exists; None: it may end anywhere."""
        return next((before for later, before in self.later if later > version), None)

    def advance(self, rank: int) -> None:
        """Takes in that the next contribution of a rank was folded in."""
        self.folded[rank] += 1

    def take_over(self, marks: Marks) -> None:
        """Continues after a version that another attempt of this rank has published."""
        self.folded = list(marks.after)
