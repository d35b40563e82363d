"""A task queue in Redis or Valkey: every operation is one atomic script, and the server's clock ends leases.

One request takes batches and one completes them, with their edges, so a task of its own batch costs two requests instead of the
dozen of `object_queue`, and is visible to readers within a request. In return a server runs all the time, and what it has not
written to disk is lost when it restarts.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ephemeron.communication.channels.cache import CacheChannel
from ephemeron.communication.channels.retrying import RetryPolicy
from ephemeron.communication.signing import SigningKey
from ephemeron.errors import ChannelEmptied, ChannelUnreachable, JobError
from ephemeron.functions.tasks import redis_scripts as scripts
from ephemeron.functions.tasks.batch_state import VANISHED, BatchState
from ephemeron.functions.tasks.model import QueueDepth, TaskEdge, TaskLease, TaskResult, TaskSpec, WaitingEdges, check_name
from ephemeron.functions.tasks.packing import batch_name, pack, pack_edge, unpack, unpack_edge
from ephemeron.functions.tasks.queue import ResultReader, TaskQueue

_MOST_CONNECTED = 10_000
"""Edges that an owner remembers."""
_KEPT_MS = 120_000
"""For how long a counter that has reached its last sum stays: a request whose answer was lost is sent again."""
_LEAST_WAIT_S = 0.001
"""A wait of 0 would have no end."""
_READ_AT_ONCE = 10_000
"""Results in one request of a reader."""


class RedisQueue(TaskQueue):
    """A queue in a cache's server.

    Args:
        channel: of the server; it is not closed here.
        queue: name; its keys begin with `NAME.queue/`.
        owner: name of this process, unlike every other's.
        lease_s: see `TaskQueue`.
        signing: key of the run, with which tasks and results are signed and verified; None: they are not.
        retry: what to do while the server does not answer.
    """

    notifies = True
    leases_followers = True

    def __init__(
        self,
        channel: CacheChannel,
        queue: str,
        *,
        owner: str,
        lease_s: float = 30.0,
        signing: SigningKey | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        check_name(queue, what="the queue")
        check_name(owner, what="the owner")
        self.owner, self.lease_s = owner, lease_s
        self._channel, self._queue, self._prefix = channel, queue, f"{queue}.queue/"
        self._signing, self._retry = signing, retry or RetryPolicy()
        self._random = random.Random(f"{queue}/{owner}")
        self._states: dict[str, BatchState] = {}
        """Batches that this owner has leased."""
        self._connected: dict[str, bytes] = {}
        """Edges that this owner has added, and digests of their documents."""

    async def publish(self, tasks: Sequence[TaskSpec], *, order: int = 0) -> str:
        batch, data = batch_name(tasks, order)
        await self._script(scripts.PUBLISH, batch, self._seal(data, batch), order)
        return batch

    def key_of(self, batch: str) -> str:
        return f"{self._prefix}batch/{batch}"

    async def connect(self, *edges: TaskEdge) -> None:
        rows: list[Any] = []
        digests: dict[str, bytes] = {}
        for edge in edges:
            document = pack_edge(edge)
            digest = hashlib.blake2b(document, digest_size=16).digest()
            if self._connected.get(edge.name) == digest:  # whatever has happened to its inputs since then was counted there
                continue
            batch, tasks = batch_name(edge.tasks, edge.order)
            rows += [edge.name, self._seal(document, f"edge/{edge.name}"), edge.inputs, batch, edge.order, self._seal(tasks, batch)]
            digests[edge.name] = digest
        if not rows:
            return
        others, abandoned = await self._script(scripts.CONNECT, *rows)
        if others:
            raise JobError(f"edge {others[0].decode()} is there already, with other inputs or tasks")
        await self._abandon([name.decode() for name in abandoned])
        if len(self._connected) >= _MOST_CONNECTED:
            self._connected.clear()
        self._connected |= digests

    async def take(self, n: int, *, is_busy: bool = False) -> list[TaskLease]:
        taken, abandoned, drained = await self._script(scripts.TAKE, n, self._lease_ms, self.owner, int(is_busy))
        self.is_drained = bool(drained)
        await self._abandon([name.decode() for name in abandoned])
        return await self._leases(taken)

    async def _leases(self, rows: Iterable[list[Any]]) -> list[TaskLease]:
        # A batch that is not as it was published ends this executor with its key, and so the map: nobody can do its tasks.
        leases = [await self._leased(*row) for row in rows]
        return [lease for lease in leases if lease.tasks]

    async def _leased(self, name: bytes, attempt: int, tasks: bytes | None, flat: list[bytes], before: bytes) -> TaskLease:
        batch = name.decode()
        state = self._states[batch] = self._state(batch, tasks, flat)
        if attempt > 2 and state.pending:
            first = state.pending[0]
            await self._record(state, [TaskResult(id=first.id, status="failed", error=VANISHED, lost=before.decode())])
        return TaskLease(batch=batch, attempt=attempt, tasks=state.pending)

    async def published(self) -> dict[str, str]:
        names = [await self._command("ZRANGE", f"{self._prefix}{part}", 0, -1) for part in ("ready", "leases")]
        found: dict[str, str] = {}
        for name in {name for part in names for name in part}:
            if (state := await self._load(name.decode())) is not None:
                found.update((task.id, state.batch) for task in state.pending)
        return found

    async def renew(self, leases: Sequence[TaskLease]) -> list[TaskLease]:
        if not leases:
            return []
        flat = [value for lease in leases for value in (lease.batch, lease.attempt)]
        alive = await self._script(scripts.RENEW, self._lease_ms, self.owner, *flat)
        lost = [lease for lease, is_alive in zip(leases, alive, strict=True) if not is_alive]
        for lease in lost:
            self._states.pop(lease.batch, None)
        return lost

    async def complete(self, lease: TaskLease, results: Sequence[TaskResult]) -> list[TaskResult]:
        return (await self.complete_and_follow(lease, results, []))[0]

    async def complete_and_follow(
        self, lease: TaskLease, results: Sequence[TaskResult], edges: Sequence[str]
    ) -> tuple[list[TaskResult], list[TaskLease]]:
        state = self._states.get(lease.batch) or await self._load(lease.batch)
        if state is None:
            return [], []
        followed: dict[str, list[Any]] = {}
        recorded = await self._record(state, results, edges, followed)
        return recorded, await self._leases(followed.values())

    async def waiting_for_one(self, edges: Sequence[str]) -> WaitingEdges:
        found, order = await self._script(scripts.WAITING_FOR_ONE, *edges)
        return WaitingEdges(edges=tuple(name.decode() for name in found), ready_order=int(order) if order else None)

    async def wait_for_work(self, seconds: float) -> bool:
        return await self._command("BLPOP", f"{self._prefix}work", max(seconds, _LEAST_WAIT_S)) is not None

    async def wait_until_empty(self, seconds: float) -> bool:
        return await self._command("BLPOP", f"{self._prefix}emptied", max(seconds, _LEAST_WAIT_S)) is not None

    async def release(self, lease: TaskLease) -> None:
        self._states.pop(lease.batch, None)
        await self._script(scripts.RELEASE, self.owner, lease.batch, lease.attempt)

    async def cancel(self, batch: str, ids: Iterable[str]) -> list[str]:
        wanted = list(ids)
        state = await self._load(batch)
        if state is not None:
            await self._record(state, [TaskResult(id=id, status="cancelled") for id in wanted])
        if not wanted:
            return []
        found = await self._command("SMISMEMBER", f"{self._prefix}cancelled", *wanted)
        return [id for id, is_cancelled in zip(wanted, found, strict=True) if is_cancelled]

    async def _load(self, batch: str) -> BatchState | None:
        tasks = await self._command("HGET", f"{self._prefix}batch/{batch}", "tasks")
        if tasks is None:
            return None
        return self._state(batch, tasks, await self._command("HGETALL", f"{self._prefix}state/{batch}"))

    def _state(self, batch: str, tasks: bytes | None, flat: Any) -> BatchState:
        key = self.key_of(batch)
        if tasks is None:
            raise ChannelEmptied("the store has lost a batch of tasks", key=key)
        state = BatchState(batch, tuple(unpack(TaskSpec, self._opened(tasks, batch), key=key)[0]))
        pairs = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
        for field, value in pairs:
            kind, _, task = field.decode().partition(":")
            if kind == "final":
                state.final[task] = TaskResult(id=task, status=value.decode())
            elif kind == "tries":
                state.failures[task] = int(value)
        return state

    async def _record(
        self, state: BatchState, results: Iterable[TaskResult], follow: Sequence[str] = (), followed: dict[str, list[Any]] | None = None
    ) -> list[TaskResult]:
        """Records what has no final result, again where another owner has counted a failed try meanwhile.

        Args:
            state: of the batch.
            results: to record.
            follow: edges whose batches are leased where this releases them.
            followed: receives these leases, by batch.
        """
        leasing = [self._lease_ms, self.owner, len(follow), *follow]
        then = {task.id: task.then for task in state.tasks}
        left, recorded = list(results), list[TaskResult]()
        nonces = {result.id: f"{self.owner}/{self._random.getrandbits(48):x}" for result in left}
        while news := state.news(left):
            rows: list[Any] = []
            for result in news:
                edges = then[result.id] if result.is_final else ()
                data = self._seal(pack([result]), "results")
                error = f"its input {result.id} is {result.status}: {result.error}".rstrip(": ")
                rows += [result.id, result.status, result.tries, nonces[result.id], data, error, len(edges), *edges]
            done, conflicts, leased = await self._script(scripts.COMPLETE, state.batch, *leasing, *rows)
            if followed is not None:
                followed |= {row[0].decode(): row for row in leased}
            accepted = {task.decode() for task in done}
            mine = [result for result in news if result.id in accepted]
            recorded += mine
            state.absorb(mine)
            tries = {task.decode(): int(number) for task, number in conflicts}
            for task, number in tries.items():
                state.failures[task] = number
            left = [result for result in left if result.id in tries]
        lost = {edge for result in recorded if result.is_final and result.status != "ok" for edge in then[result.id]}
        await self._abandon(sorted(lost))
        return recorded

    async def _abandon(self, edges: Sequence[str]) -> None:
        """Records the tasks of edges with a dead input as dead; edges that are not to be abandoned are left alone."""
        for name in edges:
            if not await self._command("SISMEMBER", f"{self._prefix}abandoned", name):
                continue
            document = await self._command("HGET", f"{self._prefix}edge/{name}", "document")
            error = (await self._command("HGET", f"{self._prefix}lost", name)).decode()
            edge = unpack_edge(self._opened(document, f"edge/{name}"), key=name)
            batch, data = batch_name(edge.tasks, edge.order)
            if await self._script(scripts.ABANDON, name, batch, self._seal(data, batch), edge.order):
                state = await self._load(batch)
                if state is not None:
                    dead = [TaskResult(id=task.id, status="dead", error=error) for task in state.pending]
                    await self._record(state, dead)
            await self._command("SREM", f"{self._prefix}abandoned", name)

    async def depth(self) -> QueueDepth:
        ready, leased, executors, closed = await self._script(scripts.DEPTH)
        names = frozenset(name.decode() for name in executors)
        return QueueDepth(ready=ready, leased=leased, executors=names, closed=bool(closed))

    async def announce(self, executor: str, *, gone: bool = False) -> None:
        if gone:
            await self._command("ZREM", f"{self._prefix}live", executor)
        else:
            await self._script(scripts.ANNOUNCE, executor, self._lease_ms)

    async def count(self, counter: str, member: str, amount: int = 1, *, last: int | None = None) -> int:
        check_name(counter, what="the counter")
        check_name(member, what="the member")
        return int((await self._script(scripts.COUNT, member, amount, _KEPT_MS, counter, last or 0))[0])

    async def count_all(self, last: Mapping[str, int], member: str) -> dict[str, int]:
        for name in (member, *last):
            check_name(name, what="the counter or member")
        rows = [value for pair in last.items() for value in pair]
        return dict(zip(last, map(int, await self._script(scripts.COUNT, member, 1, _KEPT_MS, *rows)), strict=True))

    async def finish(self) -> None:
        await self._script(scripts.FINISH)

    def reader(self) -> ResultReader:
        return RedisResultReader(self)

    async def clear(self) -> None:
        await self._channel.delete(await self._channel.list(f"{self._queue}."))
        self._states.clear()
        self._connected.clear()

    async def results(self, start: int) -> list[TaskResult]:
        """Final results in the order in which they were recorded, from one on."""
        rows = await self._command("LRANGE", f"{self._prefix}results", start, start + _READ_AT_ONCE - 1)
        found: list[TaskResult] = []
        for row in rows:
            found += unpack(TaskResult, self._opened(row, "results"), key=f"{self._prefix}results")[0]
        return found

    @property
    def _lease_ms(self) -> int:
        return max(1, round(self.lease_s * 1000))

    def _seal(self, data: bytes, name: str) -> bytes:
        return data if self._signing is None else b"".join(self._signing.signed([data], name=self._prefix + name))

    def _opened(self, data: bytes, name: str) -> memoryview:
        return memoryview(data) if self._signing is None else self._signing.verified(data, name=self._prefix + name)

    async def _script(self, source: str, *arguments: Any) -> Any:
        return await self._persist(lambda: self._channel.script(source, [self._prefix], arguments))

    async def _command(self, *words: Any) -> Any:
        return await self._persist(lambda: self._channel.command(*words))

    async def _persist(self, request: Any) -> Any:
        """Repeats a request while the server does not answer; all requests of a queue may be repeated."""
        loop, tries, began = asyncio.get_running_loop(), 0, 0.0
        while True:
            asked = loop.time()
            try:
                return await request()
            except ChannelUnreachable as e:
                tries += 1
                began = began or asked
                pause_s = self._retry.pause_s(e, tries=tries, failing_s=loop.time() - began, rng=self._random)
                if pause_s is None:
                    raise
                await asyncio.sleep(pause_s)


class RedisResultReader(ResultReader):
    """Position in the list of results."""

    def __init__(self, queue: RedisQueue) -> None:
        self._queue, self._read = queue, 0
        self._seen: set[str] = set()

    async def read(self) -> list[TaskResult]:
        found: list[TaskResult] = []
        while True:
            some = await self._queue.results(self._read)
            self._read += len(some)
            for result in some:
                if result.is_final and result.id not in self._seen:
                    self._seen.add(result.id)
                    found.append(result)
            if len(some) < _READ_AT_ONCE:
                return found
