"""K-REDUCE (FasDL, sections 2.2, 3.2.1 and 4.2.2): a reduction through storage with any number of aggregators.

Every worker cuts its vector into K shards and uploads them; aggregator j downloads shard j of all others, sums in rank order,
and uploads the mean; every worker downloads the K merged shards. K = 1 is AllReduce, K = W is ScatterReduce. Requests per
iteration are those of equations 3-24 and 3-25, exactly: K·W puts and 2K·(W−1) gets, and polls where the store cannot wait.

The pipelined form cuts shards into chunks, so that upload, reduction and download overlap and both directions of the link are
busy (the idea of FuncPipe). It costs as many times more requests as there are chunks: use it for large models (47 MB and more)
on channels with cheap requests. Chunks are summed in the same order, so both forms give the same bits.

Messages hold sums over samples and the number of samples, so unequal batches stay unbiased.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from ephemeron.communication.channels.base import Buffer
from ephemeron.errors import KeyExists
from ephemeron.events import Phase
from ephemeron.training.collectives._tasks import RequestWindow, all_of
from ephemeron.training.collectives.chunks import Chunk, ChunkSum, chunks, in_flight
from ephemeron.training.collectives.garbage_collection import ObjectGC
from ephemeron.training.collectives.group import Collective, CollectiveState, Group, Reduced, StalledPeers
from ephemeron.training.collectives.object_receiver import ObjectReceiver
from ephemeron.training.collectives.stall_search import StallSearch
from ephemeron.training.collectives.sync_policy import UNBOUNDED
from ephemeron.training.tensors import Arrays, Compressor, Kind, MessageHeader, codec_by_name, pack, unpack

PREFETCHED = 4
"""Messages that an aggregator fetches ahead, however large: bounds its memory to PREFETCHED·S/K beside the sum."""
Used: TypeAlias = Mapping[int, Iterable[int]]
"""By rank, iterations whose contributions are in a chunk of a version."""


class _AlreadyReduced(Exception):
    """Another attempt of this rank has stored the merged chunk that is being made."""


class _Submission(NamedTuple):
    """Encoded contribution to an iteration."""

    payloads: list[tuple[Chunk, list[Buffer]]]
    weight: float
    flags: int


class KReduce(Collective):
    """K-REDUCE over a channel.

    Args:
        group: the ranks that reduce together, and this rank's place among them.
        chunk_size: elements per chunk of the pipelined form; None: the plain form.
    """

    def __init__(self, group: Group, *, chunk_size: int | None = None) -> None:
        self.g = group
        self.exclusive = not group.policy.deterministic
        """Two attempts of a rank may make different bytes: the first one that stores a version determines it."""
        self.overlaps = chunk_size is not None
        self.chunks = chunks(group.size, group.aggregators, chunk_size, group.rank)
        self.mine = [c for c in self.chunks if c.owner == group.rank]
        self.upward = Compressor(codec_by_name(group.compression), group.size, group.dtype)
        # Merged shards are compressed without error feedback: a replacement of the aggregator could not restore the
        # residual, and the bits of a run would depend on which functions died.
        down = codec_by_name("bf16" if group.compression == "int8" else group.compression)
        self.downward = Compressor(down, group.size, group.dtype)
        self.garbage = ObjectGC(group.world)
        self.stalled = self._stall_search()
        self._receiver = ObjectReceiver(group.channel, group.trace, poll_worth_s=group.poll_worth_s, on_timeout=group.on_timeout)
        self._reference = self._appeared = 0.0
        self._comparable = True
        """Whether times since the reference compare with those of earlier iterations."""
        self._submitted: dict[int, _Submission] = {}
        self._own: dict[tuple[int, int], tuple[np.ndarray, MessageHeader]] = {}
        self._merged: dict[tuple[int, int], asyncio.Future[tuple[np.ndarray, int]]] = {}
        self._here: set[int] = set()
        """Versions whose chunks are reduced by this invocation, not by a predecessor."""
        self._contested = False
        """Whether this invocation replaces another attempt of its rank, which may still run."""
        self._polled: dict[int, Reduced] = {}
        self._partial: tuple[int, Reduced, int] | None = None
        largest = max(c.stop - c.start for c in self.chunks) * group.dtype.itemsize
        self._window = in_flight(largest, at_least=PREFETCHED)
        # Apart, so that merged chunks do not queue behind contributions: the downlinks of all ranks depend on them.
        puts = in_flight(largest, at_least=2) if self.overlaps else len(self.chunks)
        self._put_slots = {"upload": asyncio.Semaphore(puts), "aggregate": asyncio.Semaphore(puts)}
        self._chunk_slots = asyncio.Semaphore(self._window)

    def _stall_search(self) -> StallSearch:
        return StallSearch(self.g, self.chunks, self.garbage)

    # -- upload -------------------------------------------------------------------------------------------

    def submit(self, iteration: int, vector: np.ndarray, weight: float, flags: int = 0) -> None:
        self._here.add(iteration)
        payloads: list[tuple[Chunk, list[Buffer]]] = []
        for chunk in self.chunks:
            part = vector[chunk.start : chunk.stop]
            payload = self.upward.encode(part, chunk.start, chunk.stop)
            if chunk.owner == self.g.rank:
                header = self._header("contribution", iteration, weight, flags)
                self._own[iteration, chunk.index] = (np.array(self.upward.round_trip(payload, part)), header)
            else:
                payloads.append((chunk, payload))
                self.stalled.unsent.add((iteration, chunk.index))
        self._submitted[iteration] = _Submission(payloads, weight, flags)

    async def upload(self, iteration: int) -> None:
        loop = asyncio.get_running_loop()
        submitted = self._submitted.pop(iteration)
        # Where all ranks wait for all, a late rank must not measure the others' arrivals from its own lateness.
        common = self._appeared if self.g.policy.waits_for_all else 0.0
        self._reference, self._appeared = common or loop.time(), 0.0
        self._comparable = bool(common) or not self.g.policy.waits_for_all
        await all_of(self._send(iteration, chunk, payload, submitted) for chunk, payload in submitted.payloads)
        if not (self.overlaps or common):  # nothing is awaited yet, and arrivals depend more on the end of the upload
            self._reference = loop.time()

    async def _send(self, iteration: int, chunk: Chunk, payload: list[Buffer], submitted: _Submission) -> None:
        key = self.g.keys.contribution(iteration, self.g.rank, chunk.label)
        async with self._put_slots["upload"]:
            # Packed only now: its time stamp is that of its put, and an idle link does not wait for checksums.
            header = self._header("contribution", iteration, submitted.weight, submitted.flags)
            await self._put("upload", key, self._pack(self.upward, header, chunk, payload))
        self.stalled.unsent.discard((iteration, chunk.index))

    # -- reduction ----------------------------------------------------------------------------------------

    async def reduce(self, iteration: int) -> None:
        if self.mine:
            for chunk in self.mine:
                self._future(iteration, chunk)
            await all_of(self._reduce_chunk(iteration, chunk) for chunk in self.mine)

    async def _reduce_chunk(self, version: int, chunk: Chunk) -> None:
        """Sums the contributions of all ranks, in rank order; a few are fetched ahead."""
        async with self._chunk_slots:
            # The other attempt may have merged it, and deleted the contributions: waiting for them would be in vain.
            if self._contested and await self.stalled.is_stored(version, chunk):
                return await self._take_merged(version, chunk)
            others = [r for r in range(self.g.world) if r != self.g.rank]
            ahead = RequestWindow([self._contribution(version, r, chunk) for r in others], self._window)
            try:
                total = ChunkSum()
                for rank in range(self.g.world):
                    own = rank == self.g.rank
                    self._add(total, *(self._own.pop((version, chunk.index)) if own else await ahead.next()))
            except _AlreadyReduced:
                return await self._take_merged(version, chunk)
            finally:
                ahead.cancel()
            await self._publish(version, chunk, total, {r: [version] for r in others})

    async def _contribution(self, iteration: int, rank: int, chunk: Chunk) -> tuple[np.ndarray, MessageHeader]:
        key = self.g.keys.contribution(iteration, rank, chunk.label)

        async def stalled() -> StalledPeers:
            if self.g.policy.waits_for_all and await self.stalled.is_stored(iteration, chunk):
                raise _AlreadyReduced
            return await self.stalled.contribution(iteration, rank, key)

        def decode(data: memoryview) -> tuple[MessageHeader, np.ndarray]:
            return unpack(data, key=key)

        (header, part), _ = await self._receiver.receive(
            key,
            f"c.{rank}.{chunk.label}",
            phase="aggregate",
            reference=self._reference if self._comparable else None,
            timeout_s=lambda: self.g.wait_timeout_s(1),
            stalled=stalled,
            decode=decode,
            sent_at=_sent_at,
        )
        return part, header

    async def _take_merged(self, version: int, chunk: Chunk) -> None:
        """Takes a chunk that another attempt has merged: the contributions to it may be deleted already."""
        key = self.g.keys.merged(version, chunk.label)
        deadline = asyncio.get_running_loop().time() + self.g.wait_timeout_s(1)
        header, part = unpack((await self.g.channel.get(key, deadline=deadline)).data, key=key)
        waiting = self._future(version, chunk)
        if not waiting.done():
            waiting.set_result((np.array(part), header.flags))
        self._own.pop((version, chunk.index), None)
        self._record_objects(version, chunk, self._used_by_predecessor(version, chunk))

    def _add(self, total: ChunkSum, part: np.ndarray, header: MessageHeader) -> None:
        if header.rank != self.g.rank:
            self.g.on_message(header.rank, header.busy_s, header.spent_usd)
        self.garbage.update(header.rank, applied=header.applied, durable=header.durable)
        total.add(part, header)

    async def _publish(self, version: int, chunk: Chunk, total: ChunkSum, used: Used, marks: tuple[int, ...] = ()) -> None:
        """Stores the mean of a chunk, made of the iterations `used`, by rank."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        mean = total.mean()
        payload = self.downward.encode(mean, chunk.start, chunk.stop)
        self._record("aggregate", began)
        theirs: tuple[np.ndarray, int] | None = None
        if self.g.world > 1:
            async with self._put_slots["aggregate"]:
                header = self._header("merged", version, total.weight, total.flags, marks)
                message = self._pack(self.downward, header, chunk, payload)
                theirs, used = await self._put_merged(version, chunk, message, used)
        self._appeared = max(self._appeared, loop.time())
        waiting = self._merged.get((version, chunk.index))
        if waiting is not None and not waiting.done():
            waiting.set_result(theirs or (self.downward.round_trip(payload, mean), total.flags))
        self._record_objects(version, chunk, used)

    async def _put_merged(
        self, version: int, chunk: Chunk, message: list[Buffer], used: Used
    ) -> tuple[tuple[np.ndarray, int] | None, Used]:
        """Stores a merged chunk, unless another attempt of this rank has.

        Returns:
            Vector and flags of the other attempt's chunk, or None; and the iterations that the stored one holds, by rank.
        """
        key = self.g.keys.merged(version, chunk.label)
        try:
            await self._put("aggregate", key, message, create=self.exclusive)
            return None, used
        except KeyExists:
            data = await self.g.channel.fetch(key)
        if data is None:  # all ranks have it already, and it was deleted
            await self.g.on_timeout(StalledPeers(version, ()))
            return None, used
        header, part = unpack(data, key=key)
        taken = await self._continue_after(version, chunk, header, used)
        if taken is None:
            await self._put("aggregate", key, message)
            return None, used
        return (np.array(part), header.flags), taken

    async def _continue_after(self, version: int, chunk: Chunk, theirs: MessageHeader, used: Used) -> Used | None:
        """Iterations, by rank, in another attempt's merged chunk; None: that chunk does not count."""
        return used

    def _record_objects(self, version: int, chunk: Chunk, used: Used) -> None:
        """From now on this rank is to delete these objects, when they have expired."""
        keys = self.g.keys
        contributions = [keys.contribution(t, r, chunk.label) for r, ts in used.items() if r != self.g.rank for t in ts]
        merged = [keys.merged(version, chunk.label)] if self.g.world > 1 else []
        self.garbage.record(version, contributions, merged)

    # -- download -----------------------------------------------------------------------------------------

    async def wait(self, version: int) -> Reduced:
        reduced = self._polled.pop(version, None)
        if reduced is None:
            vector, flags, done = self._found_so_far(version)
            self._partial = None
            for found in await all_of(self._merged_into(vector, version, chunk) for chunk in self.chunks[done:]):
                flags |= found
            reduced = Reduced(vector, flags)
        for chunk in self.mine:
            self._merged.pop((version, chunk.index), None)
        self._here.discard(version)
        return reduced

    def _found_so_far(self, version: int) -> tuple[np.ndarray, int, int]:
        """Vector, flags and number of chunks that an earlier poll has found of a version."""
        if self._partial is not None and self._partial[0] == version:
            _, (vector, flags), done = self._partial
            return vector, flags, done
        return np.empty(self.g.size, dtype=self.g.dtype), 0, 0

    async def _merged_into(self, vector: np.ndarray, version: int, chunk: Chunk) -> int:
        """Waits for a merged chunk, copies it into the vector, and returns its flags."""
        if chunk.owner == self.g.rank and version in self._here:
            part, flags = await self._future(version, chunk)
            vector[chunk.start : chunk.stop] = part
            return flags
        key = self.g.keys.merged(version, chunk.label)

        def decode(data: memoryview) -> tuple[MessageHeader, np.ndarray] | None:
            header, part = unpack(data, key=key)
            return (header, part) if self._counts(chunk, header) else None

        (header, part), appeared = await self._receiver.receive(
            key,
            f"m.{chunk.label}",
            phase="download",
            reference=self._reference if self._comparable else None,
            timeout_s=lambda: self.g.wait_timeout_s(2),
            stalled=lambda: self.stalled.merged(version, chunk),
            decode=decode,
            sent_at=_sent_at,
        )
        self._appeared = max(self._appeared, appeared or 0.0)
        vector[chunk.start : chunk.stop] = part
        self.g.on_message(chunk.owner, header.busy_s, header.spent_usd)
        return header.flags

    def _counts(self, chunk: Chunk, header: MessageHeader) -> bool:
        """Whether a merged chunk of the next version counts; it is read then."""
        return True

    async def poll(self, version: int) -> bool:
        if version in self._polled:
            return True
        vector, flags, done = self._found_so_far(version)
        for chunk in self.chunks[done:]:
            found = await self._poll_chunk(vector, version, chunk)
            if found is None:
                self._partial = (version, Reduced(vector, flags), done)
                return False
            flags, done = flags | found, done + 1
        self._polled[version], self._partial = Reduced(vector, flags), None
        return True

    async def _poll_chunk(self, vector: np.ndarray, version: int, chunk: Chunk) -> int | None:
        """Like `_merged_into`, without waiting; None: the chunk is missing."""
        if chunk.owner == self.g.rank and version in self._here:
            made = self._merged.get((version, chunk.index))
            if made is None or not made.done():
                return None
            vector[chunk.start : chunk.stop], flags = made.result()
            return flags
        key = self.g.keys.merged(version, chunk.label)
        began = asyncio.get_running_loop().time()
        data = await self.g.channel.fetch(key)
        if data is None:
            return None
        header, part = unpack(data, key=key)
        self._record("download", began)
        if not self._counts(chunk, header):
            return None
        vector[chunk.start : chunk.stop] = part
        self.g.on_message(chunk.owner, header.busy_s, header.spent_usd)
        return header.flags

    # -- replacement --------------------------------------------------------------------------------------

    async def pending(self, iteration: int) -> tuple[bool, bool]:
        self._contested = True
        # A complete version holds the contributions of all ranks, this one's included.
        complete = await self.poll(iteration)
        return not complete, not complete

    def take_over(self, iteration: int, *, uploaded: bool) -> None:
        if uploaded:
            del self._submitted[iteration]
        self._here.discard(iteration)
        for chunk in self.mine:
            self._own.pop((iteration, chunk.index), None)
            self._record_objects(iteration, chunk, self._used_by_predecessor(iteration, chunk))

    def _used_by_predecessor(self, version: int, chunk: Chunk) -> Used:
        """Iterations, by rank, in a chunk that a predecessor has merged."""
        return {r: [version] for r in range(self.g.world)}

    def acknowledged(self, iteration: int) -> int:
        if self.g.world == 1:
            return iteration
        return min(iteration, self.g.status.applied, self._applied_elsewhere())

    def _applied_elsewhere(self) -> int:
        """Number of versions that every other rank is known to have applied."""
        if not self.mine:
            return UNBOUNDED
        return min(self.garbage.applied.get(r, 0) for r in range(self.g.world) if r != self.g.rank)

    async def stalled_before(self, iteration: int, rank: int, key: str) -> StalledPeers:
        return await self.stalled.contribution(iteration, rank, key)

    async def first_lost(self, rank: int, iteration: int) -> int | None:
        return await self.stalled.first_lost(rank, iteration)

    def private_arrays(self) -> Arrays:
        return {"residual": self.upward.residual.copy()}

    def state(self) -> tuple[Arrays, CollectiveState]:
        state = CollectiveState(garbage=self.garbage.state(), arrivals=self._receiver.state())
        return {"residual": self.upward.residual.copy()}, state

    def load(self, arrays: Arrays, state: CollectiveState) -> None:
        self.upward.residual = arrays["residual"]
        self.garbage.load(state.garbage)
        self._receiver.load(state.arrivals)

    def durable(self) -> int:
        known = {**self.garbage.durable, self.g.rank: self.g.status.durable}
        return min(known.values()) if len(known) == self.g.world else 0

    async def collect_garbage(self) -> None:
        self.garbage.update(self.g.rank, applied=self.g.status.applied, durable=self.g.status.durable)
        keys = self.garbage.expired()
        if keys:
            await self.g.channel.delete(keys)

    # -- messages -----------------------------------------------------------------------------------------

    def _header(self, kind: Kind, iteration: int, weight: float, flags: int, marks: tuple[int, ...] = ()) -> MessageHeader:
        return MessageHeader(
            kind=kind,
            rank=self.g.rank,
            attempt=self.g.attempt,
            iteration=iteration,
            shard=0,
            weight=weight,
            applied=self.g.status.applied,
            durable=self.g.status.durable,
            flags=flags,
            sent_at=self.g.trace.run_time(),
            busy_s=self.g.status.busy_s,
            spent_usd=self.g.status.spent_usd,
            marks=marks,
        )

    def _pack(self, by: Compressor, header: MessageHeader, chunk: Chunk, payload: list[Buffer]) -> list[Buffer]:
        header = dataclasses.replace(header, shard=chunk.owner)
        return pack(header, payload, codec=by.codec, dtype=self.g.dtype, elements=chunk.stop - chunk.start)

    def _future(self, version: int, chunk: Chunk) -> asyncio.Future[tuple[np.ndarray, int]]:
        key = (version, chunk.index)
        if key not in self._merged:
            self._merged[key] = asyncio.get_running_loop().create_future()
        return self._merged[key]

    async def _put(self, phase: Phase, key: str, message: list[Buffer], *, create: bool = False) -> None:
        began = asyncio.get_running_loop().time()
        await self.g.channel.put(key, message, create=create)
        self._record(phase, began)

    def _record(self, phase: Phase, began: float) -> None:
        self.g.trace.record(phase, began, asyncio.get_running_loop().time())


def _sent_at(message: tuple[MessageHeader, np.ndarray]) -> float:
    return message[0].sent_at
