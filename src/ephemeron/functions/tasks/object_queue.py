"""A task queue in any channel, by create-only objects alone: no server, nothing compared and swapped, no common clock.

A batch is one object, its lease another, its results a log of objects that are each created once. The party that creates number N of
the log has decided the results in it; a late executor finds number N taken, reads it, and drops what is there. So the log is
one sequence for all, and a task has one result. Nothing is appended before the object ahead of it was read back, so that the log has
no gaps even on a store that loses puts. A part of the log that is damaged counts as empty: its tasks run again, and the next number has
their results. Batches and edges, which all writers put alike, are put over a damaged object; an executor that meets a damaged one later ends with its key.

Leases end by observation: an owner puts a new sign of life every third of `lease_s`, and an observer that sees the same one for `lease_s`
takes the batch, or marks it (`depth`), so that a provisioner can watch for executors that live less long. This needs no clocks that agree; recovery takes one to two times `lease_s`.

Requests of an executor for one batch: a listing (shared by the batches it takes), the lease, the batch, the end of the log; for results
one put and one read each time; at the end the removal. About eight for a batch of any size: at 100 tasks a batch and S3's prices
$0.2 a million tasks. For tasks of more than a second with edges between them, a cache (`redis_queue`) is cheaper and quicker.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import logging
import random
from collections.abc import Iterable, Sequence

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.durable_put import create_durable
from ephemeron.errors import DamagedObject, JobError, KeyExists
from ephemeron.events import Traffic
from ephemeron.functions.tasks.batch_state import VANISHED, BatchState, edge_news
from ephemeron.functions.tasks.model import QueueDepth, TaskEdge, TaskLease, TaskResult, TaskSpec, check_name
from ephemeron.functions.tasks.object_keys import ListedBatch, QueueKeys, tasks_of
from ephemeron.functions.tasks.packing import batch_name, pack, pack_edge, unpack, unpack_edge
from ephemeron.functions.tasks.queue import ResultReader, TaskQueue

_log = logging.getLogger(__name__)

_AT_ONCE = 16
"""Concurrent requests of one operation."""
_CHOICE = 32
"""Batches from which a taker that meets others chooses at random, and a quarter of all if there are more."""
_MISSES = 4
"""Leases that others had, before the listing is made again."""


class _Held:
    """A lease of this owner."""

    def __init__(self, state: BatchState, attempt: int) -> None:
        self.state, self.attempt, self.beat = state, attempt, 0
        self.writing = asyncio.Lock()


class ObjectQueue(TaskQueue):
    """A queue in a channel.

    Args:
        channel: shared by clients and executors; retries and signatures are wrappers of it. It is not closed here.
        queue: name; below it, no other queue may begin with `NAME.`.
        owner: name of this process, unlike every other's.
        lease_s: see `TaskQueue`.
    """

    def __init__(self, channel: Channel, queue: str, *, owner: str, lease_s: float = 30.0) -> None:
        check_name(queue, what="the queue")
        check_name(owner, what="the owner")
        self.owner, self.lease_s = owner, lease_s
        self._channel, self._keys = channel, QueueKeys(queue)
        self._random = random.Random(f"{queue}/{owner}")
        self._held: dict[str, _Held] = {}
        self._candidates: list[tuple[str, int]] = []
        """Batches that the last listing showed as free, with their highest attempt."""
        self._opened: set[str] = set()
        """Batches of edges that this owner has published and not tried to lease since."""
        self._listed_at = float("-inf")
        self._width = 4
        """Part of the front, of `_CHOICE`, from which this owner chooses."""
        self._seen: dict[str, tuple[object, float]] = {}
        """By batch or executor: its sign of life, and the loop time at which it was first seen."""
        self._edges: dict[str, TaskEdge] = {}
        self._connected: dict[str, TaskEdge] = {}
        """Edges that this owner has added, and whose counts it has read since then."""
        self._announced: dict[str, int] = {}

    async def publish(self, tasks: Sequence[TaskSpec], *, order: int = 0) -> str:
        batch, data = batch_name(tasks, order)
        done = self._keys.log(batch, 0)  # stays when the batch is complete and removed
        await create_durable(self._channel, self._keys.batch(batch), data, alike=True, successor=done)
        return batch

    def key_of(self, batch: str) -> str:
        return self._keys.batch(batch)

    async def connect(self, *edges: TaskEdge) -> None:
        ends = await asyncio.gather(*(self._connect(edge) for edge in edges), return_exceptions=True)
        for end in ends:  # none goes on after this
            if end is not None:
                raise end

    async def _connect(self, edge: TaskEdge) -> None:
        if self._connected.get(edge.name) == edge:  # a later input is counted by its owner, who finds the edge
            return
        key, data = self._keys.edge(edge.name), pack_edge(edge)
        there = await create_durable(self._channel, key, data, alike=True)
        if there != data:
            raise JobError(f"edge {edge.name} is there already, with other inputs or tasks")
        self._edges[edge.name] = edge
        if await self._total(f"edge-{edge.name}") >= edge.inputs:
            await self._open(edge)
        elif (lost := await self._channel.fetch(self._keys.lost(edge.name))) is not None:
            await self._abandon(edge, bytes(lost).decode())
        self._connected[edge.name] = edge

    async def take(self, n: int, *, is_busy: bool = False) -> list[TaskLease]:
        leases: list[TaskLease] = []
        missing, misses, is_fresh = n, 0, False
        while missing > 0:
            stale = asyncio.get_running_loop().time() - self._listed_at > self.lease_s
            if not self._candidates or misses >= _MISSES or stale:
                if is_fresh:
                    break
                await self._list_work()
                misses, is_fresh = 0, True
                continue
            chosen = self._choose(missing)
            taken = await asyncio.gather(*(self._lease(batch, attempt) for batch, attempt in chosen))
            for lease in taken:
                if lease is None:
                    misses += 1
                    self._width = min(_CHOICE, 2 * self._width)
                else:
                    misses, is_fresh = 0, False
                    self._width = max(1, self._width - 1)
                    leases.append(lease)
                    missing -= len(lease.tasks)
        return leases

    def _choose(self, missing: int) -> list[tuple[str, int]]:
        """Takes as many candidates out of the list as hold the missing tasks, from the front part of it: those that this owner has
        published, whose inputs it may have in memory, else at random. That part is wider the more often others were quicker, so that many
        who list at once rarely collide, and few keep to the order."""
        chosen: list[tuple[str, int]] = []
        while self._candidates and missing > 0 and len(chosen) < _AT_ONCE:
            wide = max(_CHOICE, len(self._candidates) // 4) * self._width // _CHOICE
            front = min(max(1, wide), len(self._candidates))
            near = next((place for place in range(front) if self._candidates[place][0] in self._opened), None)
            batch, attempt = self._candidates.pop(self._random.randrange(front) if near is None else near)
            self._opened.discard(batch)
            chosen.append((batch, attempt))
            missing -= tasks_of(batch)
        return chosen

    async def _list_work(self) -> tuple[dict[str, ListedBatch], bool]:
        there, closed = self._keys.listed(await self._channel.list(self._keys.work))
        self._observe({f"b/{name}": (batch.attempt, batch.beat) for name, batch in there.items()}, kind="b/")
        free = [(name, batch.attempt) for name, batch in there.items() if not self._is_leased(name, batch)]
        self._candidates = sorted(free)
        self._listed_at = asyncio.get_running_loop().time()
        self.is_drained = closed and not there
        self._opened &= there.keys()
        return there, closed

    def _observe(self, signs: dict[str, object], *, kind: str) -> None:
        now = asyncio.get_running_loop().time()
        if len(self._seen) > 2 * len(signs) + 100:
            for name in [name for name in self._seen if name.startswith(kind) and name not in signs]:
                del self._seen[name]
        for name, sign in signs.items():
            if self._seen.get(name, (None, 0.0))[0] != sign:
                self._seen[name] = (sign, now)

    def _is_alive(self, name: str) -> bool:
        return asyncio.get_running_loop().time() - self._seen[name][1] < self.lease_s

    def _is_leased(self, name: str, batch: ListedBatch) -> bool:
        if name in self._held:
            return True
        return batch.attempt > batch.expired and self._is_alive(f"b/{name}")

    async def _lease(self, batch: str, attempt_before: int) -> TaskLease | None:
        attempt = attempt_before + 1
        try:
            await self._channel.put(self._keys.lease(batch, attempt), [self.owner.encode()], create=True)
        except KeyExists:
            return None
        state = await self._load(batch)  # an error with its key ends this executor, and the map: nobody can do its tasks
        if state is None or batch in self._held:  # completed since it was listed
            await self._channel.delete([self._keys.lease(batch, attempt)])
            return None
        held = self._held[batch] = _Held(state, attempt)
        async with held.writing:
            await self._settle(state)
            if attempt > 2 and state.pending:
                first = state.pending[0]
                before = await self._channel.fetch(self._keys.lease(batch, attempt_before))
                lost = "" if before is None else bytes(before).decode()
                await self._record(state, [TaskResult(id=first.id, status="failed", error=VANISHED, lost=lost)])
            if state.is_complete:
                await self._remove(held)
                return None
        return TaskLease(batch=batch, attempt=attempt, tasks=state.pending)

    async def published(self) -> dict[str, str]:
        there, _ = self._keys.listed(await self._channel.list(self._keys.work))
        found: dict[str, str] = {}
        batches = sorted(there)
        for at in range(0, len(batches), _AT_ONCE):
            for state in await asyncio.gather(*map(self._load, batches[at : at + _AT_ONCE])):
                if state is not None:
                    found.update((task.id, state.batch) for task in state.pending)
        return found

    async def renew(self, leases: Sequence[TaskLease]) -> list[TaskLease]:
        alive = await asyncio.gather(*(self._renew(lease) for lease in leases))
        return [lease for lease, is_alive in zip(leases, alive, strict=True) if not is_alive]

    async def _renew(self, lease: TaskLease) -> bool:
        held = self._held.get(lease.batch)
        if held is None or held.attempt != lease.attempt:
            return False
        keys, before = self._keys, held.beat
        held.beat += 1
        await self._channel.put(keys.beat(lease.batch, lease.attempt, held.beat), [b""])
        if before:
            await self._channel.delete([keys.beat(lease.batch, lease.attempt, before)])
        if self._held.get(lease.batch) is not held:  # completed meanwhile
            await self._channel.delete([keys.beat(lease.batch, lease.attempt, held.beat)])
            return False
        if await self._channel.fetch(keys.lease(lease.batch, lease.attempt + 1)) is None:
            return True
        await self._let_go(held)
        return False

    async def complete(self, lease: TaskLease, results: Sequence[TaskResult]) -> list[TaskResult]:
        held = self._held.get(lease.batch)
        if held is None or held.attempt != lease.attempt:
            state = await self._load(lease.batch)
            held = None if state is None else _Held(state, lease.attempt)
        if held is None:  # complete
            return []
        async with held.writing:
            recorded = await self._record(held.state, results)
            if held.state.is_complete:
                await self._remove(held)
        return recorded

    async def release(self, lease: TaskLease) -> None:
        held = self._held.get(lease.batch)
        if held is not None and held.attempt == lease.attempt:
            await self._let_go(held)

    async def cancel(self, batch: str, ids: Iterable[str]) -> list[str]:
        wanted = list(ids)
        held = self._held.get(batch)
        state = held.state if held is not None else await self._load(batch)
        if state is None:
            state = BatchState(batch, ())
            await self._read_log(state)
        else:
            async with held.writing if held is not None else asyncio.Lock():
                await self._record(state, [TaskResult(id=id, status="cancelled") for id in wanted])
                if state.is_complete:
                    await self._remove(held or _Held(state, 0))
        return [id for id in wanted if id in state.final and state.final[id].status == "cancelled"]

    async def _load(self, batch: str) -> BatchState | None:
        """Tasks and log of a batch; None if it is complete and removed."""
        key = self._keys.batch(batch)
        data = await self._channel.fetch(key)
        if data is None:
            return None
        state = BatchState(batch, tuple(unpack(TaskSpec, data, key=key)[0]))
        await self._read_log(state)
        return state

    async def _read_log(self, state: BatchState) -> None:
        # A gap need not be looked for: whoever appends finds the next number taken, and reads on.
        while (part := await self._part(self._keys.log(state.batch, len(state.log)))) is not None:
            state.absorb(part)

    async def _part(self, key: str) -> list[TaskResult] | None:
        """A part of a log, empty if it is damaged; None: it is not there."""
        try:
            data = await self._channel.fetch(key)
        except DamagedObject as e:
            _log.warning("results are lost, and their tasks run again: %s", e)
            return []
        return None if data is None else unpack(TaskResult, data, key=key)[0]

    async def _record(self, state: BatchState, results: Iterable[TaskResult]) -> list[TaskResult]:
        """Appends to the log what is not in it, and does what follows from it."""
        results = list(results)
        while news := state.news(results):
            number = len(state.log)
            key = self._keys.log(state.batch, number)
            mine = pack(news, owner=self.owner, nonce=self._random.getrandbits(48))
            try:
                there = await create_durable(self._channel, key, mine)
            except DamagedObject:
                state.absorb([])
                continue
            if there == mine:
                state.absorb(news)
                await self._settle(state)
                return news
            state.absorb(unpack(TaskResult, there, key=key)[0])
        return []

    async def _settle(self, state: BatchState) -> None:
        """Counts results at the edges of their tasks, those of other owners, too: they may have died before they did. Repeating it
        changes nothing."""
        for part in range(len(state.log)):
            if part not in state.settled:
                await self._settle_part(state, part)
                state.settled.add(part)

    async def _settle_part(self, state: BatchState, part: int) -> None:
        for news in edge_news(state.tasks, state.log[part]):
            total = 0
            if news.lost:
                await create_durable(self._channel, self._keys.lost(news.edge), news.lost.encode(), alike=True)
            if news.done:
                total = await self.count(f"edge-{news.edge}", f"{state.batch}-{part}", news.done)
            key = self._keys.edge(news.edge)
            if news.edge not in self._edges and (data := await self._channel.fetch(key)) is not None:
                self._edges[news.edge] = unpack_edge(data, key=key)
            edge = self._edges.get(news.edge)
            if edge is None:
                continue  # `connect` will find what was put here
            if total >= edge.inputs:
                await self._open(edge)
            elif news.lost:
                await self._abandon(edge, news.lost)

    async def _open(self, edge: TaskEdge) -> None:
        """Publishes the tasks of an edge, unless they were published and have results."""
        # If they get them just now, the batch is published again, and removed by the next taker, which reads its log first.
        batch, _ = batch_name(edge.tasks, edge.order)
        if await self._part(self._keys.log(batch, 0)) is None:
            await self.publish(edge.tasks, order=edge.order)
            if batch not in self._held and batch not in self._opened:
                self._opened.add(batch)
                if all(each != batch for each, _ in self._candidates):
                    bisect.insort(self._candidates, (batch, 0))

    async def _abandon(self, edge: TaskEdge, error: str) -> None:
        """Records the tasks of an edge as dead."""
        state = BatchState(batch_name(edge.tasks, edge.order)[0], edge.tasks)
        await self._read_log(state)
        await self._record(state, [TaskResult(id=task.id, status="dead", error=error) for task in state.pending])
        await self._settle(state)

    async def _let_go(self, held: _Held) -> None:
        """Removes what this owner has put for a lease, and what earlier attempts have left."""
        batch, attempt = held.state.batch, held.attempt
        if self._held.get(batch) is held:
            del self._held[batch]
        keys = self._own(held)
        if attempt > 1:
            keys |= await self._leases(batch, through=attempt)
        await self._channel.delete(sorted(keys))

    def _own(self, held: _Held) -> set[str]:
        batch, attempt = held.state.batch, held.attempt
        keys = {self._keys.lease(batch, attempt), self._keys.expired(batch, attempt)}
        return keys | {self._keys.beat(batch, attempt, held.beat)} if held.beat else keys

    async def _leases(self, batch: str, *, through: int | None = None) -> set[str]:
        """Keys of leases of a batch, up to an attempt."""
        prefix = f"{self._keys.batch(batch)}."
        found = await self._channel.list(prefix)
        attempts = {key: int(key[len(prefix) + 1 :].partition(".")[0]) for key in found}
        return {key for key, attempt in attempts.items() if through is None or attempt <= through}

    async def _remove(self, held: _Held) -> None:
        """Removes a batch that is complete. Its log stays until `clear`."""
        await self._settle(held.state)
        batch = held.state.batch
        keys = self._own(held)
        if self._held.get(batch) is not held or held.attempt != 1:
            keys |= await self._leases(batch)
        await self._channel.delete([self._keys.batch(batch)])  # first: a lease that is left behind is harmless
        await self._channel.delete(sorted(keys))
        if self._held.get(batch) is held:
            del self._held[batch]

    async def depth(self) -> QueueDepth:
        batches, closed = await self._list_work()
        leased = sum(tasks_of(name) for name, batch in batches.items() if self._is_leased(name, batch))
        await self._mark_expired(batches)
        numbers: dict[str, object] = {}
        for key in await self._channel.list(self._keys.live):
            executor, _, number = key[len(self._keys.live) :].rpartition(".")
            numbers[f"x/{executor}"] = max(int(number), int(str(numbers.get(f"x/{executor}", 0))))
        self._observe(numbers, kind="x/")
        return QueueDepth(
            ready=sum(map(tasks_of, batches)) - leased,
            leased=leased,
            closed=closed,
            executors=frozenset(name[2:] for name in numbers if self._is_alive(name)),
        )

    async def _mark_expired(self, batches: dict[str, ListedBatch]) -> None:
        """Tells executors that have not watched for long enough."""
        seen = [
            self._keys.expired(name, batch.attempt)
            for name, batch in batches.items()
            if batch.attempt > batch.expired and not self._is_leased(name, batch)
        ]
        await asyncio.gather(*(self._channel.put(key, [b""]) for key in seen))

    async def announce(self, executor: str, *, gone: bool = False) -> None:
        before = self._announced.pop(executor, 0)
        if not gone:
            self._announced[executor] = before + 1
            await self._channel.put(self._keys.alive(executor, before + 1), [b""])
        if before:
            await self._channel.delete([self._keys.alive(executor, before)])

    async def count(self, counter: str, member: str, amount: int = 1, *, last: int | None = None) -> int:
        check_name(counter, what="the counter")
        check_name(member, what="the member")
        while True:
            with contextlib.suppress(KeyExists):
                await self._channel.put(f"{self._keys.counter(counter)}{member}.{amount}", [b""], create=True)
            members = await self._members(counter)
            if member in members:
                total = sum(members.values())
                if last is not None and total >= last:
                    prefix = self._keys.counter(counter)
                    await self._channel.delete([f"{prefix}{name}.{of}" for name, of in members.items()])
                return total

    async def _total(self, counter: str) -> int:
        return sum((await self._members(counter)).values())

    async def _members(self, counter: str) -> dict[str, int]:
        prefix = self._keys.counter(counter)
        members: dict[str, int] = {}
        for key in await self._channel.list(prefix):
            member, _, amount = key[len(prefix) :].rpartition(".")
            members.setdefault(member, int(amount))
        return members

    async def finish(self) -> None:
        await create_durable(self._channel, self._keys.closed, b"closed", alike=True)

    def reader(self) -> ResultReader:
        return ObjectResultReader(self._channel, self._keys)

    @property
    def traffic(self) -> Traffic:
        return self._channel.traffic if isinstance(self._channel, RunChannel) else Traffic()

    async def clear(self) -> None:
        await self._channel.delete(await self._channel.list(f"{self._keys.queue}."))
        self._channel.discard_staged(f"{self._keys.queue}.")
        self._held.clear()
        self._connected.clear()
        self._candidates.clear()


class ObjectResultReader(ResultReader):
    """Reads logs of batches: one listing, and each object once."""

    def __init__(self, channel: Channel, keys: QueueKeys) -> None:
        self._channel, self._keys = channel, keys
        self._read: set[str] = set()
        self._seen: set[str] = set()

    async def read(self) -> list[TaskResult]:
        new = [key for key in await self._channel.list(self._keys.logs) if key not in self._read]
        found: list[TaskResult] = []
        for some in (new[at : at + _AT_ONCE] for at in range(0, len(new), _AT_ONCE)):
            parts = await asyncio.gather(*(self._channel.fetch(key) for key in some), return_exceptions=True)
            for key, data in zip(some, parts, strict=True):
                if data is None:  # lost: the party that put it puts it again
                    continue
                self._read.add(key)
                if isinstance(data, DamagedObject):
                    self.damaged = self.damaged or key
                    continue
                if isinstance(data, BaseException):
                    raise data
                for result in unpack(TaskResult, data, key=key)[0]:
                    if result.is_final and result.id not in self._seen:
                        self._seen.add(result.id)
                        found.append(result)
        return found
