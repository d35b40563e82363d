"""Journal of a shard: snapshots every so often and, if asked for, a log between them; and the fence against its earlier processes.

With the log, changes are collected for some milliseconds and stored as one object; only then are they acknowledged, and clients
keep what is not acknowledged. So a process that is killed loses nothing that its clients do not still have. Without it,
changes are acknowledged at once, and those since the last snapshot are lost with the process.

A process is the shard as long as no higher attempt has been claimed. That is checked after each object of the log is stored and
before it is acknowledged, and every `fence_s`; a process that was frozen for longer answers nothing until it has checked again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from ephemeron.communication.durable_put import put_durable
from ephemeron.config.typed import Positive, Typed
from ephemeron.errors import ChannelError, DamagedObject
from ephemeron.sparse.store.places import ShardPlace
from ephemeron.sparse.store.snapshot import Capture, record, superseded
from ephemeron.sparse.store.state import ClientState, ShardState

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalOptions(Typed):
    """How much a killed process may lose, and what it costs."""

    snapshot_s: Positive = 30.0
    """Seconds between snapshots; without the log, what a killed process loses at most, and `fence_s` if it was frozen."""
    log: bool = False
    """Whether changes are acknowledged only once they are stored, so that none is lost."""
    log_interval_s: Positive = 0.05
    """Seconds for which changes are collected into one object: one write and one read request for each, while there are changes."""
    fence_s: Positive = 5.0
    """Seconds for which a process that cannot reach the channel still answers."""


class Journal:
    """Journal of one process of a shard. `start` before anything is recorded.

    Args:
        place: where it is stored.
        state: recorded.
        attempt: of this process.
        durable: called when more changes are safe.
        ended: called once, when this process must not answer any more.
    """

    def __init__(
        self,
        place: ShardPlace,
        state: ShardState,
        attempt: int,
        options: JournalOptions,
        *,
        durable: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self.options = options
        self.snapshots = self.log_objects = 0
        """Written so far."""
        self.recorded = self.safe = 0
        """Changes that were taken, and those of them that a restart does not lose."""
        self.failure: ChannelError | None = None
        """Why nothing can be written any more."""
        self._place, self._state, self._attempt = place, state, attempt
        self._durable, self._ended = durable, ended
        self._logging = options.log
        self._records: list[bytes] = []
        self._touched: dict[str, int] = {}
        """Client to its last sequence number in `_records`."""
        self._queue: deque[tuple[int, list[bytes], dict[str, int], int]] = deque()
        """Objects of the log to store: number, changes, last sequence numbers, `recorded` at their end."""
        self._next_log = 0
        self._next_snapshot = 0
        self._checked_at = asyncio.get_running_loop().time()
        self._wake = asyncio.Event()
        self._based = asyncio.Event()
        """The first snapshot of this attempt is stored: its log counts."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._capturing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._over = False
        self._changed = True
        self._kept_log = 0
        """First object of the log that the last snapshot needs."""

    def start(self) -> None:
        """Begins to write."""
        for work in (self._write_log(), self._write_snapshots(), self._keep_fence()):
            self._tasks.append(asyncio.get_running_loop().create_task(self._guarded(work)))

    @property
    def loses_none(self) -> bool:
        """Whether changes are acknowledged only once a restart does not lose them."""
        return self.options.log

    @property
    def confirmed(self) -> bool:
        """Whether this process was the shard's within `fence_s`."""
        return asyncio.get_running_loop().time() - self._checked_at < self.options.fence_s and not self._over

    async def confirm(self) -> None:
        """Returns once this process is known to be the shard's; never, if it is not."""
        while not self.confirmed:
            if self._over:
                await asyncio.get_running_loop().create_future()
            await self._check_fence()

    @property
    def statistics(self) -> tuple[int, int]:
        """Snapshots and objects of the log that this process has written."""
        return self.snapshots, self.log_objects

    def record(self, client: ClientState, frame: bytes) -> None:
        """Takes a change that has just been made."""
        self._changed = True
        self.recorded += 1
        if not self._logging:
            client.durable, self.safe = client.sequence, self.recorded
            return
        if not self._records:
            self._wake.set()
            self._idle.clear()
        self._records.append(record(client.name, frame))
        self._touched[client.name] = client.sequence

    async def snapshot(self) -> None:
        """Stores the whole state as it is now."""
        async with self._capturing:
            await self._snapshot()

    async def hand_over(self, stop_answering: Callable[[], None]) -> None:
        """Stores all that was acknowledged, and says that this attempt is over. Clients wait only for the last few changes.

        Args:
            stop_answering: called once nothing more may be answered.
        """
        async with self._capturing:
            self._logging = True  # what is changed while the snapshot is written goes to the log
            await self._snapshot()
        stop_answering()
        self._cut()
        self._wake.set()
        await self._idle.wait()
        await self._place.channel.put(self._place.final(self._attempt), [b"handed over"])

    async def close(self) -> None:
        """Stops writing; what is not stored is not."""
        self._over = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _cut(self) -> int:
        """Ends the current object of the log; the number of the next one."""
        if self._records:
            self._queue.append((self._next_log, self._records, self._touched, self.recorded))
            self._next_log += 1
            self._records, self._touched = [], {}
        return self._next_log

    async def _snapshot(self) -> None:
        number, self._next_snapshot = self._next_snapshot, self._next_snapshot + 1
        self._changed = False
        capture = Capture(self._state, log=self._cut())
        await capture.write(self._place, self._attempt, number)
        self.snapshots += 1
        self._based.set()
        await self._clean(number, capture.head.log)

    async def _clean(self, number: int, log: int) -> None:
        """Deletes what precedes the last snapshot; of this attempt, the one before it is kept, with its log."""
        if not await self._check_fence():
            return
        place, attempt = self._place, self._attempt
        old = superseded(await place.keys("snapshot"), place.snapshot(attempt, max(0, number - 1)))
        old += superseded(await place.keys("log"), place.log(attempt, self._kept_log if number else 0))
        self._kept_log = log
        await place.channel.delete(old)

    async def _write_log(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._based.wait()
            await asyncio.sleep(self.options.log_interval_s)
            self._cut()
            while self._queue:
                number, records, touched, recorded = self._queue[0]
                await put_durable(self._place.channel, self._place.log(self._attempt, number), [b"".join(records)])
                if not await self._check_fence():
                    return
                self._queue.popleft()
                self.log_objects += 1
                self.safe = recorded
                for name, sequence in touched.items():
                    client = self._state.clients.get(name)
                    if client is not None:
                        client.durable = max(client.durable, sequence)
                self._durable()
            if not self._records:
                self._idle.set()

    async def _write_snapshots(self) -> None:
        while True:
            if self._changed:
                await self.snapshot()
            await asyncio.sleep(self.options.snapshot_s)

    async def _keep_fence(self) -> None:
        while True:
            await asyncio.sleep(self.options.fence_s / 3)
            if not await self._check_fence():
                return

    async def _check_fence(self) -> bool:
        """Whether this process is still the shard's."""
        begun = asyncio.get_running_loop().time()
        try:
            claimed = not self._over and await self._place.channel.fetch(self._place.attempt(self._attempt + 1)) is not None
        except DamagedObject:
            claimed = True  # whoever it was
        if not self._over and not claimed:
            self._checked_at = max(self._checked_at, begun)
            return True
        self._end(f"attempt {self._attempt + 1} has taken over")
        return False

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except ChannelError as e:
            self.failure = e
            self._end(f"its journal cannot be written: {e}")

    def _end(self, reason: str) -> None:
        if not self._over:
            self._over = True
            _log.warning("shard %d, attempt %d, ends: %s", self._state.shard, self._attempt, reason)
            self._ended()
