"""K-REDUCE (FasDL, sections 2.2, 3.2.1 and 4.2.2): a reduction through storage with any number of aggregators.

Every worker cuts its vector into K shards and uploads them; aggregator j downloads shard j of everybody else,
sums in rank order, and uploads the mean; everybody downloads the K merged shards. K = 1 is AllReduce, K = W is
ScatterReduce. Requests per iteration are those of equations 3-24 and 3-25, exactly: K·W puts and 2K·(W−1)
gets, and polls where the store cannot wait.

The pipelined form cuts shards into chunks so that upload, reduction and download overlap and both directions
of the link are busy (the idea of FuncPipe). It costs as many times more requests as there are chunks: use it
for large models (47 MB and more) on channels with cheap requests. Chunks are summed in the same order, so both
forms give the same bits.

Messages hold sums over samples and say over how many, so unequal batches stay unbiased.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from ephemeron.communication.channels.base import Buffer
from ephemeron.errors import KeyExists
from ephemeron.events import Phase
from ephemeron.training.collectives._tasks import RequestWindow, all_of
from ephemeron.training.collectives.garbage_collection import ObjectGC
from ephemeron.training.collectives.group import GRACE_SHARE, Collective, Group, Reduced, StalledPeers
from ephemeron.training.collectives.object_wait import wait_for_object
from ephemeron.training.collectives.pieces import Chunk, pieces, under_way
from ephemeron.training.collectives.poll_schedule import ArrivalPredictor
from ephemeron.training.collectives.state import CollectiveState
from ephemeron.training.collectives.sync_policy import UNBOUNDED
from ephemeron.training.tensors import Arrays, Compressor, MessageHeader, codec_by_name, pack, unpack

GATHERED = 4
"""Messages that an aggregator fetches ahead, however large: bounds its memory to GATHERED·S/K beside the sum."""
Used: TypeAlias = Mapping[int, Iterable[int]]
"""By rank, iterations whose contributions are in a share of a version."""


class _AlreadyReduced(Exception):
    """Another attempt of this rank has made the share that is being made."""


class _IterationPayloads(NamedTuple):
    """Payloads of one iteration."""

    payloads: list[tuple[Chunk, list[Buffer]]]
    weight: float
    flags: int


class KReduce(Collective):
    """K-REDUCE over a channel.

    Args:
        group: who we are.
        chunk: elements per chunk for the pipelined form; None for the plain one.
    """

    def __init__(self, group: Group, *, chunk: int | None = None) -> None:
        self.g = group
        self.exclusive = not group.policy.deterministic
        """Two attempts of a rank would not publish the same bytes: the first one to publish a version has made it."""
        self.overlaps = chunk is not None
        self.pieces = pieces(group.size, group.aggregators, chunk, group.rank)
        self.mine = [p for p in self.pieces if p.owner == group.rank]
        self.upward = Compressor(codec_by_name(group.compression), group.size, group.dtype)
        # Merged shards are compressed without memory: an aggregator's residual could not be made again by its
        # replacement, and the bits of a run would depend on who died.
        down = codec_by_name("bf16" if group.compression == "int8" else group.compression)
        self.downward = Compressor(down, group.size, group.dtype)
        self.garbage = ObjectGC(group.world)
        self._expect = ArrivalPredictor(group.channel.traits.latency_s, group.poll_worth_s)
        self._reference = self._appeared = 0.0
        self._comparable = True
        """Whether times since the reference mean what they meant in earlier iterations."""
        self._submitted: dict[int, _IterationPayloads] = {}
        self._unsent: set[tuple[int, int]] = set()
        """Iterations and pieces whose contribution is on its way."""
        self._own: dict[tuple[int, int], tuple[np.ndarray, MessageHeader]] = {}
        self._merged: dict[tuple[int, int], asyncio.Future[tuple[np.ndarray, int]]] = {}
        self._here: set[int] = set()
        """Versions whose share is reduced by this invocation, not by a predecessor."""
        self._polled: dict[int, Reduced] = {}
        self._partial: tuple[int, Reduced, int] | None = None
        largest = max(p.stop - p.start for p in self.pieces) * group.dtype.itemsize
        self._window = under_way(largest, at_least=GATHERED)
        # Apart, so that merged chunks need not queue behind contributions: everybody's downlink depends on them.
        puts = under_way(largest, at_least=2) if self.overlaps else len(self.pieces)
        self._slots = {"upload": asyncio.Semaphore(puts), "aggregate": asyncio.Semaphore(puts)}
        self._piece_slots = asyncio.Semaphore(self._window)
        self._looks = asyncio.Semaphore(GATHERED)

    # -- upload -------------------------------------------------------------------------------------------

    def submit(self, iteration: int, vector: np.ndarray, weight: float, flags: int = 0) -> None:
        self._here.add(iteration)
        payloads: list[tuple[Chunk, list[Buffer]]] = []
        for piece in self.pieces:
            part = vector[piece.start : piece.stop]
            payload = self.upward.encode(part, piece.start, piece.stop)
            if piece.owner == self.g.rank:
                envelope = self._envelope("contribution", iteration, weight, flags)
                self._own[iteration, piece.index] = (np.array(self.upward.round_trip(payload, part)), envelope)
            else:
                payloads.append((piece, payload))
                self._unsent.add((iteration, piece.index))
        self._submitted[iteration] = _IterationPayloads(payloads, weight, flags)

    async def upload(self, iteration: int) -> None:
        loop = asyncio.get_running_loop()
        submitted = self._submitted.pop(iteration)
        # Where all ranks wait for all, a late rank must not measure the others from its own late start.
        common = self._appeared if self.g.policy.waits_for_all else 0.0
        self._reference, self._appeared = common or loop.time(), 0.0
        self._comparable = bool(common) or not self.g.policy.waits_for_all
        await all_of(self._send(iteration, piece, payload, submitted) for piece, payload in submitted.payloads)
        if not (self.overlaps or common):  # no rank waits yet, and later steps depend more on the end of the upload
            self._reference = loop.time()

    async def _send(self, iteration: int, piece: Chunk, payload: list[Buffer], submitted: _IterationPayloads) -> None:
        key = self.g.keys.contribution(iteration, self.g.rank, piece.label)
        async with self._slots["upload"]:
            # Packed only now: its time stamp is that of its put, and a link that is idle does not wait for checksums.
            envelope = self._envelope("contribution", iteration, submitted.weight, submitted.flags)
            await self._put("upload", key, self._pack(self.upward, envelope, piece, payload))
        self._unsent.discard((iteration, piece.index))

    # -- aggregation --------------------------------------------------------------------------------------

    async def reduce(self, iteration: int) -> None:
        if self.mine:
            for piece in self.mine:
                self._future(iteration, piece)
            await all_of(self._reduce_chunk(iteration, piece) for piece in self.mine)

    async def _reduce_chunk(self, version: int, piece: Chunk) -> None:
        """Every rank's contribution, in rank order; a few are fetched ahead."""
        async with self._piece_slots:
            others = [r for r in range(self.g.world) if r != self.g.rank]
            ahead = RequestWindow([self._contribution(version, r, piece) for r in others], self._window)
            try:
                total, weight, flags = None, 0.0, 0
                for rank in range(self.g.world):
                    if rank == self.g.rank:
                        part, envelope = self._own.pop((version, piece.index))
                    else:
                        part, envelope = await ahead.next()
                    total, weight, flags = self._fold(total, part, envelope, weight, flags)
            except _AlreadyReduced:
                return await self._take(version, piece)
            finally:
                ahead.cancel()
            assert total is not None
            await self._publish(version, piece, total, weight, flags, {r: [version] for r in others})

    async def _take(self, version: int, piece: Chunk) -> None:
        """Goes on with a share that another attempt has made: what it was made of may be gone."""
        key = self.g.keys.merged(version, piece.label)
        data = (
            await self.g.channel.get(key, deadline=asyncio.get_running_loop().time() + self.g.wait_timeout_s(1))
        ).data
        envelope, part = unpack(data, key=key)
        waiting = self._future(version, piece)
        if not waiting.done():
            waiting.set_result((np.array(part), envelope.flags))
        self._own.pop((version, piece.index), None)
        self._kept(version, piece, self._used_by_predecessor(version, piece))

    def _fold(
        self, total: np.ndarray | None, part: np.ndarray, envelope: MessageHeader, weight: float, flags: int
    ) -> tuple[np.ndarray, float, int]:
        if envelope.rank != self.g.rank:
            self.g.on_message(envelope.rank, envelope.busy_s)
        self.garbage.update(envelope.rank, applied=envelope.applied, durable=envelope.durable)
        if total is None:
            total = np.array(part)
        else:
            total += part
        return total, weight + envelope.weight, flags | envelope.flags

    async def _publish(
        self, version: int, piece: Chunk, total: np.ndarray, weight: float, flags: int, used: Used,
        marks: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """Makes this rank's share of a version from the sum of the iterations `used`, by rank."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        if weight > 0:
            total /= total.dtype.type(weight)
        payload = self.downward.encode(total, piece.start, piece.stop)
        self._record("aggregate", began)
        theirs: tuple[np.ndarray, int] | None = None
        if self.g.world > 1:
            async with self._slots["aggregate"]:
                envelope = self._envelope("merged", version, weight, flags, marks)
                message = self._pack(self.downward, envelope, piece, payload)
                theirs, used = await self._put_merged(version, piece, message, used)
        self._appeared = max(self._appeared, loop.time())
        waiting = self._merged.get((version, piece.index))
        if waiting is not None and not waiting.done():
            waiting.set_result(theirs or (self.downward.round_trip(payload, total), flags))
        self._kept(version, piece, used)

    async def _put_merged(
        self, version: int, piece: Chunk, message: list[Buffer], used: Used
    ) -> tuple[tuple[np.ndarray, int] | None, Used]:
        """Stores a share of a version, unless another attempt of this rank has.

        Returns:
            Vector and flags of the other attempt's, or None; and the iterations that the version holds, by rank.
        """
        key = self.g.keys.merged(version, piece.label)
        try:
            await self._put("aggregate", key, message, create=self.exclusive)
            return None, used
        except KeyExists:
            data = await self.g.channel.fetch(key)
        if data is None:  # everybody has it already, and it was deleted
            await self.g.on_timeout(StalledPeers(version, ()))
            return None, used
        envelope, part = unpack(data, key=key)
        taken = await self._continue_after(version, piece, envelope, used)
        if taken is None:
            await self._put("aggregate", key, message)
            return None, used
        return (np.array(part), envelope.flags), taken

    async def _continue_after(self, version: int, piece: Chunk, theirs: MessageHeader, used: Used) -> Used | None:
        """Iterations, by rank, that another attempt's share of a version holds; None: that share does not count."""
        return used

    def _kept(self, version: int, piece: Chunk, used: Used) -> None:
        """These objects are this rank's to delete, later."""
        keys = self.g.keys
        contributions = [keys.contribution(t, r, piece.label) for r, ts in used.items() if r != self.g.rank for t in ts]
        merged = [keys.merged(version, piece.label)] if self.g.world > 1 else []
        self.garbage.record(version, contributions, merged)

    # -- download -----------------------------------------------------------------------------------------

    async def wait(self, version: int) -> Reduced:
        seen = self._polled.pop(version, None)
        if seen is None:
            vector, flags, done = self._begun(version)
            self._partial = None
            for found in await all_of(self._merged_into(vector, version, piece) for piece in self.pieces[done:]):
                flags |= found
            seen = Reduced(vector, flags)
        for piece in self.mine:
            self._merged.pop((version, piece.index), None)
        self._here.discard(version)
        return seen

    def _begun(self, version: int) -> tuple[np.ndarray, int, int]:
        """Part of a version that an earlier poll found: vector, flags, and number of pieces."""
        if self._partial is not None and self._partial[0] == version:
            _, (vector, flags), done = self._partial
            return vector, flags, done
        return np.empty(self.g.size, dtype=self.g.dtype), 0, 0

    async def _merged_into(self, vector: np.ndarray, version: int, piece: Chunk) -> int:
        if piece.owner == self.g.rank and version in self._here:
            part, flags = await self._future(version, piece)
            vector[piece.start : piece.stop] = part
            return flags
        part, envelope = await self._get(
            "download", self.g.keys.merged(version, piece.label), f"m.{piece.label}", version,
            lambda: self._stalled_for_shard(version, piece), 2, lambda envelope: self._follows(piece, envelope),
        )  # fmt: skip
        vector[piece.start : piece.stop] = part
        self.g.on_message(piece.owner, envelope.busy_s)
        return envelope.flags

    def _follows(self, piece: Chunk, envelope: MessageHeader) -> bool:
        """Whether a share of the next version counts; it is read then."""
        return True

    async def poll(self, version: int) -> bool:
        if version in self._polled:
            return True
        vector, flags, done = self._begun(version)
        for piece in self.pieces[done:]:
            found = await self._glance(vector, version, piece)
            if found is None:
                self._partial = (version, Reduced(vector, flags), done)
                return False
            flags, done = flags | found, done + 1
        self._polled[version], self._partial = Reduced(vector, flags), None
        return True

    async def _glance(self, vector: np.ndarray, version: int, piece: Chunk) -> int | None:
        """Like `_merged_into`, without waiting; None: not there."""
        if piece.owner == self.g.rank and version in self._here:
            made = self._merged.get((version, piece.index))
            if made is None or not made.done():
                return None
            vector[piece.start : piece.stop], flags = made.result()
            return flags
        key = self.g.keys.merged(version, piece.label)
        began = asyncio.get_running_loop().time()
        data = await self.g.channel.fetch(key)
        if data is None:
            return None
        envelope, part = unpack(data, key=key)
        self._record("download", began)
        if not self._follows(piece, envelope):
            return None
        vector[piece.start : piece.stop] = part
        self.g.on_message(piece.owner, envelope.busy_s)
        return envelope.flags

    async def pending(self, iteration: int) -> tuple[bool, bool]:
        # A complete version holds everybody's contribution, ours included.
        complete = await self.poll(iteration)
        return not complete, not complete

    def take_over(self, iteration: int, *, uploaded: bool) -> None:
        if uploaded:
            del self._submitted[iteration]
        self._here.discard(iteration)
        for piece in self.mine:
            self._own.pop((iteration, piece.index), None)
            self._kept(iteration, piece, self._used_by_predecessor(iteration, piece))

    def _used_by_predecessor(self, version: int, piece: Chunk) -> Used:
        """Iterations, by rank, that a predecessor's share of a version holds."""
        return {r: [version] for r in range(self.g.world)}

    def acknowledged(self, iteration: int) -> int:
        if self.g.world == 1:
            return iteration
        return min(iteration, self.g.status.applied, self._applied_elsewhere())

    def _applied_elsewhere(self) -> int:
        """Versions that every other rank is known to have applied."""
        if not self.mine:
            return UNBOUNDED
        return min(self.garbage.applied.get(r, 0) for r in range(self.g.world) if r != self.g.rank)

    def state(self) -> tuple[Arrays, CollectiveState]:
        state = CollectiveState(garbage=self.garbage.state(), arrivals=self._expect.state())
        return {"residual": self.upward.residual.copy()}, state

    def load(self, arrays: Arrays, state: CollectiveState) -> None:
        self.upward.residual = arrays["residual"]
        self.garbage.load(state.garbage)
        self._expect.load(state.arrivals)

    async def collect_garbage(self) -> None:
        self.garbage.update(self.g.rank, applied=self.g.status.applied, durable=self.g.status.durable)
        keys = self.garbage.expired()
        if keys:
            await self.g.channel.delete(keys)

    # -- messages -----------------------------------------------------------------------------------------

    def _envelope(
        self, kind: str, iteration: int, weight: float, flags: int, marks: tuple[int, ...] = ()
    ) -> MessageHeader:
        return MessageHeader(
            kind="merged" if kind == "merged" else "contribution", rank=self.g.rank,
            attempt=self.g.attempt, iteration=iteration, shard=0, weight=weight, applied=self.g.status.applied,
            durable=self.g.status.durable, flags=flags, sent_at=self.g.trace.run_time(),
            busy_s=self.g.status.busy_s, marks=marks,
        )  # fmt: skip

    def _pack(self, by: Compressor, envelope: MessageHeader, piece: Chunk, payload: list[Buffer]) -> list[Buffer]:
        envelope = dataclasses.replace(envelope, shard=piece.owner)
        return pack(envelope, payload, codec=by.codec, dtype=self.g.dtype, elements=piece.stop - piece.start)

    def _future(self, version: int, piece: Chunk) -> asyncio.Future[tuple[np.ndarray, int]]:
        key = (version, piece.index)
        if key not in self._merged:
            self._merged[key] = asyncio.get_running_loop().create_future()
        return self._merged[key]

    async def _put(self, phase: Phase, key: str, message: list[Buffer], *, create: bool = False) -> None:
        began = asyncio.get_running_loop().time()
        await self.g.channel.put(key, message, create=create)
        self._record(phase, began)

    async def _contribution(self, iteration: int, rank: int, piece: Chunk) -> tuple[np.ndarray, MessageHeader]:
        key = self.g.keys.contribution(iteration, rank, piece.label)

        async def stalled() -> StalledPeers:
            if self.g.policy.waits_for_all and await self._is_there(iteration, piece):
                raise _AlreadyReduced
            return await self._stalled_contributors(iteration, rank, key)

        return await self._get("aggregate", key, f"c.{rank}.{piece.label}", iteration, stalled)

    async def _stalled_contributors(self, iteration: int, rank: int, key: str) -> StalledPeers:
        """Ranks to replace for a late contribution: its sender, unless that waits for an earlier version or for a lost share."""
        lost = await self.first_lost(rank, iteration)
        if lost is not None:
            return StalledPeers(lost, [self.g.rank])
        theirs = [piece for piece in self.pieces if piece.owner != self.g.rank]
        missing = await self._first_missing(range(self.g.status.applied, iteration), theirs)
        if missing is not None:
            return await self._stalled_for_shard(*missing)
        # It may have waited for an earlier version that has come just now.
        grace_s = self._grace_s() if iteration > self.g.status.applied else 0.0
        return StalledPeers(iteration, [rank], [key], grace_s)

    async def first_lost(self, rank: int, iteration: int) -> int | None:
        """First version of which a share of this rank is lost: put, not deleted by any rank, not applied by `rank`, and missing."""
        first = max(self.g.status.intact, self.garbage.applied.get(rank, 0))
        found = await self._first_missing(range(first, iteration), self.mine)
        return None if found is None else found[0]

    async def _first_missing(self, versions: range, pieces: list[Chunk]) -> tuple[int, Chunk] | None:
        """The first version of which a share of these is not there."""
        wanted = [(version, piece) for version in versions for piece in pieces]
        there = await all_of(self._is_there(version, piece) for version, piece in wanted)
        return next((w for w, found in zip(wanted, there, strict=True) if not found), None)

    async def _stalled_for_shard(self, version: int, piece: Chunk) -> StalledPeers:
        """Ranks to replace for a late merged shard: its aggregator, or the ranks whose contributions it lacks."""
        ranks = [rank for rank in range(self.g.world) if rank != piece.owner]
        keys = [self.g.keys.contribution(version, rank, piece.label) for rank in ranks]
        sent = await all_of(self._exists(key) for key in keys)
        missing = [rank for rank, there in zip(ranks, sent, strict=True) if not there]
        return await self._stalled_among(version, version, missing, piece)

    async def _stalled_among(self, version: int, iteration: int, ranks: list[int], piece: Chunk) -> StalledPeers:
        """Ranks to replace for a version that lacks contributions of `ranks` to an iteration; none lacks: its aggregator."""
        others = [rank for rank in ranks if rank != self.g.rank]
        if others:
            return StalledPeers(
                iteration, others, [self.g.keys.contribution(iteration, r, piece.label) for r in others]
            )
        if ranks:  # ours was lost, unless it is on its way
            return StalledPeers(iteration, () if (iteration, piece.index) in self._unsent else ranks)
        # The last one may have come just now.
        return (await self._stalled_owner(version, piece))._replace(grace_s=self._grace_s())

    def _grace_s(self) -> float:
        """Seconds that a peer may take for an iteration if its last input has only just arrived, at most the timeout."""
        timeout_s = self.g.wait_timeout_s(1)
        return min(timeout_s, max(GRACE_SHARE * timeout_s, 1.5 * self.g.status.busy_s))

    async def _stalled_owner(self, version: int, piece: Chunk) -> StalledPeers:
        # A share that is there and does not count is no reason to wait on.
        orphan = not self.g.policy.waits_for_all and await self._is_there(version, piece)
        return StalledPeers(version, [piece.owner], () if orphan else [self.g.keys.merged(version, piece.label)])

    async def _is_there(self, version: int, piece: Chunk) -> bool:
        return await self._exists(self.g.keys.merged(version, piece.label))

    async def _exists(self, key: str) -> bool:
        """Whether an object is there, and whole."""
        async with self._looks:
            return await self.g.channel.fetch(key) is not None

    async def _get(
        self,
        phase: Phase,
        key: str,
        stream: str,
        iteration: int,
        stalled: Callable[[], Awaitable[StalledPeers]],
        timeouts: float = 1,
        counts: Callable[[MessageHeader], bool] = lambda envelope: True,
    ) -> tuple[np.ndarray, MessageHeader]:
        loop = asyncio.get_running_loop()
        polled = not self.g.channel.traits.waits
        reference, comparable = self._reference, self._comparable
        began = loop.time()
        predicted = self._expect.predict(stream, reference) if polled and comparable else None

        def accept(data: memoryview) -> tuple[MessageHeader, np.ndarray] | None:
            envelope, vector = unpack(data, key=key)
            return (envelope, vector) if counts(envelope) else None

        (envelope, vector), received, found, missed = await wait_for_object(
            self.g.channel, key, timeout_s=lambda: self.g.wait_timeout_s(timeouts), stalled=stalled, on_timeout=self.g.on_timeout,
            accept=accept, expected_at=predicted,
        )  # fmt: skip
        if polled:
            age_s = self.g.trace.run_time() - (loop.time() - found) - envelope.sent_at
            # Polls come in steps that grow by half: the last one was a third of all.
            if received.poll_s > 0:
                self._expect.polled(received.poll_s)
            gap_s = min(0.25, (found - max(began, predicted or 0)) / 3) if missed or received.polls else 0.0
            appeared = found - gap_s / 2
            if comparable:
                appeared = self._expect.observe(stream, reference, found=found, gap_s=gap_s, age_s=age_s)
            if phase == "download":
                self._appeared = max(self._appeared, appeared)
        if found > began:
            self.g.trace.record("wait", began, found)
        self._record(phase, found)
        return vector, envelope

    def _record(self, phase: Phase, began: float) -> None:
        self.g.trace.record(phase, began, asyncio.get_running_loop().time())
