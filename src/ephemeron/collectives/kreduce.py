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
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from ephemeron.channels.base import Buffer
from ephemeron.collectives.expectation import Expectation
from ephemeron.collectives.group import Blame, Collective, Group, Merged
from ephemeron.errors import ChannelTimeout
from ephemeron.events import Phase
from ephemeron.sync import Retention
from ephemeron.tensors import Compressor, Envelope, bounds, chunk_bounds, codec_by_name, pack, run_hash, unpack
from ephemeron.units import MB

UNDER_WAY_BYTES = 3 * MB
"""Small messages, or chunks, that are on their way at once in each direction: what a link of 70 MB/s moves in 40 ms.
Less leaves the link idle for a latency now and then; more lets chunks of the end queue behind chunks of the start."""
GATHERED = 4
"""Messages that an aggregator fetches ahead, however large: bounds its memory to GATHERED·S/K beside the sum."""


def under_way(message_bytes: int, *, at_least: int) -> int:
    """How many messages of that size may be on their way at once."""
    return max(at_least, UNDER_WAY_BYTES // max(1, message_bytes))


class Piece:
    """A shard, or a chunk of one: elements `start:stop`, reduced by `owner`."""

    __slots__ = ("index", "label", "owner", "start", "stop")

    def __init__(self, index: int, owner: int, label: str, start: int, stop: int) -> None:
        self.index, self.owner, self.label, self.start, self.stop = index, owner, label, start, stop


def pieces(size: int, aggregators: int, chunk: int | None, rank: int = 0) -> list[Piece]:
    """All pieces of a vector, in the order in which `rank` sends them.

    First chunks of all shards first, so that every aggregator can begin soon; and each rank begins with another
    shard, so that no aggregator's link gets everything at once while the others' are idle.
    """
    found: list[tuple[int, int, str, int, int]] = []
    for owner, (start, stop) in enumerate(bounds(size, aggregators)):
        if chunk is None:
            found.append((0, owner, str(owner), start, stop))
        else:
            cut = chunk_bounds(start, stop, chunk)
            found += [(c, owner, f"{owner}.{c}", a, b) for c, (a, b) in enumerate(cut)]
    found.sort(key=lambda f: (f[0], (f[1] - rank - 1) % aggregators))
    return [Piece(i, owner, label, a, b) for i, (_, owner, label, a, b) in enumerate(found)]


class _Staged(NamedTuple):
    """What is to be sent of an iteration."""

    payloads: list[tuple[Piece, list[Buffer]]]
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
        self.overlaps = chunk is not None
        self.pieces = pieces(group.size, group.aggregators, chunk, group.rank)
        self.mine = [p for p in self.pieces if p.owner == group.rank]
        self._run = run_hash(group.keys.run)
        self.upward = Compressor(codec_by_name(group.compression), group.size, group.dtype)
        # Merged shards are compressed without memory: an aggregator's residual could not be made again by its
        # replacement, and the bits of a run would depend on who died.
        down = codec_by_name("bf16" if group.compression == "int8" else group.compression)
        self.downward = Compressor(down, group.size, group.dtype)
        self.retention = Retention(group.world)
        self.marks = [0] * group.world
        self._expect = Expectation(group.channel.traits.latency_s, group.poll_worth_s)
        self._reference = self._appeared = 0.0
        self._comparable = True
        """Whether times since the reference mean what they meant in earlier iterations."""
        self._staged: dict[int, _Staged] = {}
        self._own: dict[tuple[int, int], tuple[np.ndarray, Envelope]] = {}
        self._merged: dict[tuple[int, int], asyncio.Future[tuple[np.ndarray, int]]] = {}
        self._peeked: dict[int, Merged] = {}
        self._partial: tuple[int, Merged, int] | None = None
        largest = max(p.stop - p.start for p in self.pieces) * group.dtype.itemsize
        self._window = under_way(largest, at_least=GATHERED)
        # Apart, so that merged chunks need not queue behind contributions: everybody's downlink depends on them.
        puts = under_way(largest, at_least=2) if self.overlaps else len(self.pieces)
        self._slots = {"upload": asyncio.Semaphore(puts), "aggregate": asyncio.Semaphore(puts)}
        self._piece_slots = asyncio.Semaphore(self._window)

    # -- upload -------------------------------------------------------------------------------------------

    def stage(self, iteration: int, vector: np.ndarray, weight: float, flags: int = 0) -> None:
        payloads: list[tuple[Piece, list[Buffer]]] = []
        for piece in self.pieces:
            part = vector[piece.start : piece.stop]
            payload = self.upward.encode(part, piece.start, piece.stop)
            if piece.owner == self.g.rank:
                envelope = self._envelope("contribution", iteration, weight, flags)
                self._own[iteration, piece.index] = (np.array(self.upward.round_trip(payload, part)), envelope)
            else:
                payloads.append((piece, payload))
        self._staged[iteration] = _Staged(payloads, weight, flags)

    async def upload(self, iteration: int) -> None:
        loop = asyncio.get_running_loop()
        staged = self._staged.pop(iteration)
        # Where all wait for all, whoever is late must not measure the others from its own lateness.
        common = self._appeared if self.g.policy.waits_for_all else 0.0
        self._reference, self._appeared = common or loop.time(), 0.0
        self._comparable = bool(common) or not self.g.policy.waits_for_all
        await _all(self._send(iteration, piece, payload, staged) for piece, payload in staged.payloads)
        if not (self.overlaps or common):  # nobody waits yet, and what follows depends more on when this ended
            self._reference = loop.time()

    async def _send(self, iteration: int, piece: Piece, payload: list[Buffer], staged: _Staged) -> None:
        key = self.g.keys.contribution(iteration, self.g.rank, piece.label)
        async with self._slots["upload"]:
            # Packed only now: its time stamp is that of its put, and a link that is idle does not wait for checksums.
            envelope = self._envelope("contribution", iteration, staged.weight, staged.flags)
            await self._put("upload", key, self._pack(self.upward, envelope, piece, payload))

    # -- aggregation --------------------------------------------------------------------------------------

    async def aggregate(self, iteration: int) -> None:
        if not self.mine:
            return
        reduce = self._reduce_all if self.g.policy.waits_for_all else self._fold_arrived
        for piece in self.mine:
            self._future(iteration, piece)
        await _all(reduce(iteration, piece) for piece in self.mine)

    async def _reduce_all(self, version: int, piece: Piece) -> None:
        """Every rank's contribution, in rank order; a few are fetched ahead."""
        async with self._piece_slots:
            others = [r for r in range(self.g.world) if r != self.g.rank]
            ahead = _Ahead([self._contribution(version, r, piece) for r in others], self._window)
            try:
                total, weight, flags = None, 0.0, 0
                for rank in range(self.g.world):
                    if rank == self.g.rank:
                        part, envelope = self._own.pop((version, piece.index))
                    else:
                        part, envelope = await ahead.next()
                    total, weight, flags = self._fold(total, part, envelope, weight, flags)
            finally:
                ahead.cancel()
            assert total is not None
            await self._publish(version, piece, total, weight, flags, {r: [version] for r in others})

    async def _fold_arrived(self, version: int, piece: Piece) -> None:
        """Whatever has arrived; the last version waits for the rest. Ranks in order, so ties are decided."""
        part, envelope = self._own.pop((version, piece.index))
        total, weight, flags = self._fold(None, part, envelope, 0.0, 0)
        self.marks[self.g.rank] = version + 1
        used: dict[int, list[int]] = {}
        last = version == self.g.iterations - 1
        for rank in range(self.g.world):
            if rank == self.g.rank:
                continue
            while self.marks[rank] < self.g.iterations:
                found = await self._arrived(self.marks[rank], rank, piece, wait=last)
                if found is None:
                    break
                total, weight, flags = self._fold(total, *found, weight, flags)
                used.setdefault(rank, []).append(self.marks[rank])
                self.marks[rank] += 1
        await self._publish(version, piece, total, weight, flags, used)

    async def _arrived(
        self, iteration: int, rank: int, piece: Piece, *, wait: bool
    ) -> tuple[np.ndarray, Envelope] | None:
        if wait:
            return await self._contribution(iteration, rank, piece)
        key = self.g.keys.contribution(iteration, rank, piece.label)
        began = asyncio.get_running_loop().time()
        data = await self.g.channel.fetch(key)
        if data is None:
            return None
        self._record("aggregate", began)
        envelope, part = unpack(data, run=self._run, key=key)
        return part, envelope

    def _fold(
        self, total: np.ndarray | None, part: np.ndarray, envelope: Envelope, weight: float, flags: int
    ) -> tuple[np.ndarray, float, int]:
        self.retention.heard(envelope.rank, applied=envelope.applied, durable=envelope.durable)
        if total is None:
            total = np.array(part)
        else:
            total += part
        return total, weight + envelope.weight, flags | envelope.flags

    async def _publish(
        self, version: int, piece: Piece, total: np.ndarray, weight: float, flags: int, used: dict[int, list[int]]
    ) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        if weight > 0:
            total /= total.dtype.type(weight)
        payload = self.downward.encode(total, piece.start, piece.stop)
        marks = () if self.g.policy.waits_for_all else tuple(self.marks)
        self._record("aggregate", began)
        key = self.g.keys.merged(version, piece.label)
        if self.g.world > 1:
            async with self._slots["aggregate"]:
                envelope = self._envelope("merged", version, weight, flags, marks)
                await self._put("aggregate", key, self._pack(self.downward, envelope, piece, payload))
        self._appeared = max(self._appeared, loop.time())
        waiting = self._merged.get((version, piece.index))
        if waiting is not None and not waiting.done():
            waiting.set_result((self.downward.round_trip(payload, total), flags))
        contributions = [self.g.keys.contribution(t, r, piece.label) for r, ts in used.items() for t in ts]
        self.retention.folded(version, contributions, [key] if self.g.world > 1 else [])

    # -- download -----------------------------------------------------------------------------------------

    async def collect(self, version: int) -> Merged:
        seen = self._peeked.pop(version, None)
        if seen is not None:
            for piece in self.mine:
                self._merged.pop((version, piece.index), None)
            return seen
        vector, flags, done = np.empty(self.g.size, dtype=self.g.dtype), 0, 0
        marks: tuple[int, ...] = ()
        if self._partial is not None and self._partial[0] == version:  # an earlier peek found some of it
            _, (vector, flags, marks), done = self._partial
            self._partial = None
        found = await _all(self._merged_into(vector, version, piece) for piece in self.pieces[done:])
        for piece_flags, piece_marks in found:
            flags |= piece_flags
            marks = piece_marks or marks
        return Merged(vector, flags, marks)

    async def _merged_into(self, vector: np.ndarray, version: int, piece: Piece) -> tuple[int, tuple[int, ...]]:
        if piece.owner == self.g.rank:
            part, flags = await self._future(version, piece)
            self._merged.pop((version, piece.index), None)
            vector[piece.start : piece.stop] = part
            return flags, ()
        key = self.g.keys.merged(version, piece.label)
        part, envelope = await self._get(
            "download", key, f"m.{piece.label}", version, lambda: self._blame_merged(version, piece), 2
        )
        vector[piece.start : piece.stop] = part
        return envelope.flags, envelope.marks

    async def peek(self, version: int) -> bool:
        if self.g.world == 1:
            return False
        if version in self._peeked:
            return True
        own = [self._merged.get((version, p.index)) for p in self.mine]
        if own and all(f is not None and f.done() for f in own) and len(own) == len(self.pieces):
            return True
        if self._partial is None or self._partial[0] != version:
            self._partial = (version, Merged(np.empty(self.g.size, dtype=self.g.dtype), 0, ()), 0)
        _, (vector, flags, marks), done = self._partial
        for piece in self.pieces[done:]:
            key = self.g.keys.merged(version, piece.label)
            began = asyncio.get_running_loop().time()
            data = await self.g.channel.fetch(key)
            if data is None:
                return False
            envelope, part = unpack(data, run=self._run, key=key)
            self._record("download", began)
            vector[piece.start : piece.stop] = part
            flags, marks = flags | envelope.flags, envelope.marks or marks
            if piece.owner == self.g.rank and envelope.marks:
                self.marks = list(envelope.marks)
            done += 1
            self._partial = (version, Merged(vector, flags, marks), done)
        self._peeked[version] = Merged(vector, flags, marks)
        self._partial = None
        return True

    async def left_to_do(self, iteration: int) -> tuple[bool, bool]:
        if self.g.policy.waits_for_all:
            # A complete version holds everybody's contribution, ours included.
            complete = await self.peek(iteration)
            return not complete, not complete
        if not self.mine:
            return True, False  # whether it was folded in nobody can say; folding looks at ranks' marks
        (piece,) = self.mine
        key = self.g.keys.merged(iteration, piece.label)
        data = await self.g.channel.fetch(key)
        if data is None:
            return True, True
        self.marks = list(unpack(data, run=self._run, key=key)[0].marks)
        return True, False

    def adopt(self, iteration: int, *, uploaded: bool) -> None:
        if uploaded:
            del self._staged[iteration]
        for piece in self.mine:  # the predecessor's objects are now this rank's to delete, later
            self._own.pop((iteration, piece.index), None)
            others = [r for r in range(self.g.world) if r != self.g.rank and self.g.policy.waits_for_all]
            contributions = [self.g.keys.contribution(iteration, r, piece.label) for r in others]
            self.retention.folded(iteration, contributions, [self.g.keys.merged(iteration, piece.label)])

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        lists = {"marks": list(self.marks), "kept": self.retention.state(), "expected": self._expect.state()}
        return {"residual": self.upward.residual.copy()}, lists

    def load(self, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        self.upward.residual = arrays["residual"]
        self.marks = meta["marks"]
        self.retention.load(meta["kept"])
        self._expect.load(meta["expected"])

    async def tidy(self) -> None:
        self.retention.heard(self.g.rank, applied=self.g.status.applied, durable=self.g.status.durable)
        keys = self.retention.expired()
        if keys:
            await self.g.channel.delete(keys)

    # -- messages -----------------------------------------------------------------------------------------

    def _envelope(self, kind: str, iteration: int, weight: float, flags: int, marks: tuple[int, ...] = ()) -> Envelope:
        return Envelope(
            kind="merged" if kind == "merged" else "contribution", run=self._run, rank=self.g.rank,
            attempt=self.g.attempt, iteration=iteration, shard=0, weight=weight, applied=self.g.status.applied,
            durable=self.g.status.durable, flags=flags, sent_at=self.g.trace.run_time(), marks=marks,
        )  # fmt: skip

    def _pack(self, by: Compressor, envelope: Envelope, piece: Piece, payload: list[Buffer]) -> list[Buffer]:
        return pack(envelope, payload, codec=by.codec, dtype=self.g.dtype, elements=piece.stop - piece.start)

    def _future(self, version: int, piece: Piece) -> asyncio.Future[tuple[np.ndarray, int]]:
        key = (version, piece.index)
        if key not in self._merged:
            self._merged[key] = asyncio.get_running_loop().create_future()
        return self._merged[key]

    async def _put(self, phase: Phase, key: str, message: list[Buffer]) -> None:
        began = asyncio.get_running_loop().time()
        await self.g.channel.put(key, message)
        self._record(phase, began)

    async def _contribution(self, iteration: int, rank: int, piece: Piece) -> tuple[np.ndarray, Envelope]:
        key = self.g.keys.contribution(iteration, rank, piece.label)

        async def blame() -> Blame:
            return Blame(iteration, [rank])

        return await self._get("aggregate", key, f"c.{rank}.{piece.label}", iteration, blame)

    async def _blame_merged(self, version: int, piece: Piece) -> Blame:
        """An aggregator is late. Its fault, or that of somebody it waits for in turn?"""
        missing = []
        for rank in range(self.g.world):
            if rank not in (piece.owner, self.g.rank):
                data = await self.g.channel.fetch(self.g.keys.contribution(version, rank, piece.label))
                if data is None:
                    missing.append(rank)
        return Blame(version, missing or [piece.owner])

    async def _get(
        self,
        phase: Phase,
        key: str,
        stream: str,
        iteration: int,
        blame: Callable[[], Awaitable[Blame]],
        patience: float = 1,
    ) -> tuple[np.ndarray, Envelope]:
        loop = asyncio.get_running_loop()
        polled = not self.g.channel.traits.waits
        reference, comparable = self._reference, self._comparable
        began = loop.time()
        predicted = self._expect.predict(stream, reference) if polled and comparable else None
        missed = False
        while True:
            asked = loop.time()
            try:
                received = await self.g.channel.get(
                    key, deadline=asked + self.g.patience_s(patience), expected_at=predicted
                )
                break
            except ChannelTimeout:
                missed = True
                await self.g.overdue(await blame())
        found = asked + received.waited_s
        envelope, vector = unpack(received.data, run=self._run, key=key)
        if polled:
            age_s = self.g.trace.run_time() - (loop.time() - found) - envelope.sent_at
            # Polls come in steps that grow by half: the last one was a third of all.
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


class _Ahead:
    """Results of coroutines in order, a few of them running ahead."""

    def __init__(self, coroutines: list[Awaitable[tuple[np.ndarray, Envelope]]], window: int) -> None:
        self._waiting = coroutines[::-1]
        self._running: list[asyncio.Future[tuple[np.ndarray, Envelope]]] = []
        self._window = window

    async def next(self) -> tuple[np.ndarray, Envelope]:
        while self._waiting and len(self._running) < self._window:
            self._running.append(asyncio.ensure_future(self._waiting.pop()))
        return await self._running.pop(0)

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()
        for coroutine in self._waiting:
            coroutine.close()  # type: ignore[attr-defined]


async def _all(coroutines: Iterable[Awaitable[object]]) -> list:  # type: ignore[type-arg]
    """Like `gather`, but a lone coroutine costs no task, and a failure cancels the others."""
    todo = list(coroutines)
    if len(todo) == 1:
        return [await todo[0]]
    if not todo:
        return []
    tasks = [asyncio.ensure_future(c) for c in todo]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
